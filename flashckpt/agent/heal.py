"""Which copies to make so that every shard of a generation has as many as were promised. Pure.

Rules, the stronger first: shards with the fewest copies come first; a target that has just refused comes last; no
target in the failure domain of a copy where there is another; a shard's own node and its buddies before others; the
least loaded; the order of the members. What is under way stays as it is while it makes sense.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

from flashckpt.wire import Copy

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from flashckpt.types import Member

# Of the whole job at once. Each is as large as a shard, and the search for a target looks at every node.
_MOST_COPIES = 64


def holders_of(holdings: Mapping[str, Iterable[int]]) -> dict[int, list[str]]:
    """By rank, those nodes that have its shard."""
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
    running: Iterable[Copy] = (),
    refused: Collection[tuple[int, str]] = (),
    preferred: Callable[[int], Collection[str]] = lambda _: (),
    per_node: int = 2,
) -> tuple[tuple[Copy, ...], str]:
    """`holdings`: ranks of one generation by node, of every node that is alive, be it none. The answer has at most
    `per_node` copies from and to each node; those of `running` among them that are still of use."""
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
    """Copies that were decided on count as made for whatever is decided after them."""

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
        self.copies: list[Copy] = []

    def keep(self, copy: Copy) -> None:
        there = self._sources.get(copy.rank, ())
        if copy.source in there and copy.target in self.live and copy.target not in self.holders[copy.rank]:
            self._note(copy)

    def add(self, rank: int, refused: Collection[tuple[int, str]], preferred: Collection[str]) -> bool:
        """One more copy of this shard; whether there was a way to have it now."""
        sources = [node for node in self._sources[rank] if self._outgoing[node] < self._per_node]
        holders = self.holders[rank]
        domains = {self._domain[node] for node in holders}
        targets = [node for node in self.live if node not in holders]
        if not sources or not targets:
            return False

        def drawback(node: str) -> tuple[bool, bool]:
            return (rank, node) in refused, self._domain[node] in domains

        # A better place that is busy is waited for: a copy that shares a domain would stay where it is.
        least = min(map(drawback, targets))
        free = [node for node in targets if self._incoming[node] < self._per_node and drawback(node) == least]
        if not free:
            return False
        target = min(free, key=lambda node: (node not in preferred, self._load[node], self.live[node]))
        self._note(Copy(rank, min(sources, key=lambda node: (self._outgoing[node], self.live[node])), target))
        return True

    def _note(self, copy: Copy) -> None:
        self.copies.append(copy)
        self.holders[copy.rank].append(copy.target)
        self._load[copy.target] += 1
        self._incoming[copy.target] += 1
        self._outgoing[copy.source] += 1
