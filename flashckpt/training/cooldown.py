"""Keeps a least time between saves. Rank 0's clock decides, and all ranks follow it without a collective.

Rank 0 looks at its clock whenever it has finished a step. Once enough time has passed since the last save, it writes a
permit, "from the next step on", into the store that torch.distributed keeps for the job. In a synchronous job no rank
can finish that step before rank 0 has begun it. So each rank finds the permit in time, whatever its own clock says.
Every save uses up one permit. Permits are numbered, so that a rank that is a step behind does not read a later one.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from flashckpt.training.stopping import job_store

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.distributed_c10d import Store

log = logging.getLogger(__name__)


class Cooldown:
    """The permits of one launch. Used by the training thread alone."""

    def __init__(
        self,
        seconds: float,
        name: str,
        rank: int,
        world: int,
        *,
        clock: Callable[[], float] = time.monotonic,
        store: Store | None = None,
    ) -> None:
        """`store`: used instead of the job's."""
        self._seconds = seconds
        self._rank = rank
        self._clock = clock
        self._store = (job_store(name) if store is None else store) if world > 1 and seconds > 0 else None
        self._saved_at: float | None = None
        self._used = 0
        self._from: int | None = 0  # the present permit holds from this step on; None: there is none yet

    def permits(self, step: int) -> bool:
        """Returns True if a save that is due only by its interval may be made at `step`. The same on all ranks."""
        if self._seconds <= 0:
            return True
        if self._from is None and self._store is not None:
            self._from = self._read()
        return self._from is not None and step >= self._from

    def note(self, step: int, saved: bool) -> None:
        """Notes that `step` was finished, and whether it was saved. Call it on every rank, after each step's
        decision."""
        if saved:
            self._saved_at, self._from = self._clock(), None
            self._used += 1
        if self._rank != 0 or self._from is not None or self._saved_at is None or self._seconds <= 0:
            return
        if self._clock() - self._saved_at >= self._seconds:
            self._from = step + 1
            self._write(self._from)

    def _key(self) -> str:
        return f"save-permit-{self._used}"

    def _write(self, first: int) -> None:
        if self._store is None:
            return
        try:
            self._store.set(self._key(), str(first))
        except Exception as error:  # the store died with its rank: the job is ending
            log.warning("save_cooldown: the other ranks could not be told that the next save may begin: %s", error)

    def _read(self) -> int | None:
        try:
            if self._store is not None and self._store.check([self._key()]):
                return int(self._store.get(self._key()))
        except Exception as error:
            log.warning(
                "save_cooldown: rank 0 could not be asked whether the next save may begin, so it waits: %s", error
            )
        return None
