"""Decides which nodes keep whose replicas: a pure function of the members, alike on every node.

Rules, the stronger first: k distinct other nodes for every shard; none of them in the shard's own failure domain; no
two of them in one domain; load (replica shards on a node) as even as the rules before allow. The reason names the rules
that could not be kept. The order of the members and their addresses do not matter, and few assignments move when a node
joins or leaves: see docs/decisions/0009-placement.md for how and how many.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, TypeVar

from flashckpt.errors import ConfigError, InternalError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from flashckpt.types import Member

T = TypeVar("T")

_MASK = (1 << 64) - 1
_TIGHT = 1.1  # a domain whose share is within a tenth of its maximum has no choice
_IDLE_ROUNDS = 4  # rounds without a single match after which matching at random gives way to exact repair
_MOST_ROUNDS = 128
_SWAP_TRIES = 4  # free holders tried for a swap before the exact search


@dataclass(frozen=True, slots=True)
class Placement:
    """The buddies of every rank, with the reason."""

    strategy: str
    replicas: int  # copies on other nodes that every shard gets: min(asked for, nodes - 1)
    reason: str
    _buddies: Mapping[int, tuple[str, ...]] = field(repr=False)  # by rank
    _holders: Mapping[str, tuple[str, ...]] = field(repr=False)  # by owner's node
    _held: Mapping[str, tuple[int, ...]] = field(repr=False)  # by holder's node

    def buddies(self, rank: int) -> tuple[str, ...]:
        """The nodes that keep a replica of this rank's shards; never its own node."""
        try:
            return self._buddies[rank]
        except KeyError:
            raise ConfigError(f"rank {rank}: expected one of the {len(self._buddies)} ranks of the launch") from None

    def holders_of(self, node_id: str) -> tuple[str, ...]:
        """The nodes that keep replicas of this node's shards, sorted."""
        return _of_node(self._holders, node_id)

    def held_by(self, node_id: str) -> tuple[int, ...]:
        """The ranks of other nodes whose replicas this node keeps, sorted; their number is the node's load."""
        return _of_node(self._held, node_id)


def _of_node(table: Mapping[str, tuple[T, ...]], node_id: str) -> tuple[T, ...]:
    try:
        return table[node_id]
    except KeyError:
        raise ConfigError(f"node {node_id!r}: expected one of the {len(table)} nodes of the launch") from None


class Strategy(Protocol):
    """One way to place. It is given the nodes in ring order, at least two, and 1 <= replicas < number of nodes."""

    def assign(self, nodes: _Nodes, replicas: int) -> tuple[list[list[tuple[int, ...]]], list[str]]:
        """Return the indices of its buddies for each rank of each node, in order, and notes for the reason."""
        ...


def place(members: Sequence[Member], replicas: int, strategy: str = "ring") -> Placement:
    """Choose min(replicas, nodes - 1) buddies for every rank of every member."""
    if strategy not in STRATEGIES:
        raise ConfigError(f"placement strategy: expected one of {sorted(STRATEGIES)}, found {strategy!r}")
    if not isinstance(replicas, int) or isinstance(replicas, bool) or replicas < 0:
        raise ConfigError(f"replicas: expected an integer of at least 0, found {replicas!r}")
    _check(members)
    nodes = _Nodes.of(members)
    effective = min(replicas, len(nodes.ids) - 1)
    if effective == 0:
        assigned: list[list[tuple[int, ...]]] = [[() for _ in ranks] for ranks in nodes.ranks]
        notes: list[str] = []
    else:
        assigned, notes = STRATEGIES[strategy].assign(nodes, effective)

    buddies: dict[int, tuple[str, ...]] = {}
    holders: list[set[int]] = [set() for _ in nodes.ids]
    held: list[list[int]] = [[] for _ in nodes.ids]
    for owner, (ranks, rows) in enumerate(zip(nodes.ranks, assigned, strict=True)):
        for rank, row in zip(ranks, rows, strict=True):
            buddies[rank] = tuple(nodes.ids[holder] for holder in row)
            holders[owner].update(row)
            for holder in row:
                held[holder].append(rank)
    return Placement(
        strategy=strategy,
        replicas=effective,
        reason=_reason(nodes, strategy, replicas, effective, [len(ranks) for ranks in held], notes),
        _buddies=buddies,
        _holders={nodes.ids[i]: tuple(sorted(nodes.ids[j] for j in one)) for i, one in enumerate(holders)},
        _held={nodes.ids[i]: tuple(sorted(one)) for i, one in enumerate(held)},
    )


