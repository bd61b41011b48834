"""The save plan: what regions weigh, what is checked before bytes are copied, and the order of attempts."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from flashckpt.errors import InternalError
from flashckpt.ranks.topology import Node, Topology
from flashckpt.save import plan as module
from flashckpt.save.attempts import Attempts
from flashckpt.save.plan import Planner, TensorSource, _check_parts
from flashckpt.save.retention import GenerationState, GenerationVerdict
from flashckpt.state.flatten import flatten
from flashckpt.types import Generation, Record


def test_regions_are_dealt_out_by_their_bytes(monkeypatch):
    """Who stores what is balanced by what a region weighs, not by how many elements it has."""
    weighed = []
    share = module.share

    def note(regions, rank):
        weighed.extend(region.size_bytes for region in regions)
        return share(regions, rank)

    monkeypatch.setattr(module, "share", note)
    state = {
        "a": torch.zeros(3, 5),
        "b": torch.zeros(7, dtype=torch.float64),
        "c": torch.zeros(11, dtype=torch.uint8),
        "d": torch.tensor(1.0, dtype=torch.bfloat16),
    }
    topology = Topology(0, 2, (Node("a", "", (0, 1)),), (0, 1))
    plan = Planner(topology).plan(flatten(state))
    assert weighed == [60, 56, 11, 2]
    # What one rank stores is as long as what it weighs.
    assert [source.length_bytes for source in plan.sources] == weighed


def source(sizes, offsets, whole):
    return TensorSource(0, 0, whole, offsets, sizes, 0, 0)


@pytest.mark.parametrize(
    ("sizes", "offsets", "whole"),
    [((4, 2), (0, 0), True), ((4, 2), (0, 0), False), ((2, 2), (2, 0), False), ((1, 1), (3, 1), False)],
)
def test_a_source_within_its_local_tensor_is_taken(sizes, offsets, whole):
    _check_parts(SimpleNamespace(tensors={"a": torch.zeros(4, 2)}), [source(sizes, offsets, whole)])


@pytest.mark.parametrize(
    ("sizes", "offsets", "whole"),
    [
        pytest.param((4, 3), (0, 0), True, id="whole, and wider"),
        pytest.param((3, 2), (0, 0), True, id="whole, and shorter"),
        pytest.param((3, 2), (2, 0), False, id="reaches over the end"),
        pytest.param((1, 1), (0, 2), False, id="begins at the end"),
        pytest.param((4,), (0,), False, id="fewer dimensions"),
        pytest.param((4, 2, 1), (0, 0, 0), False, id="more dimensions"),
    ],
)
def test_a_source_that_is_not_within_its_local_tensor_is_refused(sizes, offsets, whole):
    """The fast path would copy whatever lies behind the tensor."""
    with pytest.raises(InternalError, match=r"key 'a': local tensor of shape \(4, 2\), expected to hold"):
        _check_parts(SimpleNamespace(tensors={"a": torch.zeros(4, 2)}), [source(sizes, offsets, whole)])


def test_what_lies_on_this_node_is_judged_newest_first_also_across_a_rollback():
    """The launch that went back to step 5 has the higher epoch and the older state: the step decides."""
    before, after = Generation(100, 7, 9, 1), Generation(200, 8, 6, 1)
    same_step = after._replace(step=9)
    complete, pending = GenerationVerdict(GenerationState.COMPLETE, ""), GenerationVerdict(GenerationState.PENDING, "")
    verdicts = {after: complete, before: complete, same_step: pending}
    writer = SimpleNamespace(verdicts=lambda: (None, dict(verdicts)))
    store = SimpleNamespace(read_records=lambda: (Record(same_step, 1, 2, 0.0),))
    judged = Attempts("job", store, writer).judged()
    assert [generation for generation, _ in judged] == [same_step, before, after]
    # On several nodes the record says that all shards are there.
    assert judged[0][1] == GenerationVerdict(GenerationState.COMPLETE, "committed with 2 replicas")
