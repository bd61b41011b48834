"""Maps shards to send them: only the kernel reads through these mappings.

To map a GiB of small pages and to unmap it again takes a third of the time it takes to send it. A slot's file stays the
same from generation to generation, and so do its window here and the pages in it.
"""

from __future__ import annotations

import os
import threading

from flashckpt.store.mapping import Mapping

_STEP_BYTES = 1 << 20


class Window:
    """The mapping of one file. Threads may share it."""

    __slots__ = ("_faulted", "_map")

    def __init__(self, mapping: Mapping, *, is_faulted: bool = False) -> None:
        self._map = mapping
        self._faulted = bytearray(b"\1" if is_faulted else b"\0") * -(-mapping.size_bytes // _STEP_BYTES)

    def view_of(self, start: int, length: int) -> memoryview | None:
        """Return a view of these bytes, to be sent unread; the caller releases it. None if the file has been closed or
        shortened.

        SAFETY: only the kernel may touch it. If the file was shortened, the kernel reports an error, any other reader
        gets a signal.
        """
        try:
            with self._map.view() as whole:
                view = whole[start : start + length]
        except ValueError:  # closed, because its slot was removed
            return None
        if start < 0 or len(view) != length:
            view.release()
            return None
        if length:
            self._fault(start // _STEP_BYTES, -(-(start + length) // _STEP_BYTES))
        return view

    def _fault(self, first: int, end: int) -> None:
        # All at once: faulted one by one by the kernel's copy, pages cost a third of the time. Faulting them once more
        # would still cost a tenth.
        while (at := self._faulted.find(0, first, end)) >= 0:
            stop = self._faulted.find(1, at, end)
            stop = end if stop < 0 else stop
            self._map.populate(at * _STEP_BYTES, (stop - at) * _STEP_BYTES)
            self._faulted[at:stop] = b"\1" * (stop - at)

    def fits(self, found: os.stat_result) -> bool:
        return self._map.fits(found, found.st_size)

    def is_unlinked(self) -> bool:
        return self._map.is_unlinked()

    def close(self) -> None:
        """Close the window. Bytes that are being sent are sent to the end. May be called again."""
        self._map.forget()


class Windows:
    """The windows of one process, by slot."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[int, Window] = {}

    def of(self, slot_id: int, fd: int, found: os.stat_result) -> Window | None:
        """Return the window of a file; it stays open. None: the file can't be mapped."""
        with self._lock:
            window = self._open.get(slot_id)
            if window is not None and window.fits(found):
                return window
            self._close(slot_id)
            window = open_window(fd)
            # A window whose file was removed since it was opened is not kept: nobody would close it.
            if window is not None and not window.is_unlinked():
                self._open[slot_id] = window
            return window

    def forget_unlinked(self) -> None:
        """Close the windows of removed files, whose memory they would keep."""
        if not self._open:  # as in all trainers, which may be forked or interrupted while they hold a lock
            return
        with self._lock:
            for slot_id in [slot_id for slot_id, window in self._open.items() if window.is_unlinked()]:
                self._close(slot_id)

    def close(self) -> None:
        if not self._open:
            return
        with self._lock:
            for slot_id in list(self._open):
                self._close(slot_id)

    def drop(self, slot_id: int) -> None:
        with self._lock:
            self._close(slot_id)

    def _close(self, slot_id: int) -> None:
        window = self._open.pop(slot_id, None)
        if window is not None:
            window.close()


def open_window(fd: int) -> Window | None:
    """Map a file at its present size. The caller keeps the descriptor. None: it can't be mapped."""
    own = -1
    try:
        own = os.dup(fd)
        return Window(Mapping(own, os.fstat(own).st_size, huge_pages=False, writable=False))
    except (OSError, ValueError):  # no descriptor left, or an empty file
        if own >= 0:
            os.close(own)
        return None
