"""Serves the agent's calls on its Unix socket."""

from __future__ import annotations

import errno
import hmac
import json
import os
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

import grpc

from flashckpt.errors import AgentError, DeniedError, IncompatibleError
from flashckpt.rpc import convert, convert_load
from flashckpt.rpc.guard import Call, Caller, Guard, Role
from flashckpt.rpc.settings import AGENT_SERVICE, TICKET_KEY, Keepalive, server_options, unix_target
from flashckpt.v1 import agent_pb2

if TYPE_CHECKING:
    from collections.abc import Iterator

    from flashckpt.rpc.api import AgentApi, RetrieveNews, WatchNews

_T = TypeVar("_T")

# A rank has one watch and one other call open at a time; each call has a thread, so that none waits for another.
_CALLS = 256
_STRAGGLERS_SECONDS = 10.0  # that close() waits for methods that gRPC can't cancel
_PATH_BYTES = 107  # of a Unix socket's address, without its closing zero


class AgentServer:
    """Serves `api` on `path` from the moment it is made. The caller holds the lock that makes it the only one there."""

    def __init__(self, api: AgentApi, path: str, *, keepalive: Keepalive | None = None) -> None:
        self.path = path
        self._api = api
        self._pool = ThreadPoolExecutor(_CALLS, thread_name_prefix="flashckpt-agent")
        self._server = grpc.server(
            self._pool,
            interceptors=[Guard(self._authenticate)],
            options=server_options(keepalive or Keepalive()),
            maximum_concurrent_rpcs=_CALLS,
            compression=grpc.Compression.NoCompression,
        )
        unary = {
            "Hello": self._hello,
            "Listen": self._listen,
            "Claimants": self._claimants,
            "Begin": self._begin,
            "PutLine": self._put_line,
            "Acquire": self._acquire,
            "Prepare": self._prepare,
            "Sealed": self._sealed,
            "Flush": self._flush,
            "Void": self._void,
            "Inventory": self._inventory,
            "Trainers": self._trainers,
            "Bye": self._bye,
            "Status": self._status,
            "Stop": self._stop,
        }
        handlers: dict[str, Any] = {name: grpc.unary_unary_rpc_method_handler(run) for name, run in unary.items()}
        handlers["Watch"] = grpc.unary_stream_rpc_method_handler(self._watch)
        handlers["Retrieve"] = grpc.unary_stream_rpc_method_handler(self._retrieve)
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(AGENT_SERVICE, handlers),))
        try:
            self._bind()
        except BaseException:
            self._pool.shutdown(wait=False)
            raise
        self._server.start()

    def close(self, grace: float = 0.0) -> None:
        """Accept no new calls; running ones, watches included, have `grace` seconds. May be called twice."""
        self._server.stop(grace).wait(grace + _STRAGGLERS_SECONDS)
        self._pool.shutdown(wait=False)

    def __enter__(self) -> AgentServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _bind(self) -> None:
        if len(os.fsencode(self.path)) > _PATH_BYTES:
            raise AgentError(
                f"agent socket {self.path}: expected a path of at most {_PATH_BYTES} bytes",
                hint="name it through a descriptor of its directory: /proc/self/fd/N/agent.sock",
            )
        # SAFETY: a chmod after the bind would leave a moment in which others can connect. The umask is the process's:
        # other threads must not create files now, which is why this happens at the start.
        before = os.umask(0o177)
        try:
            bound = self._server.add_insecure_port(unix_target(self.path))
        except RuntimeError as error:
            raise self._not_bound(str(error)) from error
        finally:
            os.umask(before)
        if not bound:
            raise self._not_bound("no reason given")
        mode = os.lstat(self.path).st_mode
        if not stat.S_ISSOCK(mode) or stat.S_IMODE(mode) != 0o600:
            raise AgentError(f"agent socket {self.path}: expected a socket of mode 0600, found mode {mode:o}")

    def _not_bound(self, reason: str) -> AgentError:
        try:
            mode = os.lstat(self.path).st_mode
            reason = "something is there already" if not stat.S_ISSOCK(mode) else reason
        except OSError as error:
            if error.errno != errno.ENOENT:
                reason = str(error)
        return AgentError(f"agent socket {self.path}: expected to bind it, found: {reason}")

    def _authenticate(self, context: grpc.ServicerContext) -> Caller:
        ticket = next((value for key, value in context.invocation_metadata() if key == TICKET_KEY), None)
        if ticket is None:
            return Caller(Role.OPERATOR)
        ticket = ticket if isinstance(ticket, bytes) else ticket.encode()
        lease = self._api.lease_of(ticket)
        if lease is None or not hmac.compare_digest(lease.ticket, ticket):
            raise DeniedError(
                "expected the ticket of a live lease, found one that this agent does not know",
                hint="the agent was restarted, or the lease has ended: say hello again",
                lease="unknown",
            )
        return Caller(Role.TRAINER, ticket=ticket)

    # Methods, in the order of the service. Each decodes, calls, encodes.

    def _hello(self, data: bytes, _call: Call) -> bytes:
        request = convert.parse(agent_pb2.AgentHelloRequest, data, "Hello")
        owner = convert.needed(request, "owner", convert.from_owner)
        job = convert.name(request.job, "job")
        launch = convert.optional(request, "launch", convert.from_launch)
        acts_for = convert.name(request.acts_for, "acts_for") if request.acts_for else ""
        version, claimed_at = request.version, request.claimed_at
        lease = self._api.hello(owner, request.rank, version, job, launch, claimed_at, acts_for)
        return convert.to_lease(lease).SerializeToString()

    def _listen(self, data: bytes, _call: Call) -> bytes:
        request = convert.parse(agent_pb2.ListenRequest, data, "Listen")
        credentials = convert.needed(request, "credentials", convert.from_bundle)
        advertise = request.advertise if request.HasField("advertise") else None
        if request.port > 65535:
            raise IncompatibleError(f"expected a port, found {request.port}")
        address = self._api.listen(credentials, advertise, request.port)
        return agent_pb2.ListenResponse(address=address).SerializeToString()

    def _claimants(self, data: bytes, call: Call) -> bytes:
        convert.parse(agent_pb2.ClaimantsRequest, data, "Claimants")
        claimants = map(convert.to_claimant, self._api.claimants(call.caller.ticket))
        return agent_pb2.ClaimantsResponse(claimants=claimants).SerializeToString()

    def _begin(self, data: bytes, call: Call) -> bytes:
        request = convert.parse(agent_pb2.BeginRequest, data, "Begin")
        session = convert.needed(request, "session", convert.from_session)
        credentials = convert.optional(request, "credentials", convert.from_bundle)
        self._api.begin(call.caller.ticket, session, credentials)
        return agent_pb2.BeginResponse().SerializeToString()

    def _put_line(self, data: bytes, call: Call) -> bytes:
        request = convert.parse(agent_pb2.PutLineRequest, data, "PutLine")
        line = convert.needed(request, "line", convert.from_line)
        base = convert.optional(request, "base", convert.from_generation)
        in_force = self._api.put_line(call.caller.ticket, line, base)
        return agent_pb2.PutLineResponse(line=convert.to_line(in_force)).SerializeToString()

    def _acquire(self, data: bytes, call: Call) -> bytes:
        request = convert.parse(agent_pb2.AcquireRequest, data, "Acquire")
        slot_id = self._api.acquire(
            call.caller.ticket,
            convert.needed(request, "shard", convert.from_shard),
            convert.positive(request.size_bytes, "size_bytes"),
            convert.from_on_busy(request.on_busy),
            convert.seconds(request.timeout, "timeout"),
        )
        return agent_pb2.AcquireResponse(slot_id=slot_id).SerializeToString()

    def _prepare(self, data: bytes, call: Call) -> bytes:
        request = convert.parse(agent_pb2.PrepareRequest, data, "Prepare")
        size_bytes = convert.positive(request.size_bytes, "size_bytes")
        self._api.prepare(call.caller.ticket, size_bytes, request.count, convert.seconds(request.timeout, "timeout"))
        return agent_pb2.PrepareResponse().SerializeToString()

    def _sealed(self, data: bytes, call: Call) -> bytes:
        request = convert.parse(agent_pb2.SealedRequest, data, "Sealed")
        shard = convert.needed(request, "shard", convert.from_shard)
        self._api.sealed(call.caller.ticket, shard, request.tag, request.slot_id)
        return agent_pb2.SealedResponse().SerializeToString()

    def _flush(self, data: bytes, _call: Call) -> bytes:
        request = convert.parse(agent_pb2.FlushRequest, data, "Flush")
        generation = convert.optional(request, "generation", convert.from_generation)
        step = request.step if request.HasField("step") else None
        flushed = self._api.flush(generation, step, request.urgent)
        return agent_pb2.FlushResponse(generation=convert.to_generation(flushed)).SerializeToString()

    def _void(self, data: bytes, call: Call) -> bytes:
        request = convert.parse(agent_pb2.VoidRequest, data, "Void")
        self._api.void(call.caller.ticket, convert.needed(request, "generation", convert.from_generation))
        return agent_pb2.VoidResponse().SerializeToString()

    def _watch(self, data: bytes, call: Call) -> Iterator[bytes]:
        convert.parse(agent_pb2.WatchRequest, data, "Watch")
        there: Iterator[WatchNews] = _while_there(call, self._api.watch(call.caller.ticket))
        for progress in there:
            yield convert.to_progress(progress).SerializeToString()

    def _inventory(self, data: bytes, call: Call) -> bytes:
        convert.parse(agent_pb2.InventoryRequest, data, "Inventory")
        return convert_load.to_inventory(self._api.inventory(call.caller.ticket)).SerializeToString()

    def _retrieve(self, data: bytes, call: Call) -> Iterator[bytes]:
        request = convert.parse(agent_pb2.RetrieveRequest, data, "Retrieve")
        retrievals, timeout = convert_load.from_retrieve(request)
        there: Iterator[RetrieveNews] = _while_there(call, self._api.retrieve(call.caller.ticket, retrievals, timeout))
        for news in there:
            yield convert_load.to_news(news).SerializeToString()

    def _trainers(self, data: bytes, call: Call) -> bytes:
        convert.parse(agent_pb2.TrainersRequest, data, "Trainers")
        trainers = [convert.to_trainer(one) for one in self._api.trainers(call.caller.ticket)]
        return agent_pb2.TrainersResponse(trainers=trainers).SerializeToString()

    def _bye(self, data: bytes, call: Call) -> bytes:
        convert.parse(agent_pb2.ByeRequest, data, "Bye")
        self._api.bye(call.caller.ticket)
        return agent_pb2.ByeResponse().SerializeToString()

    def _status(self, data: bytes, _call: Call) -> bytes:
        convert.parse(agent_pb2.StatusRequest, data, "Status")
        return agent_pb2.StatusResponse(status_json=json.dumps(self._api.status())).SerializeToString()

    def _stop(self, data: bytes, _call: Call) -> bytes:
        request = convert.parse(agent_pb2.StopRequest, data, "Stop")
        told = request.HasField("drain_timeout")
        self._api.stop(convert.seconds(request.drain_timeout, "drain_timeout") if told else None)
        return agent_pb2.StopResponse().SerializeToString()


def _while_there(call: Call, news: Iterator[_T | None]) -> Iterator[_T]:
    """Yield the news (None: nothing is new), until there is no more or the caller has left."""
    left = threading.Event()
    if not call.context.add_callback(left.set):
        return
    try:
        for one in news:
            if left.is_set():
                return
            if one is not None:
                yield one
    finally:
        close = getattr(news, "close", None)  # a generator's own clean-up, at once and not when it is collected
        if close is not None:
            close()