def survives(placement: Placement, members: Sequence[Member], lost: Collection[str]) -> bool:
    """Return True if every shard keeps a copy, its own node's or a replica, when these nodes are lost together."""
    gone = set(lost)
    return all(
        not gone.issuperset(placement.buddies(rank))
        for member in members
        if member.node_id in gone
        for rank in member.ranks
    )


def _check(members: Sequence[Member]) -> None:
    if not members:
        raise ConfigError("members: expected at least one node, found none")
    seen: set[str] = set()
    owner: dict[int, str] = {}
    for member in members:
        if member.node_id in seen:
            raise ConfigError(
                f"node id {member.node_id!r}: expected once among the members, found twice",
                hint="give every machine its own FLASHCKPT_NODE_ID",
                node_id=member.node_id,
            )
        seen.add(member.node_id)
        for rank in member.ranks:
            if rank in owner:
                raise ConfigError(f"rank {rank}: expected on one node, found on {owner[rank]!r} and {member.node_id!r}")
            owner[rank] = member.node_id


def _reason(
    nodes: _Nodes, strategy: str, asked: int, effective: int, loads: Sequence[int], notes: Sequence[str]
) -> str:
    count = len(nodes.ids)
    if effective == 0:
        if asked == 0:
            return "unreplicated: replicas=0 was asked for"
        return f"unreplicated: {asked} asked for, but this is the only node; its loss loses its checkpoints"
    low, high = min(loads), max(loads)
    load = str(low) if low == high else f"{low} to {high}"
    parts = [f"{strategy}: {effective} of {asked} replicas on {count} nodes, {load} replica shards per node"]
    if effective < asked:
        parts.append(f"fewer replicas than asked for: a shard has only {count - 1} other nodes")
    return "; ".join([*parts, *notes])


@dataclass(frozen=True, slots=True)
class _Nodes:
    """The members in ring order, by index.

    The order comes from a hash of the ids: nodes with neighbouring names often share a rack, and would be lost together
    if nobody has set labels.
    """

    ids: tuple[str, ...]
    hashes: tuple[int, ...]  # ascending
    ranks: tuple[tuple[int, ...], ...]
    domains: tuple[int, ...]
    labels: tuple[str, ...]  # of domains
    by_domain: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, members: Sequence[Member]) -> _Nodes:
        order = sorted((_hash(one.node_id), one.node_id, one.domain, tuple(sorted(one.ranks))) for one in members)
        index: dict[tuple[bool, str], int] = {}
        # A node without a label is a domain of its own, even if its id is another one's label.
        domains = [index.setdefault((bool(label), label or node), len(index)) for _, node, label, _ in order]
        by_domain: list[list[int]] = [[] for _ in index]
        for node, domain in enumerate(domains):
            by_domain[domain].append(node)
        return cls(
            ids=tuple(node for _, node, _, _ in order),
            hashes=tuple(one for one, _, _, _ in order),
            ranks=tuple(ranks for _, _, _, ranks in order),
            domains=tuple(domains),
            labels=tuple(name for _, name in index),
            by_domain=tuple(map(tuple, by_domain)),
        )

    def subset(self, chosen: Sequence[int]) -> _Nodes:
        """Return a copy with only these nodes, still in ring order."""
        kept = sorted(chosen)
        index: dict[int, int] = {}
        domains = [index.setdefault(self.domains[node], len(index)) for node in kept]
        return _Nodes(
            ids=tuple(self.ids[node] for node in kept),
            hashes=tuple(self.hashes[node] for node in kept),
            ranks=tuple(self.ranks[node] for node in kept),
            domains=tuple(domains),
            labels=tuple(self.labels[domain] for domain in index),
            by_domain=tuple(tuple(i for i, d in enumerate(domains) if d == one) for one in range(len(index))),
        )


