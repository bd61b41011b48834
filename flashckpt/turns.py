"""One call at a time on an object that an exception may leave at any moment."""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING

from flashckpt.errors import ConflictError

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType


class Turns:
    """Knows which call is under way, and whether the one before ended as it should.

    A call that ends with an exception, at whatever instruction, leaves a mark, and the next one begins with `mend`,
    which puts in order what may be half done. Until `mend` has returned the mark stays.
    """

    def __init__(self, mend: Callable[[Turn], None], begin: Callable[[], None]) -> None:
        """`begin` comes first in every call; what it raises ends the call."""
        self._mend = mend
        self._begin = begin
        self._lock = threading.Lock()  # protects what follows
        self._current: Turn | None = None
        self._broken: Turn | None = None  # the first that did not end as it should

    def take(self, doing: str, since: int = 0) -> Turn:
        """For a `with`. ConflictError there, where another call is under way."""
        return Turn(self, doing, since)

    @property
    def is_busy(self) -> bool:
        """A call is under way."""
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
            # Broken until it has ended well: nothing needs to be done for that when an exception comes.
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
    """One call."""

    def __init__(self, turns: Turns, doing: str, since: int) -> None:
        self.doing = doing
        self.since = since  # for whoever mends
        self.has_failed = False  # it ended with an ordinary error, which all ranks heard of
        self._turns = turns
        self._thread = threading.get_ident()
        self._frame: FrameType | None = None

    def is_under_way(self) -> bool:
        """Whether the function that took it still runs. An exception may have ended it at any instruction, also while
        it was leaving; so the stack is asked."""
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
