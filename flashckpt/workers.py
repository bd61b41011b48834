"""Threads and waits that stay usable when an exception comes at any moment, as Ctrl-C or an alarm makes one.

Python runs signal handlers on the main thread, between two instructions of whatever it is doing. In threading's
Condition, Event and Future, in thread pools and within gRPC an exception there can leave a lock locked for ever. So
the main thread uses what is here: its locks are taken by `with` on a lock made in C, where nothing comes between taking
and releasing, and what can't be interrupted is done by a thread that no signal handler runs in.
"""

from __future__ import annotations

import _thread
import atexit
import contextlib
import threading
import time
import weakref
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

# A waiter looks again this often even if nobody wakes it: whoever was about to may have been interrupted.
_LOOK_SECONDS = 0.5
_EXIT_SECONDS = 30.0  # that the process's end waits for work which is to be finished


class Changed(_thread.RLock):  # type: ignore[misc]  # final by the stubs alone; a `with` has to find C
    """A lock, taken by `with`, and a wait for a condition. Every change under the lock ends with `notify_all`."""

    def __init__(self) -> None:
        super().__init__()
        self._bells: list[_thread.LockType] = []

    def wait_for(self, condition: Callable[[], bool], timeout: float | None) -> bool:
        """Whether `condition`, which is asked with the lock held, came true in time. Call it without the lock."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            bell = _thread.allocate_lock()
            bell.acquire()
            with self:
                if condition():
                    return True
                self._bells.append(bell)
            left = _LOOK_SECONDS if deadline is None else min(_LOOK_SECONDS, deadline - time.monotonic())
            if left > 0:
                bell.acquire(timeout=left)
            with self:
                if bell in self._bells:
                    self._bells.remove(bell)
                if condition():
                    return True
            if deadline is not None and time.monotonic() >= deadline:
                return False

    def notify_all(self) -> None:
        """Wakes whoever waits. With the lock held."""
        bells, self._bells = self._bells, []
        for bell in bells:
            bell.release()


class Flag:
    """Something that happens once; in the place of threading.Event."""

    def __init__(self) -> None:
        self._is_set = False
        self._changed = Changed()

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        with self._changed:
            self._changed.notify_all()

    def wait(self, timeout: float | None = None) -> bool:
        """Whether it was set in time."""
        return self._changed.wait_for(self.is_set, timeout)


class Pending(Generic[T]):
    """A call that a worker carries out."""

    def __init__(self, call: Callable[[], T]) -> None:
        self._call: Callable[[], T] | None = call
        self._is_begun: dict[None, bool] = {}  # decided by whoever is first to say so, in one step
        self._done = Flag()
        self._answer: list[T] = []
        self._error: BaseException | None = None

    @property
    def done(self) -> bool:
        return self._done.is_set()

    @property
    def cancelled(self) -> bool:
        return self._is_begun.get(None) is False

    def wait(self, timeout: float | None) -> bool:
        """Whether it has ended in time, well or not."""
        return self._done.wait(timeout)

    def result(self) -> T:
        """Once it is done and was not cancelled. Raises what the call raised."""
        if self._error is not None:
            error, self._error = self._error, None  # its traceback would keep the caller's frames alive
            raise error
        return self._answer[0]

    def cancel(self) -> bool:
        """Whether it had not begun; then it never does. May be called again."""
        if self._is_begun.setdefault(None, False):
            return False
        self._done.set()
        return True

    def carry_out(self) -> None:
        """By the worker."""
        if not self._is_begun.setdefault(None, True):
            return
        call, self._call = self._call, None
        try:
            if call is not None:
                self._answer.append(call())
        except BaseException as error:  # all of it is the caller's
            self._error = error
        finally:
            del call  # whoever waits may rely on it that what the call held is free
            self._done.set()


class Worker:
    """One thread, which carries out what it is given in turn. It starts with the first call and ends with `close`.

    A daemon: the end of the process waits for it only with `finishes`, and not for ever.
    """

    def __init__(self, name: str, *, finishes: bool = False) -> None:
        self._name = name
        self._finishes = finishes
        self._calls: SimpleQueue[Pending[Any] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._last: Pending[Any] | None = None
        self._closed = False

    def submit(self, call: Callable[[], T]) -> Pending[T]:
        """Returns at once."""
        return self.hand_over(Pending(call))

    def hand_over(self, pending: Pending[T]) -> Pending[T]:
        """As `submit`, for a caller that has to know of the call before it can begin."""
        if self._thread is None:
            self._start()
        self._last = pending
        self._calls.put(pending)
        return pending

    def wait_idle(self, timeout: float) -> bool:
        """Whether it had nothing left to do in time."""
        last = self._last
        return last is None or last.wait(timeout)

    def close(self) -> None:
        """It ends once it has done what it was given. Does not wait. May be called twice."""
        self._closed = True
        if self._thread is not None:
            self._calls.put(None)

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):  # it was never made
            self._calls.put(None)

    def _start(self) -> None:
        if self._finishes:
            _wait_at_exit(self)
        thread = threading.Thread(target=_work, args=(self._calls,), name=self._name, daemon=True)
        # Not thread.start() from here: interrupted, it can leave the lock locked by which the thread says it is there.
        _thread.start_new_thread(_begin, (thread,))
        self._thread = thread


def run_in_thread(call: Callable[[], T], name: str) -> T:
    """Carries out `call` in a thread of its own. Where the caller is interrupted, the thread goes on to its end."""
    pending = begin_in_thread(call, name)
    pending.wait(None)
    return pending.result()


def begin_in_thread(call: Callable[[], T], name: str) -> Pending[T]:
    """Has `call` carried out in a thread of its own."""
    worker = Worker(name)
    pending = worker.submit(call)
    worker.close()
    return pending


def on_main_thread() -> bool:
    """Whether signal handlers run here."""
    return threading.current_thread() is threading.main_thread()


def _work(calls: SimpleQueue[Pending[Any] | None]) -> None:
    while True:
        pending = calls.get()
        if pending is None:
            return
        pending.carry_out()
        del pending


def _begin(thread: threading.Thread) -> None:
    try:
        thread.start()
    except RuntimeError:  # no further thread can be started: this one is there
        thread.run()


_at_exit: weakref.WeakSet[Worker] = weakref.WeakSet()
_waits_at_exit: list[bool] = []


def _wait_at_exit(worker: Worker) -> None:
    if not _waits_at_exit:
        # Here and not at import: it has to be called before what the work needs, gRPC say, is shut down.
        _waits_at_exit.append(True)
        atexit.register(_finish_all)
    _at_exit.add(worker)


def _finish_all() -> None:
    deadline = time.monotonic() + _EXIT_SECONDS
    for worker in list(_at_exit):
        worker.wait_idle(max(0.0, deadline - time.monotonic()))
