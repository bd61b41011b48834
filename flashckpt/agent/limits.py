"""The times that an agent goes by."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Times in seconds."""

    beat: float = 1.0  # between two messages to a node that has to hear from us
    retry_first: float = 0.1  # before a failed push is tried again; doubles
    retry_most: float = 5.0
    peer_timeout: float = 10.0  # a node that was not heard from for so long is called down
    pushes_per_node: int = 2  # at once
