"""Implements `flashckpt status`: shows a node, from its agent if one answers, else from its directory. No torch."""

from __future__ import annotations

import dataclasses
import sys
from typing import TYPE_CHECKING, Any

import click

from flashckpt.cli.agent import as_fields
from flashckpt.cli.entry import NOTHING_FOUND, OK
from flashckpt.cli.memory import memory_dir_of, now, open_store, selected_jobs, view
from flashckpt.cli.options import where
from flashckpt.cli.output import age, format_bytes, note, print_json, print_table, printable
from flashckpt.errors import FlashError
from flashckpt.protocol.line import describe

if TYPE_CHECKING:
    from flashckpt.agent.start import SeenAgent
    from flashckpt.cli.memory import GenerationView, JobView
    from flashckpt.types import Session


@click.command("status")
@click.option("--timeout", type=float, default=2.0, show_default=True, help="Seconds to wait for an agent's answer.")
@where
def command(timeout: float, job: str | None, memory_dir: str | None, as_json: bool) -> None:
    """Show this node: its agent, the other nodes, generations with levels and copies, the backlog, and memory.

    Without an agent, only what is in the directory is shown: which nodes hold replicas is then not known.
    """
    directory = memory_dir_of(memory_dir, job)
    names = selected_jobs(directory, job)
    overviews = []
    for name in names:
        try:
            overviews.append(_look(directory, name, timeout))
        except FlashError as error:
            # The directory of another user must not hide the others.
            if len(names) == 1:
                raise
            note(f"job {name!r}: {error}")
    if as_json:
        print_json("status/v1", {"memory_dir": directory, "jobs": overviews})
    else:
        for number, overview in enumerate(overviews):
            if number:
                click.echo()
            _print(overview)
    sys.exit(OK if any(one["agent"] or one["generations"] for one in overviews) else NOTHING_FOUND)


def _look(directory: str, job: str, timeout: float) -> dict[str, Any]:
    from flashckpt.agent.start import look

    seen = look(directory, job, timeout)
    with open_store(directory, job) as store:
        return overview_of(view(store, job), seen, now())


def overview_of(job: JobView, seen: SeenAgent | None, at: float) -> dict[str, Any]:
    """Collect what is shown of one job. Shards are read from the directory; all else is from the agent."""
    said = None if seen is None else seen.status
    fields = as_fields(seen)
    if fields["agent"] is not None:
        del fields["agent"]["status"]
    line = job.line
    generations = [_generation(one, said, at) for one in job.generations]
    known = {_key(one) for one in generations}
    # Generations of which no shard is here: only the agent has their record.
    elsewhere = [] if said is None else [one for one in said["generations"] if _key(one) not in known]
    return {
        "job": job.job,
        "path": job.status.path,
        "node": None if said is None else said["node"],
        "address": None if said is None else said["address"],
        **fields,
        "draining": None if said is None else said["draining"],
        "launch": _launch(job.session),
        "fenced": None if said is None else said["fenced"],
        "coordinator": None if job.session is None else job.session.coordinator,
        "world": None if job.session is None else job.session.world,
        "line": None if line is None else describe(line),
        "replicas": None if said is None else said["replicas"],
        "placement": None if said is None else said["placement"],
        "trainers": None if said is None else said["trainers"],
        "peers": _members(job.session) if said is None else said["peers"],
        "kept": None if said is None else said["kept"],
        "generations": generations,
        "records_only": elsewhere,
        "backlog": None if said is None else said["backlog"],
        "persist": None if said is None else said["persist"],
        "scrub": None if said is None else said["scrub"],
        "memory": {**dataclasses.asdict(job.status), "total_bytes": job.status.total_bytes},
    }


def _generation(found: GenerationView, said: dict[str, Any] | None, at: float) -> dict[str, Any]:
    shown = found.as_json()
    told = None if said is None else next((one for one in said["generations"] if _key(one) == _key(shown)), None)
    by_rank = {} if told is None else {one["rank"]: one for one in told["shards"]}
    shards = [
        {
            "rank": shard.rank,
            "size_bytes": shard.size_bytes,
            "own": by_rank[shard.rank]["own"] if shard.rank in by_rank else None,
            "holders": by_rank[shard.rank]["holders"] if shard.rank in by_rank else None,
        }
        for shard in found.shards
    ]
    return {
        **shown,
        "sealed_at": found.sealed_at,
        "age_seconds": found.age_seconds(at),
        "shards": shards,
        "waiting_for_ranks": None if told is None else told.get("waiting_for_ranks"),
        "given_up": None if told is None else told.get("given_up"),
    }


