from __future__ import annotations

import os
import random
import struct

import pytest

from flashckpt import native
from flashckpt.errors import ConfigError, CorruptShardError, FlashError, InternalError
from flashckpt.format.caps import MAX_CHUNK_BYTES, MAX_HEADER_BYTES
from flashckpt.format.layout import encode_layout, fingerprint
from flashckpt.format.shard import (
    DEFAULT_CHUNK_BYTES,
    encode_header,
    geometry,
    invalidate,
    read_header,
    read_identity,
    seal_bytes,
)
from flashckpt.types import Generation, Layout, ShardId
from tests.compat.make_golden import Sample, build, place, whole
from tests.fuzz.forge import preamble_of

SMALL = Sample(
    place(
        ("w", ("w",), "float32", (5, 7), whole(5, 7), False),
        ("v", ("m", 0, "v"), "int16", (3,), whole(3), True),
    ),
    {"k": [1, "x", None]},
)


@pytest.fixture
def shard_file(tmp_path):
    path = tmp_path / "s"
    path.write_bytes(build(SMALL))
    fd = os.open(path, os.O_RDWR)
    yield fd
    os.close(fd)


def bad_chunks(fd):
    header = read_header(fd)
    return native.verify_file(
        fd, header.data_offset_bytes, header.data_length_bytes, header.chunk_bytes, header.chunk_crcs, 1
    )


def test_every_flipped_bit_before_the_data_is_refused(shard_file):
    data_offset = preamble_of(os.pread(shard_file, 64, 0))["data_offset"]
    head = os.pread(shard_file, data_offset, 0)
    header_end = 64 + preamble_of(head)["header_length"]
    read_header(shard_file)
    # All of preamble and header; of the zeros behind them the two ends, where a slip of one would show.
    positions = [*range(header_end + 2), data_offset - 2, data_offset - 1]
    for position in positions:
        for bit in range(8):
            os.pwrite(shard_file, bytes([head[position] ^ 1 << bit]), position)
            for read in (read_header, read_identity):
                with pytest.raises(CorruptShardError):
                    read(shard_file)
        os.pwrite(shard_file, head[position : position + 1], position)
    assert read_header(shard_file).shard == SMALL.shard


