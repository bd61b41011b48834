"""Decides which copies of kept shards are missing, and who makes them. Pure."""

from __future__ import annotations

import heapq
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING

from flashckpt.protocol.survival import survival
from flashckpt.protocol.verdict import HealerWord
from flashckpt.protocol.wire import CopyOrder, Health, Holds, Refusal

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from flashckpt.protocol.placement import Placement
    from flashckpt.protocol.wire import Report
    from flashckpt.types import Generation, Held, Member, Session, ShardId


# Which copies to make so that every shard of a generation has as many as were promised. Pure.
#
# Rules, the stronger first: shards with the fewest copies come first; a target that has just refused comes last; no
# target in the failure domain of a copy if there is another; a shard's own node and its buddies before others; the
# least loaded node; the order of the members. Copies under way stay as they are while they make sense.

# For the whole job at one time. Each is as large as a shard, and the search for a target looks at every node.
_MOST_COPIES = 64


def holders_of(holdings: Mapping[str, Iterable[int]]) -> dict[int, list[str]]:
    """Return the nodes that have each rank's shard."""
    found: dict[int, list[str]] = {}
    for node_id, ranks in holdings.items():
        for rank in ranks:
            found.setdefault(rank, []).append(node_id)
    return found


def heal(
    holdings: Mapping[str, Collection[int]],
    members: Sequence[Member],
    replicas: int,
    *,
    running: Iterable[CopyOrder] = (),
    refused: Collection[tuple[int, str]] = (),
    preferred: Callable[[int], Collection[str]] = lambda _: (),
    per_node: int = 2,
) -> tuple[tuple[CopyOrder, ...], str]:
    """Return the copies to make now, and the reason.

    `holdings`: the ranks of one generation by node, with every node that is alive, even if it holds none. At most
    `per_node` copies come from and go to each node, and those of `running` that are still of use are among them.
    """
    plan = _Plan(holdings, members, per_node)
    goal = min(replicas + 1, len(plan.live))
    lacking = [(len(nodes), rank) for rank, nodes in plan.holders.items() if len(nodes) < goal]
    if not lacking:
        return (), f"every shard has {goal} of {replicas + 1} copies on {len(plan.live)} nodes"
    for copy in running:
        if len(plan.holders.get(copy.rank, ())) < goal and (copy.rank, copy.target) not in refused:
            plan.keep(copy)
    queue = [(len(plan.holders[rank]), rank) for _, rank in lacking]
    heapq.heapify(queue)
    while queue and len(plan.copies) < _MOST_COPIES:
        count, rank = heapq.heappop(queue)
        if count < goal and plan.add(rank, refused, preferred(rank)):
            heapq.heappush(queue, (count + 1, rank))
    reason = f"{len(lacking)} shards have fewer than {goal} copies; copies under way: {len(plan.copies)}"
    return tuple(plan.copies), reason


