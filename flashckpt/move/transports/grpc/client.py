"""Calls the agent of another node.

How the other end is identified: TLS proves that the server's certificate was issued for that node of the job, by a DNS
name made of both; gRPC matches no other names and shows the certificate to no Python client. Besides, each message
names its receiver, an agent with another name refuses it, and the answer to hello is checked here.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

import grpc

from flashckpt.errors import ConfigError, CorruptShardError, DeniedError, FlashError, IncompatibleError, PeerError
from flashckpt.move.transports.grpc.send import Push
from flashckpt.move.transports.grpc.take import NoLanesError, Take
from flashckpt.move.transports.tcp.ends import LaneClient
from flashckpt.move.transports.tcp.policy import LanePolicy
from flashckpt.rpc import channels, convert, convert_load
from flashckpt.rpc.credentials import Identity
from flashckpt.rpc.errors import from_call
from flashckpt.rpc.settings import PEER_SERVICE, VERSION, Keepalive, client_options
from flashckpt.rpc.watchdog import Watchdog
from flashckpt.v1 import peer_pb2

if TYPE_CHECKING:
    from collections.abc import Callable

    from flashckpt.move.seam import BandwidthLimit, PutResult, Source, Taker
    from flashckpt.protocol.wire import Answer, Envelope, GetOpen, GetRefused, PutOpen
    from flashckpt.rpc.api import Hello
    from flashckpt.rpc.credentials import Bundle

_log = logging.getLogger(__name__)

# The size that a Get assumes before anything is known of the shard.
_TYPICAL_CHUNK_BYTES = 256 << 10


class PeerClient:
    """Makes calls to node `node_id` at `address`. Connects when first used, and again by itself.

    Every call has a deadline and raises PeerError, naming the node, if it can't be reached or does not answer; errors
    of its agent are raised as they are. May be used by several threads. For other credentials or another address: make
    a new one.
    """

    def __init__(
        self,
        address: str,
        bundle: Bundle,
        job: str,
        node_id: str,
        *,
        stall_timeout: float = 30.0,
        open_timeout: float = 120.0,
        keepalive: Keepalive | None = None,
        lanes: LanePolicy | None = None,
    ) -> None:
        """`stall_timeout`: seconds that a push may continue without an answer to what was sent; `open_timeout`: seconds
        that the receiver may take to make room for it."""
        self.address = address
        self.node_id = node_id
        self._job = job
        self._stall_timeout = stall_timeout
        self._open_timeout = open_timeout
        self._watchdog = Watchdog(min(stall_timeout, open_timeout))
        server_name = Identity(job, node_id).dns_name
        self._lanes = LaneClient(address, bundle, server_name, lanes or LanePolicy(), stall_timeout)
        self._channel = grpc.secure_channel(
            address,
            grpc.ssl_channel_credentials(bundle.ca_pem, bundle.key_pem, bundle.certificate_pem),
            options=[
                *client_options(keepalive or Keepalive()),
                ("grpc.ssl_target_name_override", server_name),
            ],
            compression=grpc.Compression.NoCompression,
        )

    def hello(self, hello: Hello, timeout: float = 10.0) -> Hello:
        data = self._call("Hello", lambda: convert.to_hello(hello, self.node_id), timeout)
        message = convert.parse(peer_pb2.PeerHello, data, f"answer of node {self.node_id!r}")
        if message.version != VERSION:
            raise IncompatibleError(
                f"{self._where()}: expected protocol version {VERSION}, found {message.version}",
                hint="run the same version of flashckpt on all nodes",
                peer=self.node_id,
            )
        answer, receiver = convert.from_hello(message)
        found = (answer.job, answer.node_id, receiver)
        expected = (self._job, self.node_id, hello.node_id)
        if found != expected:
            raise DeniedError(
                f"{self._where()}: expected an answer of (job, node, to) {expected}, found {found}",
                hint="another node has taken over the address; the next launch learns the new one",
                peer=self.node_id,
            )
        return answer

    def tell(self, envelope: Envelope, timeout: float = 10.0) -> Answer:
        data = self._call("Tell", lambda: convert.to_envelope(envelope, self.node_id), timeout)
        return convert.from_answer(convert.parse(peer_pb2.TellResponse, data, f"answer of node {self.node_id!r}"))

    def put(
        self,
        opening: PutOpen,
        source: Source,
        throttle: BandwidthLimit | None = None,
        *,
        on_progress: Callable[[int], None] | None = None,
        timeout: float | None = None,
    ) -> PutResult:
        """Push a shard, from where an earlier attempt broke off.

        `on_progress` is called with the bytes that the receiver has verified and written in this attempt; it is called
        from this thread and must not block.

        Raises PeerError if the connection breaks or the receiver stalls (try again: it resumes), what `source` raises
        if the shard here is bad, and the receiver's error if it found the bytes wrong.
        """
        started = time.monotonic()
        push = Push(opening, source, self.node_id, throttle, self._lanes)
        try:
            call = channels.stream(self._channel, f"/{PEER_SERVICE}/Put", push.requests(), timeout)
        except ValueError as error:  # what gRPC raises for a channel that was closed
            raise PeerError(f"{self._where()}: Put after close()", peer=self.node_id) from error
        watched = self._watchdog.watch(call.cancel)
        try:
            return push.follow(call, watched, self._open_timeout, self._stall_timeout, on_progress)
        except grpc.RpcError as error:
            if push.error is not None:
                raise push.error from error
            if watched.stalled:
                raise PeerError(
                    f"{self._where()}: connected, but the push of {opening.shard} made no progress "
                    f"for {push.patience:g} s ({push.taken_bytes} bytes were taken)",
                    peer=self.node_id,
                    address=self.address,
                ) from error
            translated = self._translated(error, "Put", started)
            if isinstance(translated, CorruptShardError):
                # What the receiver found wrong says nothing about our copy, which was verified while it was read.
                raise PeerError(
                    f"{self._where()}: refused the bytes of {opening.shard}: {translated.message}", peer=self.node_id
                ) from error
            raise translated from error
        finally:
            push.close()
            call.cancel()
            self._watchdog.forget(watched)

    def get(self, opening: GetOpen, taker: Taker, timeout: float | None = None) -> GetRefused | None:
        """Read a shard, or parts of it. None: the taker has all that was asked for.

        A refusal may follow after a part: the taker knows how far it got.

        Raises PeerError if the connection breaks, the holder stalls, or sends what was not asked for; and whatever the
        taker raises. The taker has to verify what was sent.
        """
        wanted = self._lanes.wanted(sum(one.count for one in opening.ranges) * _TYPICAL_CHUNK_BYTES)
        try:
            return self._get_once(opening, taker, timeout, wanted)
        except NoLanesError as error:
            if self._lanes.must:
                raise PeerError(f"{self._where()}: {error}", peer=self.node_id) from error
            _log.info("get of %s from node %r uses gRPC instead of lanes: %s", opening.shard, self.node_id, error)
        return self._get_once(opening, taker, timeout, 0)

    def _get_once(self, opening: GetOpen, taker: Taker, timeout: float | None, lanes: int) -> GetRefused | None:
        started = time.monotonic()
        request = convert_load.to_get(opening, self.node_id, lanes).SerializeToString()
        try:
            call = channels.call_for_stream(self._channel, f"/{PEER_SERVICE}/Get", request, timeout=timeout)
        except ValueError as error:  # what gRPC raises for a channel that was closed
            raise PeerError(f"{self._where()}: Get after close()", peer=self.node_id) from error
        take = Take(opening, self.node_id, taker, self._lanes)
        watched = self._watchdog.watch(call.cancel)
        try:
            return take.follow(call, watched, self._stall_timeout)
        except grpc.RpcError as error:
            if watched.stalled:
                raise PeerError(
                    f"{self._where()}: connected, but the get of {opening.shard} made no progress "
                    f"for {self._stall_timeout:g} s ({take.taken_bytes} bytes were taken)",
                    peer=self.node_id,
                    address=self.address,
                ) from error
            translated = self._translated(error, "Get", started)
            if isinstance(translated, PeerError):
                raise translated from error
            # The holder's errors are about the holder: no memory there does not mean no memory here.
            raise PeerError(
                f"{self._where()}: {translated.message}", hint=translated.hint, peer=self.node_id
            ) from error
        finally:
            call.cancel()
            take.close()
            self._watchdog.forget(watched)

    def close(self) -> None:
        """End running calls. May be called twice."""
        self._channel.close()
        self._watchdog.close()

    def __enter__(self) -> PeerClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _where(self) -> str:
        return f"node {self.node_id!r} at {self.address}"

    def _call(self, method: str, make: Callable[[], Any], timeout: float) -> bytes:
        started = time.monotonic()
        try:
            request: bytes = make().SerializeToString()
        except (ValueError, TypeError) as error:
            raise ConfigError(f"{method}: expected values that fit the protocol, found {error}") from error
        try:
            return channels.call(self._channel, f"/{PEER_SERVICE}/{method}", request, timeout)
        except grpc.RpcError as error:
            raise self._translated(error, method, started) from error
        except ValueError as error:  # what gRPC raises for a channel that was closed
            raise PeerError(f"{self._where()}: {method} after close()", peer=self.node_id) from error

    def _translated(self, error: grpc.RpcError, method: str, started: float) -> FlashError:
        waited = time.monotonic() - started
        return from_call(
            error,
            where=f"{method} of {self._where()} (waited {waited:.1f} s)",
            unreachable=PeerError,
            peer=self.node_id,
            address=self.address,
        )
