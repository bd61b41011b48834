"""One attempt at a generation, without other ranks: who may call what its own, and what happens beside a fetch."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from bench.synthetic import GENERATION, RANKS_PER_NODE, Cluster, description
from flashckpt.load.attempt import Attempt
from flashckpt.load.catalogue import Catalogue
from flashckpt.load.plan import Want, plan
from flashckpt.load.sources import Fetcher
from flashckpt.ranks.group import PrivateGroup
from flashckpt.state.assumed import Reader
from flashckpt.state.cover import index
from flashckpt.types import Box

CLUSTER = Cluster(2, 1)


def attempt(rank=0):
    context = SimpleNamespace(
        memory=SimpleNamespace(holders=None), node=0, rank=rank, group=PrivateGroup.alone(), members=((0,), (1,))
    )
    copies = SimpleNamespace(generation=GENERATION, world=CLUSTER.world, on=lambda node: [1, 0])
    return Attempt(context, copies)


# --- ranks that did not exist at the save


@pytest.mark.parametrize(
    ("rank", "layout"), [(0, 0), (CLUSTER.world - 1, RANKS_PER_NODE - 1), (CLUSTER.world, None), (99, None)]
)
def test_a_rank_above_all_that_saved_has_no_layout_of_its_own(rank, layout):
    one = attempt(rank)
    one.catalogue = Catalogue(GENERATION, CLUSTER.world, [description(CLUSTER)])
    assert one.reader == Reader(rank, layout, (0, 1))
    assert one.catalogue.has(rank) == (layout is not None)


@pytest.mark.parametrize("rank", [CLUSTER.world, CLUSTER.world + 1, 1000])
def test_a_rank_above_all_that_saved_reads_what_all_share(rank):
    catalogue = Catalogue(GENERATION, CLUSTER.world, [description(CLUSTER)])
    whole = Box((0, 0), (1024, 1024))
    want = Want("layers.0.weight", False, "float32", (1024, 1024), whole, 0)
    transfers = plan([want], index(catalogue.layouts, catalogue.ranks), Reader(rank, None), cast=False)
    assert sum(one.overlap.volume for one in transfers) == whole.volume
    assert {one.shard % RANKS_PER_NODE for one in transfers} == set(range(RANKS_PER_NODE))


# --- reading beside a fetch


@pytest.mark.parametrize(
    ("fetcher", "reads"),
    [
        pytest.param(Fetcher(1, 1, into_tensors=False), True, id="another node's agent fetches"),
        pytest.param(Fetcher(0, 1, into_tensors=True), True, id="another rank here fetches for itself"),
        pytest.param(Fetcher(0, 1, into_tensors=False), False, id="this node's agent fetches for another rank"),
    ],
)
def test_who_waits_for_nothing_reads_while_others_fetch(fetcher, reads):
    one, events = attempt(), []
    one._plan = lambda needs: {fetcher: ()}
    one._open_all = lambda transfers, names: events.append("open") or b""
    one.read = lambda transfers, targets: events.append("read") or b""
    one.fetch([], [], [])
    # What the agent fetches may be part of what this rank reads: it is opened only when all have it.
    assert events == (["open", "read", "open"] if reads else ["open"])
