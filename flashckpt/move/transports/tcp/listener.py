"""Listens for lanes, and accepts none without a ticket.

A ticket is 32 random bytes that a node is given in the answer to a call which proved its identity. It is good for one
connection, and only during that call. A connection that shows none within 5 s in all is closed, and only so many may
wait at a time, per address and in all (strangers.py): nothing else is kept for strangers.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import hashlib
import logging
import secrets
import select
import socket
import threading
import time
from typing import TYPE_CHECKING

from flashckpt.errors import ConfigError, DeniedError, FlashError
from flashckpt.move.transports.tcp.layout import MAGIC, TICKET_BYTES, WELCOME, read_exactly, set_timeouts, write
from flashckpt.move.transports.tcp.strangers import MAX_STRANGERS, Stranger, network_of, whom_to_refuse
from flashckpt.rpc.credentials import check_peer

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable

    from flashckpt.move.transports.tcp.layout import Lane

_log = logging.getLogger(__name__)

_TICKET_SECONDS = 5.0  # from the connection to the complete ticket
_LOOK_SECONDS = 0.5  # between two looks for late strangers
_JOIN_SECONDS = 10.0
_PAUSE_SECONDS = 0.1  # before the next try, if the kernel has no descriptor for a connection


class Expected:
    """The lanes of one transfer, from the first ticket to the last connection."""

    def __init__(self, listener: Listener, peer: str, work: Callable[[Lane], None], count: int) -> None:
        self.peer = peer
        self.tickets = tuple(secrets.token_bytes(TICKET_BYTES) for _ in range(count))
        self._listener = listener
        self._work = work
        self._state = threading.Condition()  # protects what follows
        self._lanes: set[Lane] = set()
        self._closed = False
        self.entered = 0
        self.ended = 0
        self.error: Exception | None = None  # of the first lane that failed

    def wait(self, timeout: float) -> bool:
        """Wait until all lanes that were opened have ended, and at least one was. Return False on timeout."""
        with self._state:
            return self._state.wait_for(lambda: 0 < self.entered == self.ended, timeout)

    def close(self) -> None:
        """Accept no more lanes, and wait until none is running. May be called twice."""
        self._listener.forget(self)
        with self._state:
            self._closed = True
            for lane in self._lanes:
                with contextlib.suppress(OSError):
                    socket.socket.shutdown(lane, socket.SHUT_RDWR)
            if not self._state.wait_for(lambda: not self._lanes, _JOIN_SECONDS):
                _log.warning("%d lanes of %s did not end within %g s", len(self._lanes), self.peer, _JOIN_SECONDS)

    def serve(self, lane: Lane) -> None:
        """Work on the lane in the calling thread, which is the lane's own."""
        with self._state:
            if self._closed:
                return
            self._lanes.add(lane)
            self.entered += 1
        error: Exception | None = None
        try:
            write(lane, WELCOME)
            self._work(lane)
        except FlashError as found:
            error = found
        except Exception as found:
            _log.exception("a data connection of node %s ended with an unexpected error", self.peer)
            error = found
        finally:
            with contextlib.suppress(OSError):
                lane.close()
            with self._state:
                self._lanes.discard(lane)
                self.ended += 1
                self.error = self.error or error
                self._state.notify_all()


