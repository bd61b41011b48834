"""Lays out, seals and reads a whole shard. Reading treats all bytes as hostile.

Writing: `invalidate` → data → `encode_header` → `seal_bytes`. The preamble is written last, so that a writer that dies
anywhere before leaves a shard that every reader refuses.
"""

from __future__ import annotations

import math
import os
import stat
import sys
from dataclasses import dataclass
from typing import cast

from google.protobuf.message import DecodeError, EncodeError

from flashckpt import native
from flashckpt.errors import ConfigError, IncompatibleError, InternalError
from flashckpt.failpoints import failpoint
from flashckpt.format import preamble as preambles
from flashckpt.format.caps import (
    CRC_BYTES,
    DATA_ALIGNMENT_BYTES,
    DEFAULT_CHUNK_BYTES,
    ENTRY_ALIGNMENT_BYTES,
    FINGERPRINT_BYTES,
    IDENTITY_ROOM_BYTES,
    MAX_CHUNK_BYTES,
    MAX_HEADER_BYTES,
    MAX_INTEGER,
    MAX_JOB_BYTES,
    MAX_NONCE,
    MAX_VALUES_BYTES,
    MAX_WORLD,
    MIN_CHUNK_BYTES,
    PREAMBLE_BYTES,
)
from flashckpt.format.layout import decode_layout, end_bytes, fingerprint
from flashckpt.format.refuse import corrupt, corrupt_because, shorten
from flashckpt.types import Generation, ShardHeader, ShardId
from flashckpt.v1 import format_pb2

__all__ = [
    "DEFAULT_CHUNK_BYTES",
    "Geometry",
    "ShardEnvelope",
    "encode_header",
    "geometry",
    "invalidate",
    "name_of",
    "parse_header",
    "read_envelope",
    "read_header",
    "read_identity",
    "seal_bytes",
]


@dataclass(frozen=True, slots=True)
class Geometry:
    """The place of a shard's data area, which reaches to the end of the file."""

    data_offset_bytes: int
    data_length_bytes: int
    file_length_bytes: int


@dataclass(frozen=True, slots=True)
class ShardEnvelope:
    """A header with its layout not decoded: enough to identify, verify and move a shard.

    Decoding tens of thousands of entries takes a hundred times longer than everything else in a header, and a node that
    only keeps replicas does not need them.
    """

    job: str
    shard: ShardId
    layout_bytes: bytes
    layout_fingerprint: bytes
    values_offset_bytes: int
    values_length_bytes: int
    chunk_bytes: int
    chunk_crcs: bytes
    data_offset_bytes: int
    data_length_bytes: int
    saved_at: float


# --- writing


def geometry(layout_length_bytes: int, payload_bytes: int, granule_bytes: int, chunk_bytes: int) -> Geometry:
    """Returns a geometry with room for the header, and the file rounded up to a multiple of `granule_bytes`."""
    if not _is_chunk_size(chunk_bytes):
        raise ConfigError(f"chunk_bytes: expected {_CHUNK_RULE}, found {chunk_bytes}")
    if granule_bytes <= 0 or granule_bytes % DATA_ALIGNMENT_BYTES:
        raise ConfigError(f"granule_bytes: expected a multiple of {DATA_ALIGNMENT_BYTES}, found {granule_bytes}")
    if layout_length_bytes < 0 or payload_bytes < 0:
        raise InternalError(f"geometry: negative length {layout_length_bytes} or {payload_bytes}")
    chunks = 0
    while True:
        # The chunk table is part of the header, and its length depends on where the data area starts. A few rounds are
        # enough, because each chunk adds only 4 bytes to the table.
        header_room = IDENTITY_ROOM_BYTES + layout_length_bytes + chunks * CRC_BYTES
        data_offset = _round_up(PREAMBLE_BYTES + header_room, DATA_ALIGNMENT_BYTES)
        file_length = _round_up(data_offset + payload_bytes, granule_bytes)
        needed = _chunk_count(file_length - data_offset, chunk_bytes)
        if needed <= chunks:
            break
        chunks = needed
    if header_room > MAX_HEADER_BYTES or file_length > MAX_INTEGER:
        raise ConfigError(
            f"shard header: expected at most {MAX_HEADER_BYTES} bytes, found {header_room} "
            f"({layout_length_bytes} for the layout, {chunks * CRC_BYTES} for {chunks} chunk checksums)",
            hint="use a larger chunk size, or save fewer tensors or shorter keys from one rank",
        )
    return Geometry(data_offset, file_length - data_offset, file_length)


