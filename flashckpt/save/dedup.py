"""Decides which rank stores what if several ranks of a node hold the same bytes. Pure, and the same on every rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

# A smaller tensor is stored by one rank. A larger one is cut into rows, one part for each holder, so that one large
# embedding does not make one rank's save the slowest.
SPLIT_BYTES = 4 << 20


class HeldRegion(NamedTuple):
    """One region that all of `holders` have."""

    size_bytes: int
    rows: int  # extent of dimension 0; 1 for a scalar
    holders: tuple[int, ...]  # sorted, at least one
    certain: bool = True  # True: the mesh proves that all hold the same bytes; False: it is assumed


class Share(NamedTuple):
    """The rows [start, stop) of a region that this rank stores."""

    start: int
    stop: int


def share(regions: Sequence[HeldRegion], rank: int) -> list[Share | None]:
    """Returns, for each region, the rows that `rank` stores; None if another holder stores it.

    Every holder computes the same answer from its own list, without communication: regions are dealt out within each
    set of holders separately, in the order of the list, which is the same for all members of the set.

    The lowest holder stores all regions that are not certain. If ranks differ after all, a load returns one rank's
    state, and not the mean of one rank with the variance of another.
    """
    load: dict[tuple[int, ...], list[int]] = {}
    shares: list[Share | None] = []
    for region in regions:
        holders = region.holders
        if len(holders) == 1:
            shares.append(Share(0, region.rows) if holders[0] == rank else None)
            continue
        loads = load.setdefault(holders, [0] * len(holders))
        mine = holders.index(rank) if rank in holders else -1
        if not region.certain:
            loads[0] += region.size_bytes
            shares.append(Share(0, region.rows) if mine == 0 else None)
            continue
        if region.size_bytes >= SPLIT_BYTES and region.rows >= len(holders):
            bounds = [region.rows * i // len(holders) for i in range(len(holders) + 1)]
            shares.append(Share(bounds[mine], bounds[mine + 1]) if mine >= 0 else None)
            continue
        lightest = loads.index(min(loads))
        loads[lightest] += region.size_bytes
        shares.append(Share(0, region.rows) if lightest == mine else None)
    return shares
