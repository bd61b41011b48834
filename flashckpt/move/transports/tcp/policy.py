"""Decides whether chunks are sent by lanes, and how. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from flashckpt.errors import ConfigError
from flashckpt.types import MAX_LANES, TRANSPORTS

# Opening lanes costs two round trips; so few bytes arrive as soon by the call itself.
SMALLEST_BYTES = 1 << 20


def usual_count(cores: int) -> int:
    """Return the number of lanes per transfer if none is configured.

    A connection keeps a core busy at each end; on two cores a second one made a transfer over loopback a tenth slower,
    and took half as much CPU time again.
    """
    return 2 if cores >= 4 else 1


@dataclass(frozen=True, slots=True)
class LanePolicy:
    """One node's policy for lanes. Each end of a transfer follows its own."""

    transport: str = "auto"  # "tcp": only lanes; "grpc": no lanes; "auto": lanes if they can be opened
    tls: bool = False  # lanes without TLS are neither offered nor opened
    count: int = 2  # lanes per transfer

    def __post_init__(self) -> None:
        if self.transport not in TRANSPORTS:
            raise ConfigError(f"transport: expected one of {TRANSPORTS}, found {self.transport!r}")
        if not 1 <= self.count <= MAX_LANES:
            raise ConfigError(f"lanes: expected 1 to {MAX_LANES}, found {self.count!r}")

    def wanted(self, size_bytes: int) -> int:
        """Return how many lanes to ask for, for so many bytes."""
        if self.transport == "grpc" or (self.transport == "auto" and size_bytes < SMALLEST_BYTES):
            return 0
        return self.count

    def offered(self, wanted: int) -> int:
        """Return how many lanes to accept if another node wants some."""
        return 0 if self.transport == "grpc" else min(wanted, MAX_LANES)

    def why_not(self, offer: Offer | None) -> str:
        """Return why lanes can't be used as they are offered; "" = they can."""
        if offer is None:
            return "the other node offers none"
        if self.tls and not offer.tls:
            return "the other node offers them without TLS, which this one's settings ask for"
        return ""


@dataclass(frozen=True, slots=True)
class Offer:
    """The port for the lanes of one transfer, and the ticket that each has to show."""

    port: int
    tickets: tuple[bytes, ...]
    tls: bool

    def __repr__(self) -> str:
        return f"Offer(port={self.port}, tls={self.tls}, {len(self.tickets)} tickets)"
