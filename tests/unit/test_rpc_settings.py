from __future__ import annotations

import threading

import pytest

from flashckpt.errors import ConfigError
from flashckpt.rpc.settings import (
    Keepalive,
    PeerLimits,
    client_options,
    prepare,
    prepare_trainer,
    server_options,
    unix_target,
)
from flashckpt.rpc.watchdog import Watchdog


def test_an_agents_environment():
    environ = {"GRPC_ENABLE_FORK_SUPPORT": "1"}
    prepare(environ)
    assert environ == {"GRPC_ENABLE_FORK_SUPPORT": "0", "GRPC_VERBOSITY": "NONE"}
    prepare(environ := {"GRPC_VERBOSITY": "DEBUG"})
    assert environ["GRPC_VERBOSITY"] == "DEBUG", "somebody wants to see it"


def test_a_trainers_environment(caplog):
    prepare_trainer(environ := {})
    assert environ == {"GRPC_ENABLE_FORK_SUPPORT": "0"}
    assert not caplog.records
    prepare_trainer(environ := {"GRPC_ENABLE_FORK_SUPPORT": "1"})
    assert environ == {"GRPC_ENABLE_FORK_SUPPORT": "1"}, "it is the user's"
    assert "may hang" in caplog.text


def test_options_are_unique_and_servers_accept_their_clients_pings():
    keepalive = Keepalive(time=2.0, timeout=1.0)
    server, client = server_options(keepalive), client_options(keepalive)
    for options in (server, client):
        assert len(dict(options)) == len(options)
        assert dict(options)["grpc.http2.ping_timeout_ms"] == dict(options)["grpc.keepalive_timeout_ms"] == 1000
    interval = dict(server)["grpc.http2.min_ping_interval_without_data_ms"]
    assert interval <= dict(client)["grpc.keepalive_time_ms"] == 2000


@pytest.mark.parametrize(("time", "timeout"), [(0, 1), (1, 0), (-1, 5)])
def test_keepalive_needs_time(time, timeout):
    with pytest.raises(ConfigError, match="keepalive"):
        Keepalive(time, timeout)


@pytest.mark.parametrize(
    "wrong",
    [
        {"streams_per_peer": 0},
        {"streams_per_peer": 49},
        {"streams": 96},
        {"gets_per_peer": 0},
        {"gets": 80},
        {"calls": 80},
        {"idle_timeout": 0.0},
    ],
)
def test_limits_that_would_lock_others_out_are_refused(wrong):
    with pytest.raises(ConfigError, match="streams_per_peer"):
        PeerLimits(**wrong)


def test_paths_are_quoted():
    assert unix_target("/a b/%41?#/s") == "unix:/a%20b/%2541%3F%23/s"


def test_the_watchdog_cancels_what_is_awaited_too_long_and_nothing_else():
    watchdog = Watchdog(0.1)
    cancelled, relaxed, spoken = threading.Event(), threading.Event(), threading.Event()
    try:
        first = watchdog.watch(cancelled.set)
        second = watchdog.watch(relaxed.set)
        third = watchdog.watch(spoken.set)
        second.expect(0.05)
        second.relax()
        third.expect(60)
        first.expect(0.05)
        assert cancelled.wait(10)
        assert first.stalled
        assert not any((relaxed.is_set(), spoken.is_set(), second.stalled, third.stalled))
        watchdog.forget(third)
    finally:
        watchdog.close()
    assert not any(thread.name == "flashckpt-watchdog" for thread in threading.enumerate())


def test_the_watchdog_survives_a_stream_that_can_not_be_cancelled(caplog):
    watchdog, after = Watchdog(0.1), threading.Event()

    def broken():
        raise OSError("gone")

    try:
        watchdog.watch(broken).expect(0.01)
        watchdog.watch(after.set).expect(0.3)
        assert after.wait(10)
    finally:
        watchdog.close()
    assert "could not be cancelled" in caplog.text
