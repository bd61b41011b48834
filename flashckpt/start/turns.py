"""Allows one call at a time on an object, and repairs it if an exception ended the call before."""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING

from flashckpt.errors import ConflictError

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType


class Turns:
    """Tracks which call is under way, and whether the call before it returned normally.

    A call that ends with an exception, at any instruction, leaves a mark. The next call then begins with `mend`, which
    repairs what may be half done. The mark stays until `mend` has returned.
    """

    def __init__(self, mend: Callable[[Turn], None], begin: Callable[[], None]) -> None:
        """`begin` runs at the start of every call, after `mend`. If it raises, the call ends."""
        self._mend = mend
        self._begin = begin
        self._lock = threading.Lock()  # protects what follows
        self._current: Turn | None = None
        self._broken: Turn | None = None  # the first call that has not returned normally

    def take(self, doing: str, since: int = 0) -> Turn:
        """Return a context manager. Entering it raises ConflictError if another call is under way."""
        return Turn(self, doing, since)

    @property
    def is_busy(self) -> bool:
        """Return True if a call is under way."""
        current = self._current
        return current is not None and current.is_under_way()

    def enter(self, turn: Turn) -> None:
        with self._lock:
            other = self._current
            if other is not None and other.is_under_way():
                raise ConflictError(
                    f"{turn.doing}() called while another call is under way", hint="call from one thread"
                )
            broken = self._broken or other
            # Marked as broken until it has returned, so that an exception leaves the mark without any code having to
            # run.
            self._broken = broken or turn
            self._current = turn
        if broken is not None:
            self._mend(broken)
            self._broken = turn
        self._begin()

    def leave(self, turn: Turn, *, well: bool) -> None:
        with self._lock:
            if well:
                self._broken = None
            if self._current is turn:
                self._current = None


class Turn:
    """One call on the object."""

    def __init__(self, turns: Turns, doing: str, since: int) -> None:
        self.doing = doing
        self.since = since  # for `mend`
        self.has_failed = False  # it ended with an ordinary error, which all ranks were told of
        self._turns = turns
        self._thread = threading.get_ident()
        self._frame: FrameType | None = None

    def is_under_way(self) -> bool:
        """Return True if the function that entered the turn still runs.

        Looks for its frame on the stack, because an exception may have ended it at any instruction, also in `_end`.
        """
        frame, stack = self._frame, sys._current_frames().get(self._thread)
        while frame is not None and stack is not None:
            if stack is frame:
                return True
            stack = stack.f_back
        return False

    def __enter__(self) -> None:
        self._frame = sys._getframe(1)
        try:
            self._turns.enter(self)
        except BaseException as error:
            self._end(type(error))
            raise

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._end(kind)

    def _end(self, kind: type[BaseException] | None) -> None:
        self.has_failed = kind is not None and issubclass(kind, Exception)
        self._turns.leave(self, well=kind is None)
        self._frame = None
