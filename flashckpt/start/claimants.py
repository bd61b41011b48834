"""Decides whether a launch may take a job over: not beside live trainers of another launch. Pure."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from flashckpt.errors import LiveJobError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from flashckpt.types import Claimant, Launch

# Seconds to wait for trainers to end before the launch is refused. A restart may begin while they are being killed.
GRACE_SECONDS = 3.0
ENDING_GRACE_SECONDS = 20.0  # if all of them are ending: freeing a large memory takes a while
_SHOWN = 4


class ClaimAnswer(enum.Enum):
    TAKE = "take"  # no other launch is alive
    WAIT = "wait"  # its trainers may be about to end: ask again
    REFUSE = "refuse"


@dataclass(frozen=True, slots=True)
class Trainer:
    """A claimant of another launch, with the node that it was found on."""

    node: str
    claimant: Claimant


def others(found: Iterable[Trainer], processes: Collection[str], launch: Launch | None) -> tuple[Trainer, ...]:
    """Return the claimants that are neither among `processes`, which want to take over, nor in `launch`, their own."""
    strangers = [one for one in found if one.claimant.process not in processes and one.claimant.launch != launch]
    return tuple(sorted(strangers, key=lambda one: (one.claimant.rank, one.node, one.claimant.pid)))


def decide(strangers: Collection[Trainer], waited: float) -> tuple[ClaimAnswer, str]:
    """Return what to do after `waited` seconds, and why. The same on all ranks, which have the same arguments."""
    if not strangers:
        return ClaimAnswer.TAKE, "no other launch is alive"
    if all(one.claimant.is_ending for one in strangers):
        if waited < ENDING_GRACE_SECONDS:
            return ClaimAnswer.WAIT, f"{describe(strangers)}: they are ending"
    elif waited < GRACE_SECONDS:
        return ClaimAnswer.WAIT, f"{describe(strangers)}: they may be about to end"
    return ClaimAnswer.REFUSE, f"{describe(strangers)}: alive after {waited:.1f} s"


def describe(strangers: Collection[Trainer]) -> str:
    shown = [f"rank {one.claimant.rank} (process {one.claimant.pid} on {one.node})" for one in strangers]
    more = f" and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else ""
    return ", ".join(shown[:_SHOWN]) + more


def live_job(job: str, strangers: Collection[Trainer]) -> LiveJobError:
    since = min(one.claimant.claimed_at for one in strangers)
    date = datetime.fromtimestamp(since, UTC).strftime("%Y-%m-%d %H:%M:%S UTC") if since > 0 else "an unknown time"
    trainers = tuple(
        {
            "node": one.node,
            "rank": one.claimant.rank,
            "pid": one.claimant.pid,
            "since": one.claimant.claimed_at,
        }
        for one in strangers
    )
    return LiveJobError(
        f"job {job!r}: expected no other live launch, found trainers that hold it since {date}: {describe(strangers)}",
        job=job,
        trainers=trainers,
    )
