"""What is really so, unseen by any agent, and the invariants that are checked against it at every step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flashckpt.protocol.line import GIVEN_UP, NOTHING, launch_of, order
from flashckpt.types import age_order

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from flashckpt.protocol.line import Line
    from flashckpt.types import Generation, Launch, Record, ShardId
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
    """The promises that were made, and the checks.

    There may be several histories: launches that know nothing of each other. What a launch knows, and what its line has
    to say of it, is derived here from what really happened, without the product's lines.
    """

    def __init__(self, machines: list[Machine], probes: set[str]) -> None:
        self.machines = machines
        self.probes = probes
        self.instances: dict[Generation, Instance] = {}
        self.launch_of: dict[Launch, SimLaunch] = {}
        self.promised: dict[Instance, SimLaunch | None] = {}  # who loaded it; None: it was committed since
        self.guards: dict[Instance, SimLaunch] = {}  # promised → the newest launch that made it or stands on it
        self.chosen: list[SimLaunch] = []  # launches that know what they go on from
        self.launches = 0
        self.commits = 0

    # --- faults ---------------------------------------------------------------------------------------------

    def fault(self, machine: Machine, file: File) -> None:
        file.instance.faulted.add((file.held.shard.rank, machine))

    def stored(self, machine: Machine, file: File) -> None:
        file.instance.faulted.discard((file.held.shard.rank, machine))

    # --- promises -------------------------------------------------------------------------------------------

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
        if self._is_overtaken(launch):
            # Cut off, it goes on with reports from before its successor's line. That binds nobody any more.
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
        self._promise(instance, launch, None)
        if any(self.faults_of(instance, rank) for rank in range(launch.world)):
            self.probes.add("commit while a fault is not known yet")

    def on_running(self, launch: SimLaunch) -> None:
        """The line is on every node: what was loaded is what must not be lost now."""
        base = launch.base
        if base is not None and base.committed and not self._is_overtaken(launch):
            self._promise(base, launch, launch)

    def _promise(self, instance: Instance, guard: SimLaunch, promiser: SimLaunch | None) -> None:
        if any(one is not instance and one.descends_from(instance) for one in self.promised):
            return
        if promiser is not None and instance in self.promised:
            promiser = self.promised[instance]
        for one in [one for one in self.promised if instance.descends_from(one)]:
            del self.promised[one]
        self.promised[instance] = promiser
        self.guards[instance] = guard
        if len(self.promised) > 1:
            self.probes.add("two histories with promises")

    def _is_overtaken(self, launch: SimLaunch) -> bool:
        """A launch that knows it has chosen what to go on from."""
        return any(launch in one.knows for one in self.chosen)

    def _has_later_commit(self, machine: Machine, guard: SimLaunch, instance: Instance) -> bool:
        """A node that has not heard that its launch is over may commit a later step of it. That promises nothing, since
        the job has gone on from elsewhere. But all ranks' shards were acknowledged: it takes the earlier one's place.
        """
        record = machine.core.threshold
        if record is None or not self._is_overtaken(guard):
            return False
        later = launch_of(record.generation) == launch_of(instance.generation)
        return later and age_order(record.generation) > age_order(instance.generation)

    # --- checks ---------------------------------------------------------------------------------------------

    def on_release(self, machine: Machine, shard: ShardId, file: File | None, reason: str) -> None:
        if file is None:
            return
        instance, core = file.instance, machine.core
        guard = self.guards.get(instance)
        is_bound = (
            guard is not None and machine in guard.members and not self._has_later_commit(machine, guard, instance)
        )
        if instance in self.promised and is_bound and file.good:
            raise Violation("NO-EARLY-GC", f"{machine} drops {shard} of the promised {instance}: {reason}")
        said = core.threshold if core is not None else None
        is_present = said is not None and machine.heard == self.instances[said.generation].launch.order
        if said is not None and is_present and shard.generation in said.keeps and file.good:
            raise Violation("KEPT", f"{machine} drops {shard} of {instance}, which its newest record keeps: {reason}")
        if core is None:
            return
        session = self.launch_of.get(core.session.launch) if core.session is not None else None
        stands_on_it = session is not None and session.base is instance and not session.has_committed
        if stands_on_it and file.good and machine.heard == session.order and session.is_running:
            raise Violation("BASE-KEPT", f"{machine} drops {shard} of {instance}, which the job stands on: {reason}")
        heads = {session, self.launch_of[core.line.head] if core.line is not None else None}
        if not any(one is not None and (one is instance.launch or instance.launch in one.knows) for one in heads):
            raise Violation("OTHERS-KEPT", f"{machine} drops {shard} of {instance}, another history's: {reason}")

    def on_replicated(self, machine: Machine, generation: Generation) -> None:
        if all(generation not in (record.generation, *record.keeps) for record in machine.records):
            raise Violation("RECORD-FIRST", f"{machine} calls {self.instances[generation]} replicated without a record")

    def on_line(self, machine: Machine, line: Line) -> None:
        """A node keeps a line: whatever it says of a launch must be so."""
        launch = self.launch_of.get(line.head)
        if launch is None:
            raise Violation("READ-ONLY", f"{machine} keeps a line of a launch that only reads")
        if launch.base is None and not launch.saves and not launch.starts_fresh:
            raise Violation("CLAIMS-NOTHING", f"{machine} keeps a line of launch {launch.number}, which has nothing")
        for other in self.launch_of.values():
            if other.order >= launch.order:
                continue
            said, true = line.cut(other.id, other.root.id), launch.cut(other)
            if said == GIVEN_UP:
                said = NOTHING
            if said == true:
                continue
            floor = line.floor
            given_up = {one.launch for one in line.listed if one.step == GIVEN_UP}
            is_spoken_for = other.root is launch.root or other.root.id in given_up
            below = floor is not None and other.order <= order(floor.launch) and is_spoken_for
            if true is None and below:
                # By design: the floor speaks also for what was never listed, of this root or one that was given up.
                self.probes.add("a floor speaks for a launch that was never listed")
                launch.knows |= {other}
                self._give_up(launch, lambda one, other=other: one.launch is other)
            elif not (below and said == floor.step and all(one.launch != other.id for one in line.listed)):
                raise Violation(
                    "TRUE-LINE",
                    f"{self.describe(line)}, on {machine}: it says {said} of launch {other.number}, which is {true}",
                )

    def on_look(self, launch: SimLaunch, chosen: Instance | None, asked: bool) -> None:
        """What a load, or one that only reads, gives. `asked`: a person wanted something else than the newest."""
        visible = launch.members
        for promised, promiser in self.promised.items():
            if asked or not self._is_there(promised, promiser, visible):
                continue
            if chosen is None or not chosen.descends_from(promised):
                raise Violation("DURABLE", f"launch {launch.number} picks {chosen}, promised is {promised}")
        if chosen is None or asked:
            return
        heads = {self.launch_of[head] for machine in visible for head in machine.lines}
        alive = [one for one in heads if one.holds(chosen)]
        for head in heads:
            if head.kills(chosen) and all(one in head.knows for one in alive):
                raise Violation("STAYS-DEAD", f"launch {launch.number} picks {chosen}, launch {head.number} gave it up")

    def on_ambiguous(self, launch: SimLaunch) -> None:
        """A load says that there are two histories: there must be."""
        self.probes.add("two histories at a load")
        visible = launch.members
        whole = {
            one
            for one in self.instances.values()
            if all(any(self.has(m, one, rank) for m in visible) for rank in range(one.launch.world))
        }
        heads = {self.launch_of[head] for m in visible for head in m.lines} | {one.launch for one in whole}
        for one in heads:
            for other in heads:
                if one in other.knows or other in one.knows:
                    continue
                mine, others = ({i for i in whole if head.holds(i)} for head in (one, other))
                if mine - others and others - mine:
                    return
        raise Violation("ONE-HISTORY", f"launch {launch.number} is told of two histories among {whole}")

    def on_choice(self, launch: SimLaunch, asked: bool) -> None:
        """A launch goes on from its base, and without all else that it knows of."""
        self.launches += 1
        self.chosen.append(launch)
        self._give_up(launch, launch.kills, "rolled back below a promise" if asked else "")
        if launch.base in self.promised:
            self.guards[launch.base] = launch

    def _give_up(self, launch: SimLaunch, is_dead: Callable[[Instance], bool], probe: str = "") -> None:
        for one in [one for one in self.promised if is_dead(one)]:
            self.probes.add(probe or "promise lost with more than k copies")
            del self.promised[one]

    # --- questions ------------------------------------------------------------------------------------------

    def _is_there(self, promised: Instance, promiser: SimLaunch | None, visible: Iterable[Machine]) -> bool:
        """It can be loaded, if anybody is left who knows that it is what the job stands on."""
        if not all(any(self.is_good(m, promised, rank) for m in visible) for rank in range(promised.launch.world)):
            return False
        # Files of a history that was given up once, and taken up again by a launch whose nodes are all gone with their
        # memory, which are more than k: nobody is left who knows.
        heads = [self.launch_of[head] for m in visible for head in m.lines]
        return promiser is None or any(one is promiser or promiser in one.knows for one in heads)

    def has(self, machine: Machine, instance: Instance, rank: int) -> bool:
        return any(f.instance is instance and s.rank == rank for s, f in machine.files.items())

    def is_good(self, machine: Machine, instance: Instance, rank: int) -> bool:
        return any(f.instance is instance and s.rank == rank and f.good for s, f in machine.files.items())

    def faults_of(self, instance: Instance, rank: int) -> int:
        return sum(r == rank for r, _ in instance.faulted)

    def describe(self, line: Line) -> str:
        """For the trace: launches by their numbers."""
        number = {launch: one.number for launch, one in self.launch_of.items()}
        listed = [f"{number.get(one.launch, '?')} to {one.step}" for one in line.listed]
        listed += [f"below {number.get(line.floor.launch, '?')} to {line.floor.step}"] if line.floor else []
        return (
            f"the line of launch {number[line.head]}, root {number.get(line.root, '?')}: {', '.join(listed) or 'alone'}"
        )
