"""A trainer's connection to its node's agent: a lease, news from it, and a new agent when the old one dies."""

from __future__ import annotations

import logging
import os
import threading
import time
from typing import TYPE_CHECKING, TypeVar

from flashckpt.errors import AgentError, ClosedError, ConflictError, DeniedError, FlashError
from flashckpt.rpc.agent_client import AgentClient
from flashckpt.rpc.api import VERSION
from flashckpt.store.owner import Owner

if TYPE_CHECKING:
    from collections.abc import Callable

    from flashckpt.rpc.api import Lease, Progress

log = logging.getLogger(__name__)

T = TypeVar("T")

_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 2.0
# The agent is gone, was restarted, or drains: another one comes.
_PASSING = (AgentError, DeniedError, ClosedError)


class AgentLink:
    """One process's lease. Any thread may call; one thread of its own listens and brings the agent back.

    `start` makes sure that an agent runs and is given by the rank that acts for its node; the others wait for it.
    """

    def __init__(
        self,
        socket_path: str,
        job: str,
        rank: int,
        start: Callable[[float], object] | None,
        timeout: float,
    ) -> None:
        self.on_progress: Callable[[Progress], None] = lambda progress: None
        self._socket_path = socket_path
        self.job = job
        self._rank = rank
        self._start = start
        self._lock = threading.Lock()  # protects the lease: one thread renews it, the others wait
        self._client = AgentClient(socket_path)
        self._lease: Lease | None = None
        self._closed = threading.Event()
        self._pid = os.getpid()
        self._open(time.monotonic() + timeout)
        self._watcher = threading.Thread(target=self._watch, name="flashckpt-watch", daemon=True)
        self._watcher.start()

    @property
    def lease(self) -> Lease:
        if self._lease is None:
            raise AgentError(f"agent at {self._socket_path}: no lease")
        return self._lease

    def call(self, call: Callable[[AgentClient, bytes, float], T], timeout: float, doing: str) -> T:
        """Runs `call(client, ticket, seconds left)`, with another agent where the first one dies meanwhile.

        So it must not matter whether `call` was carried out once or twice.
        """
        deadline = time.monotonic() + timeout
        pause = _FIRST_PAUSE
        while True:
            if self._closed.is_set():
                raise ClosedError(f"{doing}: the connection to the agent was closed")
            if self.is_forked:
                raise ConflictError(
                    f"{doing}: the connection is of process {self._pid}, used by its fork {os.getpid()}",
                    hint="make a Checkpointer of its own in the child",
                )
            lease = self._lease
            try:
                if lease is None:
                    lease = self._renew(None, deadline)
                return call(self._client, lease.ticket, max(0.05, deadline - time.monotonic()))
            except _PASSING as error:
                if time.monotonic() + pause >= deadline:
                    raise AgentError(
                        f"{doing}: expected this node's agent to answer within {round(timeout, 1):g} s, "
                        f"found: {error.message}"
                    ) from error
                log.info("%s: %s; trying again", doing, error.message)
            if self._closed.wait(pause):
                continue
            pause = min(2 * pause, _LONGEST_PAUSE)
            try:
                self._renew(lease, deadline)
            except _PASSING as error:
                log.info("no lease yet: %s", error.message)

    @property
    def is_forked(self) -> bool:
        """Whether this is a child's copy: the connection behind it is the parent's, and must not be touched."""
        return self._pid != os.getpid()

    def close(self) -> None:
        if self._closed.is_set() or self.is_forked:
            return
        self._closed.set()
        if self._lease is not None:
            try:
                self._client.bye(self._lease.ticket)
            except FlashError as error:
                log.info("goodbye to the agent: %s", error)
        self._client.close()
        self._watcher.join(5.0)

    def _open(self, deadline: float) -> None:
        """The first lease. An agent that drains answers, but takes no trainer any more: its successor will."""
        while True:
            try:
                self._renew(None, deadline)
            except ClosedError as error:
                if time.monotonic() + _FIRST_PAUSE >= deadline:
                    raise
                log.info("no lease yet: %s", error.message)
            else:
                return
            time.sleep(_FIRST_PAUSE)

    def _renew(self, old: Lease | None, deadline: float) -> Lease:
        """A lease other than `old`; starts an agent where there is none and this rank is to."""
        if not self._lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise AgentError(f"agent at {self._socket_path}: expected it to come back in time, found it still missing")
        try:
            if self._lease is not None and self._lease is not old:
                return self._lease
            left = max(0.1, deadline - time.monotonic())
            if self._start is not None and not self._closed.is_set():
                self._start(left)
            asked_at = time.monotonic()
            try:
                self._lease = self._hello(self._client)
            except AgentError:
                if self._closed.is_set() or time.monotonic() - asked_at > _LONGEST_PAUSE:
                    raise
                # A channel that has just failed to connect does not try again for a while; a new one does at once.
                fresh = AgentClient(self._socket_path)
                try:
                    self._lease = self._hello(fresh)
                except BaseException:
                    fresh.close()
                    raise
                self._client.close()
                self._client = fresh
            return self._lease
        finally:
            self._lock.release()

    def _hello(self, client: AgentClient) -> Lease:
        return client.hello(Owner.current(), self._rank, VERSION, self.job)

    def _watch(self) -> None:
        pause = _FIRST_PAUSE
        while not self._closed.is_set():
            lease = self._lease
            lives = False  # the lease: a connection may also end of age
            try:
                if lease is not None:
                    for progress in self._client.watch(lease.ticket):
                        pause = _FIRST_PAUSE
                        self.on_progress(progress)
                    lives = True
            except FlashError as error:
                if not self._closed.is_set():
                    log.info("news from the agent stopped: %s", error.message)
            if self._closed.wait(pause):
                return
            pause = min(2 * pause, _LONGEST_PAUSE)
            if lives:
                continue  # where the agent has gone, the next look says so
            try:
                self._renew(lease, time.monotonic() + 10.0)
            except FlashError as error:
                log.warning("this node has no agent at the moment: %s", error)
