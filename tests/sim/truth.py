"""What is really so, unseen by any agent, and the invariants that are checked against it at every step."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from flashckpt.types import Generation, Record, ShardId
    from tests.sim.job import SimLaunch
    from tests.sim.machine import File, Machine


class Violation(Exception):
    """An invariant does not hold."""

    def __init__(self, invariant: str, story: str) -> None:
        super().__init__(f"{invariant}: {story}")
        self.invariant = invariant


class Instance:
    """One real attempt to save. Two of them are never the same, whatever their generations are called."""

    __slots__ = ("committed", "faulted", "generation", "launch", "place")

    def __init__(self, launch: SimLaunch, generation: Generation, place: int) -> None:
        self.launch = launch
        self.generation = generation
        self.place = place  # within its launch
        self.committed = False
        self.faulted: set[tuple[int, Machine]] = set()  # copies that a fault took: rank and where

    def __repr__(self) -> str:
        return f"step {self.generation.step}.{self.generation.seq} of launch {self.launch.number}"

    def descends_from(self, other: Instance) -> bool:
        one: Instance | None = self
        while one is not None:
            if one.launch is other.launch:
                return other.place <= one.place
            one = one.launch.base
        return False


class Truth:
    """The promises that were made, and the checks."""

    def __init__(self, machines: list[Machine], probes: set[str]) -> None:
        self.machines = machines
        self.probes = probes
        self.instances: dict[Generation, Instance] = {}
        self.promised: Instance | None = None
        self.promiser: SimLaunch | None = None  # that loaded it; None where it was committed since
        self.newest: SimLaunch | None = None  # of those that have chosen what to load
        self.launches = 0
        self.commits = 0

    # --- faults ---------------------------------------------------------------------------------------------

    def fault(self, machine: Machine, file: File) -> None:
        file.instance.faulted.add((file.held.shard.rank, machine))

    def stored(self, machine: Machine, file: File) -> None:
        file.instance.faulted.discard((file.held.shard.rank, machine))

    # --- checks ---------------------------------------------------------------------------------------------

    def on_record(self, machine: Machine, record: Record) -> None:
        instance = self.instances[record.generation]
        if instance.committed:
            return
        launch = instance.launch
        instance.committed = True
        self.commits += 1
        if machine is not launch.members[0]:
            raise Violation("SOLE-COORDINATOR", f"{machine} made a record of {instance}, it does not coordinate")
        if (launch.id.epoch, launch.id.nonce) < machine.heard:
            raise Violation("FENCED-WRITER", f"{machine} commits {instance} though it knows a newer launch")
        if self.newest is not None and self.newest.order > launch.order:
            # Cut off, it goes on with reports from before its successor's fence. That binds nobody any more.
            self.probes.add("commit of an overtaken launch")
            return
        for rank in range(launch.world):
            owner = launch.machine_of[rank]
            copies = {m for r, m in instance.faulted if r == rank}
            copies |= {m for m in self.machines if self.has(m, instance, rank)}
            if owner not in copies or len(copies) - 1 < launch.replicas:
                raise Violation(
                    "HONEST-LEVEL",
                    f"{instance} is committed, rank {rank} of {owner} lies on {sorted(m.name for m in copies)}, "
                    f"promised are {launch.replicas} others",
                )
            own = launch.ranks_of[owner]
            tags = {f.held.tag for s, f in owner.files.items() if s.rank in own and f.instance is instance}
            if len(tags) > 1:
                raise Violation("WHOLE", f"{instance} is committed, ranks of {owner} relied on each other in vain")
        self.promised, self.promiser = instance, None
        if any(self.faults_of(instance, rank) for rank in range(launch.world)):
            self.probes.add("commit while a fault is not known yet")

    def on_release(self, machine: Machine, shard: ShardId, file: File | None, reason: str) -> None:
        if file is None:
            return
        instance = file.instance
        newest = self.newest
        bound = newest is not None and machine in newest.members
        if instance is self.promised and bound and file.good:
            raise Violation("NO-EARLY-GC", f"{machine} drops {shard} of the promised {instance}: {reason}")
        said = machine.core.threshold if machine.core is not None else None
        if said is not None and shard.generation in said.keeps and file.good:
            raise Violation("KEPT", f"{machine} drops {shard} of {instance}, which its newest record keeps: {reason}")
        if bound and newest is not None and newest.base is instance and not newest.has_committed and file.good:
            raise Violation("BASE-KEPT", f"{machine} drops {shard} of {instance}, which the job stands on: {reason}")

    def on_replicated(self, machine: Machine, generation: Generation) -> None:
        if all(generation not in (record.generation, *record.keeps) for record in machine.records):
            raise Violation("RECORD-FIRST", f"{machine} calls {self.instances[generation]} replicated without a record")

    def on_choice(self, launch: SimLaunch, visible: Iterable[Machine], chosen: Instance | None, asked: bool) -> None:
        """A launch has decided what to load."""
        self.launches += 1
        promised = self.promised
        if promised is not None:
            kept = all(any(self.is_good(m, promised, rank) for m in visible) for rank in range(promised.launch.world))
            # Files of a history that was given up once, and taken up again by a launch whose nodes are all gone with
            # their memory, which are more than k: nobody is left who knows.
            kept = kept and (self.promiser is None or any(_knows(m, self.promiser) for m in visible))
            follows = chosen is not None and chosen.descends_from(promised)
            if kept and not asked and not follows:
                raise Violation("DURABLE", f"launch {launch.number} picks {chosen}, promised is {promised}")
            if not follows:
                self.probes.add("rolled back below a promise" if asked else "promise lost with more than k copies")
                self.promised = None
        if self.newest is None or launch.order > self.newest.order:
            self.newest = launch

    def on_running(self, launch: SimLaunch) -> None:
        """The fence stands everywhere: what was loaded is what must not be lost now."""
        base = launch.base
        if self.promised is None and base is not None and base.committed and self.newest is launch:
            self.promised, self.promiser = base, launch

    # --- questions ------------------------------------------------------------------------------------------

    def has(self, machine: Machine, instance: Instance, rank: int) -> bool:
        return any(f.instance is instance and s.rank == rank for s, f in machine.files.items())

    def is_good(self, machine: Machine, instance: Instance, rank: int) -> bool:
        return any(f.instance is instance and s.rank == rank and f.good for s, f in machine.files.items())

    def faults_of(self, instance: Instance, rank: int) -> int:
        return sum(r == rank for r, _ in instance.faulted)


def _knows(machine: Machine, launch: SimLaunch) -> bool:
    return machine.fence is not None and (machine.fence.epoch, machine.fence.nonce) >= launch.order
