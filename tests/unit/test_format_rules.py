"""For every rule of docs/format.md a shard that breaks it, all checksums right, and is refused."""

from __future__ import annotations

import os
import re
import struct
from pathlib import Path

import google_crc32c
import pytest

from flashckpt.errors import CorruptShardError, IncompatibleError, InternalError
from flashckpt.format import caps, layout, shard, value_decode
from flashckpt.format.values import decode_values, encode_values
from flashckpt.types import Box, Generation, Layout, ShardId, TensorEntry
from flashckpt.v1 import format_pb2
from tests.compat.make_golden import Sample, build, place, whole
from tests.fuzz.checker import Bad, check
from tests.fuzz.forge import (
    entry_bytes,
    header_of,
    message_of,
    preamble_of,
    with_entries,
    with_header,
    with_header_bytes,
    with_preamble,
)

SAMPLE = Sample(
    place(
        ("a", ("a",), "float32", (4, 8), whole(4, 8), False),
        ("b", ("m", 1), "int64", (3,), whole(3), False),
    ),
    {"step": 1},
)
GOOD = build(SAMPLE)


def entry(**fields):
    plain = {
        "fqn": "a", "path": [format_pb2.PathPart(key="a")], "dtype": "float32",
        "global_shape": [4, 8], "offsets": [0, 0], "sizes": [4, 8], "offset_bytes": 0, "length_bytes": 128,
    }  # fmt: skip
    return format_pb2.TensorEntry(**(plain | fields))


def flipped(data, position):
    return data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :]


def with_layout(raw):
    return with_header(GOOD, layout=raw)


HEADER = header_of(GOOD)
END = 64 + len(HEADER)
A, B = (entry_bytes(e) for e in format_pb2.Layout.FromString(message_of(GOOD).layout).entries)
BEYOND_64_BITS = b"\x12\x0b\x10" + b"\xff" * 9 + b"\x09"
PREAMBLE = preamble_of(GOOD)
DATA_LENGTH = PREAMBLE["data_length"]

