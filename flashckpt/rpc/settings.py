"""Defines the gRPC options of both services, each with its reason. Imports no grpc: call `prepare` before that
import."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import quote

from flashckpt.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import MutableMapping

_log = logging.getLogger(__name__)

Options = list[tuple[str, int | str]]

VERSION = 2  # of the protocol; each end of a hello compares it
AGENT_SERVICE = "flashckpt.v1.Agent"
PEER_SERVICE = "flashckpt.v1.Peer"
TICKET_KEY = "flashckpt-ticket-bin"  # metadata of a call on the Unix socket

MIB = 1 << 20
MAX_MESSAGE_BYTES = 4 * MIB + (64 << 10)  # the largest batch of chunks, and room for the fields around it
MAX_HEAD_PIECE_BYTES = MIB
MAX_STREAMED_CHUNK_BYTES = MAX_MESSAGE_BYTES - (64 << 10)  # of chunks that are sent in messages
# Chunks share a message up to this size. 2 MiB saved no more CPU than runs differ by, and cost the receiver 25 MiB.
BATCH_BYTES = MIB
MAX_METADATA_BYTES = 8192


@dataclass(frozen=True, slots=True)
class Keepalive:
    """How soon a dead or stopped process at the other end of a connection is noticed: after time + timeout.

    gRPC needs the timeout twice. The wait for the answer to a ping is ended not by the keepalive timeout but by the
    ping timeout, a minute by default; and a Unix socket has no timeout of the kernel's.
    """

    time: float = 10.0  # seconds of silence before a ping
    timeout: float = 5.0  # seconds to answer it

    def __post_init__(self) -> None:
        if self.time <= 0 or self.timeout <= 0:
            raise ConfigError(
                f"keepalive: expected positive seconds, found time {self.time} and timeout {self.timeout}",
                hint="leave the defaults: 10 and 5 seconds",
            )


@dataclass(frozen=True, slots=True)
class PeerLimits:
    """How much the members of a job may use of one agent, together and each."""

    idle_timeout: float = 30.0  # seconds without a message before a stream is cancelled
    streams: int = 48  # pushes at a time
    streams_per_peer: int = 8
    gets: int = 32  # reads at a time
    gets_per_peer: int = 8
    messages_per_peer: int = 8  # calls of a single message at a time; an honest node has one or two
    calls: int = 128  # all calls at a time; each has a thread, so that none waits for another

    def __post_init__(self) -> None:
        if (
            not 0 < self.streams_per_peer <= self.streams
            or not 0 < self.gets_per_peer <= self.gets
            or self.streams + self.gets >= self.calls
            or self.messages_per_peer <= 0
            or self.idle_timeout <= 0
        ):
            raise ConfigError(
                "expected 0 < streams_per_peer <= streams, 0 < gets_per_peer <= gets, streams + gets < calls, "
                f"and positive messages_per_peer and idle_timeout, found {self}",
                hint="pushes and reads must leave calls for the messages that commit generations",
            )


def prepare(environ: MutableMapping[str, str] = os.environ) -> None:
    """Set the environment of one of our processes. Call it before grpc is imported."""
    # An agent never forks once it serves; the handlers would stop every gRPC thread around each fork.
    environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"
    # Refused handshakes would fill the log as fast as strangers connect. Errors reach us as statuses.
    environ.setdefault("GRPC_VERBOSITY", "NONE")


def prepare_trainer(environ: MutableMapping[str, str] = os.environ) -> None:
    """Set the environment of a trainer. Call it before grpc is imported. Values that the user has set stay: gRPC may be
    theirs, too.

    Children that a trainer forks (workers of a DataLoader) do not use our channels. gRPC's fork handlers are for
    children that do; since a call is always open (the watch), they print a warning at each fork, and if enabled
    explicitly they hang the child.
    """
    if environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0").lower() in ("1", "true", "yes", "y", "on"):
        _log.warning(
            "GRPC_ENABLE_FORK_SUPPORT is %s: expected 0; workers that a DataLoader forks may hang. "
            "Unset it, or give the DataLoader multiprocessing_context='spawn' or 'forkserver'",
            environ["GRPC_ENABLE_FORK_SUPPORT"],
        )


def server_options(keepalive: Keepalive) -> Options:
    return [
        # A second server on the same port has to fail, not to share the connections.
        ("grpc.so_reuseport", 0),
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_concurrent_streams", 32),
        ("grpc.max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", 2 * MAX_METADATA_BYTES),
        # Tensors do not compress, and a small message must not become a large one here.
        ("grpc.compression_enabled_algorithms_bitset", 1),
        # By default the server answers our own clients' pings with "too many pings" and closes the connection.
        ("grpc.http2.min_ping_interval_without_data_ms", _ms(min(5.0, keepalive.time / 2))),
        ("grpc.http2.max_ping_strikes", 2),
        ("grpc.keepalive_permit_without_calls", 1),
        # A client that is gone frees its streams as soon as a client notices a server that is gone.
        ("grpc.keepalive_time_ms", _ms(keepalive.time)),
        ("grpc.keepalive_timeout_ms", _ms(keepalive.timeout)),
        ("grpc.http2.ping_timeout_ms", _ms(keepalive.timeout)),
        ("grpc.server_handshake_timeout_ms", 5000),
        # Certificates are checked anew within the hour; a push that this interrupts is resumed.
        ("grpc.max_connection_age_ms", 3600_000),
        ("grpc.max_connection_age_grace_ms", 600_000),
        ("grpc.max_connection_idle_ms", 1800_000),
        ("grpc.enable_channelz", 0),
    ]


def client_options(keepalive: Keepalive, max_receive_bytes: int = MAX_MESSAGE_BYTES) -> Options:
    return [
        ("grpc.max_receive_message_length", max_receive_bytes),
        ("grpc.max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", 2 * MAX_METADATA_BYTES),
        ("grpc.compression_enabled_algorithms_bitset", 1),
        ("grpc.keepalive_time_ms", _ms(keepalive.time)),
        ("grpc.keepalive_timeout_ms", _ms(keepalive.timeout)),
        ("grpc.http2.ping_timeout_ms", _ms(keepalive.timeout)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        # A restarted agent is back within a second; an absent one costs one refused connection per second.
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 1000),
        ("grpc.max_reconnect_backoff_ms", 1000),
        # Otherwise connections are shared by address, and /proc/self/fd/N means another directory next time.
        ("grpc.use_local_subchannel_pool", 1),
        # A web proxy can't reach the agents of a cluster.
        ("grpc.enable_http_proxy", 0),
        ("grpc.enable_retries", 0),
        ("grpc.enable_channelz", 0),
    ]


def unix_target(path: str) -> str:
    return "unix:" + quote(path)


def _ms(seconds: float) -> int:
    return max(1, round(seconds * 1000))
