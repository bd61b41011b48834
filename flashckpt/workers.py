"""Threads and waits that stay usable if a signal handler (Ctrl-C, an alarm) raises an exception at any moment.

Python runs signal handlers on the main thread, between any two instructions. Inside threading's Condition, Event and
Future, thread pools and gRPC such an exception can leave a lock locked for ever. The main thread therefore uses this
module instead. Its locks are written in C and taken by `with`, which always releases them. Work that must not be
interrupted runs in another thread, where no signal handler runs.
"""

from __future__ import annotations

import _thread
import atexit
import contextlib
import os
import threading
import time
import weakref
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

# A waiter checks its condition this often without being woken: the thread that should wake it may be interrupted.
_LOOK_SECONDS = 0.5
_EXIT_SECONDS = 30.0  # the end of the process waits at most this long for workers with `finishes`


class Changed(_thread.RLock):  # type: ignore[misc]  # final in the stubs only; `with` needs the C methods
    """A lock, taken by `with`, and a wait for a condition. Call `notify_all` after every change under the lock."""

    def __init__(self) -> None:
        super().__init__()
        self._bells: list[_thread.LockType] = []

    def wait_for(self, condition: Callable[[], bool], timeout: float | None) -> bool:
        """Wait for `condition`, which is called with the lock held. False after `timeout`. Call without the lock."""
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
        """Wake all waiters. Call with the lock held."""
        bells, self._bells = self._bells, []
        for bell in bells:
            bell.release()


class Flag:
    """A flag that is set once. Replaces threading.Event."""

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
        """Wait until it is set. False after `timeout`."""
        return self._changed.wait_for(self.is_set, timeout)


class Pending(Generic[T]):
    """A call that a worker runs, and its result."""

    def __init__(self, call: Callable[[], T]) -> None:
        self._call: Callable[[], T] | None = call
        self._is_begun: dict[None, bool] = {}  # set once, by `carry_out` or `cancel`; setdefault is atomic
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
        """Wait until the call has returned, raised or been cancelled. False after `timeout`."""
        return self._done.wait(timeout)

    def result(self) -> T:
        """Return what the call returned, or raise what it raised. Only once it is done and was not cancelled."""
        if self._error is not None:
            error, self._error = self._error, None  # its traceback would keep the caller's frames alive
            raise error
        return self._answer[0]

    def cancel(self) -> bool:
        """Prevent the call from beginning. False: it has begun already. May be called again."""
        if self._is_begun.setdefault(None, False):
            return False
        self._done.set()
        return True

    def carry_out(self) -> None:
        """Run the call, unless it was cancelled. Called by the worker only."""
        if not self._is_begun.setdefault(None, True):
            return
        call, self._call = self._call, None
        try:
            if call is not None:
                self._answer.append(call())
        except BaseException as error:  # `result` raises it in the caller
            self._error = error
        finally:
            del call  # before `done`: a waiter may rely on the call's references being dropped
            self._done.set()


class Worker:
    """One thread that runs calls in order. It starts with the first call and ends with `close`.

    It is a daemon thread. With `finishes`, the end of the process waits for it, but at most for 30 s.
    """

    def __init__(self, name: str, *, finishes: bool = False) -> None:
        self._name = name
        self._finishes = finishes
        self._calls: SimpleQueue[Pending[Any] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._last: Pending[Any] | None = None
        self._closed = False

    def submit(self, call: Callable[[], T]) -> Pending[T]:
        """Queue `call` and return at once."""
        return self.hand_over(Pending(call))

    def hand_over(self, pending: Pending[T]) -> Pending[T]:
        """Queue a call that the caller has made before, so that it can note the call before it begins."""
        if self._thread is None:
            self._start()
        self._last = pending
        self._calls.put(pending)
        return pending

    def wait_idle(self, timeout: float) -> bool:
        """Wait until all queued calls have ended. False after `timeout`."""
        last = self._last
        return last is None or last.wait(timeout)

    def close(self) -> None:
        """Make the thread end after the queued calls. Does not wait. May be called twice."""
        self._closed = True
        if self._thread is not None:
            self._calls.put(None)

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):  # __init__ was interrupted
            self._calls.put(None)

    def _start(self) -> None:
        if self._finishes:
            _wait_at_exit(self)
        thread = threading.Thread(target=_work, args=(self._calls,), name=self._name, daemon=True)
        # Not thread.start() here: if interrupted, it can leave locked the lock that reports the thread's start.
        _thread.start_new_thread(_begin, (thread,))
        self._thread = thread


def run_in_thread(call: Callable[[], T], name: str) -> T:
    """Run `call` in a thread of its own and wait for it. If the caller is interrupted, the thread goes on."""
    pending = begin_in_thread(call, name)
    pending.wait(None)
    return pending.result()


def begin_in_thread(call: Callable[[], T], name: str) -> Pending[T]:
    """Start `call` in a thread of its own and return at once."""
    worker = Worker(name)
    pending = worker.submit(call)
    worker.close()
    return pending


def on_main_thread() -> bool:
    """Return True if the caller is on the main thread, where signal handlers run."""
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
    except RuntimeError:  # no more threads can be started: use the one that runs this
        thread.run()


_at_exit: weakref.WeakSet[Worker] = weakref.WeakSet()
_waits_at_exit: list[int] = []  # ids of the processes that have registered the handler


def _wait_at_exit(worker: Worker) -> None:
    if os.getpid() not in _waits_at_exit:
        # Not at import: handlers registered later run earlier, and this one must run before gRPC is shut down.
        _waits_at_exit.append(os.getpid())
        _at_exit.clear()  # in a forked child: the parent's
        atexit.register(_finish_all)
    _at_exit.add(worker)


def _finish_all() -> None:
    if os.getpid() not in _waits_at_exit:
        return  # a forked child has none of the threads
    deadline = time.monotonic() + _EXIT_SECONDS
    for worker in list(_at_exit):
        worker.wait_idle(max(0.0, deadline - time.monotonic()))
