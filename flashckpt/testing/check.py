"""Checks what must hold of the memory of all nodes together, once nothing moves. Returns problems, in words."""

from __future__ import annotations

import contextlib
import os
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flashckpt import native
from flashckpt.errors import FlashError, NotFoundError
from flashckpt.format.shard import read_header
from flashckpt.protocol.line import newer
from flashckpt.store.names import job_directory_name
from flashckpt.store.slots import SlotStore

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from flashckpt.protocol.line import Line
    from flashckpt.store.slots import Sealed
    from flashckpt.types import Record, ShardId

_THREADS = 2
_BLOCK_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class _Copy:
    """Describes one sealed file of a shard on one node."""

    node: str
    store: SlotStore
    sealed: Sealed


def find_problems(
    job: str, memory: Mapping[str, str], owners: Mapping[int, Sequence[str]], wiped: Mapping[str, int] | None = None
) -> list[str]:
    """Check all nodes.

    `memory` maps each node to its memory directory. `owners` maps a number of ranks to the node of each rank, if it is
    known. `wiped` says when nodes lost their memory, in milliseconds, as epochs count.
    """
    problems: list[str] = []
    copies: dict[ShardId, list[_Copy]] = defaultdict(list)
    records: set[Record] = set()
    line: Line | None = None
    with contextlib.ExitStack() as stack:
        for node, directory in memory.items():
            problems += [f"{node}: {problem}" for problem in _strangers(job, directory)]
            try:
                store = stack.enter_context(SlotStore.open(directory, job, create=False))
            except NotFoundError:
                continue  # a blank node
            except (FlashError, OSError) as error:
                problems.append(f"{node}: {error}")
                continue
            problems += [f"{node}: {problem}" for problem in store.check()]
            for sealed in store.scan():
                copies[sealed.shard].append(_Copy(node, store, sealed))
            records.update(store.read_records())
            line = newer(line, store.read_line())
        for held in copies.values():
            problems += _examine(job, held)
    holders = {shard: {copy.node for copy in held} for shard, held in copies.items()}
    record = newest_in_force(records, line)
    if record is not None:
        lost = {node for node, when in (wiped or {}).items() if record.generation.epoch < when}
        problems += broken_promises(record, holders, owners.get(record.world, ()), lost)
    return problems


def newest_in_force(records: Collection[Record], line: Line | None) -> Record | None:
    """Return the record that a load would have to honour."""
    living = [one for one in records if line is None or not line.kills(one.generation)]
    return max(living, key=_age, default=None)


def broken_promises(
    record: Record,
    holders: Mapping[ShardId, Collection[str]],
    owners: Sequence[str],
    lost: Collection[str] = (),
) -> list[str]:
    """Check that every rank's shard is on its own node and on as many others as the record says. If its own node has
    lost its memory since, it must be on that many nodes, whichever they are.
    """
    problems = []
    for rank in range(record.world):
        found = next((nodes for shard, nodes in holders.items() if _is_of(shard, record, rank)), ())
        where = f"shard {rank}/{record.world} of {record.generation}, which is recorded"
        if owners and owners[rank] not in found and owners[rank] not in lost:
            problems.append(f"{where}: expected on its own node {owners[rank]}, found on {sorted(found) or 'none'}")
        owner = owners[rank] if owners and owners[rank] in found else next(iter(sorted(found)), "")
        others = set(found) - {owner}
        if len(others) < record.replicas:
            problems.append(
                f"{where}: expected {record.replicas} copies on other nodes, found {len(others)}; "
                f"it is on {sorted(found) or 'none'}"
            )
    return problems


def _is_of(shard: ShardId, record: Record, rank: int) -> bool:
    return (shard.generation, shard.rank, shard.world) == (record.generation, rank, record.world)


def _age(record: Record) -> tuple[int, int, int]:
    # As everywhere else, the line decides: what a rollback left above it does not count.
    return record.generation.step, record.generation.epoch, record.generation.seq


def _strangers(job: str, directory: str) -> list[str]:
    """Return entries of the memory directory that are not the job's."""
    expected = job_directory_name(job)
    try:
        return [f"{name}: expected only {expected}" for name in sorted(os.listdir(directory)) if name != expected]
    except FileNotFoundError:
        return []
    except OSError as error:
        return [f"{directory}: {error.strerror}"]


def _examine(job: str, held: list[_Copy]) -> list[str]:
    """Check all copies of one shard: each one by itself, and that all are alike."""
    problems = [f"{copy.node}: {reason}" for copy in held if (reason := _verify(job, copy))]
    first = held[0]
    problems += [
        f"{first.sealed.shard}: the copies on {first.node} and {copy.node} {reason}"
        for copy in held[1:]
        if (reason := _compare(first, copy))
    ]
    tags = {copy.sealed.tag for copy in held}
    if len(tags) > 1:
        problems.append(f"{first.sealed.shard}: expected one tag, found {sorted(tags)}")
    return problems


def _verify(job: str, copy: _Copy) -> str:
    try:
        fd = copy.store.open_shard(copy.sealed)
    except FlashError as error:
        return error.message
    try:
        header = read_header(fd, expect=copy.sealed.shard, job=job)
        bad = native.verify_file(
            fd, header.data_offset_bytes, header.data_length_bytes, header.chunk_bytes, header.chunk_crcs, _THREADS
        )
    except FlashError as error:
        return error.message
    finally:
        os.close(fd)
    return f"{copy.sealed.shard}: chunks {bad[:8]} fail their crc32c ({copy.sealed.name})" if bad else ""


def _compare(one: _Copy, other: _Copy) -> str:
    """Return "" if the copies are equal to the last byte."""
    with contextlib.ExitStack() as stack:
        try:
            files = [stack.enter_context(open(copy.store.open_shard(copy.sealed), "rb")) for copy in (one, other)]
        except FlashError as error:
            return f"can't be compared: {error.message}"
        sizes = [os.fstat(file.fileno()).st_size for file in files]
        if sizes[0] != sizes[1]:
            return f"differ in size: {sizes[0]} and {sizes[1]} bytes"
        for offset in range(0, sizes[0], _BLOCK_BYTES):
            a, b = (file.read(_BLOCK_BYTES) for file in files)
            if a != b:
                at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
                return f"differ, first at byte {offset + at}"
    return ""
