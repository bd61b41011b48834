"""Implements `flashckpt agent`: run, start, stop or show this node's agent of a job. No torch; gRPC only if it is
needed.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, TypeVar

import click

from flashckpt.cli.entry import FAILED, NOTHING_FOUND, OK
from flashckpt.cli.memory import memory_dir_of, now, selected_job
from flashckpt.cli.options import where
from flashckpt.cli.output import age, note, print_json, print_table, printable
from flashckpt.config import CheckpointConfig, resolve

if TYPE_CHECKING:
    from collections.abc import Callable

    from flashckpt.agent.process import Options
    from flashckpt.agent.start import SeenAgent

    F = TypeVar("F", bound=Callable[..., Any])

_START_TIMEOUT = 300.0  # the same as a trainer's


@click.group("agent")
def command() -> None:
    """Run, start, stop or show this node's agent of a job.

    Trainers start the agent by themselves if none runs. It outlives them, and ends after --linger seconds without
    trainers.
    """


def _settings(function: F) -> F:
    """Add the options of an agent. Their defaults are those that trainers start it with."""
    for option in (
        click.option("--job", metavar="NAME", help="Default: FLASHCKPT_JOB or the launcher's id."),
        click.option("--memory-dir", metavar="DIR", help="Directory on a tmpfs. Default: that of the trainers."),
        click.option("--node-id", metavar="NAME", help="Default: FLASHCKPT_NODE_ID, else the host name."),
        click.option(
            "--linger", type=float, metavar="SECONDS", help="Exit after that time without trainers; 0: never."
        ),
        click.option("--budget-bytes", type=int, metavar="BYTES", help="Limit for all slots of the job on this node."),
        click.option(
            "--replicate-max-mbps", type=float, metavar="MBIT", help="Limit for all peers together, in Mbit per second."
        ),
        click.option("--transport", metavar="auto|tcp|grpc", help="How shards are sent from node to node."),
        click.option("--lanes", type=int, metavar="N", help="TCP connections per transfer."),
        click.option(
            "--encrypt-data/--no-encrypt-data",
            default=None,
            help="Use TLS for shards. Default: if FLASHCKPT_TLS_CERT is given.",
        ),
        click.option("--nice", type=click.IntRange(0, 19), metavar="N", help="Add this to the niceness."),
        click.option("--beat-interval", type=float, metavar="SECONDS", help="Time between messages to peers."),
        click.option(
            "--peer-timeout", type=float, metavar="SECONDS", help="Silence after which a peer counts as down."
        ),
        click.option("--scrub-interval", type=float, metavar="SECONDS", help="Time between checks of all shards."),
        click.option("--drain-timeout", type=float, metavar="SECONDS", help="Time for running pushes on a stop."),
    )[::-1]:
        function = option(function)
    return function


@command.command("run")
@_settings
def run(**given: Any) -> None:
    """Run the agent in the foreground: for systemd, a sidecar or a DaemonSet. Logs to stderr; SIGTERM drains."""
    options = _options(given)
    from flashckpt.agent import process

    sys.exit(process.run(options))


@command.command("start")
@click.option("--timeout", type=float, default=_START_TIMEOUT, show_default=True, help="Seconds to wait until it runs.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@_settings
def start(timeout: float, as_json: bool, **given: Any) -> None:
    """Start the agent in the background, unless it runs."""
    options = _options(given)
    from flashckpt.agent.start import ensure_agent

    found = ensure_agent(options, timeout)
    if as_json:
        content = {"job": options.job, "pid": found.pid, "started": found.started, "log": found.log_path}
        print_json("agent-start/v1", content)
    else:
        done = "started" if found.started else "runs already"
        click.echo(f"agent of job {printable(options.job)} {done}: pid {found.pid}, log {printable(found.log_path)}")


@command.command("stop")
@click.option("--timeout", type=click.FloatRange(min=0), help="Seconds it may drain. Default: its own settings.")
@click.option("--kill", is_flag=True, help="Kill it if it has not drained by then.")
@where
def stop(timeout: float | None, kill: bool, job: str | None, memory_dir: str | None, as_json: bool) -> None:
    """Stop the agent: it finishes what it is sending, and exits. Its shards stay in memory."""
    directory = memory_dir_of(memory_dir, job)
    name = selected_job(directory, job)
    from flashckpt.agent.start import stop_agent

    stopped = stop_agent(directory, name, timeout, kill=kill)
    if as_json:
        content = {"job": name, "stopped": stopped is not None, "pid": None if stopped is None else stopped.pid}
        print_json("agent-stop/v1", content)
    elif stopped is None:
        note(f"no agent of job {name!r} runs in {directory}")
    else:
        click.echo(f"agent of job {printable(name)} stopped: pid {stopped.pid}")
    sys.exit(NOTHING_FOUND if stopped is None else OK)


@command.command("status")
@click.option("--timeout", type=float, default=2.0, show_default=True, help="Seconds to wait for its answer.")
@where
def status(timeout: float, job: str | None, memory_dir: str | None, as_json: bool) -> None:
    """Show the agent. Exit code 0 if it answers, 1 if it runs and does not answer, 3 if none runs."""
    directory = memory_dir_of(memory_dir, job)
    name = selected_job(directory, job)
    from flashckpt.agent.start import look

    seen = look(directory, name, timeout)
    if as_json:
        print_json("agent-status/v1", {"job": name, "memory_dir": directory, **as_fields(seen)})
    elif seen is None:
        note(f"no agent of job {name!r} runs in {directory}")
    else:
        print_table(["agent", ""], [[key, text] for key, text in _lines(name, seen)])
        if seen.problem:
            note(f"it does not answer: {seen.problem}")
    sys.exit(NOTHING_FOUND if seen is None else OK if seen.status is not None else FAILED)


def as_fields(seen: SeenAgent | None) -> dict[str, Any]:
    """Describe the agent as listings show it."""
    if seen is None:
        return {"agent": None}
    holder = seen.holder
    agent = {
        "pid": holder.pid,
        "version": holder.version,
        "started_at": holder.started_at,
        "uptime_seconds": max(0.0, now() - holder.started_at),
        "log": seen.log_path,
        "answers": seen.status is not None,
        "problem": seen.problem,
        "status": seen.status,
    }
    return {"agent": agent}


def _lines(job: str, seen: SeenAgent) -> list[tuple[str, str]]:
    return [
        ("job", job),
        ("pid", str(seen.holder.pid)),
        ("answers", "yes" if seen.status is not None else "no"),
        ("up", age(now() - seen.holder.started_at)),
        ("version", seen.holder.version),
        *([("takes saves", f"no: {printable(reason)}")] if (reason := (seen.status or {}).get("read_only")) else []),
        ("node", "" if seen.status is None else str(seen.status["node"])),
        ("log", seen.log_path),
    ]


def _options(given: dict[str, Any]) -> Options:
    """Resolve the options: argument beats environment beats default, as for trainers."""
    from flashckpt.agent.process import Options

    names = ("job", "memory_dir", "node_id", "encrypt_data")
    settings = resolve(CheckpointConfig(**{name: given.pop(name) for name in names}))
    # An option that was not given keeps the agent's own default.
    told = {name: value for name, value in given.items() if value is not None}
    return Options(
        job=settings.job,
        memory_dir=settings.memory_dir,
        node_id=settings.node_id,
        encrypt_data=int(settings.encrypts_data),
        **told,
    )
