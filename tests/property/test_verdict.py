"""The verdict on the kept generation: never better than the truth, never in the name of the wrong node."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashckpt.protocol.survival import survival
from flashckpt.protocol.verdict import HealerWord, Noted, Peer, PeerState, Safety, View, judge, news
from flashckpt.protocol.wire import Health
from flashckpt.types import Generation

KEPT, BEFORE, OTHER = Generation(100, 7, 10, 1), Generation(100, 7, 9, 1), Generation(90, 7, 10, 1)
PATIENCE = 10.0
NODES = ("g0", "g1", "g2", "g3")
SILENT = (PeerState.DOWN, PeerState.UNREACHABLE)


def health(holders, world, missing=(), generation=KEPT, wanted=2):
    held = {rank: nodes for rank, nodes in holders.items() if nodes}
    lost = tuple(rank for rank in range(world) if rank not in held)
    at_risk = tuple(rank for rank, nodes in held.items() if len(nodes) < wanted)
    live = dict.fromkeys([node for node in NODES if node not in missing], "")
    return Health(
        generation=generation,
        world=world,
        committed=True,
        wanted=wanted,
        copies=0 if lost else min(map(len, held.values())),
        lost=lost,
        lost_count=len(lost),
        at_risk=at_risk,
        at_risk_count=len(at_risk),
        left_copies=0,
        left_bytes=0,
        running=(),
        missing=tuple(missing),
        survival=survival(held, world, live),
        reason="",
    )


@st.composite
def situations(draw):
    """Who holds what in truth, who lives, what this node has heard of that; (view, truth, live nodes)."""
    me = draw(st.sampled_from(NODES))
    world = draw(st.integers(1, 4))
    truth = {rank: draw(st.sets(st.sampled_from(NODES), min_size=1, max_size=3)) for rank in range(world)}
    live = draw(st.sets(st.sampled_from(NODES))) | {me}
    peers = {}
    for node in NODES:
        if node != me:
            # One that is dead may still count as up; one that lives is at worst hard to reach for a moment.
            states = (PeerState.UP, PeerState.UNREACHABLE) if node in live else (PeerState.UP, *SILENT)
            peers[node] = Peer(draw(st.sampled_from(states)), "refused")
    first_hand = {me} | draw(st.sets(st.sampled_from(NODES)))
    holdings = {node: frozenset(rank for rank, nodes in truth.items() if node in nodes) for node in first_hand}
    word = None
    if draw(st.booleans()):
        generation = draw(st.sampled_from((KEPT, BEFORE, OTHER)))
        missing = draw(st.sets(st.sampled_from(sorted(set(NODES) - live)))) if live != set(NODES) else set()
        counted = {rank: nodes - missing for rank, nodes in truth.items()}
        age = draw(st.floats(0, 30))
        word = HealerWord(
            health(counted, world, sorted(missing), generation), 100.0 - age, draw(st.sampled_from(NODES))
        )
    view = View(
        node_id=me,
        kept=KEPT,
        committed=draw(st.booleans()),
        wanted=2,
        world=draw(st.sampled_from((0, world))),
        domains=dict.fromkeys(NODES, ""),
        peers=peers,
        holdings=holdings,
        word=word,
        patience=PATIENCE,
    )
    return view, truth, live


@given(situations())
def test_a_word_counts_only_while_it_is_fresh_current_and_not_contradicted(situation):
    view, _, _ = situation
    verdict, reason = judge(view, 100.0)
    assert reason
    word = view.word
    if verdict.source and verdict.health is not None and word is not None and verdict.health is word.health:
        assert verdict.source == word.speaker, "never in another node's name"
        assert 100.0 - word.heard_at <= PATIENCE
        assert word.health.generation == KEPT or (word.health.generation == BEFORE and view.committed)
        silent = {node for node, peer in view.peers.items() if peer.state in SILENT}
        assert silent <= set(word.health.missing)


@given(situations())
def test_no_verdict_counts_a_node_that_is_known_to_be_gone(situation):
    view, truth, _ = situation
    verdict, _ = judge(view, 100.0)
    down = {node for node, peer in view.peers.items() if peer.state is PeerState.DOWN}
    if verdict.safety in (Safety.SAFE, Safety.AT_RISK):
        assert all(nodes - down for nodes in truth.values()), "every shard is somewhere else than on lost nodes"
        assert verdict.health.survival.any_nodes <= min(len(nodes - down) for nodes in truth.values()) - 1
    if verdict.safety is Safety.LOST:
        missed = set(view.word.health.missing) if view.word is not None else set()
        assert any(not nodes - down - missed for nodes in truth.values())


@given(situations())
def test_unknown_names_the_last_word_and_says_nothing_else(situation):
    view, _, _ = situation
    verdict, _ = judge(view, 100.0)
    assert (verdict.safety is Safety.UNKNOWN) == (verdict.health is None) == (verdict.source == "")
    if verdict.safety is Safety.UNKNOWN:
        assert verdict.words.startswith("unknown (")
        assert (view.word is None) == ("nobody has said yet" in verdict.words)
        if view.word is not None:
            assert f"last word of {view.word.speaker}, {100.0 - view.word.heard_at:.0f} s ago" in verdict.words


@given(situations())
def test_who_knows_of_every_member_does_not_ask(situation):
    """What each holds, or that it does not answer: then the verdict is never unknown."""
    view, _, _ = situation
    verdict, _ = judge(view, 100.0)
    down = {node for node, peer in view.peers.items() if peer.state is PeerState.DOWN}
    sure = all(peer.state is not PeerState.UNREACHABLE for peer in view.peers.values())
    if view.world and sure and down | view.holdings.keys() == set(NODES):
        assert verdict.safety is not Safety.UNKNOWN


def lonely(state, held, word=None):
    peers = {node: Peer(state, "Connection refused") for node in ("g0", "g1")}
    holdings = {"g2": frozenset(held)}
    return View("g2", KEPT, True, 2, 3, dict.fromkeys(("g0", "g1", "g2"), ""), peers, holdings, word, PATIENCE)


def test_the_last_of_three_nodes():
    everywhere = {0: {"g0", "g1"}, 1: {"g1", "g2"}, 2: {"g2", "g0"}}
    word = HealerWord(health(everywhere, 3), 97.0, "g0")
    verdict, reason = judge(lonely(PeerState.UP, {1, 2}, word), 100.0)
    assert (verdict.safety, verdict.source) == (Safety.SAFE, "g0")
    assert verdict.words.startswith("any 1 node; not g0 together with g1; ")
    verdict, reason = judge(lonely(PeerState.UNREACHABLE, {1, 2}, word), 100.0)
    assert (verdict.safety, verdict.words) == (Safety.UNKNOWN, "unknown (last word of g0, 3 s ago)")
    assert reason == "g0 does not answer: Connection refused"
    verdict, reason = judge(lonely(PeerState.DOWN, {1, 2}, word), 112.0)
    assert (verdict.safety, verdict.source) == (Safety.LOST, "g2")
    assert verdict.words == "not even what is there: no live node has shard 0"
    verdict, _ = judge(lonely(PeerState.DOWN, {0, 1, 2}), 112.0)
    assert (verdict.safety, verdict.health.at_risk) == (Safety.AT_RISK, (0, 1, 2))


@pytest.fixture
def log():
    """Feeds views one after the other; returns what the log got for each."""
    noted = [Noted()]

    def feed(peers, holders=None, world=3):
        verdict = None
        if holders is not None:
            word = HealerWord(
                health(holders, world, [n for n, p in peers.items() if p.state is PeerState.DOWN]), 0.0, "g0"
            )
            domains = dict.fromkeys(("g0", *peers), "")
            view = View("g0", KEPT, True, 2, world, domains, peers, {"g0": frozenset()}, word, PATIENCE)
            verdict, _ = judge(view, 0.0)
        noted[0], lines, changes = news(noted[0], peers, verdict)
        return [*lines, *map(str, changes)]

    return feed


def test_one_line_for_each_change(log):
    up, down, unsure = Peer(PeerState.UP), Peer(PeerState.DOWN, "no answer"), Peer(PeerState.UNREACHABLE, "refused")
    both = {0: {"g0", "g1"}, 1: {"g1", "g0"}, 2: {"g0", "g1"}}
    half, less = {0: {"g0"}, 1: {"g0"}, 2: {"g0"}}, {0: {"g0"}, 1: set(), 2: {"g0"}}
    assert log({"g1": up}, both) == []
    assert log({"g1": unsure}, both) == [], "it may only be restarting"
    assert log({"g1": down}, half) == [
        "node g1 is lost: no answer",
        "step 10: shard 0, 1, 2: fewer than 2 copies; survives the loss of: nothing may be lost: "
        "g0 holds the only copy of shard 0",
    ]
    assert log({"g1": down}, half) == []
    (line,) = log({"g1": down}, less)
    assert line == "step 10: no node that answers has shard 1: it can't be loaded until one that has it is back"
    assert log({"g1": unsure}) == [], "what is not known is not said"
    assert log({"g1": up}, less) == ["node g1 is back"]
    (line,) = log({"g1": up}, both)
    assert line.startswith("step 10: healed: every shard has 2 copies")
    assert log({"g1": up}, both) == []