def test_every_flipped_bit_of_the_data_is_found(shard_file):
    header = read_header(shard_file)
    assert bad_chunks(shard_file) == []
    size = os.fstat(shard_file).st_size
    data = os.pread(shard_file, size, 0)
    for position in range(header.data_offset_bytes, size):
        bit = 1 << position % 8
        os.pwrite(shard_file, bytes([data[position] ^ bit]), position)
        assert bad_chunks(shard_file) == [(position - header.data_offset_bytes) // header.chunk_bytes]
        os.pwrite(shard_file, data[position : position + 1], position)


def test_every_truncation_is_refused(shard_file):
    for size in reversed(range(os.fstat(shard_file).st_size)):
        os.ftruncate(shard_file, size)
        with pytest.raises(CorruptShardError):
            read_header(shard_file)


def test_a_writer_that_dies_leaves_no_shard(tmp_path):
    """Every prefix of the writer's stores, in a slot that holds an older shard of the same shape."""
    old = build(SMALL)
    new = build(Sample(SMALL.layout, SMALL.values, seed=9, saved_at=2.0))
    data_offset = preamble_of(new)["data_offset"]
    slot = bytearray(old)
    states = []
    invalidate(memoryview(slot))
    states.append(bytes(slot))
    slot[data_offset:] = new[data_offset:]
    states.append(bytes(slot))
    slot[64:200] = new[64:200]
    states.append(bytes(slot))
    slot[64:data_offset] = new[64:data_offset]
    states.append(bytes(slot))
    states.extend(new[:torn] + bytes(slot[torn:]) for torn in range(1, 64))
    # Where the preamble happens to end in zeros, its last stores change nothing: the shard is whole already.
    states = [state for state in states if state != new]
    assert len(states) > 60
    path = tmp_path / "slot"
    for state in states:
        path.write_bytes(state)
        fd = os.open(path, os.O_RDONLY)
        with pytest.raises(CorruptShardError):
            read_header(fd)
        os.close(fd)


def test_seal_overwrites_the_slot_before_the_data():
    assert b"\xa5" not in build(Sample(Layout(())))


def test_seal_checks_its_room():
    layout = encode_layout(SMALL.layout)
    where = geometry(len(layout), 4096, 4096, 4096)
    slot = bytearray(where.file_length_bytes)
    with pytest.raises(InternalError, match="header of at most"):
        seal_bytes(memoryview(slot), bytes(where.data_offset_bytes), where)
    with pytest.raises(InternalError, match="view of"):
        seal_bytes(memoryview(slot)[:-1], b"x", where)
    assert not any(slot)


def test_read_names_the_file(tmp_path):
    path = tmp_path / "named.shard"
    path.write_bytes(bytes(8192))
    fd = os.open(path, os.O_RDONLY)
    with pytest.raises(CorruptShardError, match=r"named\.shard: expected a sealed shard") as caught:
        read_header(fd)
    os.close(fd)
    assert caught.value.where == str(path)
    assert caught.value.hint


def test_failpoint_before_the_preamble(monkeypatch):
    from flashckpt import failpoints

    monkeypatch.setattr(failpoints, "_armed", failpoints.parse("before_preamble=error(EIO)"))
    layout = encode_layout(Layout(()))
    where = geometry(len(layout), 0, 4096, 4096)
    slot = bytearray(where.file_length_bytes)
    with pytest.raises(OSError, match="before_preamble"):
        seal_bytes(memoryview(slot), b"header", where)
    assert not any(slot[:64])
    assert slot[64:70] == b"header"


@pytest.mark.parametrize("chunk_bytes", [4096, DEFAULT_CHUNK_BYTES, MAX_CHUNK_BYTES])
@pytest.mark.parametrize("granule_bytes", [4096, 2 << 20])
def test_geometry_has_room_for_the_longest_header(chunk_bytes, granule_bytes):
    source = random.Random(chunk_bytes + granule_bytes)
    shard = ShardId(Generation(2**63 - 1, 2**64 - 1, 2**63 - 1, 2**63 - 1), 2**24 - 1, 2**24)
    for _ in range(200):
        layout_length = source.choice([0, 1, 3000, 3519, 3520, 3521, source.randrange(1 << 20)])
        payload = source.choice([0, 1, 4096, source.randrange(1 << 32)])
        where = geometry(layout_length, payload, granule_bytes, chunk_bytes)
        assert where.file_length_bytes % granule_bytes == 0
        assert where.data_offset_bytes % 4096 == 0
        assert where.file_length_bytes == where.data_offset_bytes + where.data_length_bytes
        assert payload <= where.data_length_bytes < payload + granule_bytes + 4096
        header = encode_header(
            job="j" * 256,
            shard=shard,
            layout_bytes=bytes(layout_length),
            layout_fingerprint=bytes(16),
            values_offset_bytes=2**63 - 64,
            values_length_bytes=2**30,
            chunk_bytes=chunk_bytes,
            chunk_crcs=bytes(4 * -(-where.data_length_bytes // chunk_bytes)),
            saved_at=1.7976931348623157e308,
        )
        assert 64 + len(header) <= where.data_offset_bytes


def test_geometry_refuses_what_can_not_be():
    for granule, chunk in ((0, 4096), (100, 4096), (4096, 5000), (4096, 2048), (4096, 2 * MAX_CHUNK_BYTES)):
        with pytest.raises(ConfigError, match="expected"):
            geometry(0, 0, granule, chunk)
    with pytest.raises(ConfigError, match="larger chunk size"):
        geometry(0, 1 << 40, 4096, 4096)
    with pytest.raises(ConfigError, match="at most"):
        geometry(MAX_HEADER_BYTES, 0, 4096, 4096)
    with pytest.raises(FlashError):
        geometry(-1, 0, 4096, 4096)


def test_header_embeds_the_layout_as_it_is():
    """The writer caches the layout; a header of 20,000 entries must not parse or copy it entry by entry."""
    layout_bytes = bytes(range(256)) * 4
    header = encode_header(
        job="j", shard=SMALL.shard, layout_bytes=layout_bytes, layout_fingerprint=fingerprint(layout_bytes),
        values_offset_bytes=0, values_length_bytes=0, chunk_bytes=4096, chunk_crcs=struct.pack("<I", 7), saved_at=0.5,
    )  # fmt: skip
    assert header.count(layout_bytes) == 1
