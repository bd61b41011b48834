"""Calls the agent of this node, for a trainer or an operator."""

from __future__ import annotations

import json
import math
import time
from typing import TYPE_CHECKING, Any

import grpc

from flashckpt.errors import AgentError, ConfigError
from flashckpt.rpc import channels, convert, convert_load
from flashckpt.rpc.errors import from_call
from flashckpt.rpc.settings import (
    AGENT_SERVICE,
    MAX_MESSAGE_BYTES,
    TICKET_KEY,
    Keepalive,
    client_options,
    unix_target,
)
from flashckpt.rpc.watchdog import Watchdog, Watched
from flashckpt.v1 import agent_pb2

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Sequence

    from flashckpt.protocol.line import Line
    from flashckpt.protocol.node_inventory import NodeInventory
    from flashckpt.rpc.api import Lease, RetrieveNews, TrainerState, WatchNews
    from flashckpt.rpc.credentials import Bundle
    from flashckpt.store.owner import Owner
    from flashckpt.types import Claimant, Generation, Launch, Retrieval, Session, ShardId

# The status of a large job is long. It comes from our own agent, so the limit may be high.
_MAX_RECEIVE_BYTES = 64 << 20
# Seconds for the answer itself, beyond the time that the agent was given for the work.
_GRACE = 5.0


