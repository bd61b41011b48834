"""Serves the calls of other nodes: TCP with mutual TLS, and nothing without a certificate of the job."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import resource
import socket
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import unquote

import grpc

from flashckpt.errors import BusyError, ConfigError, DeniedError, IncompatibleError
from flashckpt.move.transports.grpc.give import give, refuse
from flashckpt.move.transports.grpc.receive import Messages, receive
from flashckpt.move.transports.tcp.ends import LaneServer
from flashckpt.move.transports.tcp.policy import LanePolicy
from flashckpt.protocol.wire import GetRefused, PutRefused
from flashckpt.rpc import convert, convert_load
from flashckpt.rpc.address import parse_address
from flashckpt.rpc.credentials import check_peer
from flashckpt.rpc.guard import Call, Caller, Guard, Role
from flashckpt.rpc.settings import PEER_SERVICE, VERSION, Keepalive, PeerLimits, server_options
from flashckpt.rpc.watchdog import Watchdog
from flashckpt.v1 import peer_pb2

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Mapping, Sequence

    from flashckpt.move.seam import PeerApi
    from flashckpt.rpc.credentials import Bundle
    from flashckpt.rpc.watchdog import Watched

_log = logging.getLogger(__name__)


# How many connections an agent accepts: strangers must not use up the descriptors that it needs to keep its decisions.

_MOST = 1 << 16


def connections_allowed() -> int:
    """Return half of this process's descriptors, after raising their limit to the hard limit.

    The other half is for its own connections to other nodes, its shards and the small files without which it has to
    end. A connection without credentials is closed after the handshake's timeout, which frees its place.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard or (hard == resource.RLIM_INFINITY and soft != hard):
        with contextlib.suppress(ValueError, OSError):  # a kernel or a sandbox that allows fewer
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST if soft == resource.RLIM_INFINITY else max(1, min(_MOST, soft // 2))


# Seconds that close() waits for methods in the middle of something that gRPC can't cancel: a write, an allocation.
STRAGGLERS_SECONDS = 10.0


class PeerServer:
    """Serves `api` to nodes with certificates of `job`, once it was started."""

    def __init__(
        self,
        api: PeerApi,
        bundle: Bundle,
        job: str,
        node_id: str,
        *,
        limits: PeerLimits | None = None,
        keepalive: Keepalive | None = None,
        lanes: LanePolicy | None = None,
    ) -> None:
        self._api = api
        self._job = job
        self._node_id = node_id
        self._limits = limits or PeerLimits()
        self._watchdog = Watchdog(self._limits.idle_timeout)
        self._lanes = LaneServer(bundle, job, lanes or LanePolicy(), self._limits.idle_timeout)
        self._lock = threading.Lock()  # protects the four below
        self._idle = threading.Condition(self._lock)  # notified when a stream ends
        self._streams: Counter[str] = Counter()
        self._gets: Counter[str] = Counter()
        self._messages: Counter[str] = Counter()
        # One set for the server's whole life: gRPC can change them, but a flood of handshakes at that moment crashes
        # it, for which no credentials are needed. Another launch's certificates need another server.
        self._credentials = grpc.ssl_server_credentials(
            [(bundle.key_pem, bundle.certificate_pem)], bundle.ca_pem, require_client_auth=True
        )
        self._pool = ThreadPoolExecutor(self._limits.calls, thread_name_prefix="flashckpt-peer")
        self._server = grpc.server(
            self._pool,
            interceptors=[Guard(self._authenticate)],
            options=[
                *server_options(keepalive or Keepalive()),
                ("grpc.max_allowed_incoming_connections", connections_allowed()),
            ],
            maximum_concurrent_rpcs=self._limits.calls,
            compression=grpc.Compression.NoCompression,
        )
        handlers: dict[str, Any] = {
            "Hello": grpc.stream_unary_rpc_method_handler(self._of_one_message(self._hello)),
            "Tell": grpc.stream_unary_rpc_method_handler(self._of_one_message(self._tell)),
            "Put": grpc.stream_stream_rpc_method_handler(self._put),
            # Only one message is expected, but see _of_one_message.
            "Get": grpc.stream_stream_rpc_method_handler(self._get),
        }
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(PEER_SERVICE, handlers),))

    def start(self, address: str) -> int:
        """Listen on host:port ([host]:port for IPv6). Return the port, which the kernel chooses if 0 was asked for."""
        port = self._bind(address)
        host, asked = parse_address(address)
        self._lanes.start(host, asked)
        self._server.start()
        return port

    def close(self, grace: float = 0.0) -> None:
        """Accept no new calls; running ones have `grace` seconds. Broken pushes are suspended. May be called twice."""
        self._server.stop(grace).wait(grace + STRAGGLERS_SECONDS)
        self._watchdog.close()
        self._lanes.close()
        # Streams end by suspending their receivers, which use the caller's store: wait for them.
        with self._idle:
            if not self._idle.wait_for(lambda: not self._streams and not self._gets, STRAGGLERS_SECONDS):
                left = sorted({*self._streams, *self._gets})
                _log.warning("pushes or reads of %s did not end within %g s", left, STRAGGLERS_SECONDS)
        self._pool.shutdown(wait=False)

    def __enter__(self) -> PeerServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _bind(self, address: str) -> int:
        try:
            bound = self._server.add_secure_port(address, self._credentials)
        except RuntimeError as error:
            raise _not_bound(address, str(error)) from error
        if not bound:
            raise _not_bound(address, "no reason given")
        return bound

    def _authenticate(self, context: grpc.ServicerContext) -> Caller:
        # TLS has verified the chain and the dates. Here each call is checked for whose certificate it is.
        # The stubs declare one value per name; in fact there is a sequence of them.
        properties = cast("Mapping[str, Sequence[bytes]]", context.auth_context())
        pems = list(properties.get("x509_pem_cert", ()))
        if len(pems) != 1:
            raise DeniedError(
                f"expected one certificate of a node of job {self._job!r}, found {len(pems)}",
                hint="agents connect with the certificate that their launch gave them",
            )
        return Caller(Role.MEMBER, node_id=check_peer(pems[0], self._job))

    def _check(self, call: Call, sender: str, receiver: str) -> None:
        if sender != call.caller.node_id:
            raise DeniedError(
                f"expected a message of node {call.caller.node_id!r}, as its certificate says, found sender {sender!r}",
                hint="two nodes share a certificate, or one has changed its name: give each launch its own",
            )
        if receiver != self._node_id:
            # IMPORTANT: addresses change hands. A copy on another node would count as one on the intended node.
            raise DeniedError(
                f"expected messages for this node {self._node_id!r}, found one for {receiver!r}",
                hint="its address belongs to another node now; the next launch learns the new one",
            )

    def _hello(self, data: bytes, call: Call) -> bytes:
        message = convert.parse(peer_pb2.PeerHello, data, "Hello")
        if message.version != VERSION:
            raise IncompatibleError(
                f"expected protocol version {VERSION}, found {message.version} "
                f"in the hello of node {call.caller.node_id!r}",
                hint="run the same version of flashckpt on all nodes",
            )
        hello, receiver = convert.from_hello(message)
        self._check(call, hello.node_id, receiver)
        if hello.job != self._job:
            raise DeniedError(f"expected job {self._job!r}, found {hello.job!r} in a hello of {hello.node_id!r}")
        answer = self._api.hello(call.caller.node_id, hello)
        return convert.to_hello(answer, hello.node_id).SerializeToString()

    def _tell(self, data: bytes, call: Call) -> bytes:
        message = convert.parse(peer_pb2.TellRequest, data, "Tell")
        envelope, receiver = convert.from_envelope(message)
        self._check(call, envelope.sender, receiver)
        return convert.to_answer(self._api.tell(call.caller.node_id, envelope)).SerializeToString()

    def _of_one_message(self, method: Callable[[bytes, Call], bytes]) -> Callable[[Iterator[bytes], Call], bytes]:
        """Return a handler for gRPC that takes a stream and expects one message of it.

        IMPORTANT: not gRPC's own unary handler, which takes a thread before the message is there and waits for it
        without an end: a node that opens calls and stays silent would keep the messages of all others out.
        """

        def run(requests: Iterator[bytes], call: Call) -> bytes:
            peer, limits = call.caller.node_id, self._limits
            most = limits.calls - limits.streams - limits.gets
            with self._counted(peer, self._messages, "messages", limits.messages_per_peer, most) as reason:
                if reason:
                    raise BusyError(reason, peer=peer)
                watched = self._watchdog.watch(call.context.cancel)
                try:
                    data = Messages(requests, watched, limits.idle_timeout).take()
                finally:
                    self._watchdog.forget(watched)
                if data is None:
                    raise IncompatibleError(f"expected a message of node {peer!r}, found the end of the call")
                return method(data, call)

        return run

    def _put(self, requests: Iterator[bytes], call: Call) -> Iterator[bytes]:
        peer, limits = call.caller.node_id, self._limits
        # Counted before anything is read: a stream that stays silent occupies a thread, too.
        with self._counted(peer, self._streams, "pushes", limits.streams_per_peer, limits.streams) as reason:
            watched = self._watchdog.watch(call.context.cancel)
            try:
                if reason:
                    refused = convert.to_refused(PutRefused(reason, True, None, None))
                    watched.expect(limits.idle_timeout)
                    yield peer_pb2.PutResponse(refused=refused).SerializeToString()
                    return
                self._lanes.note_address(peer, _address_of(call.context.peer()))
                with closing(self._receive(peer, requests, call, watched)) as answers:
                    for answer in answers:
                        # A node that does not read its answers is treated like one that sends nothing.
                        watched.expect(limits.idle_timeout)
                        yield answer
                        watched.relax()
            finally:
                self._watchdog.forget(watched)

    def _receive(
        self, peer: str, requests: Iterator[bytes], call: Call, watched: Watched
    ) -> Generator[bytes, None, None]:
        return receive(
            self._api,
            peer,
            requests,
            check=lambda sender, receiver: self._check(call, sender, receiver),
            watched=watched,
            idle_timeout=self._limits.idle_timeout,
            lanes=self._lanes,
        )

    def _get(self, requests: Iterator[bytes], call: Call) -> Iterator[bytes]:
        peer, limits = call.caller.node_id, self._limits
        with self._counted(peer, self._gets, "reads", limits.gets_per_peer, limits.gets) as reason:
            watched = self._watchdog.watch(call.context.cancel)
            try:
                if reason:
                    watched.expect(limits.idle_timeout)
                    yield refuse(GetRefused(reason, retry=True))
                    return
                data = Messages(requests, watched, limits.idle_timeout).take()
                if data is None:
                    return  # ended or broke before it began
                request = convert.parse(peer_pb2.GetRequest, data, "Get")
                get, meant = convert_load.from_get(request)
                self._check(call, get.sender, meant)
                answer = self._api.get_open(peer, get)
                if isinstance(answer, GetRefused):
                    watched.expect(limits.idle_timeout)
                    yield refuse(answer)
                    return
                self._lanes.note_address(peer, _address_of(call.context.peer()))
                with closing(give(answer, get, self._lanes, request.lanes)) as messages:
                    for message in messages:
                        # A node that does not read occupies a thread and the memory of a message.
                        watched.expect(limits.idle_timeout)
                        yield message
                        watched.relax()
            finally:
                self._watchdog.forget(watched)

    @contextmanager
    def _counted(self, peer: str, running: Counter[str], what: str, most_of_peer: int, most: int) -> Iterator[str]:
        """Count a stream, and yield why there is no room for it, or "".

        Raise BusyError if even refused streams of a node pile up: each occupies a thread until the node reads the
        refusal.
        """
        with self._lock:
            total, own = sum(running.values()), running[peer]
            if own >= 2 * most_of_peer:
                raise BusyError(f"expected at most {most_of_peer} {what} per node at a time, found {own}", peer=peer)
            if own >= most_of_peer:
                reason = f"expected at most {most_of_peer} {what} per node at a time, found {own}"
            elif total >= most:
                reason = f"expected at most {most} {what} at a time, found {total}"
            else:
                reason = ""
            running[peer] += 1
        try:
            yield reason
        finally:
            with self._lock:
                running[peer] -= 1
                if not running[peer]:
                    del running[peer]
                    self._idle.notify_all()


def _address_of(peer: str) -> str:
    """Return the address in gRPC's name of the other end, such as ipv6:%5B::1%5D:4711; "" if it has none."""
    try:
        return parse_address(unquote(peer.partition(":")[2]))[0]
    except ConfigError:
        return ""


def _not_bound(address: str, reason: str) -> ConfigError:
    """Return the error with its cause. gRPC only logs the cause; binding the same address again finds it out."""
    hint = "give FLASHCKPT_ADVERTISE an address of this node, or leave it out"
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, int(port)))
            probe.listen(1)
    except ValueError:
        reason = "no port in it"
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            reason = "the port is in use by another process"
            hint = "choose another FLASHCKPT_PORT, or 0 for any"
        else:
            reason = os.strerror(error.errno) if error.errno else str(error)
    return ConfigError(f"expected to listen on {address}, found: {reason}", hint=hint, address=address)
