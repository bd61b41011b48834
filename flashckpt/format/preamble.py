"""Encodes and checks the first 64 bytes of a shard. All zeros means: not sealed."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from flashckpt import native
from flashckpt.errors import IncompatibleError
from flashckpt.format.caps import (
    DATA_ALIGNMENT_BYTES,
    FORMAT_VERSION,
    MAX_HEADER_BYTES,
    MAX_INTEGER,
    PREAMBLE_BYTES,
)
from flashckpt.format.refuse import corrupt

# A byte above 127 and both kinds of line end, so that any text-mode transfer damages it detectably.
MAGIC = b"\x89FCKPT\r\n"

# magic, version, header length, header CRC, 4 reserved, data offset, data length, 20 reserved; then the CRC
_BODY = struct.Struct("<8sIII4sQQ20s")
_CRC = struct.Struct("<I")
_UNSEALED = bytes(PREAMBLE_BYTES)
_MAX_DATA_OFFSET_BYTES = -(-(PREAMBLE_BYTES + MAX_HEADER_BYTES) // DATA_ALIGNMENT_BYTES) * DATA_ALIGNMENT_BYTES


@dataclass(frozen=True, slots=True)
class Preamble:
    header_length_bytes: int
    header_crc: int
    data_offset_bytes: int
    data_length_bytes: int


def pack(preamble: Preamble) -> bytes:
    body = _BODY.pack(
        MAGIC,
        FORMAT_VERSION,
        preamble.header_length_bytes,
        preamble.header_crc,
        bytes(4),
        preamble.data_offset_bytes,
        preamble.data_length_bytes,
        bytes(20),
    )
    return body + _CRC.pack(native.crc32c(body))


def unpack(data: bytes, file_length_bytes: int, where: str) -> Preamble:
    """Decodes a preamble and checks every rule of it. `file_length_bytes` is the length of the whole shard."""
    if len(data) != PREAMBLE_BYTES:
        corrupt(where, f"a preamble of {PREAMBLE_BYTES} bytes", f"{len(data)} bytes")
    if data == _UNSEALED:
        corrupt(where, "a sealed shard", "a zeroed preamble: never sealed, or being overwritten")
    body = data[: _BODY.size]
    magic, version, header_length, header_crc, reserved, data_offset, data_length, rest = _BODY.unpack(body)
    if magic != MAGIC:
        corrupt(where, f"magic {MAGIC.hex()}", magic.hex())
    # Check the checksum before the version. Its place is the same in every version, so that a damaged version number is
    # not taken for another version.
    (crc,) = _CRC.unpack(data[_BODY.size :])
    if crc != (actual := native.crc32c(body)):
        corrupt(where, f"preamble crc32c {crc:#010x}", f"{actual:#010x}")
    if version != FORMAT_VERSION:
        raise IncompatibleError(
            f"{where}: expected format version {FORMAT_VERSION}, found {version}",
            hint="run the version of flashckpt that wrote the shard on every node of the job",
            where=where,
            expected=FORMAT_VERSION,
            found=version,
        )
    if any(reserved) or any(rest):
        corrupt(where, "reserved bytes of zero", (reserved + rest).hex())
    if not 0 < header_length <= MAX_HEADER_BYTES:
        corrupt(where, f"a header of 1 to {MAX_HEADER_BYTES} bytes", f"{header_length}")
    if data_offset % DATA_ALIGNMENT_BYTES or not (
        PREAMBLE_BYTES + header_length <= data_offset <= _MAX_DATA_OFFSET_BYTES
    ):
        corrupt(
            where,
            f"a data offset that is a multiple of {DATA_ALIGNMENT_BYTES} between the header's end "
            f"{PREAMBLE_BYTES + header_length} and {_MAX_DATA_OFFSET_BYTES}",
            f"{data_offset}",
        )
    if data_length > MAX_INTEGER or data_offset + data_length != file_length_bytes:
        corrupt(where, f"a file of {data_offset} + {data_length} bytes", f"{file_length_bytes} bytes")
    return Preamble(header_length, header_crc, data_offset, data_length)
