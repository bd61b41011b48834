"""Healing and survivable losses on any small cluster: against rules said anew, and against trying everything out."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from flashckpt.protocol.heal import heal, holders_of
from flashckpt.protocol.survival import survival, words
from flashckpt.protocol.wire import CopyOrder
from flashckpt.types import Member

LABELS = ["", "", "rack-a", "rack-b", "rack-c"]


@st.composite
def situations(draw):
    """Members, what each live one holds, and how many copies on other nodes are wanted."""
    nodes = draw(st.integers(1, 7))
    members = [Member(f"node-{i}", "", draw(st.sampled_from(LABELS)), (i,)) for i in range(nodes)]
    live = draw(st.lists(st.sampled_from(range(nodes)), min_size=1, unique=True))
    world = draw(st.integers(1, 8))
    ranks = st.sets(st.integers(0, world - 1))
    holdings = {f"node-{i}": draw(ranks) for i in live}
    return members, holdings, world, draw(st.integers(0, 3))


def apply(holdings, copies):
    found = {node: set(ranks) for node, ranks in holdings.items()}
    for copy in copies:
        found[copy.target].add(copy.rank)
    return found


@given(situations(), st.integers(1, 3))
def test_every_shard_that_is_left_gets_its_copies_and_no_copy_is_made_in_vain(situation, per_node):
    members, holdings, world, replicas = situation
    goal = min(replicas + 1, len(holdings))
    before = holders_of(holdings)
    rounds = 0
    while True:
        copies, reason = heal(holdings, members, replicas, per_node=per_node)
        assert reason
        for copy in copies:
            assert copy.rank in holdings[copy.source]
            assert copy.rank not in holdings[copy.target]
        assert len({(copy.rank, copy.target) for copy in copies}) == len(copies)
        for node in holdings:
            assert sum(copy.source == node for copy in copies) <= per_node
            assert sum(copy.target == node for copy in copies) <= per_node
        if not copies:
            break
        holdings = apply(holdings, copies)
        rounds += 1
        assert rounds <= world * (replicas + 1)
    after = holders_of(holdings)
    assert after.keys() == before.keys()
    for rank, nodes in after.items():
        assert len(nodes) == max(goal, len(before[rank]))


@given(situations())
def test_a_copy_goes_to_another_domain_where_there_is_one(situation):
    members, holdings, _, replicas = situation
    domain = {m.node_id: m.domain or m.node_id for m in members}
    copies, _ = heal(holdings, members, replicas)
    holders = holders_of(holdings)
    for copy in copies:
        taken = {domain[node] for node in holders[copy.rank]}
        if any(domain[node] not in taken for node in holdings if node not in holders[copy.rank]):
            assert domain[copy.target] not in taken
        holders[copy.rank].append(copy.target)


@given(situations())
def test_those_with_the_fewest_copies_come_first(situation):
    members, holdings, _, replicas = situation
    holders = holders_of(holdings)
    copies, _ = heal(holdings, members, replicas)
    counts = []
    for copy in copies:
        counts.append(len(holders[copy.rank]))
        holders[copy.rank].append(copy.target)
    assert counts == sorted(counts)


@given(situations(), st.randoms(use_true_random=False))
def test_the_answer_is_a_function_of_what_is_held_and_what_runs_goes_on(situation, random):
    members, holdings, _, replicas = situation
    copies, reason = heal(holdings, members, replicas)
    shuffled = list(holdings.items())
    random.shuffle(shuffled)
    again = {node: random.sample(sorted(ranks), len(ranks)) for node, ranks in shuffled}
    assert heal(again, members, replicas) == (copies, reason)
    assert heal(holdings, members, replicas, running=copies) == (copies, reason)
    if copies:
        some = random.sample(copies, random.randint(1, len(copies)))
        assert set(some) <= set(heal(holdings, members, replicas, running=some)[0])


@given(situations(), st.data())
def test_what_runs_ends_where_it_makes_no_sense_any_more(situation, data):
    members, holdings, world, replicas = situation
    nodes = st.sampled_from([member.node_id for member in members])
    running = data.draw(st.lists(st.builds(CopyOrder, st.integers(0, world), nodes, nodes), max_size=4, unique=True))
    copies, _ = heal(holdings, members, replicas, running=running)
    for copy in copies:
        assert copy.rank in holdings[copy.source]
        assert copy.target in holdings
        assert copy.rank not in holdings[copy.target]


@given(situations())
def test_a_target_that_refused_is_taken_only_where_there_is_no_other(situation):
    members, holdings, _, replicas = situation
    copies, _ = heal(holdings, members, replicas)
    for copy in copies:
        again, _ = heal(holdings, members, replicas, refused={(copy.rank, copy.target)})
        others = [n for n in holdings if n != copy.target and copy.rank not in holdings[n]]
        wanted = min(replicas + 1, len(holdings)) - len(holders_of(holdings)[copy.rank])
        if len(others) >= wanted:
            assert (copy.rank, copy.target) not in {(one.rank, one.target) for one in again}


@given(situations())
def test_survivable_losses_are_those_that_trying_them_all_out_finds(situation):
    members, holdings, world, _ = situation
    live = list(holdings)

    def survives(lost):
        left = [holdings[node] for node in live if node not in lost]
        return set(range(world)) <= set().union(*left)

    found = survival(holders_of(holdings), world, {m.node_id: m.domain for m in members if m.node_id in holdings})
    most = -1
    for count in range(len(live) + 1):
        if not all(survives(set(lost)) for lost in itertools.combinations(live, count)):
            break
        most = count
    assert found.any_nodes == most
    if most >= 0:
        sets = [s for s in itertools.combinations(sorted(live), most + 1) if not survives(set(s))]
        assert found.fatal_count == len(sets)
        assert [one.nodes for one in found.fatal] == sets[: len(found.fatal)]
        assert all(set(one.nodes) == set(holders_of(holdings)[one.rank]) for one in found.fatal)
        domains = {m.domain for m in members if m.domain and m.node_id in holdings}
        fatal = {d for d in domains if not survives({m.node_id for m in members if m.domain == d})}
        assert set(found.fatal_domains) == fatal
    assert words(found, (0,), 1)


@given(situations(), st.integers(1, 3))
def test_a_copy_comes_from_the_least_busy_of_those_that_have_the_shard(situation, per_node):
    members, holdings, _, replicas = situation
    holders = holders_of(holdings)
    outgoing = dict.fromkeys(holdings, 0)
    for copy in heal(holdings, members, replicas, per_node=per_node)[0]:
        assert outgoing[copy.source] == min(outgoing[node] for node in holders[copy.rank])
        outgoing[copy.source] += 1


def test_sources_are_spread_over_all_that_have_the_shards():
    members = [Member(f"n{i}", "", "", (i,)) for i in range(3)]
    copies, _ = heal({"n0": (0, 1), "n1": (0, 1), "n2": ()}, members, 2)
    assert [(copy.source, copy.target) for copy in copies] == [("n0", "n2"), ("n1", "n2")]
