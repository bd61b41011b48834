"""Connects a trainer to its node's agent: holds a lease, receives news, and starts a new agent when the old one
dies."""

from __future__ import annotations

import _thread
import logging
import os
import threading
import time
from typing import TYPE_CHECKING, TypeVar

from flashckpt.errors import AgentError, ClosedError, ConflictError, DeniedError, FlashError
from flashckpt.rpc.agent_client import AgentClient
from flashckpt.rpc.api import VERSION
from flashckpt.store.owner import Owner
from flashckpt.workers import Flag, Pending, Worker, on_main_thread

if TYPE_CHECKING:
    from collections.abc import Callable

    from flashckpt.rpc.api import Lease, WatchNews
    from flashckpt.types import Launch

log = logging.getLogger(__name__)

T = TypeVar("T")

_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 2.0
_MOST_UNANSWERED = 3  # number of agents in a row that end before they answer the first call
_RENEW_SECONDS = 10.0  # for one attempt of the watching thread to get a lease
_MAX_LOG_TAIL_BYTES = 16 << 10
_GRACE = 10.0  # seconds that a call may take to end beyond its deadline
# The agent is gone, was restarted, or drains: its successor will answer.
_PASSING = (AgentError, DeniedError, ClosedError)


class _UnansweredError(AgentError):
    """Raised when an agent can't be reached that was there a moment ago: it has ended meanwhile."""


