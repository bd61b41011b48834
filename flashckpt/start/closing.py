"""Give back what a Checkpointer holds: by close(), when it is dropped without it, and in a forked child."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from typing import TYPE_CHECKING

from flashckpt.collector import resume_collector
from flashckpt.workers import begin_in_thread

if TYPE_CHECKING:
    from collections.abc import Iterator

    from flashckpt.ranks.group import PrivateGroup
    from flashckpt.save.overlap import Overlap
    from flashckpt.save.own_slots import Slots
    from flashckpt.save.prewarm import Prewarm
    from flashckpt.save.write import ShardWriter
    from flashckpt.store.slots import SlotStore

log = logging.getLogger(__name__)

_DROPPED_SECONDS = 30.0  # for closing, in the background, a Checkpointer that was dropped without close()
# Parts that a forked child has inherited. Connections and process groups must not be destroyed there: that would wait
# for ever for their threads, which exist in the parent only.
_inherited: list[Parts] = []


@contextlib.contextmanager
def unmasked(kind: type[BaseException] | None) -> Iterator[None]:
    """Log what closing raises at the end of a `with` block that raised (`kind`): the block's exception must be seen."""
    try:
        yield
    except Exception as error:
        if kind is None:
            raise
        log.warning("close() failed after %s: %s", kind.__name__, error, exc_info=True)


class Parts:
    """All that has to be closed. Does not refer to the Checkpointer, so that the Checkpointer can become garbage."""

    def __init__(
        self,
        job: str,
        group: PrivateGroup,
        slots: Slots,
        writer: ShardWriter,
        store: SlotStore,
        overlap: Overlap,
        prewarm: Prewarm,
    ) -> None:
        self._job = job
        self._group, self._slots, self._writer, self._store = group, slots, writer, store
        self._overlap, self._prewarm = overlap, prewarm
        self._pid = os.getpid()

    @property
    def is_forked(self) -> bool:
        """Whether this process is a fork of the one that opened the parts, which still uses them."""
        return self._pid != os.getpid()

    def close(self, timeout: float) -> None:
        """Close all parts, each of which may be closed twice. Each part that waits gets a share of the time.

        In a forked child nothing is closed: all of it is the parent's.
        """
        if self.is_forked:
            _inherited.append(self)
            return
        began = time.monotonic()

        def left(share: float) -> float:
            return max(0.0, began + share * timeout - time.monotonic())

        with contextlib.suppress(Exception):  # the save's handle has the error
            self._overlap.settle(left(0.6))
        self._overlap.close()
        self._prewarm.wait(left(0.8))
        self._slots.close(left(1.0))
        if self._overlap.handle is not None or self._prewarm.is_running:
            # SAFETY: a copy that still writes into a slot needs its mapping.
            log.warning("a copy did not end within %.1f s of close(): its slot and mapping stay until it ends", timeout)
        else:
            resume_collector()
            self._writer.close()
            self._store.close()
        self._group.close()

    def drop(self) -> None:
        """Close in the background. Called when the Checkpointer is garbage, in any thread, between two instructions.

        IMPORTANT: no lock may be taken here, and nothing waited for.
        """
        if self.is_forked:
            _inherited.append(self)
        else:
            begin_in_thread(self._close_dropped, "flashckpt-dropped")

    def _close_dropped(self) -> None:
        log.warning(
            "job %r: a Checkpointer was dropped without close(): its lease, threads and descriptors are given back in "
            "the "
            "background; use it in a `with` block",
            self._job,
        )
        self.close(_DROPPED_SECONDS)
