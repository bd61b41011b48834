"""Decides which epochs an agent accepts from trainers and from other nodes. Pure.

IMPORTANT: an agent adopts every newer launch or line that it hears of for good, and the job's next launch has to be
above it. An epoch without a bound could be the job's last one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flashckpt.protocol.events import Answered, Begun, GetAsked, LinePut, Pushed, PutAsked, Received, Told

if TYPE_CHECKING:
    from flashckpt.protocol.events import Event
    from flashckpt.protocol.line import Line
    from flashckpt.types import Launch

_DAY_MS = 86_400_000
# An epoch is a time in milliseconds since 1970. A node's own clock may be far behind those of the others.
_MAX_AHEAD_OF_CLOCK_MS = 100 * 366 * _DAY_MS
# Or the epoch is one above the previous launch's, whose clock was far ahead: this node may have missed as many
# launches.
_MAX_AHEAD_OF_KNOWN = _DAY_MS


def heard(event: Event) -> tuple[tuple[str, int], ...]:
    """Return the epochs that the core may adopt from an event, each with the name of what it belongs to."""
    match event:
        case Begun(session):
            return named(session.launch, None)
        case LinePut(launch=launch, line=line) | Pushed(launch=launch, line=line):
            return named(launch, line)
        case Told(said) | Answered(_, said) | PutAsked(said) | GetAsked(said):
            return named(said.launch, said.line)
        case Received(launch=launch):
            return named(launch, None)
        case _:
            return ()


def named(launch: Launch | None, line: Line | None) -> tuple[tuple[str, int], ...]:
    return (
        *(() if launch is None else (("launch", launch.epoch),)),
        *(() if line is None else (("line", line.head.epoch),)),
    )


def why_refused(epochs: tuple[tuple[str, int], ...], known: int, now: float) -> str:
    """Return why an agent does not accept one of the epochs; "" = it accepts all.

    `known`: the highest epoch that the job's own directory or trainers have brought; `now`: seconds since 1970.
    """
    limit = max(int(now * 1000) + _MAX_AHEAD_OF_CLOCK_MS, known + _MAX_AHEAD_OF_KNOWN)
    for what, epoch in epochs:
        if epoch > limit:
            return (
                f"epoch of a {what}: expected at most {limit}, a century ahead of this node's clock or a little above "
                f"the highest epoch {known} that its memory directory knows, found {epoch}"
            )
    return ""