def encode_header(
    *,
    job: str,
    shard: ShardId,
    layout_bytes: bytes,
    layout_fingerprint: bytes,
    values_offset_bytes: int,
    values_length_bytes: int,
    chunk_bytes: int,
    chunk_crcs: bytes,
    saved_at: float,
) -> bytes:
    """Encodes a header, with the checks that a reader makes. Does not check the layout and its fingerprint, because
    that would cost time at every save."""
    if sys.byteorder != "little":
        raise IncompatibleError("shard: expected a little-endian host, found a big-endian one")
    generation = shard.generation
    reason = (
        _refuse_job(job)
        or _refuse_shard_id(shard)
        or _refuse_table(layout_fingerprint, values_offset_bytes, values_length_bytes, chunk_bytes, saved_at)
    )
    if reason:
        raise InternalError(f"{shard}: header: {reason}")
    try:
        encoded = format_pb2.ShardHeader(
            job=job,
            epoch=generation.epoch,
            nonce=generation.nonce,
            step=generation.step,
            seq=generation.seq,
            rank=shard.rank,
            world=shard.world,
            saved_at=saved_at,
            layout=layout_bytes,
            layout_fingerprint=layout_fingerprint,
            values_offset_bytes=values_offset_bytes,
            values_length_bytes=values_length_bytes,
            chunk_bytes=chunk_bytes,
            chunk_crcs=chunk_crcs,
        ).SerializeToString(deterministic=True)
    except (EncodeError, TypeError, ValueError) as error:
        raise InternalError(f"{shard}: header can't be encoded: {error}") from error
    if len(encoded) > MAX_HEADER_BYTES:
        raise InternalError(f"{shard}: expected a header of at most {MAX_HEADER_BYTES} bytes, found {len(encoded)}")
    return encoded


def invalidate(view: memoryview) -> None:
    """Zeroes the preamble. Call it before the first byte of data is overwritten."""
    view[:PREAMBLE_BYTES] = bytes(PREAMBLE_BYTES)


def seal_bytes(view: memoryview, header: bytes, geometry: Geometry) -> None:
    """Writes the header, zeros up to the data area, and last the preamble. The data must be in place already."""
    header_end = PREAMBLE_BYTES + len(header)
    data_offset = geometry.data_offset_bytes
    if len(view) < geometry.file_length_bytes:
        raise InternalError(f"seal: expected a view of {geometry.file_length_bytes} bytes, found {len(view)}")
    if header_end > data_offset:
        raise InternalError(
            f"seal: expected a header of at most {data_offset - PREAMBLE_BYTES} bytes, found {len(header)}"
        )
    if any(view[:PREAMBLE_BYTES]):
        # The data of a sealed shard was overwritten without invalidate().
        raise InternalError("seal: expected an invalidated preamble, found another shard's")
    packed = preambles.pack(
        preambles.Preamble(len(header), native.crc32c(header), data_offset, geometry.data_length_bytes)
    )
    view[PREAMBLE_BYTES:header_end] = header
    view[header_end:data_offset] = bytes(data_offset - header_end)
    failpoint("before_preamble")
    view[:PREAMBLE_BYTES] = packed


# --- reading


def read_header(fd: int, *, expect: ShardId | None = None, job: str | None = None) -> ShardHeader:
    """Reads the whole header of the shard open at `fd` and checks every rule. Does not read the data.

    Raises CorruptShardError if the bytes break a rule, and IncompatibleError if they are of another format version, of
    another job than `job`, or of another shard than `expect`.
    """
    return _with_layout(read_envelope(fd, expect=expect, job=job), name_of(fd))


def read_envelope(fd: int, *, expect: ShardId | None = None, job: str | None = None) -> ShardEnvelope:
    """Like `read_header`, but leaves the layout encoded and its entries unchecked."""
    head, file_length = _read_head(fd)
    return _parse_envelope(head, file_length, expect, job, name_of(fd))


def read_identity(fd: int) -> tuple[str, ShardId]:
    """Reads job and id of the shard open at `fd`, with every check except those of its entries."""
    envelope = read_envelope(fd)
    return envelope.job, envelope.shard


