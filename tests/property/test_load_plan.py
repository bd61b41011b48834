"""Coverage and the retrieval plan against NumPy: random cuts of a tensor into shards, random wants."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashckpt.errors import MissingKeyError, StructureError
from flashckpt.load.plan import Want, plan
from flashckpt.state.assumed import Reader
from flashckpt.state.cover import Piece, uncovered
from flashckpt.state.runs import runs
from flashckpt.types import Box, TensorEntry

shapes = st.lists(st.integers(1, 7), min_size=0, max_size=3).map(tuple)


def cut(shape, draw):
    """A random partition of the whole tensor into boxes."""
    boxes = [Box((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 6)) if shape else 0):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(0, box.sizes[dim]))
        for start, size in ((0, at), (at, box.sizes[dim] - at)):
            if size:
                offsets = tuple(o + start if d == dim else o for d, o in enumerate(box.offsets))
                sizes = tuple(size if d == dim else s for d, s in enumerate(box.sizes))
                boxes.append(Box(offsets, sizes))
    return boxes


def inside(shape, draw):
    bounds = [sorted((draw(st.integers(0, n - 1)), draw(st.integers(0, n - 1)))) for n in shape]
    return Box(tuple(a for a, _ in bounds), tuple(b - a + 1 for a, b in bounds))


def entry(box, shape, offset=0, dtype="int32"):
    return TensorEntry("t", ("t",), dtype, shape, box, offset, box.volume * 4)


def view(array, box):
    return array[tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))]


@given(st.data(), shapes)
def test_any_want_is_filled_from_any_cut(data, shape):
    whole = np.arange(int(np.prod(shape)), dtype=np.int32).reshape(shape)
    pieces, shards = [], []
    for box in cut(shape, data.draw):
        pieces.append(Piece((len(shards),), entry(box, shape, 0)))
        shards.append(np.ascontiguousarray(view(whole, box)).tobytes())
        if data.draw(st.booleans()):  # a replica of the same region in another shard
            pieces.append(Piece((len(shards),), entry(box, shape, 0)))
            shards.append(shards[-1])
    assert uncovered({("t", None): pieces}) == []
    want = inside(shape, data.draw)
    filled = np.full(want.sizes, -1, dtype=np.int32)
    raw = filled.reshape(-1).view(np.uint8)
    for transfer in plan([Want("t", False, "int32", shape, want, 0)], {("t", None): pieces}, Reader(0, 0), cast=False):
        sources, targets, length = runs(transfer.overlap, transfer.entry.box, want, 4)
        for source, target in zip(sources, targets, strict=True):
            raw[target : target + length] = np.frombuffer(shards[transfer.shard], np.uint8)[source : source + length]
    assert np.array_equal(filled, view(whole, want))


@given(st.data(), shapes)
def test_a_missing_region_is_found(data, shape):
    boxes = cut(shape, data.draw)
    lost = data.draw(st.integers(0, len(boxes) - 1))
    rest = [Piece((0,), entry(box, shape)) for i, box in enumerate(boxes) if i != lost]
    if rest:
        (problem,) = uncovered({("t", None): rest})
        assert f"of {int(np.prod(shape))} elements" in problem


def test_overlap_with_the_right_volume_is_refused():
    shape = (4,)
    boxes = [Box((0,), (2,)), Box((1,), (2,))]
    (problem,) = uncovered({("t", None): [Piece((0,), entry(box, shape)) for box in boxes]})
    assert "overlap" in problem


def test_shards_that_disagree_are_refused():
    pieces = [Piece((0,), entry(Box((0,), (2,)), (4,))), Piece((1,), entry(Box((2,), (2,)), (5,)))]
    (problem,) = uncovered({("t", None): pieces})
    assert "disagree" in problem


def test_what_does_not_fit_is_refused_by_name():
    stored = {("t", None): [Piece((0,), entry(Box((0,), (4,)), (4,)))]}
    whole = Box((0,), (4,))
    with pytest.raises(MissingKeyError, match="'u'"):
        plan([Want("u", False, "int32", (4,), whole, 0)], stored, Reader(0, 0), cast=False)
    with pytest.raises(StructureError, match=r"expected shape \(5,\), found \(4,\)"):
        plan([Want("t", False, "int32", (5,), whole, 0)], stored, Reader(0, 0), cast=False)
    with pytest.raises(StructureError, match="expected dtype float32, found int32") as caught:
        plan([Want("t", False, "float32", (4,), whole, 0)], stored, Reader(0, 0), cast=False)
    assert "cast=True" in caught.value.hint
    assert plan([Want("t", False, "float32", (4,), whole, 0)], stored, Reader(0, 0), cast=True)


def test_per_rank_regions_are_found_by_their_rank_alone():
    stored = {("t", 1): [Piece((1,), entry(Box((0,), (4,)), (4,)))]}
    want = Want("t", True, "int32", (4,), Box((0,), (4,)), 0)
    assert plan([want], stored, Reader(1, 1), cast=False)[0].shard == 1
    with pytest.raises(MissingKeyError):
        plan([want], stored, Reader(0, 0), cast=False)


@given(st.sets(st.integers(0, 9), min_size=1), st.integers(0, 12), st.sets(st.integers(0, 12)))
def test_the_nearest_shard_is_the_readers_own_then_one_on_its_node(ranks, reader, near):
    """Also for a reader above all ranks that saved: the world may have grown."""
    ranks, near = tuple(sorted(ranks)), tuple(sorted(near))
    distance, rank = Reader(reader, None, near).pick(ranks)
    assert rank in ranks
    on_node = [one for one in near if one in ranks]
    if reader in ranks:
        assert (distance, rank) == (0, reader)
    elif on_node:
        assert (distance, rank) == (1, on_node[0])
    else:
        assert (distance, rank) == (2, ranks[reader % len(ranks)])
