"""Opens lanes as a client and expects them as a server, according to the node's policy."""

from __future__ import annotations

import logging
import os
import ssl
import time
from typing import TYPE_CHECKING

from flashckpt.errors import ConfigError, PeerError
from flashckpt.move.transports.tcp.connections import Connections
from flashckpt.move.transports.tcp.listener import Listener
from flashckpt.move.transports.tcp.policy import Offer
from flashckpt.rpc.address import parse_address

if TYPE_CHECKING:
    from collections.abc import Callable

    from flashckpt.move.transports.tcp.layout import Lane
    from flashckpt.move.transports.tcp.listener import Expected
    from flashckpt.move.transports.tcp.policy import LanePolicy
    from flashckpt.rpc.credentials import Bundle

_log = logging.getLogger(__name__)


# TLS for lanes, with the same certificates as the calls that announce them.


def server_context(bundle: Bundle) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.verify_mode = ssl.CERT_REQUIRED
    return _prepared(context, bundle)


def client_context(bundle: Bundle) -> ssl.SSLContext:
    return _prepared(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), bundle)  # which verifies the server's name


def _prepared(context: ssl.SSLContext, bundle: Bundle) -> ssl.SSLContext:
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_verify_locations(cadata=bundle.ca_pem.decode("ascii"))
    # ssl loads a key from files only. This file is memory of this process, freed with its descriptor.
    fd = os.memfd_create("flashckpt-key", os.MFD_CLOEXEC)
    try:
        with open(fd, "wb", closefd=False) as file:
            file.write(bundle.certificate_pem + b"\n" + bundle.key_pem)
        context.load_cert_chain(f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)
    return context


_OPEN_SECONDS = 3.0
_AVOID_SECONDS = 60.0  # a node whose lanes could not be opened is asked for none during this time


class LaneClient:
    """Opens lanes to one node. Any thread may call it."""

    def __init__(
        self, address: str, bundle: Bundle, server_name: str, policy: LanePolicy, stall_timeout: float
    ) -> None:
        self.policy = policy
        self._host = parse_address(address)[0]
        self._bundle = bundle
        self._server_name = server_name
        self._stall_timeout = stall_timeout
        self._tls: ssl.SSLContext | None = None
        self._avoid_until = 0.0

    def wanted(self, size_bytes: int) -> int:
        """Return how many lanes to ask for."""
        is_avoided = self.policy.transport == "auto" and time.monotonic() < self._avoid_until
        return 0 if is_avoided else self.policy.wanted(size_bytes)

    def open(self, offer: Offer | None) -> Connections:
        """Open the offered lanes. Raise PeerError if they can't be opened; then none are asked for during a while, if
        there is another way."""
        try:
            if reason := self.policy.why_not(offer):
                raise PeerError(f"no lanes: {reason}")
            assert offer is not None
            if offer.tls and self._tls is None:
                self._tls = client_context(self._bundle)
            return Connections.open(
                self._host,
                offer,
                tls=self._tls,
                server_name=self._server_name,
                timeout=min(_OPEN_SECONDS, self._stall_timeout),
                stall_timeout=self._stall_timeout,
            )
        except PeerError:
            self._avoid_until = time.monotonic() + _AVOID_SECONDS
            raise

    @property
    def must(self) -> bool:
        """True if there is no other way than lanes."""
        return self.policy.transport == "tcp"


class LaneServer:
    """Accepts lanes of other nodes, as the policy of this one says. Any thread may call it."""

    def __init__(self, bundle: Bundle, job: str, policy: LanePolicy, stall_timeout: float) -> None:
        self._policy = policy
        self._listener: Listener | None = None
        if policy.offered(1):
            self._listener = Listener(
                job, stall_timeout=stall_timeout, tls=server_context(bundle) if policy.tls else None
            )

    def start(self, host: str, port: int) -> None:
        """Listen for lanes. `port` is that of the calls: lanes use the next one, so that one firewall rule covers both,
        or any port."""
        if self._listener is None:
            return
        try:
            if port:
                try:
                    self._listener.start(host, port + 1)
                except ConfigError as error:
                    _log.warning("data connections use a port that the kernel chose: %s", error.message)
                else:
                    return
            self._listener.start(host, 0)
        except ConfigError as error:
            if self._policy.transport == "tcp":
                raise
            _log.warning("no data connections (lanes) are accepted; shards are sent by gRPC: %s", error)
            self._listener = None

    def note_address(self, peer: str, address: str) -> None:
        """Note the address that a member has called from."""
        if self._listener is not None:
            self._listener.note_address(peer, address)

    def expect(self, peer: str, wanted: int, work: Callable[[Lane], None]) -> Expected | None:
        count = self._policy.offered(wanted)
        return self._listener.expect(peer, count, work) if self._listener is not None and count else None

    def offer(self, expected: Expected | None) -> Offer | None:
        if expected is None or self._listener is None:
            return None
        return Offer(self._listener.port, expected.tickets, self._listener.has_tls)

    def close(self) -> None:
        if self._listener is not None:
            self._listener.close()
