"""The retrieval plan against sets of chunks: everything that is lacking is asked for once, of somebody who has it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashckpt.errors import InternalError
from flashckpt.load.catalogue import Catalogue, Description
from flashckpt.load.inventory import copies_of, encode, merge
from flashckpt.load.plan import Transfer, Want
from flashckpt.load.sources import (
    SPLIT_BYTES,
    Fetcher,
    NodePlace,
    deal_out,
    decode_needs,
    encode_needs,
    needs_of,
    plan_retrievals,
    union,
)
from flashckpt.protocol.node_inventory import Holding, NodeInventory
from flashckpt.types import Box, ChunkRange, Generation, Held, Level, ShardId, TensorEntry

CHUNK = 1 << 18
GENERATION = Generation(5, 7, 100, 1)


def catalogue(chunks):
    """Of shards with so many chunks each, all of them filled with tensors."""
    rows = [(rank, 0, 0, CHUNK, 4096, n * CHUNK, n * CHUNK, 0, 0) for rank, n in enumerate(chunks)]
    return Catalogue(GENERATION, len(chunks), [Description(rows, [b""], [_no_values()], {})])


def _no_values():
    from flashckpt.save.values import pack
    from flashckpt.state.flatten import Flat

    return pack(Flat(), None, False)


def copies(holders, chunks):
    nodes = range(max(max(some) for some in holders) + 1)
    told = []
    for node in nodes:
        held = [
            Held(ShardId(GENERATION, rank, len(holders)), bytes([rank]) * 16, 4096 + chunks[rank] * CHUNK, 3)
            for rank, some in enumerate(holders)
            if node in some
        ]
        holdings = tuple(Holding(one, Level.SEALED, verified=True) for one in held)
        told.append(encode(NodeInventory(f"n{node}", holdings, (), 0, (), ())))
    return copies_of(merge([f"n{node}" for node in nodes], told), GENERATION)


def chunk_set(ranges):
    found = [index for one in ranges for index in range(one.first, one.first + one.count)]
    assert len(found) == len(set(found))
    return set(found)


@st.composite
def clusters(draw):
    nodes = draw(st.integers(2, 6))
    shards = draw(st.integers(1, 6))
    chunks = [draw(st.integers(1, 200)) for _ in range(shards)]
    holders = [sorted(draw(st.sets(st.integers(0, nodes - 1), min_size=1, max_size=3))) for _ in range(shards)]
    domains = [draw(st.sampled_from(["", "a", "b"])) for _ in range(nodes)]
    needs = {}
    for node in range(nodes):
        lacking = {}
        for rank in range(shards):
            if node not in holders[rank] and draw(st.booleans()):
                wanted = draw(st.sets(st.integers(0, chunks[rank] - 1), min_size=1))
                lacking[rank] = ranges_of(wanted)
        needs[node] = lacking
    return nodes, chunks, holders, domains, needs


def ranges_of(wanted):
    mask = {0: tuple(ChunkRange(index, 1) for index in sorted(wanted))}
    return union([mask], {0: max(wanted) + 1})[0]


def by_agents(needs):
    """What whole nodes need, by way of their agents."""
    return {Fetcher(node, node, into_tensors=False): lacking for node, lacking in needs.items()}


@given(clusters())
def test_every_lacking_chunk_is_asked_for_once_of_a_holder(cluster):
    _, chunks, holders, domains, needs = cluster
    places = [NodePlace(f"n{number}", domain) for number, domain in enumerate(domains)]
    planned = plan_retrievals(by_agents(needs), copies(holders, chunks), catalogue(chunks), places)
    assert {fetcher.node for fetcher in planned} == {node for node, lacking in needs.items() if lacking}
    for (node, _, _), retrievals in planned.items():
        assert {one.shard.rank for one in retrievals} == set(needs[node])
        for one in retrievals:
            rank = one.shard.rank
            asked = [chunk_set(portion.ranges) for portion in one.portions]
            everything = set().union(*asked)
            assert sum(map(len, asked)) == len(everything)
            assert everything >= chunk_set(needs[node][rank])
            if one.whole:
                assert everything == set(range(chunks[rank]))
                # Little more than was needed.
                assert len(chunk_set(needs[node][rank])) >= 7 / 8 * chunks[rank]
            else:
                assert everything == chunk_set(needs[node][rank])
            for portion in one.portions:
                assert portion.ranges
                assert sorted(portion.sources) == sorted(f"n{h}" for h in holders[rank])
                # Nobody of another domain is asked first while one of the same has it.
                near = [h for h in holders[rank] if domains[node] and domains[h] == domains[node]]
                assert not near or portion.sources[0] in {f"n{h}" for h in near}


@given(clusters())
def test_all_ranks_make_the_same_plan(cluster):
    _, chunks, holders, domains, needs = cluster
    places = [NodePlace(f"n{number}", domain) for number, domain in enumerate(domains)]
    shuffled = dict(sorted(needs.items(), reverse=True))
    one = plan_retrievals(by_agents(needs), copies(holders, chunks), catalogue(chunks), places)
    two = plan_retrievals(by_agents(shuffled), copies(holders, chunks), catalogue(chunks), places)
    assert one == two


def test_a_large_shard_comes_from_all_its_holders_at_once():
    chunks = [4 * SPLIT_BYTES // CHUNK]
    places = [NodePlace(f"n{number}", "") for number in range(4)]
    needs = {3: {0: (ChunkRange(0, chunks[0]),)}}
    ((one,),) = plan_retrievals(by_agents(needs), copies([[0, 1, 2]], chunks), catalogue(chunks), places).values()
    assert one.whole
    assert [portion.sources[0] for portion in one.portions] == ["n0", "n1", "n2"]
    sizes = [sum(r.count for r in portion.ranges) for portion in one.portions]
    assert max(sizes) - min(sizes) <= 1


def test_several_shards_are_spread_over_their_holders():
    """A node that lost four shards, all of them on the same two others, gets half from each."""
    chunks = [8] * 4
    places = [NodePlace(f"n{number}", "") for number in range(3)]
    needs = {2: {rank: (ChunkRange(0, 8),) for rank in range(4)}}
    (retrievals,) = plan_retrievals(by_agents(needs), copies([[0, 1]] * 4, chunks), catalogue(chunks), places).values()
    first = [one.portions[0].sources[0] for one in retrievals]
    assert sorted(first) == ["n0", "n0", "n1", "n1"]


def test_a_shard_that_nobody_has_is_a_bug_of_ours():
    needs = by_agents({0: {0: (ChunkRange(0, 1),)}})
    with pytest.raises(InternalError, match="no other node has it"):
        plan_retrievals(needs, copies([[0]], [1]), catalogue([1]), [NodePlace("n0", "")])


@given(st.data())
def test_needed_chunks_are_those_that_the_rows_touch(data):
    """A box of a stored matrix, against every byte of it."""
    rows, columns = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 70_000))
    offset = 64 * data.draw(st.integers(0, 10_000))
    top, left = data.draw(st.integers(0, rows - 1)), data.draw(st.integers(0, columns - 1))
    height, width = data.draw(st.integers(1, rows - top)), data.draw(st.integers(1, columns - left))
    entry = TensorEntry(
        "t", ("t",), "float32", (rows, columns), Box((0, 0), (rows, columns)), offset, rows * columns * 4
    )
    overlap = Box((top, left), (height, width))
    transfer = Transfer(0, entry, Want("t", False, "float32", (rows, columns), overlap, 0), overlap)
    chunks = -(-(offset + rows * columns * 4) // CHUNK)
    needs = needs_of([transfer], catalogue([chunks]), frozenset())
    starts = offset + (np.arange(top, top + height) * columns + left) * 4
    touched = set()
    for start in starts.tolist():
        touched.update(range(start // CHUNK, (start + width * 4 - 1) // CHUNK + 1))
    assert chunk_set(needs[0]) == touched
    assert needs_of([transfer], catalogue([chunks]), frozenset([0])) == {}
    assert decode_needs(encode_needs(needs)) == needs


@given(st.lists(st.dictionaries(st.integers(0, 2), st.sets(st.integers(0, 30), min_size=1)), max_size=4))
def test_a_node_needs_what_any_of_its_ranks_needs(many):
    encoded = [{rank: ranges_of(wanted) for rank, wanted in needs.items()} for needs in many]
    together = union(encoded, dict.fromkeys(range(3), 31))
    for rank in range(3):
        expected = set().union(*(needs.get(rank, set()) for needs in many))
        assert (chunk_set(together[rank]) if rank in together else set()) == expected


@given(st.data())
def test_every_rank_gets_what_it_needs_from_itself_or_its_agent(data):
    nodes = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))
    members = [tuple(range(sum(nodes[:n]), sum(nodes[: n + 1]))) for n in range(len(nodes))]
    ranks = range(sum(nodes))
    wanted = [data.draw(st.dictionaries(st.integers(0, 2), st.sets(st.integers(0, 30), min_size=1))) for _ in ranks]
    able = [data.draw(st.booleans()) for _ in ranks]
    needs = [{shard: ranges_of(some) for shard, some in one.items()} for one in wanted]
    dealt = deal_out(needs, able, members, dict.fromkeys(range(3), 31))
    for node, some in enumerate(members):
        here = {fetcher: lacking for fetcher, lacking in dealt.items() if fetcher.node == node}
        lacking = [rank for rank in some if wanted[rank]]
        if not lacking:
            assert not here
        elif all(fetcher.into_tensors for fetcher in here):
            assert here == {Fetcher(node, rank, into_tensors=True): needs[rank] for rank in lacking}
            assert all(able[rank] for rank in lacking)
        else:
            assert here == {
                Fetcher(node, some[0], into_tensors=False): union([needs[r] for r in some], {0: 31, 1: 31, 2: 31})
            }


def test_ranks_that_need_the_same_chunks_have_their_agent_fetch_them():
    whole, half, other = ({0: (ChunkRange(first, count),)} for first, count in ((0, 8), (0, 4), (4, 4)))
    chunks = {0: 8}
    assert {one.into_tensors for one in deal_out([half, other], [True] * 2, [(0, 1)], chunks)} == {True}
    assert {one.into_tensors for one in deal_out([whole, whole], [True] * 2, [(0, 1)], chunks)} == {False}
    assert {one.into_tensors for one in deal_out([whole, whole], [True] * 2, [(0,), (1,)], chunks)} == {True}
    assert {one.into_tensors for one in deal_out([half, other], [True, False], [(0, 1)], chunks)} == {False}


def test_what_goes_into_tensors_is_no_more_than_they_need():
    needs = {Fetcher(1, 1, into_tensors=True): {0: (ChunkRange(0, 99),)}}
    places = [NodePlace("n0", ""), NodePlace("n1", "")]
    ((one,),) = plan_retrievals(needs, copies([[0]], [100]), catalogue([100]), places).values()
    assert not one.whole
    assert one.portions[0].ranges == (ChunkRange(0, 99),)
