"""Computes which losses of nodes a generation would survive right now, and puts it in words. Pure.

A set of nodes is fatal if it contains all holders of some shard. So the smallest fatal sets are the smallest sets of
holders themselves: nothing has to be searched, however many nodes there are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flashckpt.protocol.wire import Fatal, Survival

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

_SHOWN_SETS = 4
_SHOWN_NAMES = 8


def survival(holders: Mapping[int, Iterable[str]], world: int, domains: Mapping[str, str]) -> Survival:
    """Return the losses that would be survived.

    `holders`: by rank, live nodes only; `domains`: by live node, "" if it has none.
    """
    lost = world - len(holders)
    shards: dict[frozenset[str], int] = {}  # sets of holders → the lowest rank with exactly these
    for rank in sorted(holders):
        shards.setdefault(frozenset(holders[rank]), rank)
    fewest = min(map(len, shards), default=0)
    smallest = sorted((sorted(nodes), rank) for nodes, rank in shards.items() if len(nodes) == fewest)
    within = {domains.get(next(iter(nodes)), "") for nodes in shards if len({domains.get(n, "") for n in nodes}) == 1}
    return Survival(
        any_nodes=-1 if lost else fewest - 1,
        live=len(domains),
        fatal=tuple(Fatal(tuple(nodes), rank) for nodes, rank in smallest[:_SHOWN_SETS]),
        fatal_count=len(smallest),
        fatal_domains=tuple(sorted(filter(None, within))[:_SHOWN_NAMES]),
    )


def words(found: Survival, lost: Sequence[int], lost_count: int) -> str:
    """Answer "what may be lost now?" in words. `lost`: ranks whose shard nobody has, or the first of them."""
    if found.any_nodes < 0:
        more = f" and {lost_count - len(lost)} more" if lost_count > len(lost) else ""
        return f"not even what is there: no live node has shard {', '.join(map(str, lost))}{more}"
    if found.any_nodes == 0:
        only = "; ".join(f"{one.nodes[0]} holds the only copy of shard {one.rank}" for one in found.fatal)
        return f"nothing may be lost: {only}{_more(found, 'nodes hold the only copy of a shard')}"
    parts = [f"any {found.any_nodes} node{'s' if found.any_nodes > 1 else ''}"]
    if found.any_nodes + 1 < found.live:
        sets = "; ".join(_together(one.nodes) for one in found.fatal)
        parts.append(f"not {sets}{_more(found, 'sets of nodes')}")
    if found.fatal_domains:
        parts.append(f"not all nodes of domain {', '.join(found.fatal_domains)}")
    return "; ".join(parts)


def _together(nodes: Sequence[str]) -> str:
    return f"{nodes[0]} together with {' and '.join(nodes[1:])}"


def _more(found: Survival, what: str) -> str:
    hidden = found.fatal_count - len(found.fatal)
    return f"; {hidden} more {what}" if hidden else ""