REFUSED = {
    "F1": [GOOD[:-1], GOOD + b"\0", GOOD[:4096], with_preamble(GOOD, data_length=2**64 - 4096)],
    "F3": [flipped(GOOD, END), flipped(GOOD, PREAMBLE["data_offset"] - 1)],
    "P1": [b"", GOOD[:63]],
    "P2": [bytes(64) + GOOD[64:], bytes(len(GOOD))],
    "P3": [with_preamble(GOOD, magic=b"\x89FCKPT\n\n")],
    "P4": [flipped(GOOD, 60), flipped(GOOD, 8)],
    "P6": [with_preamble(GOOD, reserved=b"\0\0\0\1"), with_preamble(GOOD, rest=bytes(19) + b"\1")],
    "P7": [
        with_preamble(GOOD, header_length=0, header_crc=0),
        with_preamble(GOOD, header_length=caps.MAX_HEADER_BYTES + 1),
    ],
    "P8": [
        with_preamble(GOOD, data_offset=PREAMBLE["data_offset"] - 64, data_length=DATA_LENGTH + 64),
        with_preamble(GOOD, data_offset=0, data_length=len(GOOD)),
    ],
    "H1": [flipped(GOOD, 64), with_preamble(GOOD, header_crc=PREAMBLE["header_crc"] ^ 1)],
    "H2": [
        with_header_bytes(GOOD, b"\x0a\xff"),
        with_header_bytes(GOOD, HEADER.replace(b"golden-job", b"golden-\xffob")),
        with_header_bytes(GOOD, b"\x1b" * 200 + HEADER),
    ],
    "H3": [
        with_header_bytes(GOOD, HEADER + b"\x78\x01"),  # field 15
        with_header_bytes(GOOD, HEADER + b"\x20\x05"),  # step again
        with_header_bytes(GOOD, HEADER + b"\x20\x00"),
        with_header_bytes(GOOD, HEADER.replace(b"\x68\x80\x20", b"\x68\x80\xa0\x00")),  # chunk_bytes, over-long
        with_header_bytes(GOOD, HEADER[12:] + HEADER[:12]),  # job last
    ],
    "H4": [with_header(GOOD, job=""), with_header(GOOD, job="x" * 257), with_header(GOOD, job="ü" * 129)],
    "H5": [with_header(GOOD, **{name: 2**63}) for name in ("epoch", "step", "seq")],
    "H6": [
        with_header(GOOD, world=0, rank=0),
        with_header(GOOD, world=2**24 + 1),
        with_header(GOOD, rank=8),
    ],
    "H7": [with_header(GOOD, saved_at=value) for value in (float("nan"), float("inf"), -1.0)],
    "H8": [with_header(GOOD, layout_fingerprint=value) for value in (b"", bytes(16), bytes(32))],
    "H9": [with_header(GOOD, chunk_bytes=value) for value in (0, 2048, 4097, 12288, 2**27)],
    "H10": [
        with_header(GOOD, chunk_crcs=b""),
        with_header(GOOD, chunk_crcs=message_of(GOOD).chunk_crcs + bytes(4)),
        with_header(GOOD, chunk_crcs=message_of(GOOD).chunk_crcs[:-1]),
    ],
    "H11": [
        with_header(GOOD, values_offset_bytes=SAMPLE.values_offset_bytes + 8),
        with_header(GOOD, values_offset_bytes=SAMPLE.values_offset_bytes - 64),
        with_header(GOOD, values_offset_bytes=0, values_length_bytes=0),
        with_header(GOOD, values_offset_bytes=DATA_LENGTH, values_length_bytes=1),
        with_header(GOOD, values_offset_bytes=2**64 - 64, values_length_bytes=64),
        with_header(GOOD, values_length_bytes=DATA_LENGTH),
        with_header(GOOD, values_length_bytes=2**30 + 1),
        with_entries(GOOD, entry(offset_bytes=2**40)),
    ],
    "L1": [
        with_layout(b"\x12" + A[1:]),
        with_layout(A + b"\x08\x01"),
        with_layout(A[:-1]),
        with_layout(A + b"\x0a"),
        with_layout(A + b"\x0a\x80"),
        with_layout(A[:1] + bytes([A[1] | 0x80, 0]) + A[2:]),
        with_layout(A + b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01"),
        with_entries(GOOD, entry(path=[format_pb2.PathPart(key="k" * 4000)] * 5)),
    ],
    "L3": [
        with_layout(b"\x0a\x02\xff\xff"),
        with_layout(A.replace(b"\x0a\x01a", b"\x0a\x01\xff", 1)),
        with_layout(bytes([0x0A, A[1] + 2]) + A[2:] + b"\x50\x01"),
        with_layout(bytes([0x0A, A[1] + 2]) + A[2:] + b"\x48\x00"),
        with_layout(bytes([0x0A, A[1] + 3]) + A[2:] + b"\x0a\x01a"),
        with_layout(bytes([0x0A, A[1] + 2]) + A[2:] + b"\x48\x02"),  # a true of 2
        # an index of more than 64 bits, in as many bytes as -1 takes
        with_layout(bytes([0x0A, A[1] + 8]) + A[2:].replace(b"\x12\x03\x0a\x01a", BEYOND_64_BITS)),
        # offsets, half of them packed
        with_layout(bytes([0x0A, A[1] + 1]) + A[2:].replace(b"\x2a\x02\x00\x00", b"\x28\x00\x2a\x01\x00")),
    ],
    "L4": [
        with_entries(GOOD, entry(fqn="x" * 4097)),
        with_entries(GOOD, entry(fqn="ü" * 2049)),
        with_entries(GOOD, entry(path=[format_pb2.PathPart(key="x" * 4097)])),
    ],
    "L5": [
        with_entries(GOOD, entry(path=[])),
        with_entries(GOOD, entry(path=[format_pb2.PathPart(index=1)] * 65)),
        with_entries(GOOD, entry(path=[format_pb2.PathPart()])),
    ],
    "L6": [with_entries(GOOD, entry(dtype=name)) for name in ("", "qint8", "torch.float32", "float31")],
    "L7": [
        with_entries(GOOD, entry(global_shape=[4, 8, 1])),
        with_entries(GOOD, entry(offsets=[0])),
        with_entries(GOOD, entry(sizes=[4, 8, 1])),
        with_entries(GOOD, entry(global_shape=[1] * 65, offsets=[0] * 65, sizes=[1] * 65, length_bytes=4)),
    ],
    "L8": [
        with_entries(GOOD, entry(offsets=[1, 0])),
        with_entries(GOOD, entry(global_shape=[4, 7])),
        with_entries(GOOD, entry(offsets=[2**64 - 1, 0])),
        with_entries(GOOD, entry(global_shape=[4, 2**63])),
    ],
    "L9": [
        with_entries(GOOD, entry(length_bytes=127)),
        with_entries(GOOD, entry(dtype="float64")),
        # 2^32 times 2^32 times 4 wraps to 0 in 64 bits
        with_entries(GOOD, entry(global_shape=[2**32] * 2, sizes=[2**32] * 2, length_bytes=0)),
    ],
    "L10": [
        with_entries(GOOD, entry(offset_bytes=32)),
        with_entries(GOOD, entry(offset_bytes=2**63)),
        with_entries(GOOD, entry(offset_bytes=2**64 - 64)),
    ],
    "L11": [
        with_layout(B + A),
        with_entries(GOOD, entry(), entry(fqn="c", offset_bytes=64)),
        with_entries(GOOD, entry(), entry(fqn="c", sizes=[2, 8], length_bytes=64)),
        with_entries(GOOD, entry(), entry(fqn="c", sizes=[0, 8], length_bytes=0)),
        with_entries(
            GOOD, entry(), entry(fqn="c", sizes=[0, 8], length_bytes=0, offset_bytes=192), entry(fqn="d")
        ),
    ],
    "L12": [
        with_entries(GOOD, entry(), entry(fqn="c", dtype="int32")),
        with_entries(GOOD, entry(), entry(fqn="c", global_shape=[8, 4], sizes=[8, 4])),
    ],
    "L13": [
        with_entries(GOOD, entry(sizes=[2, 8], length_bytes=64), entry(offset_bytes=64, **other))
        for half in [{"offsets": [2, 0], "sizes": [2, 8], "length_bytes": 64}]
        for other in [
            half | {"global_shape": [5, 8]},
            half | {"dtype": "int32"},
            half | {"per_rank": True},
            half | {"path": [format_pb2.PathPart(key="b")]},
        ]
    ],
    "L14": [
        with_entries(GOOD, entry(), entry(offset_bytes=128)),
        with_entries(GOOD, entry(), entry()),
    ],
}  # fmt: skip

CASES = [f"{rule}-{index}" for rule, cases in REFUSED.items() for index in range(len(cases))]


def read(data, tmp_path, **asked):
    path = tmp_path / "shard"
    path.write_bytes(data)
    fd = os.open(path, os.O_RDONLY)
    try:
        return shard.read_header(fd, **asked)
    finally:
        os.close(fd)


def test_the_good_one_is_accepted(tmp_path):
    header = read(GOOD, tmp_path, expect=SAMPLE.shard, job=SAMPLE.job)
    assert (header.layout, header.shard) == (SAMPLE.layout, SAMPLE.shard)
    assert check(GOOD)["bad_chunks"] == []


@pytest.mark.parametrize("name", CASES)
def test_broken_rule_is_refused(name, tmp_path):
    rule, index = name.split("-")
    case = REFUSED[rule][int(index)]
    with pytest.raises(CorruptShardError, match="expected"):
        read(case, tmp_path)
    # The independent reader agrees on the very rule, except where it stops at the wire or at the magic.
    with pytest.raises(Bad) as caught:
        check(case)
    assert str(caught.value) == rule or rule in {"P2", "H2", "H3", "L1", "L3"}


def test_f2_not_a_regular_file(tmp_path):
    ends = os.pipe()
    with pytest.raises(CorruptShardError, match="regular file"):
        shard.read_header(ends[0])
    for fd in ends:
        os.close(fd)


def test_f4_seal_needs_an_invalidated_slot():
    slot = bytearray(GOOD)
    view = memoryview(slot)
    place_of = shard.Geometry(PREAMBLE["data_offset"], DATA_LENGTH, len(GOOD))
    with pytest.raises(InternalError, match="invalidated"):
        shard.seal_bytes(view, HEADER, place_of)
    assert bytes(slot) == GOOD
    shard.invalidate(view)
    shard.seal_bytes(view, HEADER, place_of)
    assert bytes(slot) == GOOD


@pytest.mark.parametrize("version", [0, 2, 2**32 - 1])
def test_p5_other_version_is_incompatible(version, tmp_path):
    with pytest.raises(IncompatibleError, match=f"version 1, found {version}"):
        read(with_preamble(GOOD, version=version), tmp_path)


def test_p8_data_offset_has_a_cap(tmp_path):
    """At the cap a reader reads 64 MiB, above it nothing."""
    highest = 67_112_960
    for offset, reason in ((highest, "crc32c"), (highest + 4096, "a data offset")):
        path = tmp_path / "sparse"
        path.write_bytes(with_preamble(GOOD, data_offset=offset, data_length=0, header_crc=1)[:64])
        os.truncate(path, offset)
        fd = os.open(path, os.O_RDONLY)
        with pytest.raises(CorruptShardError, match=reason):
            shard.read_header(fd)
        os.close(fd)


def test_h12_other_job_or_shard_is_incompatible(tmp_path):
    with pytest.raises(IncompatibleError, match="job 'other'"):
        read(GOOD, tmp_path, job="other")
    generation, rank, world = SAMPLE.shard.generation, SAMPLE.shard.rank, SAMPLE.shard.world
    others = [ShardId(generation, rank, world + 1), ShardId(generation, rank + 1, world)]
    for name in Generation._fields:
        changed = generation._replace(**{name: getattr(generation, name) + 1})
        others.append(ShardId(changed, rank, world))
    for other in others:
        with pytest.raises(IncompatibleError, match="expected shard") as caught:
            read(GOOD, tmp_path, expect=other)
        assert caught.value.found == SAMPLE.shard


def test_l2_too_many_entries(monkeypatch):
    raw = message_of(GOOD).layout
    monkeypatch.setattr(layout, "MAX_ENTRIES", 2)
    layout.decode_layout(raw)
    monkeypatch.setattr(layout, "MAX_ENTRIES", 1)
    with pytest.raises(CorruptShardError, match="at most 1 entries"):
        layout.decode_layout(raw)
    with pytest.raises(TypeError, match="at most 1 entries"):
        layout.encode_layout(SAMPLE.layout)


# --- values


def text(string):
    return bytes([len(string)]) + string


def under_key(value):
    return b"\x01" + text(b"k") + value


def numpy_of(tag, dtype, rest):
    return under_key(tag + text(dtype) + rest)


def colliding_ints(count):
    return [number * (2**61 - 1) for number in range(1, count + 1)]


def raw_int(number):
    length = number.bit_length() // 8 + 1
    return b"i" + bytes([length]) + number.to_bytes(length, "little", signed=True)


REFUSED_VALUES = {
    "V1": [b"\x00"],
    "V2": [
        b"\x81\x00" + text(b"k") + b"N",
        under_key(b"z\x01" + b"\x80" * 9 + b"\x01"),
        under_key(b"z\x01" + b"\xff" * 9),
        under_key(b"l\x80\x00"),
    ],
    "V3": [
        b"\x02" + text(b"k") + b"N",
        b"\x7f",
        b"\x01\x05k",
        b"\x01" + text(b"k"),
        under_key(b"l\x02N"),
        under_key(b"l" + b"\xff" * 8 + b"\x7f"),
        under_key(b"t\xff\xff\xff\x7f" + b"N" * 100),
        under_key(b"d\x01N"),
        under_key(b"S\x02N"),
        under_key(b"b\x05abc"),
        under_key(b"s\x05abc"),
        under_key(b"f1234567"),
        under_key(b"c123456789abcdef"),
        under_key(b"i\x02\x01"),
        under_key(b"z\x03\x01"),
        numpy_of(b"a", b"<i4", b"\x02\xff\xff\x03\xff\xff\x03"),
        numpy_of(b"n", b"<i4", b"\x00\x00\x00"),
    ],
    "V4": [under_key(b"Q"), under_key(b"\x00"), under_key(b"\xff")],
    "V5": [under_key(b"l\x01" * 64 + b"N"), under_key(b"l\x01" * 5000 + b"N")],
    "V7": [
        b"\x02" + (text(b"k") + b"N") * 2,
        under_key(b"d\x02" + (raw_int(1) + b"N") * 2),
        under_key(b"d\x02" + raw_int(1) + b"NTN"),  # 1 == True
        under_key(b"O\x02" + raw_int(1) + b"Nf" + struct.pack("<d", 1.0) + b"N"),
    ],
    "V8": [
        under_key(b"i\x00"),
        under_key(b"i\x02\x01\x00"),
        under_key(b"i\x02\xff\xff"),
        under_key(b"i\x81\x80\x04" + b"\x01" * 65537),
    ],
    "V9": [
        b"\x01\x01\xff" + b"N",
        under_key(b"s\x01\xff"),
        under_key(b"s\x03\xed\xa0\x80"),  # a surrogate
        under_key(b"s\x02\xc0\x80"),  # over-long
    ],
    "V10": [
        under_key(b"S\x02s\x01bs\x01a"),
        under_key(b"S\x02s\x01as\x01a"),
        under_key(b"Z\x02" + b"TN"),
        under_key(b"Z\x02" + b"T" + raw_int(1)),
    ],
    "V11": [
        under_key(b"d\x01l\x00N"),
        under_key(b"S\x01d\x00"),
        under_key(b"Z\x01t\x01B\x00"),
        under_key(b"d\x41" + b"".join(raw_int(n) + b"N" for n in colliding_ints(65))),
        under_key(b"S\x41" + b"".join(sorted(map(raw_int, colliding_ints(65))))),
    ],
    "V12": [
        under_key(b"rNNN"),
        under_key(b"r" + raw_int(0) + raw_int(5) + raw_int(0)),
        under_key(b"r" + raw_int(0) + b"T" + raw_int(1)),
    ],
    "V13": [under_key(b"D" + text(name)) for name in (b"float31", b"", b"nn", b"float")],
    "V14": [under_key(b"V" + text(name)) for name in (b"", b"CPU", b"cuda:", b"cuda:1000", b"cuda:01", b"cpu ")],
    "V15": [
        numpy_of(b"a", name, b"\x01\x01" + bytes(64))
        for name in (b"|O", b"<U3", b"|S3", b"<V4", b"<f16", b"<c32", b"i4", b"<i4,<i4", b"<M8[1s]", b"<M8[q]",
                     b"float32", b"<b1", b"|i4", b"<i1")
    ],
    "V16": [
        numpy_of(b"n", b">i4", bytes(4)),
        numpy_of(b"n", b"|b1", b"\x02"),
        numpy_of(b"a", b"|b1", b"\x01\x02\x01\xff"),
        numpy_of(b"a", b"|u1", b"\x21" + b"\x01" * 33 + b"\x00"),
        numpy_of(b"a", b"<i8", b"\x03\x00" + (b"\xff" * 8 + b"\x7f") * 2),
    ],
    "V17": [under_key(b"NN"), under_key(b"N\x00")],
}  # fmt: skip

VALUE_CASES = [f"{rule}-{index}" for rule, cases in REFUSED_VALUES.items() for index in range(len(cases))]


@pytest.mark.parametrize("name", VALUE_CASES)
def test_broken_value_rule_is_refused(name):
    rule, index = name.split("-")
    case = REFUSED_VALUES[rule][int(index)]
    with pytest.raises(CorruptShardError, match="values"):
        decode_values(case)


def test_values_at_the_caps_are_accepted():
    deep = None
    for _ in range(caps.MAX_VALUE_DEPTH - 1):
        deep = [deep]
    values = {
        "deep": deep,
        "hashes": dict.fromkeys(colliding_ints(64)),
        "int": -(2 ** (8 * caps.MAX_VALUE_INT_BYTES - 9)),
    }
    assert decode_values(encode_values(values)) == values
    with pytest.raises(TypeError, match="nesting"):
        encode_values({"deep": [deep]})
    with pytest.raises(TypeError, match="one hash"):
        encode_values({"hashes": set(colliding_ints(65))})
    with pytest.raises(TypeError, match="65537 bytes"):
        encode_values({"int": 2 ** (8 * caps.MAX_VALUE_INT_BYTES)})


def test_v1_and_v6_caps_on_the_whole(monkeypatch):
    from flashckpt.format import value_encode

    raw = encode_values({"k": [1, 2, {3: 4}]})
    for module, decode_limit in ((value_decode, True), (value_encode, False)):
        for name, limit in (("MAX_VALUE_ITEMS", 6), ("MAX_VALUES_BYTES", len(raw))):
            with monkeypatch.context() as patch:
                patch.setattr(module, name, limit)
                assert decode_values(raw) == {"k": [1, 2, {3: 4}]}
                assert encode_values({"k": [1, 2, {3: 4}]}) == raw
                patch.setattr(module, name, limit - 1)
                with pytest.raises(CorruptShardError if decode_limit else TypeError):
                    decode_values(raw) if decode_limit else encode_values({"k": [1, 2, {3: 4}]})


def test_colliding_keys_cost_no_quadratic_time():
    import time

    keys = [number * (2**61 - 1) for number in range(1, 200_000)]
    raw = under_key(b"d\xbf\x9a\x0c" + b"".join(raw_int(number) + b"N" for number in keys))
    start = time.thread_time()
    with pytest.raises(CorruptShardError, match="one hash"):
        decode_values(raw)
    assert time.thread_time() - start < 1.0


def test_every_rule_has_a_test():
    page = (Path(__file__).parents[2] / "docs" / "format.md").read_text()
    rules = set(re.findall(r"\*\*\[([A-Z]+\d+)\]\*\*", page))
    source = Path(__file__).read_text().lower()
    tested = set(REFUSED) | set(REFUSED_VALUES)
    tested |= {rule for rule in rules if re.search(rf"def test_(\w+_)?{rule.lower()}_", source)}
    assert tested == rules


def test_writer_refuses_what_readers_refuse():
    """The same rules before sealing: a bad layout must not cost a generation that looks saved."""
    box = whole(4, 8)
    user = [
        ("x" * 4097, ("a",), "float32"),
        ("lone \ud800", ("a",), "float32"),
        ("a", (), "float32"),
        ("a", (True,), "float32"),
        ("a", (2**63,), "float32"),
        ("a", (b"bytes",), "float32"),
        ("a", ("x" * 4000,) * 5, "float32"),
        ("a", ("a",), "qint8"),
    ]
    for fqn, path, dtype in user:
        with pytest.raises(TypeError, match="layout"):
            layout.encode_layout(Layout((TensorEntry(fqn, path, dtype, (4, 8), box, 0, 128),)))
    ours = [
        TensorEntry("a", ("a",), "float32", (4, 8), box, 8, 128),
        TensorEntry("a", ("a",), "float32", (4, 8), box, 0, 64),
        TensorEntry("a", ("a",), "float32", (4, 8), Box((-1, 0), (1, 8)), 0, 32),
        TensorEntry("a", ("a",), "float32", (4, 8), box, -64, 128),
    ]
    for one in ours:
        with pytest.raises(InternalError, match="layout"):
            layout.encode_layout(Layout((one,)))
    good = {
        "job": "j", "shard": SAMPLE.shard, "layout_bytes": b"", "layout_fingerprint": bytes(16),
        "values_offset_bytes": 0, "values_length_bytes": 0, "chunk_bytes": 4096, "chunk_crcs": b"", "saved_at": 0.0,
    }  # fmt: skip
    shard.encode_header(**good)
    generation = SAMPLE.shard.generation
    for lie in (
        {"job": ""},
        {"job": "lone \ud800"},
        {"shard": ShardId(generation, 8, 8)},
        {"shard": ShardId(generation, -1, 8)},
        {"shard": ShardId(generation._replace(step=-1), 0, 8)},
        {"shard": ShardId(generation._replace(nonce=2**64), 0, 8)},
        {"layout_fingerprint": bytes(15)},
        {"values_offset_bytes": 4},
        {"values_length_bytes": 2**30 + 1},
        {"chunk_bytes": 1000},
        {"saved_at": float("nan")},
        {"layout_bytes": bytes(2**26)},
    ):
        with pytest.raises(InternalError):
            shard.encode_header(**(good | lie))


def test_crc_is_castagnoli():
    from flashckpt import native

    assert native.crc32c(b"123456789") == google_crc32c.value(b"123456789") == 0xE3069283
