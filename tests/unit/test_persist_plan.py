"""Every element once, although nodes keep copies of what they share; and how nodes find each other's parts."""

from __future__ import annotations

import itertools
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashckpt.errors import CorruptShardError, PeerError
from flashckpt.persist.exchange import Exchange
from flashckpt.persist.meta import FileInfo, Meta, decode_meta, encode_meta, json_part
from flashckpt.persist.names import attempt_of, is_deleting, parse_per_rank_key, per_rank_key, step_of, temporary_name
from flashckpt.persist.plan import Contribution, plan
from flashckpt.persist.storage import open_storage
from flashckpt.types import Box, Generation, TensorEntry


def entry(fqn, shape, offsets, sizes, per_rank=False):
    box = Box(tuple(offsets), tuple(sizes))
    return TensorEntry(fqn, tuple(fqn.split(".")), "float32", tuple(shape), box, 0, box.volume * 4, per_rank)


def covered_once(todo, key, shape):
    count = np.zeros(shape, dtype=int)
    for item in todo.tensors:
        if item.key == key:
            box = item.box
            count[tuple(slice(a, a + n) for a, n in zip(box.offsets, box.sizes, strict=True))] += 1
            # What is written has to lie within what the shard has.
            assert item.entry.box.intersect(box) == box or not box.volume
    return bool((count == 1).all())


def test_copies_are_written_once_and_the_load_is_spread():
    ranks = [
        Contribution(rank, (entry("a", (8, 4), (0, 0), (8, 4)), entry("b", (6,), (0,), (6,))), (), ())
        for rank in (0, 1)
    ]
    todo = plan(ranks)
    assert covered_once(todo, "a", (8, 4))
    assert covered_once(todo, "b", (6,))
    assert {item.rank for item in todo.tensors} == {0, 1}


cuts = st.lists(st.integers(1, 11), max_size=4, unique=True).map(sorted)


@given(st.lists(cuts, min_size=1, max_size=4), st.integers(8, 200))
def test_whatever_the_cuts_every_element_is_written_once(nodes, piece_bytes):
    shape = (12, 3)
    contributions = []
    rank = itertools.count()
    for node in nodes:
        for low, high in itertools.pairwise([0, *node, 12]):
            contributions.append(Contribution(next(rank), (entry("a", shape, (low, 0), (high - low, 3)),), (), ()))
    todo = plan(contributions, piece_bytes)
    assert covered_once(todo, "a", shape)
    # DCP finds a part by where it begins.
    offsets = [item.box.offsets for item in todo.tensors]
    assert len(set(offsets)) == len(offsets)


def test_what_overlaps_in_two_dimensions_is_cut():
    parts = [((0, 0), (4, 6)), ((2, 2), (6, 6)), ((0, 4), (8, 4)), ((4, 0), (4, 8))]
    ranks = [Contribution(n, (entry("a", (8, 8), *part),), (), ()) for n, part in enumerate(parts)]
    assert covered_once(plan(ranks), "a", (8, 8))


def test_of_assumed_tensors_all_come_from_one_rank():
    """Two nodes stored them; of what is certain to be equal, the other one writes more in return."""
    entries = (
        *(entry(key, (64,), (0,), (64,))._replace(offset_bytes=256 * at) for at, key in enumerate("abcd")),
        *(entry(key, (64,), (0,), (64,))._replace(offset_bytes=256 * at) for at, key in enumerate("xy", start=4)),
    )
    todo = plan([Contribution(rank, entries, (), (), assumed_bytes=4 * 256) for rank in (2, 5)])
    assert {item.key: item.rank for item in todo.tensors if item.key in "abcd"} == dict.fromkeys("abcd", 2)
    assert {item.key: item.rank for item in todo.tensors if item.key in "xy"} == dict.fromkeys("xy", 5)


def test_a_hole_is_found():
    with pytest.raises(CorruptShardError, match="3 of 4"):
        plan([Contribution(0, (entry("a", (4,), (0,), (3,)),), (), ())])


def test_scalars_empty_tensors_per_rank_and_values():
    ranks = [
        Contribution(
            rank,
            (entry("s", (), (), ()), entry("e", (0, 3), (0, 0), (0, 3)), entry("own", (2,), (0,), (2,), True)),
            ("lr",) if rank else (),
            ("seed",),
        )
        for rank in (0, 1)
    ]
    todo = plan(ranks)
    keys = sorted(item.key for item in todo.tensors)
    assert keys == ["__rank__.0.own", "__rank__.1.own", "e", "s"]
    assert {value.key: value.rank for value in todo.values} == {"lr": 1, "__rank__.0.seed": 0, "__rank__.1.seed": 1}


def test_names():
    assert step_of("step-12") == 12
    assert step_of("step-012") is None
    assert step_of("step_7") is None
    for name in ("step_7", "step7", "checkpoint-7", "step-7_ckpt"):
        assert step_of(name, foreign=True) == 7
    name = temporary_name(3, "0123456789abcdef")
    assert attempt_of(name) == "0123456789abcdef"
    assert step_of(name, foreign=True) is None
    assert is_deleting("step-3.deleting-0123456789abcdef")
    assert not is_deleting("step-3")
    assert parse_per_rank_key(per_rank_key(3, "a.b")) == (3, "a.b")
    for other in ("__rank__.x.a", "__rank__.1", "a.b", "__rank__..a"):
        assert parse_per_rank_key(other) is None


def make_meta(**changes):
    fields = {
        "job": "j",
        "generation": Generation(1, 2**63, 3, 4),
        "world": 2,
        "saved_at": 1.5,
        "persisted_at": 2.5,
        "reason": "why",
        "files": {"a": FileInfo(3, 2**32 - 1)},
        "values": {0: "v"},
        "extra": {"x": 1},
        "extra_keys": ("x",),
        "versions": {"torch": "2"},
    }
    return Meta(**{**fields, **changes})


def test_meta_comes_back():
    assert decode_meta(encode_meta(make_meta()), "x") == make_meta()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"a": {', b'"../a": {'),
        (b'"world": 2', b'"world": 0'),
        (b'"step": 3', b'"step": 4'),
        (b"flashckpt.persist/v1", b"flashckpt.persist/v9"),
        (b'"world": 2', b'"world": "2"'),
        (b"{", b"["),
    ],
)
def test_a_meta_that_is_not_ours_is_refused(old, new):
    data = encode_meta(make_meta())
    assert old in data
    with pytest.raises(CorruptShardError):
        decode_meta(data.replace(old, new, 1), "x")


def test_only_what_json_keeps_is_shown():
    assert json_part({"a": 1, "t": (1, 2), "n": float("nan"), 3: 4, "d": {"x": [1]}}) == {"a": 1, "d": {"x": [1]}}
    assert json_part(None) == {}


# --- how nodes find each other's parts


def exchange(root, node, seconds, nodes=("n0", "n1")):
    storage = open_storage(str(root))
    return Exchange(storage, storage.stage(1, "0" * 16), nodes, node, time.monotonic() + seconds)


def test_a_node_that_fails_says_why(tmp_path):
    one, two = exchange(tmp_path, "n0", 60), exchange(tmp_path, "n1", 60)
    one.offer([])
    two.fail("no space left")
    with pytest.raises(PeerError, match="n1: no space left"):
        one.offered()