def parse_header(
    head: bytes,
    file_length_bytes: int,
    *,
    expect: ShardId | None = None,
    job: str | None = None,
    where: str = "shard",
) -> ShardHeader:
    """Does what `read_header` does, from bytes: `head` is exactly everything before the data area."""
    return _with_layout(_parse_envelope(head, file_length_bytes, expect, job, where), where)


def name_of(fd: int) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return f"descriptor {fd}"


def _read_head(fd: int) -> tuple[bytes, int]:
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        corrupt(name_of(fd), "a regular file", stat.filemode(status.st_mode))
    first = os.pread(fd, PREAMBLE_BYTES, 0)
    # Checks the length of the file too, so that the next read finds all bytes.
    preamble = preambles.unpack(first, status.st_size, name_of(fd))
    head = os.pread(fd, preamble.data_offset_bytes, 0)
    # A read of a regular file is short only at its end: the file was cut after fstat.
    if len(head) != preamble.data_offset_bytes:
        corrupt(name_of(fd), f"{preamble.data_offset_bytes} bytes before the data", f"{len(head)}")
    return head, status.st_size


def _parse_envelope(
    head: bytes, file_length: int, expect: ShardId | None, job: str | None, where: str
) -> ShardEnvelope:
    preamble = preambles.unpack(head[:PREAMBLE_BYTES], file_length, where)
    if len(head) != preamble.data_offset_bytes:
        corrupt(where, f"{preamble.data_offset_bytes} bytes before the data", f"{len(head)}")
    header_end = PREAMBLE_BYTES + preamble.header_length_bytes
    header = memoryview(head)[PREAMBLE_BYTES:header_end]
    if preamble.header_crc != (crc := native.crc32c(header)):
        corrupt(where, f"header crc32c {preamble.header_crc:#010x}", f"{crc:#010x}")
    if head.count(0, header_end) != len(head) - header_end:
        corrupt(where, f"zeros from byte {header_end} to {len(head)}", "other bytes")
    envelope = _decode_header(header, preamble, where)
    if job is not None and envelope.job != job:
        raise IncompatibleError(
            f"{where}: expected a shard of job {shorten(job)}, found one of {shorten(envelope.job)}",
            where=where,
            expected=job,
            found=envelope.job,
        )
    if expect is not None and envelope.shard != expect:
        raise IncompatibleError(
            f"{where}: expected {expect}, found {envelope.shard}",
            where=where,
            expected=expect,
            found=envelope.shard,
        )
    return envelope


def _decode_header(header: memoryview, preamble: preambles.Preamble, where: str) -> ShardEnvelope:
    try:
        # Protobuf takes any buffer, although its stub says bytes. A copy of a large header would double its memory.
        message = format_pb2.ShardHeader.FromString(cast("bytes", header))
    except DecodeError as error:
        corrupt(where, "a ShardHeader", str(error))
    # Only the canonical encoding is accepted, as in the layout.
    message.DiscardUnknownFields()
    if message.SerializeToString(deterministic=True) != header:
        corrupt(where, "the canonical encoding of what the header says", "another one")
    shard = ShardId(Generation(message.epoch, message.nonce, message.step, message.seq), message.rank, message.world)
    layout_bytes, chunk_crcs = message.layout, message.chunk_crcs
    envelope = ShardEnvelope(
        message.job,
        shard,
        layout_bytes,
        message.layout_fingerprint,
        message.values_offset_bytes,
        message.values_length_bytes,
        message.chunk_bytes,
        chunk_crcs,
        preamble.data_offset_bytes,
        preamble.data_length_bytes,
        message.saved_at,
    )
    reason = (
        _refuse_job(envelope.job)
        or _refuse_shard_id(shard)
        or _refuse_table(
            envelope.layout_fingerprint,
            envelope.values_offset_bytes,
            envelope.values_length_bytes,
            envelope.chunk_bytes,
            envelope.saved_at,
        )
    )
    if reason:
        corrupt_because(where, reason)
    table = _chunk_count(preamble.data_length_bytes, envelope.chunk_bytes) * CRC_BYTES
    if len(chunk_crcs) != table:
        corrupt(where, f"{table} bytes of chunk checksums", f"{len(chunk_crcs)}")
    if envelope.values_offset_bytes + envelope.values_length_bytes > preamble.data_length_bytes:
        corrupt(
            where,
            f"values within {preamble.data_length_bytes} bytes of data",
            f"{envelope.values_offset_bytes}+{envelope.values_length_bytes}",
        )
    if envelope.layout_fingerprint != (actual := fingerprint(layout_bytes)):
        corrupt(where, f"layout fingerprint {envelope.layout_fingerprint.hex()}", actual.hex())
    return envelope


