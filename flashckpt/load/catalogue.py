"""The catalogue of a generation: what every shard's header says, so that any rank can plan without opening them.

One holder describes each shard; the descriptions are gathered. Most of a header is its layout, and most layouts are
alike (the ranks of a data-parallel group, the values of a step): each is sent once.
"""

from __future__ import annotations

import hashlib
import os
import struct
import zlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from flashckpt import native
from flashckpt.errors import CorruptShardError, FlashError, IncompatibleError, InternalError, NotFoundError
from flashckpt.format.layout import decode_layout, end_bytes
from flashckpt.format.refuse import corrupt
from flashckpt.format.shard import read_envelope
from flashckpt.load.read import OpenShard, read_range
from flashckpt.move.outgoing import digest_of
from flashckpt.save.values import Values, unpack
from flashckpt.state.assumed import AssumedTensors, make_table
from flashckpt.types import Layout

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from flashckpt.format.shard import ShardEnvelope
    from flashckpt.load.inventory import Copy
    from flashckpt.store.slots import SlotStore
    from flashckpt.types import Generation

_HEAD = struct.Struct("<IIII")  # shards, layouts, values, problems
_LENGTH = struct.Struct("<Q")
_BLOB_LIMIT = 1 << 31
SHARD = np.dtype(
    [
        ("rank", "<u4"),
        ("layout", "<u4"),  # index into the layouts
        ("values", "<u4"),  # index into the values
        ("chunk_bytes", "<u4"),
        ("data_offset_bytes", "<u8"),
        ("data_length_bytes", "<u8"),
        ("values_offset_bytes", "<u8"),
        ("assumed_bytes", "<u8"),  # end of its assumed tensors in the data area; 0: it has none
        ("assumed_digest", "<u8"),  # of their checksums; 0: it has none
    ]
)
Table = npt.NDArray[Any]


@dataclass(slots=True)
class Description:
    """One node's description of the shards that it was asked for."""

    shards: list[tuple[int, ...]] = field(default_factory=list)  # rows of SHARD
    layouts: list[bytes] = field(default_factory=list)
    values: list[bytes] = field(default_factory=list)
    problems: dict[int, str] = field(default_factory=dict)  # rank → why its copy here can't be used

    def add(self, rank: int, envelope: ShardEnvelope, values: bytes, assumed_bytes: int, assumed_digest: int) -> None:
        self.shards.append(
            (
                rank,
                _index(self.layouts, envelope.layout_bytes),
                _index(self.values, values),
                envelope.chunk_bytes,
                envelope.data_offset_bytes,
                envelope.data_length_bytes,
                envelope.values_offset_bytes,
                assumed_bytes,
                assumed_digest,
            )
        )


def describe(store: SlotStore, job: str, asked: Iterable[Copy], verify: bool) -> Description:
    """Reads heads and values of copies on this node. Adds a bad copy to `problems` instead of raising an error."""
    described = Description()
    present = {one.shard: one for one in store.scan()}
    for copy in asked:
        rank, sealed = copy.shard.rank, present.get(copy.shard)
        if sealed is None:
            described.problems[rank] = f"{copy.shard}: no longer in this node's memory"
            continue
        try:
            fd = store.open_shard(sealed)
            try:
                described.add(rank, *_read(fd, job, copy, verify))
            finally:
                os.close(fd)
        except CorruptShardError as error:
            store.quarantine(sealed, error.message)
            described.problems[rank] = error.message
        except (FlashError, OSError) as error:
            described.problems[rank] = str(error)
    return described


def _read(fd: int, job: str, copy: Copy, verify: bool) -> tuple[ShardEnvelope, bytes, int, int]:
    envelope = read_envelope(fd, expect=copy.shard, job=job)
    found = digest_of(fd)
    if found != copy.digest:
        raise IncompatibleError(f"{copy.shard}: expected digest {copy.digest.hex()}, found {found.hex()}")
    whole = OpenShard(fd, envelope, Layout(()))
    values = read_range(whole, copy.shard.rank, envelope.values_offset_bytes, envelope.values_length_bytes, verify)
    # Decode here: values that can't be decoded count as damage, like a wrong checksum.
    end = unpack(values).assumed_bytes
    digest = hashlib.blake2b(_table(whole, copy.shard.rank, end, verify), digest_size=8).digest() if end else b""
    return envelope, bytes(values), end, int.from_bytes(digest, "little")


