"""`flashckpt ls`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from flashckpt.cli.entry import NOTHING_FOUND, OK
from flashckpt.cli.memory import level_name, memory_dir_of, now, open_store, selected_jobs, view
from flashckpt.cli.options import where
from flashckpt.cli.output import age, format_bytes, note, print_json, print_table
from flashckpt.errors import FlashError

if TYPE_CHECKING:
    from flashckpt.cli.memory import JobView


@click.command("ls")
@where
def command(job: str | None, memory_dir: str | None, as_json: bool) -> None:
    """List the generations in this node's memory, newest first.

    complete: every rank's shard is sealed, a load can use it. pending: the trainers are still writing it. partial:
    other nodes may have the other ranks' shards. dead: it never becomes usable, and its memory is reused.
    Levels: sealed survives a crash of the trainers, replicated the loss of nodes.
    """
    directory = memory_dir_of(memory_dir)
    names = selected_jobs(directory, job)
    jobs = []
    for name in names:
        try:
            with open_store(directory, name) as store:
                jobs.append(view(store, name))
        except FlashError as error:
            # Somebody else's directory must not hide the others.
            if len(names) == 1:
                raise
            note(f"job {name!r}: {error}")
    at = now()
    if as_json:
        print_json("ls/v1", {"memory_dir": directory, "jobs": [_as_json(one, at) for one in jobs]})
    else:
        _print(jobs, at)
    sys.exit(OK if any(one.generations for one in jobs) else NOTHING_FOUND)


def _print(jobs: list[JobView], at: float) -> None:
    rows = [
        [
            one.job,
            str(found.generation.step),
            f"{len(found.shards)}/{found.world}",
            found.state,
            level_name(found),
            format_bytes(found.size_bytes),
            age(found.age_seconds(at)),
            "" if found.state == "complete" else found.reason,
        ]
        for one in jobs
        for found in one.generations
    ]
    if rows:
        print_table(["job", "step", "ranks", "state", "level", "size", "age", "reason"], rows, right=(1, 2, 5, 6))
    for one in jobs:
        status = one.status
        if not one.generations:
            note(f"job {one.job!r}: no shard in memory")
        note(
            f"{one.job}: {format_bytes(status.sealed.size_bytes)} in {status.sealed.files} shards, "
            f"{format_bytes(status.pool.size_bytes + status.writing.size_bytes)} in "
            f"{status.pool.files + status.writing.files} other slots"
            + (f", {status.quarantine.files} quarantined" if status.quarantine.files else "")
        )


def _as_json(job: JobView, at: float) -> dict[str, Any]:
    fence = job.fence
    counts = {name: getattr(job.status, name) for name in ("pool", "writing", "sealed", "quarantine")}
    return {
        "job": job.job,
        "path": job.status.path,
        "generations": [
            {**one.as_json(), "sealed_at": one.sealed_at, "age_seconds": one.age_seconds(at)} for one in job.generations
        ],
        "fence": None if fence is None else {"step": fence.step, "epoch": fence.epoch, "nonce": f"{fence.nonce:016x}"},
        "slots": {name: {"files": one.files, "size_bytes": one.size_bytes} for name, one in counts.items()},
    }
