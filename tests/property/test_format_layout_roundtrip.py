from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flashckpt import native
from flashckpt.errors import FlashError
from flashckpt.format import layout as layout_format
from flashckpt.format.dtypes import ITEMSIZE
from flashckpt.format.layout import decode_layout, encode_layout, end_bytes, fingerprint
from flashckpt.format.shard import parse_header
from flashckpt.types import Box, Generation, Layout, ShardId, TensorEntry
from tests.compat.make_golden import Sample, build
from tests.fuzz.checker import check

names = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
paths = st.lists(names | st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=5).map(tuple)
# A busy machine is no failure.
unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


@st.composite
def boxes(draw):
    """A region of at most 64 elements within a shape of any size."""
    dims = draw(st.integers(0, 3))
    shape, offsets, sizes = [], [], []
    for _ in range(dims):
        size = draw(st.integers(0, 4))
        offset = draw(st.integers(0, 2**40))
        shape.append(offset + size + draw(st.integers(0, 2**40)))
        offsets.append(offset)
        sizes.append(size)
    return tuple(shape), Box(tuple(offsets), tuple(sizes))


@st.composite
def layouts(draw):
    entries: list[TensorEntry] = []
    end = 0
    for index in range(draw(st.integers(0, 8))):
        fqn = f"{draw(names)}.{index}"
        dtype = draw(st.sampled_from(sorted(ITEMSIZE)))
        shape, box = draw(boxes())
        length = box.volume * ITEMSIZE[dtype]
        start = -(-end // 64) * 64 + 64 * draw(st.integers(0, 3))
        path, per_rank = draw(paths), draw(st.booleans())
        entries.append(TensorEntry(fqn, path, dtype, shape, box, start, length, per_rank))
        end = start + length
        if length and draw(st.booleans()):  # tied
            entries.append(TensorEntry(fqn + "=", draw(paths), dtype, shape, box, start, length, per_rank))
        if shape and draw(st.booleans()):  # another region of the same tensor
            start = -(-end // 64) * 64
            other = Box((box.offsets[0] + 1, *box.offsets[1:]), (0, *box.sizes[1:]))
            if other.offsets[0] <= shape[0] and other != box:
                entries.append(TensorEntry(fqn, path, dtype, shape, other, start, 0, per_rank))
                end = start
    return Layout(tuple(entries))


@unhurried
@given(layouts())
def test_layout_round_trip(layout):
    raw = encode_layout(layout)
    assert decode_layout(raw) == layout
    assert encode_layout(layout) == raw
    assert fingerprint(raw) == fingerprint(bytes(bytearray(raw)))
    assert end_bytes(layout) == max((e.offset_bytes + e.length_bytes for e in layout.entries), default=0)


generations = st.builds(
    Generation,
    st.integers(0, 2**63 - 1),
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**63 - 1),
    st.integers(0, 2**63 - 1),
)
shard_ids = st.tuples(generations, st.integers(1, 2**24), st.integers(0, 2**24)).map(
    lambda drawn: ShardId(drawn[0], drawn[2] % drawn[1], drawn[1])
)
jobs = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=60)


@unhurried
@given(
    layouts(),
    shard_ids,
    jobs,
    st.floats(0, allow_infinity=False, allow_nan=False),
    st.sampled_from([4096, 65536]),
    st.sampled_from([4096, 12288]),
)
def test_shard_round_trip(layout, shard, job, saved_at, chunk_bytes, granule_bytes):
    sample = Sample(layout, {"k": 1}, job, shard, saved_at, chunk_bytes, granule_bytes)
    data = build(sample)
    found = check(data)
    data_offset = found["data"][0]
    header = parse_header(data[:data_offset], len(data), expect=shard, job=job)
    assert (header.layout, header.job, header.shard, header.saved_at) == (layout, job, shard, saved_at)
    assert (found["job"], found["identity"]) == (job, (*shard.generation, shard.rank, shard.world))
    assert len(found["entries"]) == len(layout.entries)
    assert found["bad_chunks"] == []
    assert len(data) % granule_bytes == 0


@unhurried
@given(layouts(), st.data())
def test_a_changed_layout_is_another_one_or_refused(layout, data):
    """No byte of an encoded layout is without meaning."""
    raw = encode_layout(layout)
    if not raw:
        return
    position = data.draw(st.integers(0, len(raw) - 1))
    changed = raw[:position] + bytes([raw[position] ^ data.draw(st.integers(1, 255))]) + raw[position + 1 :]
    assert fingerprint(changed) != fingerprint(raw)
    try:
        decoded = decode_layout(changed)
    except FlashError:
        return
    assert decoded != layout


def quick(raw, dtypes=None):
    caps = (1 << 20, 16 << 10, 4 << 10, 64, 64, 64)
    return native.layout_entries(raw, dict(ITEMSIZE) if dtypes is None else dtypes, caps, TensorEntry, Box)


@unhurried
@given(layouts())
def test_the_native_reader_takes_what_writers_write(layout):
    found = quick(encode_layout(layout))
    if native.IS_NATIVE:
        assert found == list(layout.entries)
        assert all(type(entry) is TensorEntry and type(entry.box) is Box for entry in found)
        assert all(type(entry.per_rank) is bool for entry in found)


@unhurried
@given(layouts(), st.data())
def test_what_the_native_reader_takes_the_plain_one_takes_alike(layout, data):
    """It may decline, but never accept what the plain one refuses, nor read it otherwise."""
    raw = bytearray(encode_layout(layout))
    for _ in range(data.draw(st.integers(1, 3))):
        position = data.draw(st.integers(0, len(raw)))
        match data.draw(st.sampled_from(["flip", "insert", "remove", "repeat"])):
            case "flip" if position < len(raw):
                raw[position] ^= data.draw(st.integers(1, 255))
            case "insert":
                raw[position:position] = data.draw(st.binary(min_size=1, max_size=3))
            case "remove":
                del raw[position : position + data.draw(st.integers(1, 3))]
            case "repeat":
                raw += raw[position:]
    found = quick(bytes(raw))
    if found is None or len({entry.fqn for entry in found}) != len(found):
        return  # decode_layout goes the plain way
    assert layout_format._decode_layout(bytes(raw), "layout").entries == tuple(found)


@unhurried
@given(st.binary(max_size=60))
def test_arbitrary_bytes_are_read_alike_or_declined(raw):
    found = quick(raw)
    if found is not None and len({entry.fqn for entry in found}) == len(found):
        assert layout_format._decode_layout(raw, "layout").entries == tuple(found)