class _Plan:
    """A set of copies. Each that was added counts as made for the next decision."""

    def __init__(self, holdings: Mapping[str, Collection[int]], members: Sequence[Member], per_node: int) -> None:
        self.live = {m.node_id: index for index, m in enumerate(members) if m.node_id in holdings}
        # A node without a label is a domain of its own.
        self._domain = {m.node_id: m.domain or f"\0{m.node_id}" for m in members}
        self._sources = holders_of({node: ranks for node, ranks in holdings.items() if node in self.live})
        self.holders = {rank: list(nodes) for rank, nodes in self._sources.items()}
        self._load = {node: len(holdings[node]) for node in self.live}
        self._incoming = dict.fromkeys(self.live, 0)
        self._outgoing = dict.fromkeys(self.live, 0)
        self._per_node = per_node
        self.copies: list[CopyOrder] = []

    def keep(self, copy: CopyOrder) -> None:
        there = self._sources.get(copy.rank, ())
        if copy.source in there and copy.target in self.live and copy.target not in self.holders[copy.rank]:
            self._note(copy)

    def add(self, rank: int, refused: Collection[tuple[int, str]], preferred: Collection[str]) -> bool:
        """Add one more copy of a shard. Return False if no source or no target is free for it now."""
        sources = [node for node in self._sources[rank] if self._outgoing[node] < self._per_node]
        holders = self.holders[rank]
        domains = {self._domain[node] for node in holders}
        targets = [node for node in self.live if node not in holders]
        if not sources or not targets:
            return False

        def drawback(node: str) -> tuple[bool, bool]:
            return (rank, node) in refused, self._domain[node] in domains

        # If the best target is busy, wait for it: a copy in a shared domain would stay there.
        least = min(map(drawback, targets))
        free = [node for node in targets if self._incoming[node] < self._per_node and drawback(node) == least]
        if not free:
            return False
        target = min(free, key=lambda node: (node not in preferred, self._load[node], self.live[node]))
        self._note(CopyOrder(rank, min(sources, key=lambda node: (self._outgoing[node], self.live[node])), target))
        return True

    def _note(self, copy: CopyOrder) -> None:
        self.copies.append(copy)
        self.holders[copy.rank].append(copy.target)
        self._load[copy.target] += 1
        self._incoming[copy.target] += 1
        self._outgoing[copy.source] += 1


# One node's part in healing: what it tells the healer of the kept generation, and what it knows as the healer. No I/O.
#
# The healer is the first member that answers. Every node tells it at every beat what it has, and the answer says which
# copies the node has to make. Whatever the healer forgets, it hears again within a beat.

_SHOWN = 16  # of a list in a summary


