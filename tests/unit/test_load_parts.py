"""What is whole where shards are missing, in words."""

from __future__ import annotations

import pytest

from flashckpt.load.parts import told, whole_prefixes


@pytest.mark.parametrize(
    ("whole", "broken", "expected"),
    [
        (["model.a", "model.b.c", "step"], [], ["model", "step"]),
        (["model.a", "model.b.c", "model.b.d"], ["model.b.e"], ["model.a", "model.b.c", "model.b.d"]),
        (["model.a.x", "model.b.y"], ["model.c"], ["model.a", "model.b"]),
        (["model"], ["model.a"], []),
        ([], ["model.a"], []),
    ],
)
def test_the_shortest_prefixes_that_no_broken_key_begins_with(whole, broken, expected):
    assert whole_prefixes(whole, broken) == expected


def test_it_names_the_arguments():
    said = told(10, [0], ["model.a", "optimizer.b"], [], ["rng.cpu"])
    assert said.startswith("all that the ranks share is whole; PerRank parts of ranks [0] are missing: 'rng'; ")
    assert "load(step=10, keys=['model', 'optimizer']) takes what is whole" in said
    assert "load(step=10, strict=False) too" in said
    said = told(10, [0], ["step"], ["model.a"], [])
    assert said.startswith("whole: 'step'; incomplete: 'model.a'; load(step=10, keys=['step'])")
    assert told(10, [0], [], ["model.a"], []).startswith("no part of it is whole without them")
