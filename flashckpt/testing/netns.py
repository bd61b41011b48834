"""Gives nodes a network of their own: a network and host-name namespace each, on a bridge in a separate namespace.

    switch ── bridge ─┬─ port0 ═ veth ═ eth0 ── node 0   10.77.0.11, fd77::11
                      └─ port1 ═ veth ═ eth0 ── node 1   10.77.0.12, fd77::12

The bridge is not in the machine's own network, so nothing there can collide with it, and two clusters do not see
each other. No namespace has a name. Each lives as long as its keeper (a process that waits for the end of a pipe
that we hold) or another process in it. When we die, even by SIGKILL, the keepers end, and the kernel removes links,
bridge and rates with the namespaces.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
from typing import TYPE_CHECKING

from flashckpt.errors import ConfigError, InternalError
from flashckpt.testing import processes
from flashckpt.testing.host import FIRST_HOST, Direction, Host, free_port

if TYPE_CHECKING:
    from flashckpt.testing.processes import Seen

_TOOLS = ("ip", "tc", "unshare", "nsenter", "mount", "umount")
_BRIDGE = "switch0"
# No node has this hardware address: frames to it reach no one.
_NOWHERE = "02:00:00:00:00:00"
_TRIAL = f"""
ip link add name {_BRIDGE} type bridge && ip link add name a type veth peer name b &&
ip link set dev a master {_BRIDGE} && tc qdisc add dev a root tbf rate 1mbit burst 64kb latency 50ms &&
mount -t tmpfs tmpfs /mnt
"""


@functools.cache
def unavailable() -> str:
    """Return why this machine cannot have such nodes; "" if it can. Makes one as a trial, and leaves nothing behind."""
    if os.geteuid() != 0:
        return f"network namespaces need root, found uid {os.geteuid()}"
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing:
        return f"expected the tools of iproute2 and util-linux, found no {', '.join(missing)}"
    trial = subprocess.run(
        ["unshare", "--net", "--uts", "--mount", "sh", "-c", _TRIAL], capture_output=True, text=True, check=False
    )
    return "" if trial.returncode == 0 else f"the kernel or container refuses: {trial.stderr.strip()}"


class Namespace:
    """Holds a network and host-name namespace that ends with this object, or with this process."""

    def __init__(self, name: str) -> None:
        script = 'hostname "$0" && echo ready && exec cat'
        self._keeper = subprocess.Popen(
            ["unshare", "--net", "--uts", "sh", "-c", script, name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for us; the keeper ends last
        )
        self.pid = self._keeper.pid
        output = self._keeper.stdout
        if output is None or output.readline() != b"ready\n":
            self.close()
            raise ConfigError(f"namespace of {name}: expected it to start, found that unshare failed")
        self.network = processes.network_of(self.pid)

    def wrap(self, argv: list[str]) -> list[str]:
        return ["nsenter", f"--target={self.pid}", "--net", "--uts", "--", *argv]

    def ip(self, *lines: str) -> None:
        """Run commands of `ip` in one process; the first that fails raises."""
        self._do(["ip", "-batch", "-"], "\n".join(lines) + "\n")

    def tc(self, line: str) -> None:
        self._do(["tc", *line.split()], "")

    def hostname(self, name: str) -> None:
        self._do(["hostname", name], "")

    def close(self) -> None:
        """End the namespace. May be called twice."""
        for pipe in (self._keeper.stdin, self._keeper.stdout):
            if pipe is not None:
                pipe.close()
        self._keeper.kill()
        self._keeper.wait()

    def _do(self, argv: list[str], lines: str) -> None:
        done = subprocess.run(self.wrap(argv), input=lines, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise InternalError(f"{' '.join(argv)} {lines.strip()}: expected success, found {done.stderr.strip()}")


class Switch:
    """Runs the bridge that connects all nodes of one cluster."""

    def __init__(self) -> None:
        self.namespace = Namespace("switch")
        try:
            self.namespace.ip(
                f"link add name {_BRIDGE} type bridge stp_state 0 forward_delay 0",
                f"link set dev {_BRIDGE} up",
                "link set dev lo up",
            )
        except BaseException:
            self.close()
            raise

    def plug(self, index: int, name: str) -> NetnsHost:
        return NetnsHost(self, index, name)

    def close(self) -> None:
        self.namespace.close()


class NetnsHost:
    """Runs a host-name and a network namespace with one link to the switch."""

    interface = "eth0"

    def __init__(self, switch: Switch, index: int, name: str) -> None:
        number = FIRST_HOST + index
        self.address = f"10.77.0.{number}"
        self.address6 = f"fd77::{number}"
        self._switch = switch
        self._port = f"port{index}"
        self._namespace = Namespace(name)
        self._blind: set[str] = set()  # addresses to which packets from here are lost
        self._blinded: list[NetnsHost] = []  # peers that cannot send to us because of a cut
        self._rated = False
        try:
            switch.namespace.ip(
                f"link add name {self._port} type veth peer name eth0 netns {self._namespace.pid}",
                f"link set dev {self._port} master {_BRIDGE} up",
            )
            self._namespace.ip(
                f"addr add {self.address}/24 dev eth0",
                f"addr add {self.address6}/64 dev eth0 nodad",
                "link set dev lo up",
                "link set dev eth0 up",
            )
        except BaseException:
            self.close()
            raise

    def rendezvous_address(self, position: int) -> str:
        return self.address

    def wrap(self, argv: list[str]) -> list[str]:
        return self._namespace.wrap(argv)

    def contains(self, seen: Seen) -> bool:
        return seen.network == self._namespace.network and seen.pid != self._namespace.pid

    def free_port(self) -> int:
        return free_port(self._namespace.pid)

    def rename(self, name: str) -> None:
        self._namespace.hostname(name)

    def cut(self, peer: Host | None, direction: Direction) -> None:
        if peer is None:
            if direction != "both":
                raise ConfigError(
                    f"cut: expected a peer for direction {direction!r}, found none", hint="a whole link goes both ways"
                )
            # Taken out of the switch while the carrier stays: nothing at either end notices.
            self._switch.namespace.ip(f"link set dev {self._port} nomaster")
            return
        if not isinstance(peer, NetnsHost) or peer is self or peer._switch is not self._switch:
            raise ConfigError("cut: expected another node of the same cluster")
        if direction in ("both", "out"):
            self._lose_the_way_to(peer)
        if direction in ("both", "in"):
            peer._lose_the_way_to(self)
            self._blinded.append(peer)

    def heal(self) -> None:
        self._switch.namespace.ip(f"link set dev {self._port} master {_BRIDGE}")
        while self._blinded:
            self._blinded.pop()._find_the_way_to(self)
        for address in list(self._blind):
            self._forget(address)

    def rate(self, mbit: float | None) -> None:
        """Limit each direction."""
        for namespace, device in ((self._namespace, "eth0"), (self._switch.namespace, self._port)):
            if mbit is None:
                if self._rated:
                    namespace.tc(f"qdisc del dev {device} root")
                continue
            # A bucket smaller than what arrives between two ticks of a slow clock would never give the full rate.
            burst_kb = max(64, int(mbit * 1000 / 8 / 100))
            namespace.tc(f"qdisc replace dev {device} root tbf rate {mbit}mbit burst {burst_kb}kb latency 50ms")
        self._rated = mbit is not None

    def close(self) -> None:
        self._namespace.close()

    def _lose_the_way_to(self, peer: NetnsHost) -> None:
        for address in (peer.address, peer.address6):
            self._namespace.ip(f"neigh replace {address} lladdr {_NOWHERE} dev eth0 nud permanent")
            self._blind.add(address)

    def _find_the_way_to(self, peer: NetnsHost) -> None:
        for address in (peer.address, peer.address6):
            self._forget(address)

    def _forget(self, address: str) -> None:
        if address in self._blind:
            self._namespace.ip(f"neigh del {address} dev eth0")
            self._blind.discard(address)
