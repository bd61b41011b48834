"""Checks this node's agent, the address and port at which others reach it, its certificates, and its buddies."""

from __future__ import annotations

import socket
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from flashckpt import __version__
from flashckpt.doctor.finding import Finding, fail, ok, warn
from flashckpt.errors import ConfigError, DeniedError, FlashError, NotFoundError
from flashckpt.rpc.address import advertised_address, is_loopback, parse_address

if TYPE_CHECKING:
    from collections.abc import Iterator

    from flashckpt.config import Settings

_CONNECT_SECONDS = 2.0
_MOST_SECONDS = 20.0  # timeout for all peers together
_SOON_DAYS = 14.0


@dataclass(frozen=True, slots=True)
class AgentFacts:
    runs: bool
    version: str = ""
    status: dict[str, Any] | None = None  # the agent's answer
    problem: str = ""  # why it does not answer, or cannot be asked
    log_path: str = ""


@dataclass(frozen=True, slots=True)
class NetworkFacts:
    agent: AgentFacts
    host: str | None  # what other nodes would be told; None: see host_problem
    host_problem: str
    port: int  # 0: any
    port_problem: str  # why it cannot be bound; "" = it can, or the agent has it
    tls: tuple[str, str, str] | None  # the operator's files
    tls_problem: str
    tls_days: float | None  # until the first certificate expires
    unreachable: dict[str, str]  # of the agent's peers: node → why no connection could be made from here


def look_at_network(settings: Settings, timeout: float = 2.0) -> NetworkFacts:
    agent = _look_at_agent(settings, timeout)
    try:
        host, host_problem = advertised_address(settings.advertise, all_local=False), ""
    except ConfigError as error:
        host, host_problem = None, error.message
    tls_problem, tls_days = _look_at_certificates(settings)
    listens = agent.status is not None and bool(agent.status["address"])
    return NetworkFacts(
        agent=agent,
        host=host,
        host_problem=host_problem,
        port=settings.port,
        port_problem="" if listens or not settings.port else _try_port(settings.port),
        tls=settings.tls_files,
        tls_problem=tls_problem,
        tls_days=tls_days,
        unreachable=_try_peers(agent.status),
    )


def judge_network(facts: NetworkFacts) -> Iterator[Finding]:
    yield from _agent(facts.agent)
    yield _address(facts)
    yield _port(facts)
    yield _certificates(facts)
    if facts.agent.status is not None:
        yield from _peers(facts.agent.status, facts.unreachable)


def _agent(facts: AgentFacts) -> Iterator[Finding]:
    if not facts.runs:
        if facts.problem:
            yield fail("agent.runs", facts.problem, "look at the directory, or name the job with --job")
        else:
            yield ok("agent.runs", "none runs; the first trainer starts it")
        return
    if facts.status is None:
        advice = f"look at {facts.log_path}; `flashckpt agent stop --kill` ends it, and nothing that is sealed is lost"
        yield fail("agent.runs", f"it does not answer: {facts.problem}", advice)
    else:
        yield ok("agent.runs", f"pid {facts.status['pid']}, node {facts.status['node']}")
    if facts.version != __version__:
        advice = "`flashckpt agent stop`: the next trainer starts one of this version"
        yield fail("agent.version", f"it is {facts.version}, this is {__version__}", advice)
    else:
        yield ok("agent.version", facts.version)
    status = facts.status or {}
    if status.get("fenced"):
        advice = "its trainers are left over: end them"
        yield warn("agent.launch", "a newer launch of the job has taken over from this node's", advice)
    persist = status.get("persist") or {}
    if persist.get("problem"):
        advice = "it is tried again automatically; look at persist_dir on this node"
        yield warn("agent.flush", f"the last flush failed: {persist['problem']}", advice)


def _address(facts: NetworkFacts) -> Finding:
    if facts.host is None:
        advice = "on one node there is nothing to do; else set FLASHCKPT_ADVERTISE to an address or interface"
        return warn("network.address", facts.host_problem, advice)
    if is_loopback(facts.host):
        return warn("network.address", f"{facts.host} is a loopback address", "set FLASHCKPT_ADVERTISE")
    return ok("network.address", facts.host)


