"""What another node sends of its holdings is checked before a copy is taken for one of a generation."""

from __future__ import annotations

import struct

import pytest

from flashckpt.errors import InternalError
from flashckpt.load.inventory import _COPY, encode, merge
from flashckpt.protocol.node_inventory import Holding, NodeInventory
from flashckpt.types import Generation, Held, Level, ShardId

OLD, NEW = Generation(1, 10, 8, 3), Generation(1, 10, 9, 1)


def told(*generations, damaged=()):
    holdings = tuple(
        Holding(Held(ShardId(one, 0, 1), bytes(16), 4096, 0), Level.SEALED, verified=False) for one in generations
    )
    return encode(NodeInventory("any", holdings, (), 0, tuple(damaged), ()))


def with_index(data, number):
    """The last copy, said to be of the generation with that number."""
    return data[: -_COPY.itemsize] + struct.pack("<I", number) + data[-_COPY.itemsize + 4 :]


def test_generations_of_several_nodes_are_matched_by_what_they_are():
    found = merge(["a", "b"], [told(OLD, NEW), told(NEW)])
    assert [row["node"] for row in found.of(NEW)] == [0, 1]
    assert [row["node"] for row in found.of(OLD)] == [0]


@pytest.mark.parametrize("others", [[], [told(OLD, NEW)]], ids=["alone", "with another node"])
@pytest.mark.parametrize("number", [1, 2, 0xFFFFFFFF])
def test_a_copy_of_a_generation_that_its_node_did_not_name_is_refused(number, others):
    """It must not become a copy of what the next node named."""
    encoded = [with_index(told(OLD), number), *others]
    with pytest.raises(InternalError, match="expected copies of the generations that it lists"):
        merge(["a", "b"], encoded)


def test_the_last_generation_that_a_node_named_is_one_of_its_own():
    found = merge(["a"], [with_index(told(OLD, NEW), 1)])
    assert len(found.of(NEW)) == 1


@pytest.mark.parametrize(
    ("spoilt", "message"),
    [
        pytest.param(b"", "inventory of 0 bytes, expected at least", id="nothing"),
        pytest.param(struct.pack("<I", 1) + told(OLD)[4:], "inventory version 1 of", id="an older version"),
        pytest.param(struct.pack("<I", 99) + told(OLD)[4:], "inventory version 99 of", id="a newer version"),
        pytest.param(told(OLD)[:-1], "bytes with 1 copies", id="one byte less"),
        pytest.param(told(OLD) + b"\0", "expected", id="one byte more"),
        pytest.param(told(damaged=[(ShardId(OLD, 0, 1), "rot")])[:-1], "expected", id="a reason cut short"),
    ],
)
def test_an_inventory_of_another_version_or_length_is_refused(spoilt, message):
    with pytest.raises(InternalError, match=message):
        merge(["a"], [spoilt])
