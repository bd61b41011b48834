"""Decisions of the persistent tier: what to flush now, who writes what, when to try again. Pure."""

from __future__ import annotations

from itertools import takewhile
from typing import TYPE_CHECKING

from flashckpt.types import age_order

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from flashckpt.placement import Placement
    from flashckpt.types import Generation, Member, PersistSettings, Session

_RETRY_FIRST_SECONDS = 5.0
_RETRY_MOST_SECONDS = 300.0


def choose(
    settings: PersistSettings,
    *,
    newest: Generation | None,
    persisted: Generation | None,
    wanted: tuple[Generation, str] | None,
    since_step: int,
    since_seconds: float,
) -> tuple[Generation | None, str]:
    """The committed generation to flush now, with the reason; None with the reason why nothing is due.

    `newest` is the newest committed one, `wanted` what somebody asked for, `since_step` the step that was flushed or
    loaded last, `since_seconds` how long ago that was.
    """
    if newest is None:
        return None, "nothing is committed yet"
    if wanted is not None and not is_persisted(wanted[0], persisted):
        return wanted
    if is_persisted(newest, persisted):
        return None, f"step {newest.step} is persisted"
    # Whoever crosses a multiple is due: the save at the multiple itself may have been skipped.
    if settings.interval is not None and newest.step // settings.interval > since_step // settings.interval:
        return newest, f"every {settings.interval} steps"
    if settings.interval_seconds is not None and since_seconds >= settings.interval_seconds:
        return newest, f"every {settings.interval_seconds / 60:g} minutes"
    return None, f"nothing is due since step {since_step}"


def who_orders(members: Sequence[Member], silent: Collection[str], own: str) -> tuple[str, str]:
    """The node whose orders count, as this node sees it, with the reason: the first member that answers.

    Two nodes that do not hear each other may both order. Each attempt has its own temporary name, a step is whole
    whoever commits it, and `latest` never goes back: one of them wins, the other finds the step there.
    """
    chosen = next((one.node_id for one in members if one.node_id == own or one.node_id not in silent), own)
    if members and chosen != members[0].node_id:
        before = [one.node_id for one in takewhile(lambda one: one.node_id != chosen, members)]
        return chosen, f"{', '.join(before)} {'does' if len(before) == 1 else 'do'} not answer"
    return chosen, "the coordinator"


def is_persisted(generation: Generation, persisted: Generation | None) -> bool:
    return persisted is not None and age_order(generation) == age_order(persisted)


def retry_delay(failures: int) -> float:
    """Seconds until the next attempt after so many in a row failed."""
    return min(_RETRY_MOST_SECONDS, _RETRY_FIRST_SECONDS * 2.0 ** min(16, max(0, failures - 1)))


def writers(
    session: Session, placement: Placement, down: Collection[str]
) -> tuple[tuple[tuple[str, tuple[int, ...]], ...], str]:
    """(node → ranks whose shards it writes), and why it can't be done; "" = it can.

    Each node those of its own ranks; where it is down, the first of its buddies that is not.
    """
    chosen: dict[str, list[int]] = {member.node_id: [] for member in session.members if member.node_id not in down}
    for member in session.members:
        for rank in member.ranks:
            holders = (member.node_id, *placement.buddies(rank)[: placement.replicas])
            node_id = next((node for node in holders if node in chosen), None)
            if node_id is None:
                return (), f"no node that holds the shard of rank {rank} answers: {', '.join(holders)}"
            chosen[node_id].append(rank)
    return tuple((node_id, tuple(ranks)) for node_id, ranks in chosen.items() if ranks), ""