def _with_layout(envelope: ShardEnvelope, where: str) -> ShardHeader:
    layout = decode_layout(envelope.layout_bytes, f"{where}: layout")
    end = end_bytes(layout)
    # This also keeps the tensors within the data area, because the values are within it.
    if end > envelope.values_offset_bytes:
        corrupt(where, f"values behind the last tensor, which ends at {end}", f"{envelope.values_offset_bytes}")
    return ShardHeader(
        job=envelope.job,
        shard=envelope.shard,
        layout=layout,
        layout_fingerprint=envelope.layout_fingerprint,
        values_offset_bytes=envelope.values_offset_bytes,
        values_length_bytes=envelope.values_length_bytes,
        chunk_bytes=envelope.chunk_bytes,
        chunk_crcs=envelope.chunk_crcs,
        data_offset_bytes=envelope.data_offset_bytes,
        data_length_bytes=envelope.data_length_bytes,
        saved_at=envelope.saved_at,
    )


# --- rules that writer and reader share: each returns why it is broken, or ""

_CHUNK_RULE = f"a power of two from {MIN_CHUNK_BYTES} to {MAX_CHUNK_BYTES}"


def _is_chunk_size(chunk_bytes: int) -> bool:
    return MIN_CHUNK_BYTES <= chunk_bytes <= MAX_CHUNK_BYTES and chunk_bytes & (chunk_bytes - 1) == 0


def _chunk_count(data_length_bytes: int, chunk_bytes: int) -> int:
    return -(-data_length_bytes // chunk_bytes)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _refuse_job(job: str) -> str:
    try:
        length = len(job.encode())
    except UnicodeEncodeError:
        return f"expected a job name that UTF-8 can hold, found {shorten(job)}"
    if not 1 <= length <= MAX_JOB_BYTES:
        return f"expected a job name of 1 to {MAX_JOB_BYTES} bytes, found {length}"
    return ""


def _refuse_shard_id(shard: ShardId) -> str:
    generation = shard.generation
    for name, number, largest in (
        ("epoch", generation.epoch, MAX_INTEGER),
        ("nonce", generation.nonce, MAX_NONCE),
        ("step", generation.step, MAX_INTEGER),
        ("seq", generation.seq, MAX_INTEGER),
    ):
        if not 0 <= number <= largest:
            return f"expected {name} from 0 to {largest}, found {number}"
    if not 1 <= shard.world <= MAX_WORLD:
        return f"expected 1 to {MAX_WORLD} ranks, found {shard.world}"
    if not 0 <= shard.rank < shard.world:
        return f"expected a rank below {shard.world}, found {shard.rank}"
    return ""


def _refuse_table(
    layout_fingerprint: bytes,
    values_offset_bytes: int,
    values_length_bytes: int,
    chunk_bytes: int,
    saved_at: float,
) -> str:
    if len(layout_fingerprint) != FINGERPRINT_BYTES:
        return f"expected a fingerprint of {FINGERPRINT_BYTES} bytes, found {len(layout_fingerprint)}"
    if not 0 <= values_offset_bytes <= MAX_INTEGER or values_offset_bytes % ENTRY_ALIGNMENT_BYTES:
        return f"expected values at a multiple of {ENTRY_ALIGNMENT_BYTES}, found {values_offset_bytes}"
    if not 0 <= values_length_bytes <= MAX_VALUES_BYTES:
        return f"expected at most {MAX_VALUES_BYTES} bytes of values, found {values_length_bytes}"
    if not _is_chunk_size(chunk_bytes):
        return f"expected a chunk size that is {_CHUNK_RULE}, found {chunk_bytes}"
    if not (math.isfinite(saved_at) and saved_at >= 0):
        return f"expected a time after 1970, found {saved_at}"
    return ""