def _key(found: dict[str, Any]) -> tuple[int, str, int, int]:
    return found["epoch"], found["nonce"], found["step"], found["seq"]


def _launch(session: Session | None) -> dict[str, Any] | None:
    return None if session is None else {"epoch": session.launch.epoch, "nonce": f"{session.launch.nonce:016x}"}


def _members(session: Session | None) -> list[dict[str, Any]] | None:
    """List the nodes as the session names them, this node included. Only an agent knows whether they are alive."""
    if session is None:
        return None
    if len(session.members) == 1:
        return []
    return [
        {
            "node": one.node_id,
            "address": one.address,
            "domain": one.domain,
            "state": "unknown",
            "silent_seconds": None,
            "problem": "",
        }
        for one in session.members
    ]


# -- for people ------------------------------------------------------------------------------------------


def _print(shown: dict[str, Any]) -> None:
    lines = [_headline(shown), _launch_line(shown), _memory_line(shown["memory"]), _backlog_line(shown)]
    for line in [*lines, persist_line(shown["persist"]), *kept_lines(shown["kept"])]:
        if line:
            click.echo(printable(line))
    if shown["peers"]:
        click.echo()
        columns = ["node", "address", "domain", "state", "problem"]
        print_table(columns, [_peer_row(one) for one in shown["peers"]])
    if shown["generations"]:
        click.echo()
        columns = ["step", "ranks", "state", "level", "copies", "size", "age", "reason"]
        print_table(columns, [_generation_row(one) for one in shown["generations"]], right=(0, 1, 5, 6))
    else:
        note(f"job {shown['job']!r}: no shard in memory")


def _headline(shown: dict[str, Any]) -> str:
    agent = shown["agent"]
    if agent is None:
        return f"{shown['job']}: no agent runs; the directory {shown['path']} alone says:"
    who = f"agent pid {agent['pid']}, up {age(agent['uptime_seconds'])}, version {agent['version']}"
    if not agent["answers"]:
        return f"{shown['job']}: {who}, does not answer: {agent['problem']}"
    trainers = f"trainers: {len(shown['trainers'])}"
    return f"{shown['job']} on {shown['node']}: {who}, {trainers}" + (", draining" if shown["draining"] else "")


def _launch_line(shown: dict[str, Any]) -> str:
    parts = []
    if shown["launch"] is not None:
        launch = shown["launch"]
        parts.append(f"launch epoch {launch['epoch']} ({launch['nonce']}), {shown['world']} ranks")
        parts.append(f"coordinator {shown['coordinator']}")
    if shown["fenced"]:
        parts.append("overtaken: a newer launch owns the job")
    line = shown["line"]
    if line is not None and line["from_step"] is not None:
        parts.append(f"continued from step {line['from_step']} of launch {line['from_launch']}")
    if shown["replicas"] is not None and shown["launch"] is not None:
        asked, effective = shown["replicas"]["asked"], shown["replicas"]["effective"]
        parts.append(f"replicas: {effective} of {asked}" + (f" ({shown['placement']})" if effective < asked else ""))
    return "; ".join(parts)


def _memory_line(memory: dict[str, Any]) -> str:
    sealed, room = memory["sealed"], memory["room"]
    others = [memory[name] for name in ("pool", "writing", "quarantine")]
    line = (
        f"memory: {format_bytes(sealed['size_bytes'])} in {sealed['files']} shards, "
        f"{format_bytes(sum(one['size_bytes'] for one in others))} in {sum(one['files'] for one in others)} other slots"
    )
    if memory["quarantine"]["files"]:
        line += f" ({memory['quarantine']['files']} quarantined)"
    if room["budget_bytes"] is not None:
        line += f", budget {format_bytes(room['budget_bytes'])}"
    if room["fs_free_bytes"] is not None:
        line += f", {format_bytes(room['fs_free_bytes'])} free on {room['mount_point']}"
    return line