class Listener:
    """Accepts data connections and checks their tickets. Any thread may call it."""

    def __init__(self, job: str, *, stall_timeout: float, tls: ssl.SSLContext | None = None) -> None:
        """`stall_timeout`: seconds that the other end of a lane may be silent."""
        self.port = 0
        self._job = job
        self._stall_timeout = stall_timeout
        self._tls = tls
        self._listener: socket.socket | None = None
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()  # protects what follows
        self._tickets: dict[bytes, Expected] = {}  # by hash: the time of a lookup tells nothing about a ticket
        self._strangers: dict[socket.socket, Stranger] = {}  # in the order of their arrival
        self._networks: dict[str, str] = {}  # of members: the network that each last called from
        self._closed = False

    @property
    def has_tls(self) -> bool:
        return self._tls is not None

    def start(self, host: str, port: int) -> int:
        """Listen. Return the port, which the kernel chooses if 0 was asked for."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if host == "::":
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            listener.bind((host, port))
            listener.listen(MAX_STRANGERS)
            listener.setblocking(False)
        except OSError as error:
            listener.close()
            raise ConfigError(
                f"expected to listen for lanes on port {port} of {host}, found: {error.strerror}",
                hint='choose another FLASHCKPT_PORT (lanes use the one after it), 0 for any, or transport="grpc"',
            ) from error
        self._listener = listener
        self.port = listener.getsockname()[1]
        self._thread = threading.Thread(target=self._accept, name="flashckpt-listener", daemon=True)
        self._thread.start()
        return self.port

    def expect(self, peer: str, count: int, work: Callable[[Lane], None]) -> Expected:
        """Issue tickets. `work` runs in a thread of each lane that shows one of them."""
        expected = Expected(self, peer, work, count)
        with self._lock:
            self._tickets |= {_hash(ticket): expected for ticket in expected.tickets}
        return expected

    def note_address(self, peer: str, address: str) -> None:
        """Note a member's address: lanes that it has tickets for are accepted before strangers."""
        with self._lock:
            self._networks[peer] = network_of(address)

    def forget(self, expected: Expected) -> None:
        with self._lock:
            for ticket in expected.tickets:
                self._tickets.pop(_hash(ticket), None)

    def close(self) -> None:
        """Accept no more lanes. Those that are open stay until their transfers end."""
        with self._lock:
            self._closed = True
            for one in self._strangers:
                _shut(one)
            self._tickets.clear()
        if self._listener is not None:
            _shut(self._listener)
        if self._thread is not None:
            self._thread.join(_JOIN_SECONDS)
        if self._listener is not None:
            self._listener.close()

    def _accept(self) -> None:
        assert self._listener is not None
        poll = select.poll()
        poll.register(self._listener, select.POLLIN)
        while not self._closed:
            try:
                self._refuse_late(time.monotonic())
                if not poll.poll(_LOOK_SECONDS * 1000):
                    continue
                connection, address = self._listener.accept()
                connection.setblocking(True)
                self._take_in(connection, Stranger(network_of(address[0]), time.monotonic()))
            except BlockingIOError:
                continue  # the other end has closed it already
            except OSError as error:
                if self._closed or error.errno in (errno.EBADF, errno.EINVAL):
                    return
                time.sleep(_PAUSE_SECONDS)
            except Exception:
                _log.exception("a data connection could not be accepted; the listener continues")
                time.sleep(_PAUSE_SECONDS)

    def _take_in(self, connection: socket.socket, stranger: Stranger) -> None:
        with self._lock:
            self._strangers[connection] = stranger
            index = whom_to_refuse(tuple(self._strangers.values()), self._expected())
            if self._closed:
                _shut(connection)
            elif index is not None:
                refused = list(self._strangers)[index]
                del self._strangers[refused]
                _shut(refused)  # its thread notices this and closes it
        try:
            threading.Thread(target=self._admit, args=(connection,), name="flashckpt-lane", daemon=True).start()
        except BaseException:
            with self._lock:
                self._strangers.pop(connection, None)
            connection.close()
            raise

    def _expected(self) -> collections.Counter[str]:
        """Return how many lanes may still come from each network. The caller holds the lock."""
        networks = (self._networks.get(expected.peer, "") for expected in self._tickets.values())
        return collections.Counter(network for network in networks if network)

    def _refuse_late(self, now: float) -> None:
        """Close connections that have not shown a ticket in time. The kernel's timeouts are for each byte; this one is
        for all of them."""
        with self._lock:
            for lane, stranger in self._strangers.items():
                if now - stranger.since > _TICKET_SECONDS:
                    _shut(lane)

    def _admit(self, connection: socket.socket) -> None:
        lane: Lane = connection
        expected: Expected | None = None
        try:
            set_timeouts(connection, _TICKET_SECONDS)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._tls is not None:
                lane = self._wrap(connection, self._tls)
                lane.do_handshake()  # type: ignore[attr-defined]
            expected = self._redeem(lane)
            set_timeouts(lane, self._stall_timeout)
        except Exception as error:
            if not isinstance(error, FlashError | OSError):
                _log.exception("a data connection failed unexpectedly before its ticket was checked")
            _log.info("data connection refused: %s", error)
            expected = None
        finally:
            with self._lock:
                self._strangers.pop(connection, None)
                self._strangers.pop(lane, None)
        if expected is None:
            with contextlib.suppress(OSError):
                lane.close()
        else:
            expected.serve(lane)

    def _wrap(self, connection: socket.socket, tls: ssl.SSLContext) -> Lane:
        """Replace the bare connection by the same one with TLS; the bare one can't be shut down any more."""
        with self._lock:
            lane = tls.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
            self._strangers = {lane if one is connection else one: who for one, who in self._strangers.items()}
        return lane

    def _redeem(self, lane: Lane) -> Expected:
        magic, ticket = read_exactly(lane, len(MAGIC)), read_exactly(lane, TICKET_BYTES)
        with self._lock:
            expected = self._tickets.pop(_hash(ticket), None) if magic == MAGIC else None
        if expected is None:
            raise DeniedError("lane: expected a ticket that this node has given and that was not used, found another")
        if self._tls is not None:
            certificate = lane.getpeercert(binary_form=True)  # type: ignore[attr-defined]
            found = check_peer(certificate or b"", self._job)
            if found != expected.peer:
                raise DeniedError(f"lane: expected a certificate of node {expected.peer!r}, found {found!r}")
        return expected


def _shut(lane: socket.socket) -> None:
    """Shut down a connection that a thread waits for. The thread closes it."""
    with contextlib.suppress(OSError):
        socket.socket.shutdown(lane, socket.SHUT_RDWR)  # not TLS's own, which changes what the other thread uses


def _hash(ticket: bytes) -> bytes:
    return hashlib.blake2b(ticket, digest_size=16).digest()
