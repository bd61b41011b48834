"""Defines what a node runs on: an address, a link and a way to start processes. One implementation per kind."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from flashckpt.errors import ConfigError

if TYPE_CHECKING:
    from flashckpt.testing.processes import Seen

Direction = Literal["both", "out", "in"]
FIRST_HOST = 11  # the last byte of its address; two digits each, because torchrun sorts addresses as text
MAX_HOSTS = 89

_LISTENING = "0A"
_handed_out: set[int] = set()


class Host(Protocol):
    """Says what Node and Cluster need from a kind of cluster."""

    @property
    def address(self) -> str:
        """Return the address at which other nodes reach this one."""

    def rendezvous_address(self, position: int) -> str:
        """Return the address of the node at `position` in a launch; torchrun numbers nodes by these texts."""

    @property
    def interface(self) -> str: ...

    def wrap(self, argv: list[str]) -> list[str]:
        """Return the command that runs `argv` on this host, in place of itself: same pid."""

    def contains(self, seen: Seen) -> bool:
        """Return True if the process is certainly on this host. False also if the host cannot tell."""

    def free_port(self) -> int:
        """Return a TCP port on which nobody listens right now."""

    def rename(self, name: str) -> None: ...

    def cut(self, peer: Host | None, direction: Direction) -> None:
        """Drop packets; neither end gets an error."""

    def heal(self) -> None:
        """Undo every cut of this host."""

    def rate(self, mbit: float | None) -> None: ...

    def close(self) -> None: ...


class LoopbackHost:
    """Runs nodes on this machine itself. They differ by name and memory directory only."""

    interface = "lo"
    address = "127.0.0.1"

    def rendezvous_address(self, position: int) -> str:
        return f"127.0.0.{FIRST_HOST + position}"  # all of 127/8 is this machine

    def wrap(self, argv: list[str]) -> list[str]:
        return argv

    def contains(self, seen: Seen) -> bool:
        return False

    def free_port(self) -> int:
        return free_port("self")

    def rename(self, name: str) -> None:
        pass  # the machine keeps its name; FLASHCKPT_NODE_ID is the node's

    def cut(self, peer: Host | None, direction: Direction) -> None:
        raise _no_links("cut()")

    def heal(self) -> None:
        pass

    def rate(self, mbit: float | None) -> None:
        if mbit is not None:
            raise _no_links("rate()")

    def close(self) -> None:
        pass


def free_port(pid: int | str) -> int:
    """Return a port on which nobody listens in the network namespace of `pid`.

    It is below the range that the kernel gives to clients, and each port is given out only once, because a trainer
    binds it seconds later.
    """
    taken = _handed_out | _listening(f"/proc/{pid}/net/tcp") | _listening(f"/proc/{pid}/net/tcp6")
    port = secrets.choice([port for port in range(20000, 30000) if port not in taken])
    _handed_out.add(port)
    return port


def _listening(table: str) -> set[int]:
    try:
        lines = Path(table).read_text(encoding="ascii").splitlines()[1:]
    except FileNotFoundError:
        return set()  # a kernel without IPv6
    rows = [line.split() for line in lines]
    return {int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == _LISTENING}


def _no_links(what: str) -> ConfigError:
    return ConfigError(
        f"{what}: expected a cluster of kind 'netns', found 'loopback', whose nodes have no links of their own",
        hint="use kind='netns', or put a flashckpt.testing.Proxy between two sockets",
    )
