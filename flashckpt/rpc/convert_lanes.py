"""Protobuf messages ↔ the project's types, for offers of lanes. What arrives is checked here."""

from __future__ import annotations

from flashckpt.lanes.layout import TICKET_BYTES
from flashckpt.lanes.policy import MAX_LANES, Offer
from flashckpt.rpc.checks import bounded, refused
from flashckpt.v1 import peer_pb2


def to_offer(offer: Offer) -> peer_pb2.Lanes:
    return peer_pb2.Lanes(port=offer.port, tickets=offer.tickets, tls=offer.tls)


def from_offer(message: peer_pb2.Lanes) -> Offer:
    if not 0 < message.port < 1 << 16:
        raise refused("port of lanes", "1 to 65535", message.port)
    tickets = bounded(message.tickets, "tickets of lanes", MAX_LANES)
    if not tickets or any(len(one) != TICKET_BYTES for one in tickets):
        raise refused("tickets of lanes", f"one or more of {TICKET_BYTES} bytes", [len(one) for one in tickets])
    return Offer(message.port, tuple(tickets), message.tls)