def _port(facts: NetworkFacts) -> Finding:
    if not facts.port:
        return ok("network.port", "any free one")
    if facts.port_problem:
        advice = "end the process that has it, or set FLASHCKPT_PORT to another one or 0"
        return fail("network.port", f"port {facts.port}: {facts.port_problem}", advice)
    return ok("network.port", f"port {facts.port}")


def _certificates(facts: NetworkFacts) -> Finding:
    if facts.tls_problem:
        return fail("network.certificates", facts.tls_problem, "docs/operations.md says what they have to look like")
    if facts.tls is None:
        return ok("network.certificates", "each launch makes its own")
    days = facts.tls_days if facts.tls_days is not None else 0.0
    found = f"{facts.tls[0]}: valid for {days:.0f} more days"
    if days < _SOON_DAYS:
        return warn("network.certificates", found, "renew them before the job is restarted")
    return ok("network.certificates", found)


def _peers(status: dict[str, Any], unreachable: dict[str, str]) -> Iterator[Finding]:
    peers = status["peers"]
    if not peers:
        return
    for one in peers:
        name = f"{one['node']} at {one['address']}"
        if one["node"] in unreachable:
            advice = "look at that node, and at firewalls between the two"
            yield fail("network.peers", f"{name}: {unreachable[one['node']]}", advice)
        elif one["state"] != "up":
            silent = "" if one["silent_seconds"] is None else f" for {one['silent_seconds']:.0f} s"
            advice = "look at that node's agent (flashckpt status there)"
            yield warn("network.peers", f"{name} is {one['state']}{silent}: {one['problem']}", advice)
    asked, effective = status["replicas"]["asked"], status["replicas"]["effective"]
    if effective < asked:
        found = f"{effective} of {asked} copies: {status['placement']}"
        yield warn("network.replicas", found, "add nodes, or ask for fewer")
    elif not unreachable and all(one["state"] == "up" for one in peers):
        yield ok("network.peers", f"all {len(peers)} other nodes answer")


def _look_at_agent(settings: Settings, timeout: float) -> AgentFacts:
    from flashckpt.agent.start import look

    try:
        seen = look(settings.memory_dir, settings.job, timeout)
    except NotFoundError:
        return AgentFacts(runs=False)
    except (FlashError, OSError) as error:
        return AgentFacts(runs=False, problem=error.message if isinstance(error, FlashError) else str(error))
    if seen is None:
        return AgentFacts(runs=False)
    return AgentFacts(True, seen.holder.version, seen.status, seen.problem, seen.log_path)


def _look_at_certificates(settings: Settings) -> tuple[str, float | None]:
    """Return (what is wrong, days until the first certificate expires)."""
    if settings.tls_files is None:
        return "", None
    from cryptography import x509

    from flashckpt.rpc.credentials import identity, load_operator_bundle

    try:
        bundle = load_operator_bundle(*settings.tls_files)
        found = identity(bundle.certificate_pem)
    except (ConfigError, DeniedError) as error:
        return error.message, None
    if (found.job, found.node_id) != (settings.job, settings.node_id):
        expected = f"job {settings.job!r}, node {settings.node_id!r}"
        return f"{settings.tls_files[0]}: expected {expected}, found job {found.job!r}, node {found.node_id!r}", None
    every = [x509.load_pem_x509_certificate(bundle.certificate_pem), *x509.load_pem_x509_certificates(bundle.ca_pem)]
    first = min(one.not_valid_after_utc for one in every)
    return "", (first - datetime.now(UTC)).total_seconds() / 86_400


def _try_port(port: int) -> str:
    for family, host in ((socket.AF_INET6, "::"), (socket.AF_INET, "0.0.0.0")):
        try:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((host, port))
                return ""
        except OSError as error:
            if family == socket.AF_INET:
                return error.strerror or str(error)
    return ""


def _try_peers(status: dict[str, Any] | None) -> dict[str, str]:
    """Connect to each peer. This says more than the agent, which may have heard from a node that it cannot call."""
    found: dict[str, str] = {}
    deadline = time.monotonic() + _MOST_SECONDS
    for one in status["peers"] if status is not None else ():
        left = deadline - time.monotonic()
        if left <= 0:
            break
        try:
            socket.create_connection(parse_address(one["address"]), min(_CONNECT_SECONDS, left)).close()
        except (OSError, ConfigError) as error:
            found[one["node"]] = str(error)
    return found