class AgentLink:
    """One process's lease. Any thread may call; a thread of its own listens for news and brings the agent back.

    IMPORTANT: the main thread makes no call of gRPC itself, since Ctrl-C would leave a channel's lock locked. A worker
    makes it. If the main thread is interrupted meanwhile, the channel is closed, which ends the call, and the next call
    opens another.

    `start` makes sure that an agent runs. Only the rank that acts for its node is given it; the others wait for it.
    `open` has to be called before any other call.
    """

    def __init__(
        self, socket_path: str, job: str, rank: int, start: Callable[[float], object] | None, acts_for: str = ""
    ) -> None:
        self.on_progress: Callable[[WatchNews], None] = lambda progress: None
        self.claimed: tuple[Launch, float] | None = None  # the launch that this process has begun, and when
        self._socket_path = socket_path
        self.job = job
        self._rank = rank
        self._start = start
        self._acts_for = acts_for  # the trainer's process, if this is not the trainer itself
        self._worker = Worker("flashckpt-agent")  # makes the calls of the main thread, and the last one
        self._lock = threading.Lock()  # protects the lease: one thread renews it, the others wait
        self._swap = threading.Lock()  # protects _client
        self._client: AgentClient | None = None  # for all calls except the watch
        self._watching: AgentClient | None = None
        self._lease: Lease | None = None
        self._closed = Flag()
        self._farewell: Pending[None] | None = None
        self._pid = os.getpid()
        self._watcher: threading.Thread | None = None

    def open(self, timeout: float) -> None:
        """Connect. Once this was called, even if it raised, `close` has to be called."""
        deadline = time.monotonic() + timeout
        self._aside(lambda _: self._open(deadline), timeout, "connecting to the agent")

    @property
    def lease(self) -> Lease:
        if self._lease is None:
            raise AgentError(f"agent at {self._socket_path}: no lease")
        return self._lease

    def call(self, call: Callable[[AgentClient, bytes, float], T], timeout: float, doing: str) -> T:
        """Run `call(client, ticket, seconds left)`, again with another agent if the first one dies meanwhile.

        So it must not matter whether `call` was carried out once or twice.
        """
        return self._aside(lambda given_up: self._call(call, timeout, doing, given_up), timeout, doing)

    def release(self, end: Callable[[], None]) -> None:
        """Call `end`, which ends a stream or the like over the connection."""
        if not self.is_forked:
            self._aside(lambda _: end(), _GRACE, "ending a call of the agent")

    def _aside(self, call: Callable[[Flag], T], timeout: float, doing: str) -> T:
        """Run `call` in a thread where no signal handler runs. Set its flag if the caller stops waiting."""
        given_up = Flag()
        if not on_main_thread() or self._closed.is_set():
            return call(given_up)
        self._refuse_fork(doing)
        pending = Pending(lambda: call(given_up))
        try:
            self._worker.hand_over(pending)
            ended = pending.wait(timeout + _GRACE)
        except BaseException:
            given_up.set()
            if not pending.cancel() and not pending.done:
                _thread.start_new_thread(self._throw_away, (self._client,))
            raise
        if not ended:
            given_up.set()
            _thread.start_new_thread(self._throw_away, (self._client,))
            raise AgentError(f"{doing}: expected this node's agent to answer within {timeout:g} s, found no answer")
        return pending.result()

    def _throw_away(self, client: AgentClient | None) -> None:
        """Close a client, in a thread of its own. Other threads repeat their calls with another client."""
        if client is not None:
            self._replace(client, None)

    def _replace(self, old: AgentClient, new: AgentClient | None) -> None:
        with self._swap:
            if self._client is old:
                self._client = new
        old.close()

    def _call(self, call: Callable[[AgentClient, bytes, float], T], timeout: float, doing: str, given_up: Flag) -> T:
        deadline = time.monotonic() + timeout
        pause = _FIRST_PAUSE
        while True:
            if self._closed.is_set() or given_up.is_set():
                raise ClosedError(f"{doing}: the connection to the agent was closed")
            self._refuse_fork(doing)
            lease, client = self._lease, self._client
            try:
                if lease is None or client is None:
                    lease, client = self._renew(None, deadline)
                return call(client, lease.ticket, max(0.05, deadline - time.monotonic()))
            except _PASSING as error:
                if self._closed.is_set() or given_up.is_set():
                    raise
                if time.monotonic() + pause >= deadline:
                    raise AgentError(
                        f"{doing}: expected this node's agent to answer within {round(timeout, 1):g} s, "
                        f"found: {error.message}{_last_words(self._socket_path)}"
                    ) from error
                log.info("%s: %s; trying again", doing, error.message)
            if client is not None and self._client is not client:
                continue  # the client was thrown away with an interrupted call of another thread
            if self._closed.wait(pause):
                continue
            pause = min(2 * pause, _LONGEST_PAUSE)
            try:
                self._renew(lease, deadline)
            except _PASSING as error:
                log.info("no lease yet: %s", error.message)

    def _refuse_fork(self, doing: str) -> None:
        if self.is_forked:
            raise ConflictError(
                f"{doing}: the connection belongs to process {self._pid}, but its fork {os.getpid()} used it",
                hint="make a Checkpointer of its own in the child",
            )

    @property
    def is_forked(self) -> bool:
        """True in a forked child. The connection belongs to the parent and must not be used."""
        return self._pid != os.getpid()

    def close(self, timeout: float = _GRACE) -> bool:
        """End the lease and the connection. Return False if that took too long; they then end by themselves. May be
        called again."""
        if self.is_forked:
            return True
        self._closed.set()
        if self._farewell is None:
            farewell = Pending(self._say_goodbye)
            self._worker.hand_over(farewell)
            # If close() is interrupted here, the next one sends a second goodbye, which does no harm.
            self._farewell = farewell
            self._worker.close()
        ended = self._farewell.wait(timeout)
        if not ended:
            text = "the agent did not answer close() within %.1f s; it ends the lease when this process ends"
            log.warning(text, timeout)
        return ended

    def _say_goodbye(self) -> None:
        lease, client = self._lease, self._client
        if lease is not None:
            self._lease = None
            try:
                if client is None:
                    client = AgentClient(self._socket_path)
                client.bye(lease.ticket)
            except (FlashError, OSError) as error:
                log.info("the agent did not take the end of the lease: %s; it notices when this process ends", error)
        for one in (client, self._client, self._watching):
            if one is not None:
                one.close()
        if self._watcher is not None:
            self._watcher.join(5.0)

    def _open(self, deadline: float) -> None:
        """Get the first lease. An agent that drains accepts no trainer and soon ends: its successor will answer.

        The rank that starts the agents gives up after a few that end before they answer; the others wait for it.
        """
        began, unanswered, pause = time.monotonic(), 0, _FIRST_PAUSE
        while True:
            try:
                self._renew(None, deadline)
            except (ClosedError, _UnansweredError) as error:
                unanswered += isinstance(error, _UnansweredError)
                if self._closed.is_set() or (self._start is not None and unanswered > _MOST_UNANSWERED):
                    raise
                if time.monotonic() + pause >= deadline:
                    raise AgentError(
                        f"agent at {self._socket_path}: expected one that takes trainers within "
                        f"{time.monotonic() - began:.0f} s, found: {error.message}",
                        hint="`flashckpt agent status` shows it, and where its log is; wait longer (start_timeout), "
                        "or end one that drains with `flashckpt agent stop --kill`: what is sealed stays",
                    ) from error
                log.info("no lease yet: %s", error.message)
            else:
                break
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE / 4)
        self._watcher = threading.Thread(target=self._watch, name="flashckpt-watch", daemon=True)
        self._watcher.start()

    def _renew(self, old: Lease | None, deadline: float) -> tuple[Lease, AgentClient]:
        """Return a lease other than `old`; start an agent if none runs and this rank has to."""
        if not self._lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise AgentError(f"agent at {self._socket_path}: expected it to come back in time, found it still missing")
        try:
            client = self._connected()
            if self._lease is not None and self._lease is not old:
                return self._lease, client
            left = max(0.1, deadline - time.monotonic())
            if self._start is not None and not self._closed.is_set():
                try:
                    self._start(left)
                except OSError as error:  # out of descriptors or processes: passes, as when an agent is away
                    raise AgentError(
                        f"agent at {self._socket_path}: expected to look for it and start it, found: {error}"
                    ) from error
            asked_at = time.monotonic()
            try:
                self._lease = self._hello(client)
            except AgentError:
                if self._closed.is_set() or time.monotonic() - asked_at > _LONGEST_PAUSE:
                    raise
                # A channel that has just failed to connect waits before it tries again; a new one tries at once.
                fresh = AgentClient(self._socket_path)
                try:
                    self._lease = self._hello(fresh)
                except AgentError as error:
                    fresh.close()
                    raise _UnansweredError(error.message, hint=error.hint, **error.fields) from error
                except BaseException:
                    fresh.close()
                    raise
                self._replace(client, fresh)
                client = fresh
            return self._lease, client
        finally:
            self._lock.release()

    def _connected(self) -> AgentClient:
        with self._swap:
            if self._client is None:
                self._client = AgentClient(self._socket_path)
            return self._client

    def _hello(self, client: AgentClient) -> Lease:
        # Tell an agent that was restarted which launch its trainers are in: another launch may be about to take over.
        launch, claimed_at = self.claimed or (None, 0.0)
        return client.hello(Owner.current(), self._rank, VERSION, self.job, launch, claimed_at, self._acts_for)

    def _watch(self) -> None:
        """Listen for news and bring the agent back, until close(). Any error is followed by another try."""
        pause = _FIRST_PAUSE
        while not self._closed.is_set():
            lease = self._lease
            lives = False  # the lease does: a connection may also end because it is old
            try:
                if lease is not None:
                    # A connection of its own, because the other is thrown away when a call is interrupted.
                    with AgentClient(self._socket_path) as self._watching:
                        if self._closed.is_set():
                            return
                        for progress in self._watching.watch(lease.ticket):
                            pause = _FIRST_PAUSE
                            self.on_progress(progress)
                    lives = True
            except Exception as error:
                if not self._closed.is_set():
                    # An unknown error tells nothing about the lease, which may well live.
                    _report(error, logging.INFO, "news from the agent stopped")
            if self._closed.wait(pause):
                return
            pause = min(2 * pause, _LONGEST_PAUSE)
            if lives:
                continue  # if the agent has gone, the next look shows it
            try:
                self._renew(lease, time.monotonic() + _RENEW_SECONDS)
            except Exception as error:
                _report(error, logging.WARNING, "this node has no agent at the moment")


def _last_words(socket_path: str) -> str:
    """Return why the last agent ended, from the end of its log; "" if the log does not say."""
    try:
        with open(os.path.join(os.path.dirname(socket_path), "agent.log"), "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _MAX_LOG_TAIL_BYTES))
            lines = file.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return ""
    for line in reversed(lines):
        if " CRITICAL " in line or " does not run: " in line or " stopping: " in line:
            return f"; its log says: {line.strip()}"
        if " runs: pid " in line:
            break
    return ""


def _report(error: Exception, level: int, what: str) -> None:
    """Log an error that the caller survives: an expected one as one line, any other with its traceback."""
    if isinstance(error, FlashError):
        log.log(level, "%s: %s", what, error)
    else:
        log.warning("%s; trying again", what, exc_info=error)
