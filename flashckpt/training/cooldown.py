"""Least time between saves: rank 0's clock decides, and all ranks follow it without a collective.

Rank 0 looks at its clock whenever it has finished a step. Once enough time has passed since the last save, it writes
"from the next step on" into the store that torch.distributed keeps for the job. In a synchronous job no rank can finish
that step before rank 0 has begun it, so each of them finds it there in time, whatever its own clock says. Every save
uses one such permit up; permits are numbered, so that a rank that is a step behind does not read a later one.
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
        """`store`: another one than the job's."""
        self._seconds = seconds
        self._rank = rank
        self._clock = clock
        self._store = (job_store(name) if store is None else store) if world > 1 and seconds > 0 else None
        self._saved_at: float | None = None
        self._used = 0
        self._from: int | None = 0  # the present permit holds from this step on; the first save waits for nothing

    def permits(self, step: int) -> bool:
        """Whether a save that is only due by its interval may be taken at `step`. Alike on all ranks."""
        if self._seconds <= 0:
            return True
        if self._from is None and self._store is not None:
            self._from = self._read()
        return self._from is not None and step >= self._from

    def note(self, step: int, saved: bool) -> None:
        """`step` was finished, and saved or not. On every rank, at every step, after the decision."""
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
            log.warning("save_cooldown: the other ranks can't be told that saves may go on: %s", error)

    def _read(self) -> int | None:
        try:
            if self._store is not None and self._store.check([self._key()]):
                return int(self._store.get(self._key()))
        except Exception as error:
            log.warning("save_cooldown: rank 0 can't be asked whether saves may go on: %s", error)
        return None
