"""Runs several nodes on one machine, to test what happens when machines, links and processes fail."""

from __future__ import annotations

import atexit
import contextlib
import secrets
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from flashckpt.errors import ClosedError, ConfigError
from flashckpt.testing import netns, places
from flashckpt.testing.check import find_problems
from flashckpt.testing.host import MAX_HOSTS, LoopbackHost
from flashckpt.testing.launch import LAUNCH_MARK, Launch
from flashckpt.testing.node import Node
from flashckpt.testing.torchrun import Rendezvous
from flashckpt.testing.trainers import Trainers

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

    from flashckpt.testing.host import Host

Kind = Literal["loopback", "netns"]
_NETNS_MEMORY_BYTES = 1 << 30
_CHECK_SECONDS = 0.05


class Cluster:
    """Runs several nodes. A context manager: when it ends, for whatever reason, everything that was started in it is
    gone.

    `loopback`: nodes differ by `FLASHCKPT_NODE_ID` and `FLASHCKPT_MEMORY_DIR` only; any user can run it.
    `netns`: each node has its own network (address, link that can be cut and limited), host name and tmpfs of
    `memory_bytes`; this needs root. See `Cluster.available`.
    """

    def __init__(
        self,
        nodes: int = 2,
        kind: Kind = "loopback",
        *,
        ranks_per_node: int | Sequence[int] = 1,
        domains: Sequence[str] | None = None,
        memory_bytes: int | None = None,
        rate_mbit: float | None = None,
        job: str = "cluster",
        memory_root: Path = places.MEMORY_ROOT,
    ) -> None:
        """`memory_bytes` gives each node a tmpfs of that size (needs root); without it, loopback nodes share
        `memory_root`.
        """
        if not 1 <= nodes <= MAX_HOSTS:
            raise ConfigError(f"nodes: expected 1 to {MAX_HOSTS}, found {nodes}")
        self.ranks_per_node = [ranks_per_node] * nodes if isinstance(ranks_per_node, int) else list(ranks_per_node)
        for name, given in (("ranks_per_node", self.ranks_per_node), ("domains", domains)):
            if given is not None and len(given) != nodes:
                raise ConfigError(f"{name}: expected one for each of {nodes} nodes, found {len(given)}")
        if min(self.ranks_per_node) < 1:
            raise ConfigError(f"ranks_per_node: expected at least 1 each, found {self.ranks_per_node}")
        if kind not in ("loopback", "netns"):
            raise ConfigError(f"kind: expected loopback or netns, found {kind!r}")
        if memory_bytes is not None and memory_bytes < 1 << 20:
            raise ConfigError(f"memory_bytes: expected at least a MiB for each node, found {memory_bytes}")
        self.kind: Kind = kind
        self.job = job
        self.nodes: list[Node] = []
        self.launches: list[Launch] = []
        self.scratch = Path()
        self._count = nodes
        self._domains = [""] * nodes if domains is None else list(domains)
        self._memory_bytes = _NETNS_MEMORY_BYTES if memory_bytes is None and kind == "netns" else memory_bytes
        self._rate_mbit = rate_mbit
        self._memory_root = memory_root
        self._cleanup = contextlib.ExitStack()
        self._is_up = False

    @staticmethod
    def available(kind: Kind) -> str:
        """Return why a cluster of this kind cannot run here; "" if it can."""
        return netns.unavailable() if kind == "netns" else ""

    def __enter__(self) -> Cluster:
        self.start_nodes()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getitem__(self, index: int) -> Node:
        return self.nodes[index]

    def __len__(self) -> int:
        return self._count

    def start_nodes(self) -> None:
        """Do what entering the `with` block does. Also removes what crashed runs left behind."""
        if self._is_up:
            raise ConfigError("cluster: expected one that is down, found one that is up")
        reason = self.available("netns" if self._memory_bytes is not None else self.kind)
        if reason:
            raise ConfigError(
                f"cluster of kind {self.kind!r}"
                + (f" with memory_bytes={self._memory_bytes}" if self._memory_bytes is not None else "")
                + f": {reason}",
                hint="kind='loopback' without memory_bytes runs everywhere",
            )
        places.sweep(self._memory_root)
        self._is_up = True
        atexit.register(self.close)  # also if the block is never left
        try:
            self._set_up()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Kill all processes, unmount, delete. May be called twice."""
        if not self._is_up:
            return
        atexit.unregister(self.close)
        self._is_up = False
        # Every step runs, also after one that raised or was interrupted; the error is raised at the end.
        self._cleanup.close()
        self.nodes, self.launches = [], []

    def _set_up(self) -> None:
        undo = self._cleanup.callback
        memory = places.make(self._memory_root)
        undo(places.remove, memory)
        self.scratch = places.make(places.scratch_root())
        undo(places.remove, self.scratch)
        plug = self._network()
        for index in range(self._count):
            place = memory / f"node{index}"
            place.mkdir(mode=0o700)
            if self._memory_bytes is not None:
                _mount(place, self._memory_bytes)
            node = Node(
                index=index,
                name=f"node{index}",
                job=self.job,
                domain=self._domains[index],
                ranks=self.ranks_per_node[index],
                place=place,
                scratch=self.scratch,
            )
            node.host = plug(index, node.name)
            undo(node.host.close)
            node.host.rate(self._rate_mbit)
            self.nodes.append(node)
            undo(node.kill)

    def _network(self) -> Callable[[int, str], Host]:
        if self.kind == "loopback":
            return lambda *_: LoopbackHost()
        switch = netns.Switch()
        self._cleanup.callback(switch.close)
        return switch.plug

    # --- launching ------------------------------------------------------------------------------------------

    def torchrun(
        self,
        script: str | Path,
        *arguments: str,
        nodes: int | Sequence[Node] | None = None,
        nproc_per_node: int | Sequence[int] | None = None,
        max_restarts: int = 0,
        elastic: tuple[int, int] | None = None,
        join: Launch | None = None,
        endpoint: str = "",
        environment: Mapping[str, str] | None = None,
    ) -> Launch:
        """Start a real torchrun on each node; ranks are numbered in the order of the nodes. Does not wait.

        `nodes`: all nodes by default, a number of them from the first, or a list. `nproc_per_node`: the cluster's by
        default. `script` is a file, or `-m` with the module as first argument. `elastic`: the fewest and the most nodes
        that the launch may have. `join`: the elastic launch that these nodes join. `endpoint`: host:port of a
        rendezvous that another process runs; by default the first node runs it.
        """
        nodes, counts = self._who(nodes, nproc_per_node)
        mark = secrets.token_hex(8) if join is None else join.mark
        taken = 0 if join is None else len(join.nodes)
        addresses = [node.host.rendezvous_address(taken + position) for position, node in enumerate(nodes)]
        if addresses != sorted(addresses):
            raise ConfigError(
                f"nodes: expected them in the order of their addresses, found {addresses}",
                hint="torchrun numbers nodes by address; kind='loopback' gives them any order",
            )
        is_ours = join is None and not endpoint
        if join is not None:
            endpoint = join.endpoint
        elif is_ours:
            endpoint = f"{addresses[0]}:{nodes[0].host.free_port()}"
        fewest, most = elastic or (len(nodes), len(nodes))
        rendezvous = Rendezvous(mark, endpoint, fewest, most, max_restarts)
        marked = {**rendezvous.environment, **(environment or {}), LAUNCH_MARK: mark}
        started = []
        for position, (node, count) in enumerate(zip(nodes, counts, strict=True)):
            argv = rendezvous.command(
                addresses[position], count, (str(script), *arguments), is_host=is_ours and position == 0
            )
            started.append(node.start(argv, environment=marked, what=f"torchrun on {node.name}"))
        launch = self._launched(mark, nodes, counts, started)
        launch.endpoint, launch.is_elastic = endpoint, rendezvous.is_elastic
        return launch

    def start(
        self,
        argv: Sequence[str],
        *,
        nodes: int | Sequence[Node] | None = None,
        nproc_per_node: int | Sequence[int] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> Launch:
        """Start the ranks as torchrun would, but directly, which is several seconds quicker. Does not wait."""
        nodes, counts = self._who(nodes, nproc_per_node)
        mark = secrets.token_hex(8)
        common = {
            **(environment or {}),
            LAUNCH_MARK: mark,
            "WORLD_SIZE": str(sum(counts)),
            "MASTER_ADDR": nodes[0].host.address,
            "MASTER_PORT": str(nodes[0].host.free_port()),
        }
        started = []
        for position, (node, count) in enumerate(zip(nodes, counts, strict=True)):
            for local_rank in range(count):
                rank = sum(counts[:position]) + local_rank
                variables = {
                    **common,
                    "RANK": str(rank),
                    "LOCAL_RANK": str(local_rank),
                    "LOCAL_WORLD_SIZE": str(count),
                    "GROUP_RANK": str(position),
                }
                started.append(node.start(argv, environment=variables, what=f"rank {rank} on {node.name}"))
        return self._launched(mark, nodes, counts, started)

    def trainers(
        self,
        *,
        launcher: Literal["direct", "torchrun"] = "direct",
        config: Mapping[str, Any] | None = None,
        mebibytes: float = 1.0,
        nodes: int | Sequence[Node] | None = None,
        nproc_per_node: int | Sequence[int] | None = None,
        environment: Mapping[str, str] | None = None,
        max_restarts: int = 0,
    ) -> Trainers:
        """Start the ranks of flashckpt.testing.trainer, which save and load on command. Does not wait."""
        directory = self.scratch / f"trainers-{secrets.token_hex(4)}"
        arguments = Trainers.prepare(directory, config or {}, mebibytes)
        module = ["-m", "flashckpt.testing.trainer", *arguments]
        if launcher == "torchrun":
            launch = self.torchrun(
                *module,
                nodes=nodes,
                nproc_per_node=nproc_per_node,
                max_restarts=max_restarts,
                environment=environment,
            )
        else:
            argv = [sys.executable, *module]
            launch = self.start(argv, nodes=nodes, nproc_per_node=nproc_per_node, environment=environment)
        return Trainers(launch, directory)

    def _who(
        self, nodes: int | Sequence[Node] | None, nproc_per_node: int | Sequence[int] | None
    ) -> tuple[list[Node], list[int]]:
        if not self._is_up:
            raise ClosedError("cluster: used outside of its `with` block")
        if isinstance(nodes, int) and not 1 <= nodes <= len(self.nodes):
            raise ConfigError(f"nodes: expected 1 to {len(self.nodes)} of them, found {nodes}")
        # None as the end of a slice means all nodes.
        chosen = self.nodes[:nodes] if nodes is None or isinstance(nodes, int) else list(nodes)
        if nproc_per_node is None:
            counts = [node.ranks for node in chosen]
        elif isinstance(nproc_per_node, int):
            counts = [nproc_per_node] * len(chosen)
        else:
            counts = list(nproc_per_node)
        if not chosen or len(counts) != len(chosen) or min(counts) < 1:
            raise ConfigError(f"expected a number of ranks for each of {len(chosen)} nodes, found {counts}")
        return chosen, counts

    def _launched(self, mark: str, nodes: list[Node], counts: list[int], started: list[Any]) -> Launch:
        owners = [node for node, count in zip(nodes, counts, strict=True) for _ in range(count)]
        launch = Launch(mark, nodes, started, owners)
        self.launches.append(launch)
        return launch

    # --- looking --------------------------------------------------------------------------------------------

    def check(self, *, timeout: float = 0.0) -> list[str]:
        """Return what should never be, on any node, in words; empty if all is well. Call it when nothing moves.

        With `timeout` it checks again until all is well or the time is over: for what is still being finished.
        """
        deadline = time.monotonic() + timeout
        while True:
            memory = {node.name: node.memory_dir for node in self.nodes}
            wiped = {name: when for node in self.nodes for name, when in node.wiped.items()}
            problems = find_problems(self.job, memory, self._owners_by_world(), wiped)
            for node in self.nodes:
                problems += [f"{node.name}: process {pid} was left behind" for pid in node.leftovers()]
            if not problems or time.monotonic() >= deadline:
                return problems
            time.sleep(_CHECK_SECONDS)

    def _owners_by_world(self) -> dict[int, tuple[str, ...]]:
        """Return the names of the nodes that ranks ran on, if all launches of the same world agree on that."""
        if any(launch.is_elastic for launch in self.launches):
            return {}
        layouts: dict[int, set[tuple[str, ...]]] = {}
        for launch in self.launches:
            layouts.setdefault(launch.world, set()).add(tuple(node.name for node in launch.owners))
        return {world: next(iter(found)) for world, found in layouts.items() if len(found) == 1}


def _mount(place: Path, size_bytes: int) -> None:
    options = f"size={size_bytes},mode=0700"
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise ConfigError(f"tmpfs of {size_bytes} bytes at {place}: expected to mount it, found {done.stderr.strip()}")
