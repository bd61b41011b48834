"""Limits how long a save waits for a slot while other ranks lag, and names these ranks within seconds."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from flashckpt.ranks.roll import NOTICE_SECONDS, VAIN_SAVES

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from flashckpt.ranks.roll import Roll

log = logging.getLogger(__name__)

LOOK_SECONDS = 1.0
_SHOWN = 4


class Patience:
    """The patience of one rank. After VAIN_SAVES saves that waited in vain, saves take a free slot or fail at once."""

    def __init__(self, roll: Roll | None = None, ended: Callable[[], Mapping[int, str]] = dict) -> None:
        """`ended` returns the ranks whose processes have ended, and how. Without a roll, lagging ranks are not
        named."""
        self._roll = roll
        self._ended = ended
        self._vain = 0
        self._looked = 0.0  # seconds into the wait
        self._told = False

    @property
    def is_left(self) -> bool:
        """Return True if a save may wait."""
        return self._vain < VAIN_SAVES

    def served(self) -> None:
        """Note that a save got a slot."""
        self._vain, self._looked, self._told = 0, 0.0, False

    def exhaust(self) -> None:
        """Note that a save has waited in vain."""
        self._vain, self._looked, self._told = self._vain + 1, 0.0, False

    def look(self, step: int, waited: float, reason: str | Callable[[], str]) -> bool:
        """Log once per wait which ranks are missing. Return False if waiting is useless, because a rank has ended.

        Call it often: it looks once per second, and less often as the wait gets longer.
        """
        if waited < self._looked + max(LOOK_SECONDS, 0.2 * self._looked):
            return True
        self._looked = waited
        if self._gone(step):
            self._vain = VAIN_SAVES
            return False
        if waited >= NOTICE_SECONDS and not self._told:
            self._told = True
            log.warning(
                "step %d has waited %.0f s for memory: %s%s",
                step,
                waited,
                reason if isinstance(reason, str) else reason(),
                self.who(step),
            )
        return True

    def who(self, step: int) -> str:
        """Return, for a message, which ranks have ended or lag; "" if none is known."""
        named = self._gone(step)
        behind = {} if self._roll is None or named else self._roll.behind(step)
        for rank, last in list(behind.items())[:_SHOWN]:
            since = "" if last is None else f" since step {last}"
            named.append(f"rank {rank} has not called save(){since}; call it on every rank")
        if len(behind) > _SHOWN:
            named.append(f"and {len(behind) - _SHOWN} more ranks")
        return "".join(f"; {one}" for one in named)

    def _gone(self, step: int) -> list[str]:
        """Return how those ranks ended that have not saved `step`. Ranks that have saved it are not waited for."""
        behind = {} if self._roll is None else self._roll.behind(step)
        ended = self._ended() if behind else {}
        return [how for rank, how in sorted(ended.items()) if rank in behind]