def table_of(store: SlotStore, job: str, copy: Copy, verify: bool) -> bytes:
    """Reads the checksum table of the assumed tensors of a shard on this node. Raises if it can't be read."""
    sealed = store.find(copy.shard)
    if sealed is None:
        raise NotFoundError(f"{copy.shard}: no longer in this node's memory", shard_index=copy.shard.rank)
    fd = store.open_shard(sealed)
    try:
        envelope = read_envelope(fd, expect=copy.shard, job=job)
        whole = OpenShard(fd, envelope, Layout(()))
        values = read_range(whole, copy.shard.rank, envelope.values_offset_bytes, envelope.values_length_bytes, verify)
        return _table(whole, copy.shard.rank, unpack(values).assumed_bytes, verify)
    except CorruptShardError as error:
        error.fields["shard_index"] = copy.shard.rank
        raise
    finally:
        os.close(fd)


def _table(shard: OpenShard, rank: int, end_bytes: int, verify: bool) -> bytes:
    """Returns the checksum table of the assumed tensors. Their last chunk, which may hold other tensors too, gets a
    checksum of the assumed part only."""
    head = shard.head
    if end_bytes > head.values_offset_bytes:
        corrupt(f"{head.shard}: values", f"assumed tensors up to {head.values_offset_bytes}", end_bytes)
    start = end_bytes // head.chunk_bytes * head.chunk_bytes
    tail = read_range(shard, rank, start, end_bytes - start, verify)
    return make_table(head.chunk_bytes, head.chunk_crcs, end_bytes, native.crc32c(tail))


def encode(described: Description) -> bytes:
    problems = [f"{rank} {text}".encode() for rank, text in described.problems.items()]
    blobs = [*(zlib.compress(layout, 1) for layout in described.layouts), *described.values, *problems]
    parts = [
        _HEAD.pack(len(described.shards), len(described.layouts), len(described.values), len(problems)),
        np.array(described.shards, dtype=SHARD).tobytes(),
    ]
    for blob in blobs:
        parts += [_LENGTH.pack(len(blob)), blob]
    return b"".join(parts)


def decode(data: bytes) -> Description:
    shards, layouts, values, problems = _HEAD.unpack_from(data)
    at = _HEAD.size + shards * SHARD.itemsize
    rows = np.frombuffer(data, dtype=SHARD, count=shards, offset=_HEAD.size).tolist()
    blobs = []
    for _ in range(layouts + values + problems):
        (length,) = _LENGTH.unpack_from(data, at)
        at += _LENGTH.size + length
        if length > _BLOB_LIMIT or at > len(data):
            raise InternalError(f"description of {len(data)} bytes: a part reaches to {at}")
        blobs.append(data[at - length : at])
    if at != len(data) or any(row[1] >= layouts or row[2] >= values for row in rows):
        raise InternalError(f"description of {len(data)} bytes: expected {at}, and no index beyond its parts")
    told = [blob.decode(errors="replace").split(" ", 1) for blob in blobs[layouts + values :]]
    return Description(
        rows,
        [_inflate(blob) for blob in blobs[:layouts]],
        blobs[layouts : layouts + values],
        {int(rank): text for rank, text in told},
    )