class Healing:
    """The state of healing in one session. Times are those of the core."""

    def __init__(self, node_id: str, session: Session, placement: Placement, patience: float, per_node: int) -> None:
        self._node_id = node_id
        self._session = session
        self._placement = placement
        self._patience = patience  # a node that has said nothing for so long is not counted
        self._per_node = per_node
        self.health: HealerWord | None = None  # the last word of a healer
        # as a holder
        self._refusals: dict[tuple[ShardId, str], tuple[Refusal, float]] = {}
        self._made: dict[tuple[ShardId, str], float] = {}
        self._expected: dict[tuple[Generation, int], tuple[bytes, float]] = {}
        # as the healer
        self._said: dict[str, tuple[Holds, float]] = {}
        self._generation: Generation | None = None
        self._since = 0.0  # when this node began to ask for this generation
        self._looked_at: float | None = None
        self._decided: dict[str, Holds] = {}  # by node: the holdings that the following was decided on
        self._found: Health | None = None
        self._holdings: dict[str, frozenset[int]] = {}  # by counted node: ranks whose shards it has, as agreed
        self._copies: tuple[CopyOrder, ...] = ()
        self._told: set[CopyOrder] = set()  # copies of these that their targets have heard of

    # --- as a holder ----------------------------------------------------------------------------------------

    def holds(self, generation: Generation, held: Iterable[Held], *, committed: bool, now: float) -> Holds:
        """Return which shards of the generation this node has."""
        mine = sorted((one for one in held if one.shard.generation == generation), key=lambda one: one.shard.rank)
        self._refusals = {
            key: (one, at)
            for key, (one, at) in self._refusals.items()
            if key[0].generation == generation and now - at <= self._patience
        }
        return Holds(
            generation,
            mine[0].shard.world if mine else 0,
            committed,
            tuple(one.shard.rank for one in mine),
            tuple(one.size_bytes for one in mine),
            tuple(one.digest for one in mine),
            tuple(one for one, _ in self._refusals.values()),
        )

    def expect(self, generation: Generation, copies: Iterable[CopyOrder], now: float) -> None:
        """Note the copies that the healer has announced.

        IMPORTANT: nobody else decides which shards a node receives from others than their owners: otherwise one node
        that lies could put its own bytes into the memory of all others.
        """
        self._expected = {key: one for key, one in self._expected.items() if now - one[1] <= self._patience}
        for copy in copies:
            if copy.target == self._node_id and copy.digest:
                self._expected[generation, copy.rank] = (copy.digest, now)

    def is_expected(self, shard: ShardId, digest: bytes, now: float) -> bool:
        expected, at = self._expected.get((shard.generation, shard.rank), (b"", now))
        return expected == digest and now - at <= self._patience

    def note_made(self, shard: ShardId, target: str, now: float) -> None:
        """Note that a copy was made: the healer does not know it yet, and orders it once more."""
        self._made[shard, target] = now

    def is_made(self, shard: ShardId, target: str, now: float) -> bool:
        self._made = {key: at for key, at in self._made.items() if now - at <= self._patience / 2}
        return (shard, target) in self._made

    def note_refusal(self, shard: ShardId, target: str, reason: str, now: float) -> None:
        self._refusals[shard, target] = (Refusal(shard.rank, target, reason), now)

    # --- as the healer --------------------------------------------------------------------------------------

    def take(self, sender: str, holds: Holds, now: float) -> None:
        self._said[sender] = (holds, now)

    def note_commit(self, reports: Mapping[int, Report], now: float) -> None:
        """Set, as the coordinator, who holds what of a generation that was just committed.

        It counts until all members have told what they have. Where commits come faster than beats, they never do.
        """
        generation, world = next(iter(reports.values())).shard.generation, self._session.world
        ranks_of = {member.node_id: reports.keys() & set(member.ranks) for member in self._session.members}
        for rank, report in reports.items():
            for node in report.holders:
                ranks_of.get(node, set()).add(rank)
        live = {}
        for node, ranks in ranks_of.items():
            digests = tuple(reports[rank].digest for rank in sorted(ranks))
            live[node] = Holds(generation, world, True, tuple(sorted(ranks)), (0,) * len(ranks), digests)
        self._generation, self._since, self._looked_at, self._copies = generation, now, now, ()
        self._decided = live
        self._found = self._decide(generation, live)
        if self._found is not None:
            self.health = HealerWord(self._found, now, self._node_id)

    def rest(self) -> None:
        """Stop deciding: another node is the healer."""
        self._looked_at = None

    def look(self, mine: Holds, now: float) -> None:
        """Decide on copies, once every member has told what it has or was given the time to."""
        # Start anew also after a pause: members that could not be heard meanwhile must not be taken for lost.
        new = self._looked_at is None or now - self._looked_at > self._patience / 2
        if new or mine.generation != self._generation:
            self._generation, self._since, self._found, self._copies = mine.generation, now, None, ()
        self._looked_at = now
        self.take(self._node_id, mine, now)
        live: dict[str, Holds] = {}
        for member in self._session.members:
            holds, at = self._said.get(member.node_id, (None, 0.0))
            if holds is not None and holds.generation == self._generation and now - at <= self._patience:
                live[member.node_id] = holds
            elif now - self._since <= self._patience:
                return
        if self._found is None or live != self._decided:
            self._decided = live
            self._found = self._decide(mine.generation, live)
        if self._found is not None:
            self.health = HealerWord(self._found, now, self._node_id)
        self.expect(mine.generation, self.copies_for(self._node_id), now)

    def holdings(self, generation: Generation) -> dict[str, frozenset[int]]:
        """Return, as the healer, the ranks whose shards of this generation each counted member has."""
        is_current = self._looked_at is not None and self._found is not None and self._generation == generation
        return dict(self._holdings) if is_current else {}

    def answer_to(self, node_id: str) -> tuple[Health | None, tuple[CopyOrder, ...]]:
        """Return the health and the copies to tell a node that has told what it has; nothing if this node is not the
        healer."""
        if self._looked_at is None or self._found is None:
            return None, ()
        return self._found, self.copies_for(node_id)

    def copies_for(self, node_id: str) -> tuple[CopyOrder, ...]:
        """Return the copies that the node has to expect, and those that it has to make because their targets expect
        them."""
        missing = [one for one in self._copies if not self._is_there(one)]
        self._told.update(one for one in missing if one.target == node_id)
        return tuple(one for one in missing if one.target == node_id or (one.source == node_id and one in self._told))

    def _is_there(self, copy: CopyOrder) -> bool:
        """Return True if the target has reported the shard since the copy was decided on."""
        holds, _ = self._said[copy.target]
        return holds.generation == self._generation and copy.rank in holds.ranks

    def _decide(self, generation: Generation, live: Mapping[str, Holds]) -> Health | None:
        mine = live[self._node_id]
        world = mine.world or max(holds.world for holds in live.values())
        if not world:
            return None  # no live node has a shard of it: the number of ranks is not known
        session = self._session
        contents, differ = _agreed(live, world)
        holdings = {
            node: [r for r, digest in zip(holds.ranks, holds.digests, strict=True) if contents.get(r) == digest]
            for node, holds in live.items()
        }
        self._holdings = {node: frozenset(ranks) for node, ranks in holdings.items()}
        holders = holders_of(holdings)
        copies, reason = heal(
            holdings,
            session.members,
            session.replicas,
            running=[replace(copy, digest=b"") for copy in self._copies],
            refused={(one.rank, one.target) for holds in live.values() for one in holds.refusals},
            preferred=lambda rank: self._homes(rank, world),
            per_node=self._per_node,
        )
        self._copies = tuple(replace(copy, digest=contents[copy.rank]) for copy in copies)
        self._told.intersection_update(self._copies)
        problems = sorted({f"{one.target}: {one.reason}" for holds in live.values() for one in holds.refusals})
        wanted = min(session.replicas, len(session.members) - 1) + 1
        goal = min(wanted, len(live))
        sizes = {
            rank: size for holds in live.values() for rank, size in zip(holds.ranks, holds.sizes_bytes, strict=True)
        }
        left = {rank: goal - len(nodes) for rank, nodes in holders.items() if len(nodes) < goal}
        at_risk = sorted(rank for rank, nodes in holders.items() if len(nodes) < wanted)
        lost = world - len(holders)
        return Health(
            generation=generation,
            world=world,
            committed=any(holds.committed for holds in live.values()),
            wanted=wanted,
            copies=0 if lost else min(map(len, holders.values())),
            lost=tuple(islice((rank for rank in range(world) if rank not in holders), _SHOWN)),
            lost_count=lost,
            at_risk=tuple(at_risk[:_SHOWN]),
            at_risk_count=len(at_risk),
            left_copies=sum(left.values()),
            left_bytes=sum(sizes[rank] * count for rank, count in left.items()),
            running=copies[:_SHOWN],
            missing=tuple(m.node_id for m in session.members if m.node_id not in live)[:_SHOWN],
            survival=survival(holders, world, {m.node_id: m.domain for m in session.members if m.node_id in live}),
            reason="; ".join([reason, *differ[:_SHOWN], *problems[:_SHOWN]]),
        )

    def _homes(self, rank: int, world: int) -> Collection[str]:
        """Return the nodes that would hold the shard if this launch had saved it."""
        if world != self._session.world:
            return ()
        owner = next((m.node_id for m in self._session.members if rank in m.ranks), "")
        return (owner, *self._placement.buddies(rank))


def _agreed(live: Mapping[str, Holds], world: int) -> tuple[dict[int, bytes], list[str]]:
    """Return the content that most holders of each rank's shard have, and a line for each shard whose copies differ
    without a majority."""
    votes: dict[int, dict[bytes, int]] = {}
    for holds in live.values():
        for rank, digest in zip(holds.ranks, holds.digests, strict=True):
            if rank < world:
                counts = votes.setdefault(rank, {})
                counts[digest] = counts.get(digest, 0) + 1
    found, differ = {}, []
    for rank, counts in votes.items():
        most = max(counts.values())
        best = [digest for digest, count in counts.items() if count == most]
        if len(best) == 1:
            found[rank] = best[0]
        else:
            differ.append(f"copies of shard {rank} differ")
    return found, differ