class _Ring:
    """Places each node's shards on its k successors on the ring, except if domains or loads forbid it."""

    def assign(self, nodes: _Nodes, replicas: int) -> tuple[list[list[tuple[int, ...]]], list[str]]:
        quota, notes = _quota(nodes, replicas)
        sizes = [len(ranks) for ranks in nodes.ranks]
        capacity, tight = _capacities(nodes, sizes, replicas, quota)
        flow = _Flow(nodes, sizes, [size * replicas for size in sizes], capacity, quota)
        flow.fill(replicas, tight)
        # All rules can be kept at some higher load: raise it until everything is placed.
        fair = level = max(capacity)
        while flow.repair():
            if level > sum(sizes):
                raise InternalError(f"placement: expected room for all replicas at {level} shards per node, found none")
            flow.raise_to(level)
            level += 1
        if max(flow.loads()) > max(fair, -(-sum(sizes) * replicas // len(sizes))):
            notes.append("loads are uneven because the rules above leave no other choice")
        rows = [_spread(nodes, flow.given[node], sizes[node], replicas) for node in range(len(sizes))]
        return rows, notes


class _Group:
    """Places shards in closed groups of k + 1 nodes that keep each other's: the fewest sets of nodes whose loss is
    fatal."""

    def assign(self, nodes: _Nodes, replicas: int) -> tuple[list[list[tuple[int, ...]]], list[str]]:
        count = len(nodes.ids) // (replicas + 1)
        told: list[str] = []
        if count > 1 and len(nodes.by_domain) == 1:
            told = [f"all nodes are in domain {nodes.labels[0]!r}: its loss loses everything"]
            nodes = _without_labels(nodes)
        if count == 1:
            return STRATEGIES["ring"].assign(nodes, replicas)
        largest = max(nodes.by_domain, key=len)
        if len(largest) > count:
            # Larger groups could keep the domains apart, but would double the load of the other domains' nodes.
            rows, notes = STRATEGIES["ring"].assign(nodes, replicas)
            label = nodes.labels[nodes.domains[largest[0]]]
            instead = f"ring instead of groups: domain {label!r} has {len(largest)} nodes, but there are {count} groups"
            return rows, [instead, *notes]
        groups = self._groups(nodes, replicas, count)
        if groups is None:
            rows, notes = STRATEGIES["ring"].assign(nodes, replicas)
            return rows, ["ring instead of groups: no groups keep the domains apart", *notes]
        placed: list[list[tuple[int, ...]]] = [[] for _ in nodes.ids]
        told_of = dict.fromkeys(told)
        for group in groups:
            if len(group) == replicas + 1:
                for node in group:
                    others = tuple(one for one in group if one != node)
                    placed[node] = [others] * len(nodes.ranks[node])
                continue
            rows, notes = STRATEGIES["ring"].assign(nodes.subset(group), replicas)
            told_of.update(dict.fromkeys(notes))
            for node, row in zip(group, rows, strict=True):
                placed[node] = [tuple(group[i] for i in one) for one in row]
        return placed, list(told_of)

    def _groups(self, nodes: _Nodes, replicas: int, count: int) -> list[list[int]] | None:
        """Return sorted groups of at least k + 1 nodes, none with two of one domain; None if there are no such
        groups."""
        # The heads are chosen so that few change when a node joins; the other nodes are then matched with them.
        heads = sorted(range(len(nodes.ids)), key=lambda node: _mix(nodes.hashes[node], 1))[:count]
        rest = len(nodes.ids) - count * (replicas + 1)
        # A domain with nearly as many nodes as there are groups has to be in nearly every group.
        tight = {domain for domain, members in enumerate(nodes.by_domain) if _TIGHT * len(members) >= count}
        # One larger group has fewer fatal sets than several that are larger by one.
        spread = [rest // count + (place < rest % count) for place in range(count)]
        for extra in ([rest] + [0] * (count - 1), spread):
            need = [0] * len(nodes.ids)
            capacity = [1] * len(nodes.ids)
            for head, more in zip(heads, extra, strict=True):
                need[head], capacity[head] = replicas + more, 0
            flow = _Flow(nodes, [1] * len(nodes.ids), need, capacity, None)
            flow.fill(replicas, tight if len(tight) < len(nodes.by_domain) else ())
            if not flow.repair():
                return [sorted([head, *flow.given[head]]) for head in heads]
        return None


STRATEGIES: dict[str, Strategy] = {"ring": _Ring(), "group": _Group()}


def _without_labels(nodes: _Nodes) -> _Nodes:
    every = range(len(nodes.ids))
    return _Nodes(nodes.ids, nodes.hashes, nodes.ranks, tuple(every), nodes.ids, tuple((node,) for node in every))


def _quota(nodes: _Nodes, replicas: int) -> tuple[list[list[int]] | None, list[str]]:
    """Return the most copies of a shard of domain d in domain e, as [d][e]; None: one in every other domain, none in
    its own."""
    sizes = [len(one) for one in nodes.by_domain]
    if len(sizes) > replicas:
        return None, []
    quota, notes = [], []
    if len(sizes) > 1:
        notes.append(f"several replicas of a shard share a domain: there are only {len(sizes)} domains")
    for home, label in enumerate(nodes.labels):
        others = [size for domain, size in enumerate(sizes) if domain != home]
        outside = sum(others)
        if outside < replicas:
            row = [replicas - outside if domain == home else size for domain, size in enumerate(sizes)]
            notes.append(
                f"shards of domain {label!r} keep {replicas - outside} of {replicas} replicas inside it: "
                f"{outside} nodes are outside"
            )
        else:
            share = next(q for q in range(1, replicas + 1) if sum(min(q, size) for size in others) >= replicas)
            row = [0 if domain == home else min(share, size) for domain, size in enumerate(sizes)]
        quota.append(row)
    return quota, notes


def _capacities(
    nodes: _Nodes, sizes: Sequence[int], replicas: int, quota: list[list[int]] | None
) -> tuple[list[int], set[int]]:
    """Return how many replica shards each node should keep: one level for all, less if a domain can't be given as much.

    No lower maximum is possible, and the figures change little when a node joins or leaves.
    Also returns the domains that can hardly be given their share, because most shards are their own.
    """
    domains = nodes.by_domain
    shards = [sum(sizes[node] for node in one) for one in domains]
    wanted, total = sum(shards) * replicas, sum(shards)
    most_node: list[int] = [0] * len(sizes)
    most: list[int] = []  # by domain
    for domain, members in enumerate(domains):
        if quota is None:
            most.append(total - shards[domain])
            outside = total - shards[domain]
        else:
            most.append(sum(row[domain] * count for row, count in zip(quota, shards, strict=True)))
            outside = sum(count for row, count in zip(quota, shards, strict=True) if row[domain])
        at_home = quota is not None and quota[domain][domain] > 0
        for node in members:
            most_node[node] = outside - (sizes[node] if at_home else 0)

    def at(level: int) -> list[int]:
        if quota is None:
            return [min(top, level * len(one)) for top, one in zip(most, domains, strict=True)]
        return [min(top, sum(min(level, most_node[v]) for v in one)) for top, one in zip(most, domains, strict=True)]

    low, high = 0, wanted + 1  # at(low) is not enough or just enough; at(high) is more
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if sum(at(middle)) <= wanted else (low, middle)
    shares = at(low)
    spare = wanted - sum(shares)
    # Hashes decide which nodes get one more than the others: so one node more or less changes few of them.
    order = sorted(range(len(sizes)), key=lambda node: _mix(nodes.hashes[node], 2))
    above = at(low + 1)
    for node in order:
        if spare == 0:
            break
        domain = nodes.domains[node]
        if shares[domain] < above[domain] and most_node[node] > low:
            shares[domain] += 1
            spare -= 1
    capacity = [0] * len(sizes)
    turn: list[list[int]] = [[] for _ in domains]
    for node in order:
        turn[nodes.domains[node]].append(node)
    for share, members_in_turn in zip(shares, turn, strict=True):
        even, more = divmod(share, len(members_in_turn))
        for place_in_turn, node in enumerate(members_in_turn):
            capacity[node] = even + (place_in_turn < more)
    tight = {d for d, members in enumerate(domains) if _TIGHT * low * len(members) >= most[d]}
    return capacity, tight if len(tight) < len(domains) else set()


class _Flow:
    """Moves shards from owners to holders: first along the ring, then by random matching, then exactly.

    Amounts are counted per pair of nodes; `_spread` makes single shards of them. An owner gives one holder at most
    `sizes[owner]` (each shard once) and a domain at most its quota of that.
    """

    def __init__(
        self,
        nodes: _Nodes,
        sizes: Sequence[int],
        need: Sequence[int],
        capacity: Sequence[int],
        quota: list[list[int]] | None,
    ) -> None:
        self._nodes = nodes
        self._sizes = sizes
        self._quota = quota
        self._need = list(need)
        self._capacity = list(capacity)
        self._free = list(capacity)
        self.given: list[dict[int, int]] = [{} for _ in sizes]
        self._to_domain: list[dict[int, int]] = [{} for _ in sizes]
        self._owners: list[dict[int, None]] = [{} for _ in sizes]  # of what a holder holds; a set with an order

    def loads(self) -> list[int]:
        return [top - free for top, free in zip(self._capacity, self._free, strict=True)]

    def raise_to(self, level: int) -> None:
        for node, top in enumerate(self._capacity):
            if top < level:
                self._free[node] += level - top
                self._capacity[node] = level

    def fill(self, replicas: int, tight: Collection[int] = ()) -> None:
        """Give what can be given without taking anything back.

        `tight` are domains that have no choice: they are served first, so that nobody with a choice takes what they
        need.
        """
        domains = self._nodes.domains
        everyone = range(len(domains))
        if tight:
            pinned = [node for node in everyone if domains[node] in tight]
            self._match(everyone, pinned, replicas, tight)
            # A single tight domain can't give to itself: without it no circle is matched in vain.
            outside = [node for node in everyone if len(tight) > 1 or domains[node] not in tight]
            self._match(pinned, outside, replicas)
        self._match(everyone, everyone, replicas)

    def _match(
        self, owners: Sequence[int], holders: Sequence[int], replicas: int, targets: Collection[int] = ()
    ) -> None:
        """Match `owners` with `holders`, which are in the domains `targets` (none: in any)."""
        count, allowed = len(self._sizes), set(holders)
        for distance in range(1, replicas + 1):
            for owner in owners:
                if (owner + distance) % count in allowed:
                    self._give(owner, (owner + distance) % count)
        # The rest is matched on circles of other orders, each owner with the holders that directly follow it. One node
        # more or less changes at most one match per circle: all others keep their neighbours.
        hashes, idle = self._nodes.hashes, 0
        for circle in range(_MOST_ROUNDS):
            owners = [
                node
                for node in owners
                if self._need[node] and (not targets or any(self._left(node, domain) for domain in targets))
            ]
            holders = [node for node in holders if self._free[node]]
            if not owners or not holders or idle == _IDLE_ROUNDS:
                return
            salt = 3 + 2 * circle
            line = [(_mix(hashes[node], salt), node, True) for node in owners]
            line += [(_mix(hashes[node], salt + 1), node, False) for node in holders]
            line.sort()
            first = next(place for place, (_, _, gives) in enumerate(line) if gives)
            owner, moved = -1, False
            for _, node, gives in line[first:] + line[:first]:
                if gives:
                    owner = node
                elif self._need[owner]:
                    moved = self._give(owner, node) or moved
            idle = 0 if moved else idle + 1

    def repair(self) -> bool:
        """Give the rest by taking back and giving elsewhere. Return True if something can't be given at these
        capacities."""
        stuck = False
        for owner in range(len(self._sizes)):
            while self._need[owner] and (self._swap(owner) or self._augment(owner)):
                pass
            stuck = stuck or self._need[owner] > 0
        return stuck

    def _room(self, owner: int, holder: int, leaving: int = -1, freed: int = 0) -> int:
        """Return how much `owner` may still give to `holder`, if it takes back `freed` from `leaving` first."""
        if owner == holder:
            return 0
        domain = self._nodes.domains[holder]
        left = self._left(owner, domain)
        if leaving >= 0 and self._nodes.domains[leaving] == domain:
            left += freed
        return min(left, self._sizes[owner] - self.given[owner].get(holder, 0))

    def _left(self, owner: int, domain: int) -> int:
        """Return how much `owner` may still give to a domain."""
        home = self._nodes.domains[owner]
        quota = int(home != domain) if self._quota is None else self._quota[home][domain]
        return quota * self._sizes[owner] - self._to_domain[owner].get(domain, 0)

    def _give(self, owner: int, holder: int) -> bool:
        amount = min(self._need[owner], self._free[holder])
        if amount:
            amount = min(amount, self._room(owner, holder))
        if amount > 0:
            self._move(owner, holder, amount)
            self._need[owner] -= amount
            self._free[holder] -= amount
            return True
        return False

    def _move(self, owner: int, holder: int, amount: int) -> None:
        given, domain = self.given[owner], self._nodes.domains[holder]
        given[holder] = given.get(holder, 0) + amount
        self._to_domain[owner][domain] = self._to_domain[owner].get(domain, 0) + amount
        if given[holder]:
            self._owners[holder][owner] = None
        else:
            del given[holder]
            del self._owners[holder][owner]

    def _swap(self, owner: int) -> bool:
        """Try the usual repair, found in a few steps: another owner moves to a free holder and leaves its place to
        `owner`."""
        count = len(self._sizes)
        start = bisect_left(self._nodes.hashes, _mix(self._nodes.hashes[owner], 0))
        for holder in self._free_holders(_SWAP_TRIES):
            if self._give(owner, holder):
                return True
            for other in (one % count for one in range(start, start + count)):
                if other == owner:
                    continue
                for left, amount in self.given[other].items():
                    amount = min(amount, self._need[owner], self._free[holder], self._room(owner, left))
                    if amount > 0:
                        amount = min(amount, self._room(other, holder, leaving=left, freed=amount))
                    if amount > 0:
                        self._move(other, left, -amount)
                        self._move(other, holder, amount)
                        self._move(owner, left, amount)
                        self._need[owner] -= amount
                        self._free[holder] -= amount
                        return True
        return False

    def _free_holders(self, count: int) -> Iterator[int]:
        for holder, free in enumerate(self._free):
            if free:
                yield holder
                count -= 1
                if not count:
                    return

    def _augment(self, start: int) -> bool:
        """Try the exact repair: the shortest chain of owners that move, each to the place that the next one leaves."""
        unseen = [dict.fromkeys(one) for one in self._nodes.by_domain]
        open_domains = dict.fromkeys(range(len(unseen)))
        came_from: dict[int, tuple[int, int]] = {}  # holder: (owner that would move to it, the holder it would leave)
        seen_owners = {start}
        queue: deque[int] = deque()

        def reach(owner: int, left: int, domains: Sequence[int], *, inside: bool) -> int | None:
            """Visit the holders that `owner` could move to. `inside`: within the domain it leaves, which needs no
            quota."""
            for domain in domains:
                if not inside and self._left(owner, domain) <= 0:
                    continue
                for holder in list(unseen[domain]):
                    if holder == owner or self.given[owner].get(holder, 0) >= self._sizes[owner]:
                        continue
                    came_from[holder] = (owner, left)
                    del unseen[domain][holder]
                    if self._free[holder]:
                        return holder
                    queue.append(holder)
                if not unseen[domain]:
                    open_domains.pop(domain, None)
            return None

        found = reach(start, -1, list(open_domains), inside=False)
        while found is None and queue:
            holder = queue.popleft()
            domain = self._nodes.domains[holder]
            for owner in self._owners[holder]:
                found = reach(owner, holder, [domain], inside=True) if domain in open_domains else None
                if found is None and owner not in seen_owners:
                    seen_owners.add(owner)
                    found = reach(owner, holder, list(open_domains), inside=False)
                if found is not None:
                    break
        if found is None:
            return False
        self._free[found] -= 1
        self._need[start] -= 1
        holder = found
        while holder >= 0:
            owner, left = came_from[holder]
            if left >= 0:
                self._move(owner, left, -1)
            self._move(owner, holder, 1)
            holder = left
        return True


def _spread(nodes: _Nodes, given: Mapping[int, int], size: int, replicas: int) -> list[tuple[int, ...]]:
    """Make single shards of the amounts: `size` rows of `replicas` distinct holders.

    Holders are laid out in a line, as often as they were given something, domain by domain, and every shard takes each
    `size`-th place. No holder's stretch is longer than `size`, so none gets a shard twice; the same holds for domains
    and their quota.
    """
    line: list[int] = []
    for holder in sorted(given, key=lambda one: (nodes.labels[nodes.domains[one]], nodes.domains[one], one)):
        line += [holder] * given[holder]
    if len(line) != size * replicas:
        raise InternalError(f"placement: expected {size * replicas} assignments, found {len(line)}")
    return [tuple(line[rank::size]) for rank in range(size)]


def _hash(node_id: str) -> int:
    return int.from_bytes(hashlib.blake2b(node_id.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")


def _mix(value: int, salt: int) -> int:
    """Return another order of the same nodes for each salt (the finalizer of SplitMix64)."""
    value = (value + salt * 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
