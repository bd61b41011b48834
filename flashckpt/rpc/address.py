"""Chooses the address by which other nodes reach this one. Never a loopback one by accident."""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flashckpt.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

_SIOCGIFADDR, _SIOCGIFFLAGS = 0x8915, 0x8913
_IFF_UP = 1
_IFA_F_UNUSABLE = 0x48  # another machine has it too, or the kernel does not know yet


@dataclass(frozen=True, slots=True)
class Candidate:
    """An address of this machine."""

    interface: str
    host: str  # numeric


def advertised_address(configured: str | None, *, all_local: bool) -> str:
    """Return the numeric host to tell other nodes. `all_local`: they are all on this machine, in this network
    namespace."""
    rendezvous = os.environ.get("MASTER_ADDR", "")
    host, _ = choose(
        local_candidates(),
        configured,
        resolved=_resolve(configured) if configured else None,
        towards_rendezvous=source_towards(rendezvous) if rendezvous else None,
        all_local=all_local,
    )
    return host


def choose(
    candidates: Sequence[Candidate],
    configured: str | None,
    *,
    resolved: str | None,
    towards_rendezvous: str | None,
    all_local: bool,
) -> tuple[str, str]:
    """Return the host and the reason for it. Pure.

    `resolved` is what the configured name resolves to, `towards_rendezvous` the own address on the route to the
    rendezvous host.
    """
    if configured:
        named = [one.host for one in candidates if one.interface == configured]
        host = _best(named) if named else resolved
        if host is None:
            known = ", ".join(sorted({one.interface for one in candidates}))
            raise ConfigError(
                f"advertise: expected a host, an address or an interface ({known}), found {configured!r}",
                hint="set FLASHCKPT_ADVERTISE to an address by which other nodes reach this one",
            )
        if ipaddress.ip_address(host).is_unspecified or ipaddress.ip_address(host).is_multicast:
            raise ConfigError(
                f"advertise: expected the address of one machine, found {configured!r}",
                hint="the agent listens on all interfaces by itself; other nodes need one address to call",
            )
        if is_loopback(host) and not all_local:
            raise ConfigError(
                f"advertise: {configured!r} is {host}, which other machines can't reach",
                hint="set FLASHCKPT_ADVERTISE to an address or interface that they can",
            )
        return host, "configured"
    if all_local:
        loopback = _best([one.host for one in candidates if is_loopback(one.host)])
        return loopback or "127.0.0.1", "all nodes are on this machine"
    # A link-local one would need the name of the other machine's interface.
    if towards_rendezvous and not is_loopback(towards_rendezvous) and "%" not in towards_rendezvous:
        return towards_rendezvous, "it reaches the rendezvous host"
    best = _best([one.host for one in candidates if not is_loopback(one.host)])
    if best is None:
        raise ConfigError(
            "expected an address by which other nodes reach this one, found none but loopback",
            hint="set FLASHCKPT_ADVERTISE to a host, an address or an interface",
        )
    return best, "the first address that is not a loopback one"


def format_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def parse_address(text: str) -> tuple[str, int]:
    """Return host and port of what format_address() made. Raise ConfigError for anything else."""
    host, colon, port = text.rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    bracketed = bare != host
    is_number = port.isascii() and port.isdecimal() and len(port) <= 5
    if not colon or not bare or (":" in bare) != bracketed or not is_number or int(port) >= 1 << 16:
        raise ConfigError(f"address: expected host:port or [host]:port, found {text!r}")
    return bare, int(port)


def is_loopback(host: str) -> bool:
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host == "localhost"
    mapped = getattr(address, "ipv4_mapped", None)
    return address.is_loopback or (mapped is not None and mapped.is_loopback)


def source_towards(host: str) -> str | None:
    """Return this machine's address on the route to `host`; None if there is no route or no such host. Sends
    nothing."""
    for family, target in _lookup(host):
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(target)
                return str(probe.getsockname()[0])
        except OSError:
            continue  # for example an IPv6 address to which there is no route
    return None


def local_candidates() -> list[Candidate]:
    """Return the addresses of the interfaces that are up, IPv4 first; those on the default route before e.g. container
    bridges."""
    outward = _default_interfaces()
    return sorted([*_ipv4(), *_ipv6()], key=lambda one: (":" in one.host, one.interface not in outward))


def _best(hosts: Sequence[str]) -> str | None:
    """Return the first of the best kind: IPv4 before IPv6, link-local and loopback ones last."""

    def order(host: str) -> tuple[bool, bool, bool]:
        address = ipaddress.ip_address(host)
        return is_loopback(host), address.is_link_local, address.version == 6

    return min(hosts, key=order, default=None)


def _resolve(name: str) -> str | None:
    return _best([host for _, (host, *_) in _lookup(name) if "%" not in host])


def _lookup(name: str) -> list[tuple[int, tuple[str, int]]]:
    try:
        found = socket.getaddrinfo(name, 9, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError, ValueError):  # no such host, or a text that can't be a host's name
        return []
    return [(family, target) for family, _, _, _, target in found]  # type: ignore[misc]


def _ipv4() -> list[Candidate]:
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, interface in socket.if_nameindex():
            try:
                flags = struct.unpack_from("H", _ask(probe, _SIOCGIFFLAGS, interface), 16)[0]
                address = socket.inet_ntoa(_ask(probe, _SIOCGIFADDR, interface)[20:24])
            except OSError:
                continue  # it has none, or has just lost it
            if flags & _IFF_UP:
                found.append(Candidate(interface, address))
    return found


def _ask(probe: socket.socket, request: int, interface: str) -> bytes:
    return fcntl.ioctl(probe.fileno(), request, struct.pack("256s", os.fsencode(interface)[:15]))


def _ipv6() -> list[Candidate]:
    """Return the addresses that the kernel lists for interfaces that are up, without link-local ones: they have no
    meaning on another machine."""
    found = []
    for digits, _, _, _, flags, interface in _table("/proc/net/if_inet6", columns=6):
        address = ipaddress.IPv6Address(bytes.fromhex(digits))
        if not address.is_link_local and not int(flags, 16) & _IFA_F_UNUSABLE:
            found.append(Candidate(interface, str(address)))
    return found


def _default_interfaces() -> set[str]:
    found = {row[0] for row in _table("/proc/net/route", columns=11) if row[1] == row[7] == "00000000"}
    for row in _table("/proc/net/ipv6_route", columns=10):
        if row[0] == "0" * 32 and row[1] == "00":
            found.add(row[9])
    return found - {"lo"}  # the kernel keeps its "unreachable" for ::/0 there


def _table(path: str, columns: int) -> list[list[str]]:
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            rows = [line.split() for line in file]
    except OSError:
        return []  # no IPv6
    return [row for row in rows if len(row) == columns]