class Catalogue:
    """Every shard of one generation, by rank."""

    def __init__(
        self,
        generation: Generation,
        world: int,
        described: Sequence[Description],
        lacking: frozenset[int] = frozenset(),
    ) -> None:
        """Raises CorruptShardError if a layout can't be decoded. `lacking`: ranks whose shards no node has."""
        self.generation = generation
        self.world = world
        self.lacking = lacking
        self.layouts: list[Layout] = []
        self.ranks: list[tuple[int, ...]] = []  # of each layout
        self._values: list[bytes | Values] = []
        self.shards = np.zeros(world, dtype=SHARD)
        self._join(described)

    def _join(self, described: Sequence[Description]) -> None:
        layouts: dict[bytes, int] = {}
        values: dict[bytes, int] = {}
        seen = np.zeros(self.world, dtype=bool)
        for one in described:
            to_layout = [layouts.setdefault(blob, len(layouts)) for blob in one.layouts]
            to_values = [values.setdefault(blob, len(values)) for blob in one.values]
            rows = np.array(one.shards, dtype=SHARD)
            if len(rows):
                rows["layout"] = np.array(to_layout, dtype=np.uint32)[rows["layout"]]
                rows["values"] = np.array(to_values, dtype=np.uint32)[rows["values"]]
                self.shards[rows["rank"]] = rows
                seen[rows["rank"]] = True
        if set(np.flatnonzero(~seen).tolist()) != self.lacking:
            raise InternalError(f"{self.generation}: no node described ranks {np.flatnonzero(~seen).tolist()[:8]}")
        self._seen = np.flatnonzero(seen)
        self.layouts = [decode_layout(blob, f"{self.generation}: layout") for blob in layouts]
        self.fingerprints = [hashlib.blake2b(blob, digest_size=16).digest() for blob in layouts]
        self._values = list(values)
        numbers = self.shards["layout"][self._seen]
        order = self._seen[np.argsort(numbers, kind="stable")]
        counts = np.bincount(numbers, minlength=len(self.layouts))
        self.ranks = [tuple(part.tolist()) for part in np.split(order, np.cumsum(counts)[:-1])]
        self._check_ends()
        ends = [int(self.shards["assumed_bytes"][list(ranks)].max(initial=0)) for ranks in self.ranks]
        self.assumed = AssumedTensors(self.layouts, self.ranks, ends, self.shards["assumed_digest"].tolist())

    def _check_ends(self) -> None:
        """Refuses tensors that reach into the values. As the header keeps the values within the data area, this keeps
        the tensors within it too."""
        for layout, ranks in zip(self.layouts, self.ranks, strict=True):
            least = int(self.shards["values_offset_bytes"][list(ranks)].min()) if ranks else 0
            if ranks and end_bytes(layout) > least:
                raise CorruptShardError(
                    f"{self.generation}: expected values behind the last tensor, which ends at {end_bytes(layout)}, "
                    f"found them at {least}"
                )

    def has(self, rank: int) -> bool:
        """Returns True if the rank saved a shard and a node has it."""
        return rank < self.world and rank not in self.lacking

    def layout_of(self, rank: int) -> int:
        return int(self.shards["layout"][rank])

    def values(self, rank: int) -> Values:
        """Returns the non-tensor values that one rank saved; if no node has its shard, those of the lowest rank."""
        index = int(self.shards["values"][rank if self.has(rank) else self._seen[0]])
        found = self._values[index]
        if not isinstance(found, Values):
            found = self._values[index] = unpack(found)
        return found

    def distinct_values(self) -> list[tuple[int, Values]]:
        """Returns each different set of values once, with the lowest rank that saved it, in the order of these
        ranks."""
        first: dict[int, int] = {}
        for rank in self._seen.tolist():
            first.setdefault(int(self.shards["values"][rank]), rank)
        return [(rank, self.values(rank)) for rank in first.values()]

    def chunks(self, rank: int) -> int:
        row = self.shards[rank]
        return -(-int(row["data_length_bytes"]) // int(row["chunk_bytes"]))

    def saved_keys(self, rank: int, stored: Mapping[tuple[str, int | None], Any]) -> set[str]:
        """Returns every key that this rank could ask for."""
        mine = self.layout_of(rank) if self.has(rank) else -1
        keys = {fqn for fqn, owner in stored if owner in (None, mine)}
        for first, saved in self.distinct_values():
            own = self.has(rank) and self.shards["values"][first] == self.shards["values"][rank]
            keys.update(fqn for fqn in saved.values if own or fqn not in saved.per_rank)
        return keys

    def value(self, fqn: str, rank: int) -> tuple[bool, Any]:
        """Returns (found, value): what this rank saved under the key, else what the lowest rank that has it saved."""
        if self.has(rank):
            mine = self.values(rank)
            if fqn in mine.values:
                return True, mine.values[fqn]
        for _, saved in self.distinct_values():
            if fqn in saved.values and fqn not in saved.per_rank:
                return True, saved.values[fqn]
        return False, None


def _index(known: list[bytes], blob: bytes) -> int:
    # From the end: neighbours are usually alike.
    for number in range(len(known) - 1, -1, -1):
        if known[number] == blob:
            return number
    known.append(blob)
    return len(known) - 1


def _inflate(blob: bytes) -> bytes:
    inflater = zlib.decompressobj()
    data = inflater.decompress(blob, _BLOB_LIMIT)
    if not inflater.eof or inflater.unused_data:
        raise InternalError("description: expected one compressed layout, found more or less")
    return data
