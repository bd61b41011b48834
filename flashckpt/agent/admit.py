"""Whether another node may store a replica here, or read a shard. Pure: the answer comes with its reason."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flashckpt.agent.messages import Accept, Decline, DeclineGet, Serve
from flashckpt.line import launch_of
from flashckpt.wire import GetRefused, PutHave, PutRefused

if TYPE_CHECKING:
    from collections.abc import Callable

    from flashckpt.agent.custody import Custody
    from flashckpt.agent.ledger import Ledger
    from flashckpt.agent.standing import Standing
    from flashckpt.types import Generation, ShardId
    from flashckpt.wire import GetOpen, PutOpen

_OTHER_CONTENT = "another content lies here under that name"


def answer_put(
    put: PutOpen,
    standing: Standing,
    ledger: Ledger,
    custody: Custody,
    *,
    expected: bool,
    is_spare: Callable[[Generation], bool],
) -> Accept | Decline:
    """`expected`: the healer has announced it. `is_spare`: a generation that is not counted against the slots."""
    held = custody.held.get(put.shard)
    reason, retry = _why_no_put(put, standing, ledger, custody, expected, is_spare)
    if reason:
        return Decline(PutRefused(reason, retry, standing.newest, standing.line))
    if held is None:
        return Accept(heals=_is_extra(put.shard, standing, ledger, custody))
    if held.digest == put.digest:
        return Decline(PutHave(held.digest))
    return Decline(PutRefused(_OTHER_CONTENT, False, None, None))


def answer_get(get: GetOpen, standing: Standing, custody: Custody) -> Serve | DeclineGet:
    held = custody.held.get(get.shard)
    reason, retry = standing.why_stranger(get.sender, get.launch)
    if not reason and held is None:
        reason = f"{standing.node_id} does not hold {get.shard}"
    elif not reason and held is not None and held.digest != get.digest:
        reason = _OTHER_CONTENT
    if reason or held is None:
        return DeclineGet(GetRefused(reason, retry, standing.newest, standing.line))
    return Serve(held)


def _why_no_put(
    put: PutOpen,
    standing: Standing,
    ledger: Ledger,
    custody: Custody,
    expected: bool,
    is_spare: Callable[[Generation], bool],
) -> tuple[str, bool]:
    """Why it is refused ("" = it is not), and whether asking again later may help."""
    shard, session, node_id = put.shard, standing.session, standing.node_id
    reason, retry = standing.why_stranger(put.sender, put.launch)
    member = standing.member(put.sender)
    if reason or session is None or member is None:
        return reason, retry
    why = ledger.why_droppable(shard.generation)
    if why:
        return why, False
    # What was lost here may come from any member that has it; so may what is kept, where the healer has announced it.
    if custody.wanted.get(shard) is not None or expected:
        return "", False
    if launch_of(shard.generation) != put.launch or shard.rank not in member.ranks:
        return f"{shard} is not {put.sender}'s to give away", False
    if standing.placement is None or node_id not in standing.placement.buddies(shard.rank):
        return f"{node_id} keeps no replicas of rank {shard.rank}", False
    # A rank writes into slots_per_rank slots; one more for the moment between a commit here and there.
    kept = sum(
        s.rank == shard.rank and launch_of(s.generation) == put.launch and not is_spare(s.generation)
        for s in custody.held
        if s != shard
    )
    if kept > session.slots_per_rank:
        return f"{node_id} holds {kept} generations of rank {shard.rank} that are not committed", True
    return "", False


def _is_extra(shard: ShardId, standing: Standing, ledger: Ledger, custody: Custody) -> bool:
    """A copy that this node would not have if all nodes were well."""
    is_ours = standing.owns(shard) or (
        standing.is_of_this_launch(shard.generation) and standing.node_id in standing.buddies(shard.rank)
    )
    return shard.generation == ledger.kept and not is_ours and shard not in custody.wanted
