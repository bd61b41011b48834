"""Whom to ask next for a part of a shard. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

# A holder whose connection broke is asked once more, when all others were: its agent may be back within a second.
_TRIES_BROKEN = 2
_TRIES_BUSY = 6  # that says itself that another time may help
_FIRST_PAUSE, _LONGEST_PAUSE = 0.25, 4.0


class Sources:
    """Holders of one part, in the order to ask them. One that fails goes to the end, or for good."""

    def __init__(self, node_ids: Iterable[str]) -> None:
        self._left = list(node_ids)
        self._failures: dict[str, int] = {}
        self._reasons: dict[str, str] = {}

    @property
    def reasons(self) -> tuple[tuple[str, str], ...]:
        """What went wrong last, holder by holder."""
        return tuple(self._reasons.items())

    def next(self) -> tuple[str | None, float]:
        """The holder to ask, after so many seconds. None: there is none left."""
        if not self._left:
            return None, 0.0
        failures = self._failures.get(self._left[0], 0)
        pause = min(_FIRST_PAUSE * 2 ** (failures - 1), _LONGEST_PAUSE) if failures else 0.0
        return self._left[0], pause

    def failed(self, node_id: str, reason: str, *, passing: bool) -> None:
        """`passing`: in transport; else what it gave was wrong."""
        self._drop(node_id, reason, _TRIES_BROKEN if passing else 1)

    def refused(self, node_id: str, reason: str, *, retry: bool) -> None:
        self._drop(node_id, reason, _TRIES_BUSY if retry else 1)

    def _drop(self, node_id: str, reason: str, tries: int) -> None:
        self._reasons[node_id] = reason
        self._failures[node_id] = self._failures.get(node_id, 0) + 1
        self._left.remove(node_id)
        if self._failures[node_id] < tries:
            self._left.append(node_id)
