"""Which generations may go: never the newest whole one, whatever the ranks have sealed so far."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from flashckpt.errors import AmbiguousHistoryError
from flashckpt.load.choose import choose
from flashckpt.load.inventory import copies_of, encode, merge
from flashckpt.protocol.line import Ancestor, Line, from_fence
from flashckpt.protocol.node_inventory import Holding, NodeInventory
from flashckpt.save.retention import GenerationState, GenerationVerdict, judge, releasable
from flashckpt.types import Generation, Held, Launch, Level, ShardId, age_order

WORLD = 3
generations = st.builds(
    Generation, epoch=st.integers(1, 3), nonce=st.just(7), step=st.integers(0, 5), seq=st.integers(1, 4)
)


@st.composite
def lying(draw):
    """Shard → tag. Most generations are whole, else nothing would be decided between them."""
    found = {}
    for generation in draw(st.lists(generations, unique=True, max_size=6)):
        everyone = st.just(set(range(WORLD)))
        for rank in draw(everyone | everyone | st.sets(st.integers(0, WORLD - 1))):
            found[ShardId(generation, rank, WORLD)] = 5
        if draw(st.integers(0, 3)) == 0:
            found[ShardId(generation, 0, WORLD)] = 6
    return found


tags = lying()


@st.composite
def _lines(draw):
    """Of a launch that knows of some of the earlier ones."""
    head = Launch(draw(st.integers(1, 4)), draw(st.sampled_from([1, 7])))
    steps = draw(st.dictionaries(st.integers(1, 3), st.integers(-1, 5)))
    listed = [Ancestor(Launch(epoch, 7), steps[epoch]) for epoch in sorted(steps)]
    return Line(head, Launch(1, 7), tuple(one for one in listed if one.launch.is_older_than(head)))


fences = st.builds(from_fence, step=st.integers(-1, 5), epoch=st.integers(1, 4), nonce=st.just(1))
lines = st.none() | fences | _lines()
launches = st.none() | st.builds(Launch, epoch=st.integers(1, 3), nonce=st.just(7))


@given(tags, launches, lines, st.sets(generations, max_size=3), st.integers(1, 4))
def test_the_newest_complete_ones_are_never_released(tags, launch, line, voids, keep):
    verdicts = judge(tags, launch, line, voids)
    free = releasable(verdicts, keep)
    complete = [g for g, verdict in verdicts.items() if verdict.state is GenerationState.COMPLETE]
    for g in complete:
        ranks = {shard.rank for shard in tags if shard.generation == g}
        assert ranks == set(range(WORLD))
        assert line is None or not line.kills(g)
    if complete:
        newest = max(complete, key=age_order)
        assert newest not in free
        kept = sorted(complete, key=age_order)[-keep:]
        assert not free & set(kept)
        known = [g for g, verdict in verdicts.items() if verdict.state is not GenerationState.OTHER]
        assert all(age_order(g) >= age_order(newest) or g in free or g in kept for g in known)
    assert not free & {g for g, verdict in verdicts.items() if verdict.state is GenerationState.OTHER}
    # What this launch may still complete stays, unless something newer is whole.
    for g, verdict in verdicts.items():
        if verdict.state is GenerationState.PENDING and g in free:
            assert complete
            assert age_order(g) < max(map(age_order, complete))


def told_of(line):
    return () if line is None else (line,)


def holdings(tags):
    return tuple(Holding(Held(s, bytes(16), 4096, tag), Level.SEALED, verified=True) for s, tag in tags.items())


@given(tags, lines)
def test_choice_and_retention_agree(tags, line):
    """What retention keeps as newest is what a load would choose first; tags, which compare the ranks of one node, are
    left to the proof of coverage there, since a load knows nothing of the nodes that saved."""
    inventory = merge(["node"], [encode(NodeInventory("node", holdings(tags), told_of(line), 0, (), ()))])
    try:
        choice = choose(inventory, None)
    except AmbiguousHistoryError:
        return
    untagged = dict.fromkeys(tags, 0)
    if any(verdict.state is GenerationState.OTHER for verdict in judge(tags, None, line).values()):
        return  # a load may take it, as the only history; retention leaves it to that
    complete = [g for g, v in judge(untagged, None, line).items() if v.state is GenerationState.COMPLETE]
    kept = [g for g, v in judge(tags, None, line).items() if v.state is GenerationState.COMPLETE]
    assert set(kept) <= set(complete)
    assert list(choice.candidates) == sorted(complete, key=age_order, reverse=True)
    assert {g for g, _ in choice.passed_over} | set(choice.candidates) == {shard.generation for shard in tags}


@given(tags, st.lists(st.integers(0, 2), max_size=40), lines, st.integers(0, 9))
def test_what_nodes_encode_is_what_all_learn(tags, where, line, quarantined):
    """Shards dealt out over three nodes, some to several of them."""
    nodes = [{}, {}, {}]
    for number, (shard, tag) in enumerate(tags.items()):
        for node in {number % 3, where[number] if number < len(where) else 0}:
            nodes[node][shard] = tag
    damaged = ((ShardId(Generation(9, 9, 9, 9), 0, 2), "crc32c"),)
    told = [
        NodeInventory("a", holdings(nodes[0]), told_of(line), quarantined, (), ()),
        NodeInventory("b", holdings(nodes[1]), (from_fence(0, 99, 1), *told_of(line)), 0, damaged, (), 2),
        NodeInventory("c", holdings(nodes[2]), (), 0, (), ()),
    ]
    merged = merge(["a", "b", "c"], map(encode, told))
    assert merged.lines == (*told_of(line), from_fence(0, 99, 1))
    assert merged.damaged_lines == ("b",)
    assert merged.quarantined == quarantined
    assert merged.damage(Generation(9, 9, 9, 9)) == [(0, "b: crc32c")]
    for generation in {shard.generation for shard in tags}:
        found = copies_of(merged, generation)
        expected = {s.rank: s for s in tags if s.generation == generation}
        assert found.ranks == tuple(sorted(expected))
        for number in range(3):
            assert set(found.on(number)) == {s.rank for s in nodes[number] if s.generation == generation}
        for rank, shard in expected.items():
            copy = found[rank]
            assert copy.shard == shard
            assert copy.nodes == tuple(n for n in range(3) if copy.shard in nodes[n])
            assert copy.tag == tags[copy.shard]


def test_half_a_generation_of_this_launch_is_pending_until_a_rank_goes_on():
    launch = Launch(epoch=2, nonce=7)
    first, second = Generation(2, 7, 1, 1), Generation(2, 7, 2, 2)
    half = {ShardId(first, 0, 2): 0}
    assert judge(half, launch, None)[first].state is GenerationState.PENDING
    assert judge(half, launch, None, voids={first})[first].state is GenerationState.DEAD
    assert judge(half, None, None)[first].state is GenerationState.DEAD
    went_on = {**half, ShardId(second, 1, 2): 0}
    verdicts = judge(went_on, launch, None)
    assert verdicts[first].state is GenerationState.DEAD
    assert "went on" in verdicts[first].reason
    assert verdicts[second].state is GenerationState.PENDING


def test_ranks_that_share_different_tensors_disagree():
    generation = Generation(2, 7, 1, 1)
    tags = {ShardId(generation, 0, 2): 11, ShardId(generation, 1, 2): 12}
    assert judge(tags, Launch(2, 7), None)[generation].state is GenerationState.DISAGREES
    assert releasable(judge(tags, Launch(2, 7), None)) == {generation}


def test_of_whole_generations_the_newest_stay_and_the_older_ones_go():
    steps = [Generation(1, 7, step, 1) for step in range(5)]
    states = (
        GenerationState.COMPLETE,
        GenerationState.PENDING,
        GenerationState.COMPLETE,
        GenerationState.COMPLETE,
        GenerationState.PENDING,
    )
    verdicts = {generation: GenerationVerdict(state, "") for generation, state in zip(steps, states, strict=True)}
    assert releasable(verdicts, 1) == set(steps[:3])
    assert releasable(verdicts, 2) == set(steps[:2])
    assert releasable(verdicts, 3) == {steps[1]}
    assert releasable({steps[1]: verdicts[steps[1]]}) == set()
    assert releasable({**verdicts, steps[4]: GenerationVerdict(GenerationState.DEAD, "")}, 3) == {steps[1], steps[4]}
