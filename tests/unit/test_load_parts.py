"""What is complete if shards are missing, in words."""

from __future__ import annotations

import pytest

from flashckpt.load.parts import complete_prefixes, describe_parts


@pytest.mark.parametrize(
    ("complete", "broken", "expected"),
    [
        (["model.a", "model.b.c", "step"], [], ["model", "step"]),
        (["model.a", "model.b.c", "model.b.d"], ["model.b.e"], ["model.a", "model.b.c", "model.b.d"]),
        (["model.a.x", "model.b.y"], ["model.c"], ["model.a", "model.b"]),
        (["model"], ["model.a"], []),
        ([], ["model.a"], []),
    ],
)
def test_the_shortest_prefixes_that_no_broken_key_begins_with(complete, broken, expected):
    assert complete_prefixes(complete, broken) == expected


def test_it_names_the_arguments():
    said = describe_parts(10, [0], ["model.a", "optimizer.b"], [], ["rng.cpu"])
    assert said.startswith("all that the ranks share is complete; PerRank parts of ranks [0] are missing: 'rng'; ")
    assert "load(step=10, keys=['model', 'optimizer']) or load(step=10, strict=False) loads what is complete" in said
    said = describe_parts(10, [0], ["step"], ["model.a"], [])
    assert said.startswith("complete: 'step'; incomplete: 'model.a'; load(step=10, keys=['step'])")
    assert describe_parts(10, [0], [], ["model.a"], []).startswith("no part of it is complete without them")
