"""Opens the lanes of one transfer."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from typing import TYPE_CHECKING

from flashckpt.errors import FlashError, PeerError
from flashckpt.move.transports.tcp.layout import MAGIC, WELCOME, read_exactly, set_timeouts, write

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable

    from flashckpt.move.transports.tcp.layout import Lane
    from flashckpt.move.transports.tcp.policy import Offer

_log = logging.getLogger(__name__)


class Connections:
    """Open lanes. Once `start` was called, a thread works on each."""

    def __init__(self, lanes: list[Lane]) -> None:
        self._lanes = lanes
        self._state = threading.Condition()  # protects what follows
        self._running = 0
        self._error: Exception | None = None

    @staticmethod
    def open(
        host: str, offer: Offer, *, tls: ssl.SSLContext | None, server_name: str, timeout: float, stall_timeout: float
    ) -> Connections:
        """Open as many lanes as possible. Raise PeerError if not even one can be opened."""
        lanes: list[Lane] = []
        problem: Exception | None = None
        for ticket in offer.tickets:
            try:
                lanes.append(
                    _open(host, offer.port, ticket, tls if offer.tls else None, server_name, timeout, stall_timeout)
                )
            except (OSError, FlashError) as error:
                problem = error
                break  # the next one would take as long
        if not lanes:
            raise PeerError(f"no lane to port {offer.port} of {host}: {problem}") from problem
        if problem is not None:
            _log.info("opened %d of %d lanes to %s: %s", len(lanes), len(offer.tickets), host, problem)
        return Connections(lanes)

    def start(self, work: Callable[[Lane], None]) -> None:
        self._running = len(self._lanes)
        for lane in self._lanes:
            threading.Thread(target=self._run, args=(lane, work), name="flashckpt-lane", daemon=True).start()

    def wait(self, timeout: float) -> bool:
        """Wait until all lanes have ended or one has failed. Return False on timeout."""
        with self._state:
            return self._state.wait_for(lambda: not self._running or self._error is not None, timeout)

    @property
    def error(self) -> Exception | None:
        """The error of the first lane that failed."""
        return self._error

    def close(self, timeout: float = 10.0) -> None:
        """End all lanes; once it has returned, nothing is sent or taken. May be called twice."""
        for lane in self._lanes:
            with contextlib.suppress(OSError):
                socket.socket.shutdown(lane, socket.SHUT_RDWR)
        with self._state:
            if not self._state.wait_for(lambda: not self._running, timeout):
                _log.warning("%d lanes did not end within %g s", self._running, timeout)
        for lane in self._lanes:
            with contextlib.suppress(OSError):
                lane.close()

    def _run(self, lane: Lane, work: Callable[[Lane], None]) -> None:
        error: Exception | None = None
        try:
            work(lane)
        except FlashError as found:
            error = found
        except Exception as found:
            _log.exception("a data connection ended with an unexpected error")
            error = found
        finally:
            with self._state:
                self._running -= 1
                self._error = self._error or error
                self._state.notify_all()


def _open(
    host: str,
    port: int,
    ticket: bytes,
    tls: ssl.SSLContext | None,
    server_name: str,
    timeout: float,
    stall_timeout: float,
) -> Lane:
    connection = socket.create_connection((host, port), timeout)
    lane: Lane = connection
    try:
        connection.settimeout(None)
        set_timeouts(connection, timeout)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if tls is not None:
            lane = tls.wrap_socket(connection, server_hostname=server_name)
        write(lane, MAGIC + ticket)
        if read_exactly(lane, len(WELCOME)) != WELCOME:
            raise PeerError("lane: expected a welcome, found something else")
        set_timeouts(lane, stall_timeout)
    except BaseException:
        lane.close()
        raise
    return lane
