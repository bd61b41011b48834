"""Implements `flashckpt verify`: checks every rule of the format and every chunk's CRC32C, shard by shard. No torch."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from flashckpt import native
from flashckpt.cli.entry import ERRORS_FOUND, NOTHING_FOUND, OK
from flashckpt.cli.memory import memory_dir_of, open_store, selected_jobs, view
from flashckpt.cli.options import where
from flashckpt.cli.output import format_bytes, note, print_json, print_table
from flashckpt.errors import FlashError, NotFoundError
from flashckpt.format.shard import read_header
from flashckpt.state.cover import index_headers, uncovered

if TYPE_CHECKING:
    from flashckpt.cli.memory import GenerationView, ShardView
    from flashckpt.store.slots import SlotStore
    from flashckpt.types import ShardHeader

_MAX_THREADS = 8


@dataclass(frozen=True, slots=True)
class ShardVerdict:
    """Holds the result of one shard, or (rank None) of a generation."""

    job: str
    step: int
    generation: str
    rank: int | None
    size_bytes: int
    ok: bool
    code: str  # of the error class, "" if ok
    reason: str


@click.command("verify")
@click.argument("step", type=click.IntRange(min=0), required=False)
@click.option("--threads", type=click.IntRange(min=1), help="Default: the usable cores, at most 8.")
@where
def command(step: int | None, threads: int | None, job: str | None, memory_dir: str | None, as_json: bool) -> None:
    """Check every byte of the shards of STEP, or of all steps in memory. Exit code 5 if something is bad."""
    directory = memory_dir_of(memory_dir, job)
    threads = threads or min(_MAX_THREADS, len(os.sched_getaffinity(0)))
    verdicts: list[ShardVerdict] = []
    began = time.perf_counter()
    for name in selected_jobs(directory, job):
        with open_store(directory, name) as store:
            for found in view(store, name).generations:
                if step is None or found.generation.step == step:
                    verdicts += _verify_generation(store, name, found, threads)
    seconds = time.perf_counter() - began
    if not verdicts:
        raise NotFoundError(
            f"memory directory {directory}: expected {'a shard' if step is None else f'shards of step {step}'}, "
            "found none",
            hint="`flashckpt ls` lists what is there",
        )
    bad = [one for one in verdicts if not one.ok]
    size = sum(one.size_bytes for one in verdicts)
    if as_json:
        content = {
            "memory_dir": directory,
            "ok": not bad,
            "size_bytes": size,
            "seconds": seconds,
            "verdicts": [_as_json(one) for one in verdicts],
        }
        print_json("verify/v1", content)
    else:
        print_table(["job", "step", "shard", "size", "verdict"], [_row(one) for one in verdicts], right=(1, 3))
        note(
            f"{format_bytes(size)} in {seconds:.3f} s with {threads} threads ({native.kernel()}): "
            + (f"{len(bad)} bad" if bad else "all good")
        )
    sys.exit(ERRORS_FOUND if bad else OK if any(one.rank is not None for one in verdicts) else NOTHING_FOUND)


def _verify_generation(store: SlotStore, job: str, found: GenerationView, threads: int) -> list[ShardVerdict]:
    verdicts: list[ShardVerdict] = []
    headers: list[ShardHeader] = []
    for shard in found.shards:
        header, problem = _verify_shard(store, job, shard, threads)
        if problem is not None and _has_gone(shard):
            # The trainers freed it meanwhile, and its slot was written to during the check.
            note(f"{shard.sealed.shard}: released while it was read; left out")
            continue
        code, reason = problem or ("", "")
        generation = found.generation
        verdicts.append(
            ShardVerdict(
                job, generation.step, str(generation), shard.rank, shard.size_bytes, problem is None, code, reason
            )
        )
        if header is not None and problem is None:
            headers.append(header)
    if found.state == "complete" and len(headers) == found.world:
        verdicts += [
            ShardVerdict(job, found.generation.step, str(found.generation), None, 0, False, "FC-LOAD-004", problem_text)
            for problem_text in uncovered(index_headers(headers))
        ]
    return verdicts


def _verify_shard(
    store: SlotStore, job: str, shard: ShardView, threads: int
) -> tuple[ShardHeader | None, tuple[str, str] | None]:
    """Return the header, and (code, reason) if the shard must not be used."""
    header = None
    try:
        fd = store.open_shard(shard.sealed)
        try:
            header = read_header(fd, expect=shard.sealed.shard, job=job)
            bad = native.verify_file(
                fd,
                header.data_offset_bytes,
                header.data_length_bytes,
                header.chunk_bytes,
                header.chunk_crcs,
                threads,
            )
        finally:
            os.close(fd)
    except FlashError as error:
        return header, (error.code, error.message)
    except OSError as error:
        return header, ("FC-FMT-001", f"can't be read: {error.strerror}")
    return header, (("FC-FMT-001", _describe(header, bad)) if bad else None)


def _describe(header: ShardHeader, bad: list[int]) -> str:
    size = header.chunk_bytes
    keys = sorted(
        {
            entry.fqn
            for entry in header.layout.entries
            for chunk in bad[:64]
            if entry.offset_bytes < (chunk + 1) * size and entry.offset_bytes + entry.length_bytes > chunk * size
        }
    )
    return (
        f"{len(bad)} of {len(header.chunk_crcs) // 4} chunks fail their crc32c, first chunk {bad[0]} at byte "
        f"{header.data_offset_bytes + bad[0] * size}; keys {keys[:8]}" + (" and more" if len(keys) > 8 else "")
    )


def _has_gone(shard: ShardView) -> bool:
    try:
        return shard.sealed.size_bytes < 0
    except NotFoundError:
        return True


def _row(one: ShardVerdict) -> list[str]:
    name = "all ranks" if one.rank is None else f"rank {one.rank}"
    return [one.job, str(one.step), name, format_bytes(one.size_bytes), "ok" if one.ok else f"{one.code} {one.reason}"]


def _as_json(one: ShardVerdict) -> dict[str, Any]:
    return {
        "job": one.job,
        "step": one.step,
        "generation": one.generation,
        "rank": one.rank,
        "size_bytes": one.size_bytes,
        "ok": one.ok,
        "code": one.code,
        "reason": one.reason,
    }
