"""Version 1 as it was first written: today's code reads it exactly and writes it to the byte."""

from __future__ import annotations

import os
import struct

import pytest

from flashckpt import native
from flashckpt.format.layout import encode_layout, fingerprint
from flashckpt.format.shard import parse_header, read_envelope, read_header, read_identity
from flashckpt.format.values import decode_values, encode_values
from tests.compat.make_golden import DIRECTORY, build, samples
from tests.compat.sameness import plain
from tests.fuzz.checker import check

SAMPLES = samples()


@pytest.fixture(params=sorted(SAMPLES))
def golden(request):
    path = DIRECTORY / f"{request.param}.shard"
    fd = os.open(path, os.O_RDONLY)
    yield SAMPLES[request.param], path.read_bytes(), fd
    os.close(fd)


def test_every_golden_file_has_a_sample():
    assert {path.stem for path in DIRECTORY.iterdir()} == set(SAMPLES)


def test_reads_exactly(golden):
    sample, data, fd = golden
    header = read_header(fd, expect=sample.shard, job=sample.job)
    assert header.job == sample.job
    assert header.shard == sample.shard
    assert header.layout == sample.layout
    assert header.layout_fingerprint == fingerprint(encode_layout(sample.layout))
    assert header.values_offset_bytes == sample.values_offset_bytes
    assert header.chunk_bytes == sample.chunk_bytes
    assert header.saved_at == sample.saved_at
    assert header.data_offset_bytes + header.data_length_bytes == len(data)
    assert parse_header(data[: header.data_offset_bytes], len(data)) == header
    start = header.data_offset_bytes + header.values_offset_bytes
    values = decode_values(memoryview(data)[start : start + header.values_length_bytes])
    assert plain(values) == plain(sample.values)
    assert read_identity(fd) == (sample.job, sample.shard)
    envelope = read_envelope(fd, expect=sample.shard, job=sample.job)
    assert envelope.layout_bytes == encode_layout(sample.layout)


def test_data_is_intact(golden):
    _, _, fd = golden
    header = read_header(fd)
    area = (fd, header.data_offset_bytes, header.data_length_bytes, header.chunk_bytes, header.chunk_crcs)
    assert native.verify_file(*area, 1) == []
    assert len(header.chunk_crcs) == struct.calcsize("<I") * -(-header.data_length_bytes // header.chunk_bytes)


def test_writes_the_same_bytes(golden):
    sample, data, _ = golden
    assert build(sample) == data


def test_value_encoding_is_stable_after_a_round_trip(golden):
    sample, _, _ = golden
    once = encode_values(sample.values)
    assert encode_values(decode_values(once)) == once


def test_an_independent_reader_agrees(golden):
    sample, data, fd = golden
    found = check(data)
    generation = sample.shard.generation
    assert found["job"] == sample.job
    assert found["identity"] == (*generation, sample.shard.rank, sample.shard.world)
    assert found["bad_chunks"] == []
    assert found["entries"] == [
        (
            e.fqn,
            e.path,
            e.dtype,
            e.global_shape,
            (e.box.offsets, e.box.sizes),
            e.offset_bytes,
            e.length_bytes,
            e.per_rank,
        )
        for e in read_header(fd).layout.entries
    ]
