"""Decides whether another node may store a replica here, or read a shard. Pure: the answer comes with its reason."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flashckpt.protocol.events import Accept, Decline, DeclineGet, Serve
from flashckpt.protocol.line import launch_of
from flashckpt.protocol.wire import GetRefused, PutHave, PutRefused

if TYPE_CHECKING:
    from collections.abc import Callable

    from flashckpt.protocol.current_launch import CurrentLaunch
    from flashckpt.protocol.holdings import Holdings
    from flashckpt.protocol.ledger import Ledger
    from flashckpt.protocol.wire import GetOpen, PutOpen
    from flashckpt.types import Generation, ShardId

_OTHER_CONTENT = "another content lies here under that name"


def answer_put(
    put: PutOpen,
    current: CurrentLaunch,
    ledger: Ledger,
    holdings: Holdings,
    *,
    expected: bool,
    is_spare: Callable[[Generation], bool],
) -> Accept | Decline:
    """Accept or decline a replica that another node wants to store here.

    `expected`: the healer has announced it. `is_spare` returns True for a generation that is not counted against the
    slots.
    """
    held = holdings.held.get(put.shard)
    reason, retry = _why_no_put(put, current, ledger, holdings, expected, is_spare)
    if reason:
        return Decline(PutRefused(reason, retry, current.newest, current.line))
    if held is None:
        return Accept(heals=_is_extra(put.shard, current, ledger, holdings))
    if held.digest == put.digest:
        return Decline(PutHave(held.digest))
    return Decline(PutRefused(_OTHER_CONTENT, False, None, None))


def answer_get(get: GetOpen, current: CurrentLaunch, holdings: Holdings) -> Serve | DeclineGet:
    held = holdings.held.get(get.shard)
    reason, retry = current.why_stranger(get.sender, get.launch)
    if not reason and held is None:
        reason = f"{current.node_id} does not hold {get.shard}"
    elif not reason and held is not None and held.digest != get.digest:
        reason = _OTHER_CONTENT
    if reason or held is None:
        return DeclineGet(GetRefused(reason, retry, current.newest, current.line))
    return Serve(held)


def _why_no_put(
    put: PutOpen,
    current: CurrentLaunch,
    ledger: Ledger,
    holdings: Holdings,
    expected: bool,
    is_spare: Callable[[Generation], bool],
) -> tuple[str, bool]:
    """Return why the replica is refused ("" = it is not), and whether a later try may succeed."""
    shard, session, node_id = put.shard, current.session, current.node_id
    reason, retry = current.why_stranger(put.sender, put.launch)
    member = current.member(put.sender)
    if reason or session is None or member is None:
        return reason, retry
    why = ledger.why_droppable(shard.generation)
    if why:
        return why, False
    # A shard that is wanted back may come from any member that has it; so may a kept one that the healer has announced.
    if holdings.wanted.get(shard) is not None or expected:
        return "", False
    if launch_of(shard.generation) != put.launch or shard.rank not in member.ranks:
        return f"{shard} is not {put.sender}'s to give away", False
    if current.placement is None or node_id not in current.placement.buddies(shard.rank):
        return f"{node_id} keeps no replicas of rank {shard.rank}", False
    # A rank writes into slots_per_rank slots. One more is needed between the commit on the coordinator and its news
    # here.
    kept = sum(
        s.rank == shard.rank and launch_of(s.generation) == put.launch and not is_spare(s.generation)
        for s in holdings.held
        if s != shard
    )
    if kept > session.slots_per_rank:
        return f"{node_id} holds {kept} generations of rank {shard.rank} that are not committed", True
    return "", False


def _is_extra(shard: ShardId, current: CurrentLaunch, ledger: Ledger, holdings: Holdings) -> bool:
    """Return True if the replica is here only because another node is down or was."""
    is_ours = current.owns(shard) or (
        current.is_of_this_launch(shard.generation) and current.node_id in current.buddies(shard.rank)
    )
    return shard.generation == ledger.kept and not is_ours and shard not in holdings.wanted
