"""Decides which connection without a ticket is refused when there are more than places for them. Pure."""

from __future__ import annotations

import ipaddress
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

MAX_STRANGERS = 64
MAX_OF_NETWORK = 16
_IPV6_NETWORK_BITS = 64  # as many addresses as one host may have for itself


@dataclass(frozen=True, slots=True)
class Stranger:
    """A connection that has not shown a ticket yet."""

    network: str  # see network_of()
    since: float  # monotonic clock at its acceptance


def network_of(address: str) -> str:
    """Return the part of an address that one host can't choose freely; "" if it is no address."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return ""
    if isinstance(found, ipaddress.IPv6Address):
        if found.ipv4_mapped is None:
            return str(ipaddress.ip_network((found, _IPV6_NETWORK_BITS), strict=False))
        found = found.ipv4_mapped
    return str(found)


def whom_to_refuse(strangers: Sequence[Stranger], expected: Mapping[str, int]) -> int | None:
    """Return the index of the connection to refuse; None if all may stay. Call it after each new connection.

    `strangers`: in the order of their arrival. `expected`: how many lanes may still come from a network with the
    tickets that members there were given. These have places of their own, so that strangers elsewhere cost them none.
    Of the others each network has a share, and the oldest is refused first: a client with a ticket shows it at once.
    """
    if not strangers:
        return None
    counts = Counter(one.network for one in strangers)
    newest = strangers[-1].network
    if counts[newest] > MAX_OF_NETWORK + expected.get(newest, 0):
        return _oldest_of(strangers, newest)
    if len(strangers) <= MAX_STRANGERS + sum(expected.values()):
        return None
    return _oldest_of(strangers, max(counts, key=lambda network: counts[network] - expected.get(network, 0)))


def _oldest_of(strangers: Sequence[Stranger], network: str) -> int:
    return next(index for index, one in enumerate(strangers) if one.network == network)