class AgentClient:
    """Makes the calls of AgentApi over the socket. Connects when first used, and again by itself.

    Every call has a deadline and raises AgentError if the agent can't be reached or does not answer in time; errors of
    the agent itself are raised as they are. May be used by several threads.
    """

    def __init__(self, socket_path: str, *, timeout: float = 10.0, keepalive: Keepalive | None = None) -> None:
        self.socket_path = socket_path
        self._timeout = timeout
        self._watchdog = Watchdog(timeout)
        self._channel = grpc.insecure_channel(
            unix_target(socket_path),
            # The default name is made of the path, which may contain characters that a host name must not have.
            options=[
                *client_options(keepalive or Keepalive(), _MAX_RECEIVE_BYTES),
                ("grpc.default_authority", "agent"),
            ],
            compression=grpc.Compression.NoCompression,
        )

    def hello(
        self,
        owner: Owner,
        rank: int,
        version: int,
        job: str,
        launch: Launch | None = None,
        claimed_at: float = 0.0,
        acts_for: str = "",
    ) -> Lease:
        data = self._call(
            "Hello",
            b"",
            lambda: agent_pb2.AgentHelloRequest(
                owner=convert.to_owner(owner),
                rank=rank,
                version=version,
                job=job,
                launch=convert.maybe(launch, convert.to_launch),
                claimed_at=claimed_at,
                acts_for=acts_for,
            ),
        )
        return convert.from_lease(convert.parse(agent_pb2.AgentHelloResponse, data, "Hello's answer"))

    def listen(self, ticket: bytes, credentials: Bundle, advertise: str | None, port: int) -> str:
        data = self._call(
            "Listen",
            ticket,
            lambda: agent_pb2.ListenRequest(credentials=convert.to_bundle(credentials), advertise=advertise, port=port),
        )
        return convert.name(convert.parse(agent_pb2.ListenResponse, data, "Listen's answer").address, "address")

    def claimants(self, ticket: bytes) -> tuple[Claimant, ...]:
        data = self._call("Claimants", ticket, agent_pb2.ClaimantsRequest)
        answer = convert.parse(agent_pb2.ClaimantsResponse, data, "Claimants' answer")
        return tuple(map(convert.from_claimant, answer.claimants))

    def begin(self, ticket: bytes, session: Session, credentials: Bundle | None) -> None:
        self._call(
            "Begin",
            ticket,
            lambda: agent_pb2.BeginRequest(
                session=convert.to_session(session), credentials=convert.maybe(credentials, convert.to_bundle)
            ),
        )

    def put_line(self, ticket: bytes, line: Line, base: Generation | None) -> Line:
        data = self._call(
            "PutLine",
            ticket,
            lambda: agent_pb2.PutLineRequest(
                line=convert.to_line(line), base=convert.maybe(base, convert.to_generation)
            ),
        )
        response = convert.parse(agent_pb2.PutLineResponse, data, "PutLine's answer")
        return convert.needed(response, "line", convert.from_line)

    def acquire(self, ticket: bytes, shard: ShardId, size_bytes: int, on_busy: str, timeout: float) -> int:
        """Wait a little longer than `timeout`: the agent's own error tells better what was missing."""
        data = self._call(
            "Acquire",
            ticket,
            lambda: agent_pb2.AcquireRequest(
                shard=convert.to_shard(shard),
                size_bytes=size_bytes,
                on_busy=convert.to_on_busy(on_busy),
                timeout=timeout,
            ),
            timeout + _GRACE,
        )
        return convert.parse(agent_pb2.AcquireResponse, data, "Acquire's answer").slot_id

    def prepare(self, ticket: bytes, size_bytes: int, count: int, timeout: float) -> None:
        self._call(
            "Prepare",
            ticket,
            lambda: agent_pb2.PrepareRequest(size_bytes=size_bytes, count=count, timeout=timeout),
            timeout + _GRACE,
        )

    def sealed(self, ticket: bytes, shard: ShardId, tag: int, slot_id: int) -> None:
        self._call(
            "Sealed",
            ticket,
            lambda: agent_pb2.SealedRequest(shard=convert.to_shard(shard), tag=tag, slot_id=slot_id),
        )

    def flush(
        self, generation: Generation | None = None, step: int | None = None, *, urgent: bool = False
    ) -> Generation:
        """Return the generation that is going to be flushed. Raise NotFoundError if it is not in memory."""
        data = self._call(
            "Flush",
            b"",
            lambda: agent_pb2.FlushRequest(
                generation=convert.maybe(generation, convert.to_generation), step=step, urgent=urgent
            ),
        )
        answer = convert.parse(agent_pb2.FlushResponse, data, "Flush's answer")
        return convert.needed(answer, "generation", convert.from_generation)

    def void(self, ticket: bytes, generation: Generation) -> None:
        self._call("Void", ticket, lambda: agent_pb2.VoidRequest(generation=convert.to_generation(generation)))

    def watch(self, ticket: bytes) -> Iterator[WatchNews]:
        """Yield news, without a deadline.

        Ends when the agent drains, raises AgentError when it is gone or hangs (keepalive finds that out), and when
        another thread closes the client.
        """
        for data in self._stream("Watch", ticket, agent_pb2.WatchRequest().SerializeToString()):
            yield convert.from_progress(convert.parse(agent_pb2.WatchResponse, data, "Watch's answer"))

    def inventory(self, ticket: bytes, timeout: float) -> NodeInventory:
        data = self._call("Inventory", ticket, agent_pb2.InventoryRequest, timeout)
        return convert_load.from_inventory(convert.parse(agent_pb2.InventoryResponse, data, "Inventory's answer"))

    def retrieve(self, ticket: bytes, retrievals: Sequence[Retrieval], timeout: float) -> Generator[RetrieveNews]:
        """Yield the progress of a retrieval.

        After Retrieved the generator would wait without an end, so don't ask it for more: closing it removes what was
        fetched in part. The agent keeps to `timeout`; AgentError if it does not answer at all.
        """
        request = convert_load.to_retrieve(retrievals, timeout).SerializeToString()
        if len(request) > MAX_MESSAGE_BYTES:
            raise ConfigError(
                f"Retrieve: expected a plan of at most {MAX_MESSAGE_BYTES} bytes, found {len(request)}",
                hint="ask for fewer shards, or fewer ranges of chunks, at a time",
            )
        for data in self._stream("Retrieve", ticket, request, timeout + _GRACE):
            yield convert_load.from_news(convert.parse(agent_pb2.RetrieveResponse, data, "Retrieve's answer"))

    def trainers(self, ticket: bytes) -> tuple[TrainerState, ...]:
        data = self._call("Trainers", ticket, agent_pb2.TrainersRequest)
        return convert.from_trainers(convert.parse(agent_pb2.TrainersResponse, data, "Trainers' answer").trainers)

    def bye(self, ticket: bytes) -> None:
        self._call("Bye", ticket, agent_pb2.ByeRequest)

    def status(self) -> dict[str, Any]:
        data = self._call("Status", b"", agent_pb2.StatusRequest)
        text = convert.parse(agent_pb2.StatusResponse, data, "Status's answer").status_json
        try:
            status = json.loads(text)
        except ValueError as error:
            raise AgentError(f"agent at {self.socket_path}: expected its status as JSON, found {error}") from error
        if not isinstance(status, dict):
            raise AgentError(f"agent at {self.socket_path}: expected a JSON object, found {type(status).__name__}")
        return status

    def stop(self, drain_timeout: float | None) -> None:
        """Tell the agent to end. Returns at once: it drains for at most that long (None: as its own limits say)
        first."""
        self._call("Stop", b"", lambda: agent_pb2.StopRequest(drain_timeout=drain_timeout))

    def close(self) -> None:
        """End running calls, watches included. May be called twice."""
        self._channel.close()
        self._watchdog.close()

    def __enter__(self) -> AgentClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _stream(self, method: str, ticket: bytes, request: bytes, timeout: float = math.inf) -> Iterator[bytes]:
        """Yield the answers of a call. `timeout` is for each answer. The call is cancelled when the generator is
        closed."""
        started = time.monotonic()
        try:
            call = channels.call_for_stream(
                self._channel, f"/{AGENT_SERVICE}/{method}", request, ((TICKET_KEY, ticket),)
            )
        except ValueError as error:  # what gRPC raises for a channel that was closed
            raise AgentError(f"agent at {self.socket_path}: {method} after close()") from error
        # A watch has no deadline, and needs no watchdog.
        watched = Watched(call.cancel) if timeout == math.inf else self._watchdog.watch(call.cancel)
        try:
            watched.expect(timeout)
            for data in call:
                watched.relax()
                yield data
                watched.expect(timeout)
        except grpc.RpcError as error:
            raise self._translated(error, method, started) from error
        finally:
            call.cancel()
            self._watchdog.forget(watched)

    def _call(self, method: str, ticket: bytes, make: Callable[[], Any], timeout: float | None = None) -> bytes:
        started = time.monotonic()
        try:
            request: bytes = make().SerializeToString()
        except (ValueError, TypeError) as error:
            raise ConfigError(f"{method}: expected values that fit the protocol, found {error}") from error
        try:
            return channels.call(
                self._channel,
                f"/{AGENT_SERVICE}/{method}",
                request,
                self._timeout if timeout is None else timeout,
                ((TICKET_KEY, ticket),) if ticket else (),
            )
        except grpc.RpcError as error:
            raise self._translated(error, method, started) from error
        except ValueError as error:  # what gRPC raises for a channel that was closed
            raise AgentError(f"agent at {self.socket_path}: {method} after close()") from error

    def _translated(self, error: grpc.RpcError, method: str, started: float) -> Exception:
        waited = time.monotonic() - started
        return from_call(
            error,
            where=f"{method} of the agent at {self.socket_path} (waited {waited:.1f} s)",
            unreachable=AgentError,
            socket_path=self.socket_path,
            waited_seconds=waited,
        )
