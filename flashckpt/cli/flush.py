"""Implements `flashckpt flush`."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

import click

from flashckpt.cli.entry import FAILED, OK
from flashckpt.cli.memory import memory_dir_of, selected_jobs
from flashckpt.cli.options import where
from flashckpt.cli.output import note, print_json
from flashckpt.errors import AgentError, ConfigError, DeadlineError

if TYPE_CHECKING:
    from flashckpt.types import Generation

_POLL_SECONDS = 0.2


@click.command("flush")
@where
@click.option("--step", type=int, metavar="N", help="Default: the newest committed step.")
@click.option("--wait", "timeout", type=float, default=600.0, metavar="SECONDS", help="0: only ask. Default: 600.")
def command(job: str | None, memory_dir: str | None, as_json: bool, step: int | None, timeout: float) -> None:
    """Write a committed step from memory to persist_dir now, and wait until it is there.

    All nodes write their part; the trainers do nothing. A flush that fails is tried again automatically.
    """
    directory = memory_dir_of(memory_dir, job)
    names = selected_jobs(directory, job)
    if len(names) != 1:
        raise ConfigError(f"expected one job, found {len(names)}: {', '.join(names)}", hint="name it with --job")
    generation = _ask(directory, names[0], step, urgent=timeout > 0)
    status = _wait(directory, names[0], generation, timeout) if timeout > 0 else {}
    done = bool(status) and status["step"] == generation.step
    if as_json:
        print_json("flush/v1", {"job": names[0], "step": generation.step, "done": done, "persist": status})
    elif done:
        note(f"step {generation.step} is in {status['directory']}")
    else:
        note(f"step {generation.step} is being flushed")
    sys.exit(OK if done or timeout <= 0 else FAILED)


def _ask(memory_dir: str, job: str, step: int | None, *, urgent: bool) -> Generation:
    from flashckpt.agent.start import ask_agent

    return ask_agent(memory_dir, job, lambda client: client.flush(None, step, urgent=urgent), timeout=10.0)


def _wait(memory_dir: str, job: str, generation: Generation, timeout: float) -> dict[str, Any]:
    from flashckpt.agent.start import look

    deadline = time.monotonic() + timeout
    problem = ""
    while True:
        seen = look(memory_dir, job)
        if seen is None:
            raise AgentError(f"job {job!r}: its agent ended while step {generation.step} was being flushed")
        found: dict[str, Any] = (seen.status or {}).get("persist") or {}
        if found and found["step"] == generation.step and found["flushing"] is None:
            return found
        if found and found["problem"] and found["problem"] != problem:
            problem = found["problem"]
            note(f"an attempt failed: {problem}; trying again in {found['retry_seconds']:.0f} s")
        if time.monotonic() > deadline:
            raise DeadlineError(
                f"step {generation.step}: expected it in persist_dir within {timeout:g} s, found that it is not",
                hint=problem or "`flashckpt status` shows how far it is",
                step=generation.step,
            )
        time.sleep(_POLL_SECONDS)
