"""Implements `flashckpt inspect`: shows what a saved step holds, from the headers of its shards. No torch."""

from __future__ import annotations

import os
import struct
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import click

from flashckpt import native
from flashckpt.cli.memory import memory_dir_of, open_store, pick, selected_job, view
from flashckpt.cli.options import where
from flashckpt.cli.output import format_bytes, note, print_json, print_table, printable
from flashckpt.errors import CorruptShardError, FlashError
from flashckpt.format.refuse import shorten
from flashckpt.format.shard import read_header
from flashckpt.format.values import Blob, decode_values
from flashckpt.state.cover import index_headers, uncovered

if TYPE_CHECKING:
    from flashckpt.cli.memory import GenerationView
    from flashckpt.state.cover import Piece
    from flashckpt.store.slots import SlotStore
    from flashckpt.types import ShardHeader

_RESERVED = "\x1f"  # prefix of the keys under which flashckpt keeps its own values beside the user's
_EXTRA = "\x1fextra"
_LONGEST_LIST = 3


@click.command("inspect")
@click.argument("step", type=click.IntRange(min=0), required=False)
@click.option("--tensors", metavar="GLOB", default="*", help="Show only keys that match, e.g. 'model.*.weight'.")
@click.option("--values", is_flag=True, help="Also show values that are not tensors, shortened.")
@where
def command(
    step: int | None, tensors: str, values: bool, job: str | None, memory_dir: str | None, as_json: bool
) -> None:
    """Show what STEP holds (default: the newest complete step): keys, dtypes, shapes, and who has which region."""
    directory = memory_dir_of(memory_dir, job)
    name = selected_job(directory, job)
    with open_store(directory, name) as store:
        found = pick(view(store, name), step)
        headers, packed = _read(store, found, name, values)
    stored = index_headers(headers)
    problems = uncovered(stored)
    listed = [_tensor(key[0], pieces) for key, pieces in stored.items() if fnmatchcase(key[0], tensors)]
    shown = [one for rank, decoded in packed.items() for one in _values(rank, decoded)]
    if as_json:
        content = {
            "job": name,
            **found.as_json(),
            "problems": problems,
            "tensors": listed,
            "values": shown if values else None,
        }
        print_json("inspect/v1", content)
        return
    print_table(
        ["key", "dtype", "shape", "rank", "regions", "bytes"],
        [_tensor_row(one) for one in listed],
        right=(4, 5),
    )
    if values:
        click.echo()
        print_table(["key", "rank", "value"], [[one["key"], str(one["rank"]), one["value"]] for one in shown])
    total = sum(one["size_bytes"] for one in listed)
    note(
        f"{printable(name)}: {found.generation}, {found.state}, {len(found.shards)} of {found.world} shards; "
        f"{len(listed)} of {len(stored)} tensors shown, {format_bytes(total)}"
    )
    for problem in problems:
        note(f"not whole: {problem}")


def _read(
    store: SlotStore, found: GenerationView, job: str, values: bool
) -> tuple[list[ShardHeader], dict[int, dict[str, Any]]]:
    headers: list[ShardHeader] = []
    packed: dict[int, dict[str, Any]] = {}
    for shard in found.shards:
        fd = store.open_shard(shard.sealed)
        try:
            header = read_header(fd, expect=shard.sealed.shard, job=job)
            headers.append(header)
            if values:
                packed[shard.rank] = decode_values(memoryview(_verified_values(fd, header)))
        except FlashError as error:
            if len(found.shards) == 1:
                raise
            note(f"{shard.sealed.shard}: left out: {error}")
        finally:
            os.close(fd)
    if not headers:
        raise CorruptShardError(
            f"{found.generation}: expected a readable shard, found none",
            hint="`flashckpt verify` says what is wrong with each",
        )
    return headers, packed


def _verified_values(fd: int, header: ShardHeader) -> bytes:
    """Read the packed values. Their chunks are checked before they are parsed."""
    start, length, chunk = header.values_offset_bytes, header.values_length_bytes, header.chunk_bytes
    if not length:
        return b""
    first, last = start // chunk, (start + length - 1) // chunk
    stop = min((last + 1) * chunk, header.data_length_bytes)
    data = os.pread(fd, stop - first * chunk, header.data_offset_bytes + first * chunk)
    for number in range(first, last + 1):
        at = (number - first) * chunk
        (expected,) = struct.unpack_from("<I", header.chunk_crcs, 4 * number)
        if native.crc32c(data[at : at + chunk]) != expected:
            raise CorruptShardError(f"{header.shard}: chunk {number}, which holds values, fails its crc32c")
    return data[start - first * chunk :][:length]


def _tensor(fqn: str, pieces: list[Piece]) -> dict[str, Any]:
    entry = pieces[0].entry
    regions = [
        {
            "rank": piece.ranks[0],
            "offsets": list(piece.entry.box.offsets),
            "sizes": list(piece.entry.box.sizes),
            "size_bytes": piece.entry.length_bytes,
        }
        for piece in pieces
    ]
    return {
        "key": fqn,
        "rank": pieces[0].ranks[0] if entry.per_rank else None,
        "dtype": entry.dtype,
        "global_shape": list(entry.global_shape),
        "size_bytes": sum(piece.entry.length_bytes for piece in pieces),
        "regions": regions,
    }


def _tensor_row(one: dict[str, Any]) -> list[str]:
    ranks = sorted({region["rank"] for region in one["regions"]})
    listed = ", ".join(map(str, ranks[:_LONGEST_LIST])) + (", …" if len(ranks) > _LONGEST_LIST else "")
    return [
        one["key"],
        one["dtype"],
        str(one["global_shape"]),
        f"{one['rank']} only" if one["rank"] is not None else listed,
        str(len(one["regions"])),
        str(one["size_bytes"]),
    ]


def _values(rank: int, decoded: dict[str, Any]) -> list[dict[str, Any]]:
    listed = []
    for key, value in decoded.items():
        if key.startswith(_RESERVED) and key != _EXTRA:
            continue
        # A blob is a pickle: this command never opens it.
        text = f"<torch.save blob of {len(value)} bytes>" if isinstance(value, Blob) else shorten(value)
        listed.append(
            {"key": "(extra)" if key == _EXTRA else key, "rank": rank, "type": type(value).__name__, "value": text}
        )
    return listed