def _backlog_line(shown: dict[str, Any]) -> str:
    backlog = shown["backlog"]
    if not backlog:
        return "" if backlog is None else "replication: nothing waits"
    running = sum(one["running"] for one in backlog)
    line = (
        f"replication: copies to make: {len(backlog)}, {format_bytes(sum(one['size_bytes'] for one in backlog))}; "
        f"being sent: {running}"
    )
    problems = sorted({f"{one['to']}: {one['problem']}" for one in backlog if one["problem"]})
    return line + "".join(f"; {problem}" for problem in problems)


def persist_line(persist: dict[str, Any] | None) -> str:
    if persist is None:
        return ""
    newest = "nothing yet" if persist["step"] is None else f"step {persist['step']}"
    line = f"on disk: {newest} in {persist['directory']}"
    if persist["flushing"] is not None:
        line += f"; flushing step {persist['flushing']} ({persist['reason']}): {format_bytes(persist['flushed_bytes'])}"
    if persist["problem"]:
        line += f"; {persist['failures']} failed, last: {persist['problem']}"
        line += f"; next attempt in {persist['retry_seconds']:.0f} s" if persist["retry_seconds"] else ""
    return line


def kept_lines(kept: dict[str, Any] | None) -> list[str]:
    """Describe the kept generation: its state, which losses it would survive, and what is being done about it."""
    if kept is None:
        return []
    what = f"kept: step {kept['step']}" + ("" if kept["this_launch"] else ", as it was loaded")
    verdict, health = kept["verdict"], kept["health"]
    if health is None:
        return [f"{what}: {verdict['words']}: {verdict['reason']}", f"survives the loss of: {verdict['words']}"]
    copies = health["copies"]
    state = "lost" if health["lost"]["shards"] else health["level"]
    lines = [
        f"{what}: {state}, copies of each shard: at least {copies['fewest']}, wanted {copies['wanted']} "
        f"({verdict['source']} said so {age(verdict['age_seconds'])} ago)",
        f"survives the loss of: {verdict['words']}",
    ]
    if health["missing_nodes"]:
        lines.append(f"not heard of: {', '.join(health['missing_nodes'])}; their copies are not counted")
    if health["at_risk"]["shards"] or health["lost"]["shards"]:
        lines.append(f"at risk: {_shards(health['at_risk'])}; lost: {_shards(health['lost'])}")
    healing = health["healing"]
    if healing["copies"]:
        running = [f"{one['rank']} from {one['source']} to {one['target']}" for one in healing["running"]]
        lines.append(
            f"healing: copies to make: {healing['copies']}, {format_bytes(healing['size_bytes'])}; "
            f"being made: {', '.join(running) or 'none'}; {healing['reason']}"
        )
    return lines


def _shards(found: dict[str, Any]) -> str:
    if not found["shards"]:
        return "no shard"
    ranks, hidden = ", ".join(map(str, found["ranks"])), found["shards"] - len(found["ranks"])
    return f"shard {ranks}" + (f" and {hidden} more" if hidden else "")


def _peer_row(one: dict[str, Any]) -> list[str]:
    state = one["state"] if one["silent_seconds"] is None else f"{one['state']} for {age(one['silent_seconds'])}"
    return [one["node"], one["address"], one["domain"], state, one["problem"]]


def _generation_row(one: dict[str, Any]) -> list[str]:
    reason = one["given_up"] or ("" if one["state"] == "complete" else one["reason"])
    return [
        str(one["step"]),
        f"{len(one['ranks'])}/{one['world']}",
        one["state"],
        one["level"] or "",
        _copies(one["shards"]),
        format_bytes(one["size_bytes"]),
        age(one["age_seconds"]),
        reason,
    ]


def _copies(shards: list[dict[str, Any]]) -> str:
    """Say which other nodes have this node's shards; "" if nobody knows."""
    parts = [f"{one['rank']} on {', '.join(one['holders'])}" for one in shards if one["own"] and one["holders"]]
    kept = sum(one["own"] is False for one in shards)
    if kept:
        parts.append(f"keeps {kept} for others")
    return "; ".join(parts)
