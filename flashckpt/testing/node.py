"""Runs one node of a cluster: its processes, its memory, and the faults that a test can cause there."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import flashckpt
from flashckpt.agent.lock import AgentLock
from flashckpt.errors import ConfigError, DeadlineError, NotFoundError
from flashckpt.store.directory import open_directory
from flashckpt.testing import processes
from flashckpt.testing.launch import Process

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import IO

    from flashckpt.testing.host import Direction, Host

Which = Literal["all", "agent", "trainers"]
_STOP_TIMEOUT = 10.0
# Variables of the outer process, which may be a trainer itself.
_NOT_INHERITED = (
    *("FLASHCKPT_", "TORCHELASTIC_", "GLOO_", "SLURM_", "LSB_", "PBS_"),
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "MASTER_"),
)


class Node:
    """Runs one node; Cluster makes it. Its name, memory and link change over time; its place in the cluster (`index`)
    does not.
    """

    def __init__(self, *, index: int, name: str, job: str, domain: str, ranks: int, place: Path, scratch: Path) -> None:
        self.index = index
        self.name = name
        self.job = job
        self.domain = domain
        self.ranks = ranks  # ranks per launch, unless the launch says otherwise
        self.wiped: dict[str, int] = {}  # when its memory was lost, in milliseconds since 1970, by the name it had
        self.memory_dir = str(place / "memory")
        self._scratch = scratch
        self._started: list[Process] = []
        self._extra: dict[str, str] = {}
        self.host: Host

    def __repr__(self) -> str:
        return f"<Node {self.index} {self.name!r} at {self.address}>"

    @property
    def address(self) -> str:
        return self.host.address

    @property
    def environment(self) -> dict[str, str]:
        """Return the environment of every process of this node: ours, without what an outer launcher set, and this
        node's settings.
        """
        kept = {name: value for name, value in os.environ.items() if not name.startswith(_NOT_INHERITED)}
        paths = [str(Path(flashckpt.__file__).parent.parent), *filter(None, [kept.get("PYTHONPATH")])]
        settings = {"JOB": self.job, "NODE_ID": self.name, "MEMORY_DIR": self.memory_dir, "ADVERTISE": self.address}
        if self.domain:
            settings["DOMAIN"] = self.domain
        return {
            **kept,
            "PYTHONPATH": os.pathsep.join(paths),
            "OMP_NUM_THREADS": "1",
            # Else gloo looks up the address of the host's name, which no name server knows.
            "GLOO_SOCKET_IFNAME": self.host.interface,
            # torch looks up the names of addresses, which takes long if a configured name server is not reachable.
            "RES_OPTIONS": "attempts:1 timeout:1",
            **{f"FLASHCKPT_{name}": value for name, value in settings.items()},
            **self._extra,
        }

    def set_environment(self, **variables: str) -> None:
        """Set variables for processes started from now on, failpoints for example."""
        self._extra.update(variables)

    # --- processes ------------------------------------------------------------------------------------------

    def start(self, argv: Sequence[str], *, environment: Mapping[str, str] | None = None, what: str = "") -> Process:
        """Start a process of this node, in a session of its own."""
        what = what or f"{Path(argv[0]).name} on {self.name}"
        log_path = self._scratch / f"node{self.index}-{len(self._started)}.log"
        process = Process(self.host.wrap(list(argv)), {**self.environment, **(environment or {})}, log_path, what)
        self._started.append(process)
        return process

    def run(
        self, argv: Sequence[str], *, timeout: float = 60.0, environment: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a command of this node to its end. The caller has to check the exit code.

        The output goes to files, not pipes: a process that the command leaves in the background would keep a pipe open.
        """
        with tempfile.TemporaryFile(dir=self._scratch) as output, tempfile.TemporaryFile(dir=self._scratch) as errors:
            child = subprocess.Popen(
                self.host.wrap(list(argv)),
                env={**self.environment, **(environment or {})},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
                start_new_session=True,
            )
            try:
                child.wait(timeout)
            except subprocess.TimeoutExpired as error:
                raise DeadlineError(
                    f"{argv[0]} on {self.name}: expected it to end within {timeout} s, found it running; "
                    f"it said last: {_text(errors)[-1000:]}"
                ) from error
            finally:
                if child.poll() is None:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(child.pid, signal.SIGKILL)
                    child.wait()
            return subprocess.CompletedProcess(list(argv), child.returncode, _text(output), _text(errors))

    def python(self, *arguments: str, timeout: float = 60.0) -> subprocess.CompletedProcess[str]:
        """Run this interpreter with these arguments, on this node."""
        return self.run([sys.executable, *arguments], timeout=timeout)

    def pids(self) -> list[int]:
        """Return all processes of this node: those started here, and their descendants, however they detached
        themselves.
        """
        agents = self.agent_pids()
        return [seen.pid for seen in processes.look() if seen.pid in agents or self._owns(seen)]

    def agent_pid(self) -> int | None:
        """Return the pid of the agent of the cluster's job on this node; None if none runs."""
        try:
            directory = open_directory(self.memory_dir, self.job, create=False)
        except NotFoundError:
            return None
        except ConfigError:
            return None  # there is no memory directory: wiped, or not up yet
        try:
            holder = AgentLock(directory).holder()
            return None if holder is None else holder.pid
        finally:
            directory.close()

    def agent_pids(self) -> list[int]:
        """Return the agent's pid as a list, for callers that spare the agent, or act on it alone."""
        pid = self.agent_pid()
        return [] if pid is None else [pid]

    def leftovers(self) -> list[int]:
        """Return processes that are neither the agent, nor were started here, nor descend from such a process."""
        seen = {one.pid: one for one in processes.look()}
        roots = {*self.agent_pids(), *(process.pid for process in self._started)}
        orphans = []
        for pid in (one.pid for one in seen.values() if self._owns(one)):
            above: int | None = pid
            while above is not None and above not in roots:
                above = seen[above].parent if above in seen else None
            if above is None:
                orphans.append(pid)
        return orphans

    # --- faults ---------------------------------------------------------------------------------------------

    def kill(self) -> int:
        """Kill all its processes with SIGKILL, agent included. Returns how many there were, once they are gone."""
        count = processes.kill_all(self.pids, f"node {self.name}")
        for process in self._started:
            process.kill()
        return count

    def wipe(self) -> None:
        """Remove its memory. Processes that still run keep what they have mapped."""
        shutil.rmtree(self.memory_dir, ignore_errors=True)
        if os.path.lexists(self.memory_dir):
            shutil.rmtree(self.memory_dir)  # a process wrote into it meanwhile: try once more, and raise if that fails
        self.wiped[self.name] = int(time.time() * 1000)

    def replace(self, name: str | None = None) -> None:
        """Replace the machine by a blank one with the same rack and address, maybe another name."""
        self.kill()
        self.wipe()
        self.host.heal()
        if name is not None:
            self.rename(name)

    def rename(self, name: str) -> None:
        """Change the name for processes started from now on."""
        self.host.rename(name)
        self.name = name

    def pause(self, which: Which = "all") -> list[int]:
        """Send SIGSTOP; returns the pids once the processes have stopped."""
        pids = self._select(which)
        for pid in pids:
            processes.signal_to(pid, signal.SIGSTOP)
        processes.wait_stopped(pids, _STOP_TIMEOUT)
        return pids

    def resume(self, which: Which = "all") -> list[int]:
        """Send SIGCONT."""
        pids = self._select(which)
        for pid in pids:
            processes.signal_to(pid, signal.SIGCONT)
        return pids

    def cut(self, peer: Node | None = None, direction: Direction = "both") -> None:
        """Lose packets without an error: all of them, or those to ("out") and from ("in") one peer."""
        self.host.cut(None if peer is None else peer.host, direction)

    def heal(self) -> None:
        """Undo every cut that was made at this node."""
        self.host.heal()

    def rate(self, mbit: float | None) -> None:
        """Limit its link, in each direction; None: no limit."""
        if mbit is not None and not mbit > 0:
            raise ConfigError(f"rate: expected more than 0 Mbit/s or None, found {mbit}")
        self.host.rate(mbit)

    def _select(self, which: Which) -> list[int]:
        agents = self.agent_pids()
        if which == "agent":
            if not agents:
                raise NotFoundError(f"node {self.name}: expected an agent of job {self.job!r}, found none")
            return agents
        return [pid for pid in self.pids() if which == "all" or pid not in agents]

    def _owns(self, seen: processes.Seen) -> bool:
        return self.host.contains(seen) or seen.names(self.memory_dir)


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")
