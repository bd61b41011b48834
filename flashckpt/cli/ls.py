"""Implements `flashckpt ls`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from flashckpt.cli.entry import NOTHING_FOUND, OK
from flashckpt.cli.memory import level_name, memory_dir_of, now, open_store, selected_jobs, view
from flashckpt.cli.options import where
from flashckpt.cli.output import age, format_bytes, note, print_json, print_table
from flashckpt.cli.persisted import as_json as disk_json
from flashckpt.cli.persisted import persist_dir_of, persisted_steps
from flashckpt.errors import FlashError
from flashckpt.protocol.line import describe

if TYPE_CHECKING:
    from flashckpt.cli.memory import JobView
    from flashckpt.persist.catalog import Persisted


@click.command("ls")
@where
def command(job: str | None, memory_dir: str | None, as_json: bool) -> None:
    """List the generations in this node's memory, newest first, and the steps in the job's persist_dir.

    complete: every rank's shard is sealed, a load can use it. pending: the trainers are still writing it. partial:
    other nodes may have the other ranks' shards. lost: no node that answered has some rank's shard; a load can use it
    only after a node that has it is back. dead: it never becomes usable, and its memory is reused.
    Levels: sealed survives a crash of the trainers, replicated the loss of nodes, persisted the loss of the cluster.
    """
    directory = memory_dir_of(memory_dir, job)
    names = selected_jobs(directory, job)
    jobs = []
    directories: dict[str, str | None] = {}
    for name in names:
        try:
            with open_store(directory, name) as store:
                jobs.append(view(store, name))
                directories[name] = persist_dir_of(store)
        except FlashError as error:
            # The directory of another user must not hide the others.
            if len(names) == 1:
                raise
            note(f"job {name!r}: {error}")
    at = now()
    on_disk = {name: (path, *persisted_steps(path)) for name, path in directories.items() if path is not None}
    if as_json:
        listed = [{**_as_json(one, at), "persist": _disk_json(on_disk.get(one.job))} for one in jobs]
        print_json("ls/v1", {"memory_dir": directory, "jobs": listed})
    else:
        _print(jobs, at)
        _print_disk(on_disk, at)
    found = any(one.generations for one in jobs) or any(steps for _, steps, _ in on_disk.values())
    sys.exit(OK if found else NOTHING_FOUND)


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


def _print_disk(on_disk: dict[str, tuple[str, list[Persisted], str]], at: float) -> None:
    for job, (directory, steps, problem) in on_disk.items():
        rows = [
            [
                job,
                str(one.step),
                "complete" if not one.problem else "unusable",
                format_bytes(one.meta.size_bytes) if one.meta is not None else "",
                age(at - one.meta.persisted_at) if one.meta is not None else "",
                one.problem or ("written by another program" if one.meta is None else ""),
            ]
            for one in steps
        ]
        note(f"{job}: {len(steps)} steps in {directory}{f': {problem}' if problem else ''}")
        if rows:
            print_table(["job", "persisted step", "state", "size", "age", "reason"], rows, right=(1, 3, 4))


def _disk_json(found: tuple[str, list[Persisted], str] | None) -> dict[str, Any] | None:
    if found is None:
        return None
    directory, steps, problem = found
    return {"directory": directory, "problem": problem, "steps": [disk_json(one) for one in steps]}


def _as_json(job: JobView, at: float) -> dict[str, Any]:
    line = job.line
    counts = {name: getattr(job.status, name) for name in ("pool", "writing", "sealed", "quarantine")}
    return {
        "job": job.job,
        "path": job.status.path,
        "generations": [
            {**one.as_json(), "sealed_at": one.sealed_at, "age_seconds": one.age_seconds(at)} for one in job.generations
        ],
        "line": None if line is None else describe(line),
        "slots": {name: {"files": one.files, "size_bytes": one.size_bytes} for name, one in counts.items()},
    }
