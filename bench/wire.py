"""Bytes on the wire of this machine's own network, which all contenders with two processes use."""

from __future__ import annotations

from pathlib import Path


def loopback_bytes() -> int:
    """Received since the machine started, headers included. What others send in the meantime counts, too."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == "lo":
            return int(counters.split()[0])
    return 0
