"""The trainers of the simulated job: launches, what they choose to load, and their saves.

Which history a launch goes on with, what it loads of it and what its line says is decided by the product's own pure
functions, over inventories that are taken node by node, while agents go on in between.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

from flashckpt.errors import AmbiguousHistoryError, NotFoundError
from flashckpt.load.choose import choose, complete_generations
from flashckpt.load.histories import anew, pick
from flashckpt.load.inventory import merge
from flashckpt.protocol.events import (
    Begun,
    GaveUp,
    LeaseEnded,
    LinePut,
    RefuseFenced,
    Rotten,
    ShardSealed,
    SlotWanted,
    WantDropped,
)
from flashckpt.protocol.line import begun, name_of
from flashckpt.types import Generation, Held, Launch, Member, Session, ShardId
from tests.sim.machine import File, Machine
from tests.sim.truth import Instance, Violation

if TYPE_CHECKING:
    from flashckpt.load.choose import Choice
    from flashckpt.load.histories import Pick
    from flashckpt.load.inventory import Inventory
    from flashckpt.protocol.events import Effect, Notify
    from flashckpt.protocol.line import Line
    from flashckpt.protocol.wire import PutOpen
    from flashckpt.types import Record
    from tests.sim.world import World

_PATIENCE = 4  # tries of a trainer to reach its agent
_EPOCH_ZERO = 1_000_000  # the wall clock when a history begins, in ms


class Phase(enum.Enum):
    BEGINNING = enum.auto()
    LOADING = enum.auto()
    CLAIMING = enum.auto()  # the line is put on every node
    RUNNING = enum.auto()
    DEAD = enum.auto()


class SimLaunch:
    """One start of all trainers."""

    def __init__(self, number: int, launch: Launch, members: list[Machine], shares: list[int], asked: bool) -> None:
        self.number = number
        self.id = launch
        self.members = members
        self.asked = asked  # to go back on purpose
        self.world = sum(shares)
        self.machine_of: list[Machine] = []
        self.ranks_of: dict[Machine, tuple[int, ...]] = {}
        for machine, share in zip(members, shares, strict=True):
            self.ranks_of[machine] = tuple(range(len(self.machine_of), len(self.machine_of) + share))
            self.machine_of += [machine] * share
        self.started_ms = 0
        self.phase = Phase.BEGINNING
        self.is_zombie = False
        self.is_wrong = False  # on nodes that a person took by mistake
        self.stray_saves: int | None = None  # of a launch beside the job: how often it saves before it ends
        self.is_planned = False  # the next save
        self.hangs = False  # a machine is gone, and its trainers wait for it
        self.base: Instance | None = None
        self.replicas = 0
        self.session: Session | None = None
        self.begun: set[Machine] = set()
        self.inventories: dict[Machine, bytes] = {}
        self.claimed: set[Machine] = set()
        self.line: Line | None = None  # put at the end of the load, or before the first shard
        self.starts_fresh = False  # a person gave up what is there
        self.knows: set[SimLaunch] = set()  # launches that this one goes on from, or without
        self.step = -1
        self.seq = 0
        self.saves = 0
        self.has_committed = False
        self.newest: Instance | None = None  # committed
        self.alive: set[int] = set(range(self.world))
        self.busy: set[int] = set()  # ranks that are saving
        self.untold: dict[int, Held] = {}  # sealed, and the agent does not know it from them

    @property
    def is_running(self) -> bool:
        return self.phase is Phase.RUNNING

    @property
    def order(self) -> tuple[int, int]:
        return self.id.epoch, self.id.nonce

    @property
    def root(self) -> SimLaunch:
        return self if self.base is None else self.base.launch.root

    def cut(self, other: SimLaunch) -> int | None:
        """Up to which step another launch belongs to this one's history; -1: not at all; None: it is not known."""
        if other not in self.knows:
            return None
        one = self.base
        while one is not None:
            if one.launch is other:
                return one.generation.step
            one = one.launch.base
        return -1

    def holds(self, instance: Instance) -> bool:
        cut = self.cut(instance.launch)
        return instance.launch is self or (cut is not None and instance.generation.step <= cut)

    def kills(self, instance: Instance) -> bool:
        cut = self.cut(instance.launch)
        return instance.launch is not self and cut is not None and instance.generation.step > cut

    def lease(self, rank: int) -> int:
        return self.number * 64 + rank


class _Request:
    __slots__ = ("deadline", "instance", "launch", "machine", "rank")

    def __init__(self, launch: SimLaunch, rank: int, instance: Instance, machine: Machine, deadline: float) -> None:
        self.launch = launch
        self.rank = rank
        self.instance = instance
        self.machine = machine
        self.deadline = deadline  # on the machine's clock


class Job:
    """All launches of one history."""

    def __init__(self, world: World) -> None:
        self.world = world
        world.job = self
        self.launches: list[SimLaunch] = []
        self.requests: dict[int, _Request] = {}
        self._number = 0
        self.given_up: set[Instance] = set()
        self.latest: Instance | None = None  # the last attempt that was begun
        self.resolved: set[tuple[str, Generation]] = set()  # node, generation: its trainers know how it ended
        self.has_clock = True
        self.reader_claims = self.stray_claims = self.claims_once = False  # mistakes of trainers
        self.nonce_of = lambda: self.world.rng.getrandbits(32)

    @property
    def newest(self) -> SimLaunch | None:
        """Not counting launches beside the job."""
        return next((one for one in reversed(self.launches) if one.stray_saves is None), None)

    # --- launches -------------------------------------------------------------------------------------------

    def members(self, is_wrong: bool = False) -> tuple[list[Machine], list[int]]:
        """Healthy machines for the next launch, and blank ones if there are too few. `is_wrong`: a person errs."""
        world, rng = self.world, self.world.rng
        there = [m for m in world.machines if m.alive and not m.isolated]
        last = self.newest
        stay = [m for m in there if last is not None and m in last.members]
        spare = [m for m in there if m not in stay]
        if is_wrong:
            rng.shuffle(there)
            chosen = there[: rng.randrange(world.swarm.nodes)]
        elif last is not None and last.is_wrong and rng.random() < 0.7:
            # The mistake is noticed: back to where the job was.
            chosen = sorted(there, key=lambda m: (-len(m.files), m.number))
        elif spare and world.faults_on and rng.random() < 0.4:
            # One that was left out takes the place of another, which keeps its memory.
            rng.shuffle(there)
            chosen = there
        else:
            rng.shuffle(spare)
            chosen = stay + spare
        chosen = chosen[: world.swarm.nodes]
        if world.faults_on and rng.random() < 0.3:
            rng.shuffle(chosen)  # other ranks on the same machines
        while len(chosen) < world.swarm.nodes:
            # A blank replacement; it may have the name of one that is gone for good.
            dead = [m.name for m in world.machines if not m.alive and world.by_name[m.name] is m]
            name = rng.choice(dead) if dead and rng.random() < 0.5 else None
            chosen.insert(rng.randrange(len(chosen) + 1), world.add_machine(name))
        return chosen, list(world.swarm.shares)

    def start(self, asked: bool = False, is_wrong: bool = False) -> None:
        launch = self._launch(*self.members(is_wrong), asked)
        launch.is_wrong = is_wrong

    def start_stray(self, members: list[Machine], saves: int) -> None:
        """A launch of the same job beside it: somebody tries something out, or a debug run."""
        shares = [self.world.rng.randint(1, 2) for _ in members]
        self._launch(members, shares, False).stray_saves = saves

    def _launch(self, members: list[Machine], shares: list[int], asked: bool) -> SimLaunch:
        world, rng = self.world, self.world.rng
        for machine in members:
            world.start_agent(machine)
        clock = _EPOCH_ZERO + int(world.now * 1000)
        if self.launches and world.swarm.clock_lags and world.faults_on:
            # The assumption: clocks differ by less than the time between two launches.
            clock -= int(rng.random() * max(0, clock - self.launches[-1].started_ms - 1))
        epoch = max(1 + max(m.highest_epoch() for m in members), clock if self.has_clock else 0)
        launch = SimLaunch(len(self.launches) + 1, Launch(epoch, self.nonce_of()), members, shares, asked)
        launch.started_ms = _EPOCH_ZERO + int(world.now * 1000)
        launch.replicas = min(world.swarm.replicas, len(members) - 1)
        launch.session = Session(
            launch=launch.id,
            world=launch.world,
            members=tuple(Member(m.name, f"{m.name}:1", m.domain, launch.ranks_of[m]) for m in members),
            replicas=world.swarm.replicas,
            strategy=world.swarm.strategy,
            slots_per_rank=world.swarm.slots,
            keep_memory=world.swarm.keep,
        )
        self.launches.append(launch)
        world.truth.launch_of[launch.id] = launch
        if world.trace:
            world.say(f"launch {launch.number} (epoch {epoch}) on {members}{', to go back' if asked else ''}")
        for machine in members:
            self.after(0.05 * rng.random(), self._begin, launch, machine)
        return launch

    def after(self, delay: float, action, *arguments) -> None:
        self.world.after(delay, action, *arguments)

    def _again(self, machine: Machine) -> float:
        """When a trainer whose agent does not answer asks again."""
        return max(0.25, machine.paused_until - self.world.now + 0.01)

    def _reach(self, launch: SimLaunch, machine: Machine) -> bool:
        """Whether the trainers of a machine reach its agent; they start it where it is down."""
        if not machine.alive:
            self.kill(launch)
            return False
        if machine.core is None and self.world.rng.random() < 0.5:
            self.world.start_agent(machine)
        return machine.core is not None and not self.world.is_paused(machine)

    def _begin(self, launch: SimLaunch, machine: Machine) -> None:
        if launch.phase is not Phase.BEGINNING:
            return
        if not self._reach(launch, machine):
            self.after(self._again(machine), self._begin, launch, machine)
            return
        effects = self.world.feed(machine, Begun(launch.session))
        if effects is None:
            self.after(0.25, self._begin, launch, machine)
            return
        if any(isinstance(effect, RefuseFenced) for effect in effects):
            self.world.probes.add("a launch is refused at its start")
            self.kill(launch)
            return
        launch.begun.add(machine)
        if self.world.rng.random() < 0.2:
            self.after(0.5 * self.world.rng.random(), self._begin_again, launch, machine)
        if len(launch.begun) == len(launch.members):
            launch.phase = Phase.LOADING
            for one in launch.members:
                self.after(0.05 * self.world.rng.random(), self._look, launch, one)

    def _begin_again(self, launch: SimLaunch, machine: Machine) -> None:
        """Every rank of a node says it."""
        if launch.phase is not Phase.DEAD and machine.core is not None and not self.world.is_paused(machine):
            self.world.feed(machine, Begun(launch.session))

    def _look(self, launch: SimLaunch, machine: Machine) -> None:
        if launch.phase is not Phase.LOADING:
            return
        if not self._reach(launch, machine):
            self.after(self._again(machine), self._look, launch, machine)
            return
        launch.inventories[machine] = machine.inventory()
        if len(launch.inventories) == len(launch.members):
            self._choose(launch)

    def _choose(self, launch: SimLaunch) -> None:
        world, rng = self.world, self.world.rng
        inventory = merge([m.name for m in launch.members], [launch.inventories[m] for m in launch.members])
        found = self._pick(launch, inventory)
        if found is None:
            self.kill(launch)  # a person has to think about it
            return
        picked, choice = found
        if len(inventory.copies) and not choice.candidates and not choice.passed_over:
            raise Violation("NO-FRESH-START", f"launch {launch.number} passes shards over in silence")
        chosen = self._newest_readable(launch, choice)
        if world.trace:
            world.say(f"launch {launch.number} picks {chosen}, promised is {list(world.truth.promised)}")
        world.truth.on_look(launch, chosen, launch.asked)
        present = inventory.launches()
        if chosen is not None:
            launch.line = picked.line_for(launch.id, chosen.generation).compacted(present, world.swarm.most_listed)
            launch.base, launch.step = chosen, chosen.generation.step
            launch.knows = self._known(launch, picked, inventory) | {chosen.launch}
        elif choice.candidates or choice.passed_over:
            world.probes.add("nothing usable")
            if launch.asked or launch.stray_saves is not None or (world.faults_on and rng.random() < 0.5):
                self.kill(launch)
                return
            picked = anew(inventory.lines, present)
            launch.asked = launch.starts_fresh = True
            launch.line = picked.line_for(launch.id, None).compacted(present, world.swarm.most_listed)
            launch.knows = self._known(launch, picked, inventory)
            world.probes.add("a person starts anew")
        else:
            launch.line = begun(launch.id)
        world.truth.on_choice(launch, launch.asked)
        if launch.line.floor is not None:
            world.probes.add("a line has a floor")
        launch.phase = Phase.CLAIMING
        if chosen is None and not self.stray_claims and not (launch.starts_fresh and rng.random() < 0.5):
            self._run(launch)
            return
        for machine in launch.members:
            self.after(0.1 * rng.random(), self._put_line, launch, machine)

    def _pick(self, launch: SimLaunch, inventory: Inventory) -> tuple[Pick, Choice] | None:
        """The history to go on with, and what may be loaded of it. None: a person could not say."""
        world, rng = self.world, self.world.rng
        facts = (inventory.lines, complete_generations(inventory), inventory.launches())
        step: int | None = None
        try:
            picked = pick(*facts)
            candidates = choose(inventory, None, picked).candidates
            if launch.asked and inventory.lines and rng.random() < 0.2:
                world.probes.add("a person goes back to a history by its name")
                picked = pick(*facts, history=name_of(rng.choice(inventory.lines).head))
            elif launch.asked and len(candidates) > 1:
                step = rng.choice(candidates).step
                picked = pick(*facts, step=step)
            else:
                launch.asked = False
        except AmbiguousHistoryError as error:
            if step is None:
                world.truth.on_ambiguous(launch)
            if world.faults_on and rng.random() < 0.5:
                return None
            launch.asked, step = True, None
            picked = pick(*facts, history=rng.choice(error.fields["histories"]))
            world.probes.add("a person chooses between two histories")
        except NotFoundError:
            return None
        return picked, choose(inventory, step, picked)

    def _known(self, launch: SimLaunch, picked: Pick, inventory: Inventory) -> set[SimLaunch]:
        """What a launch that goes on with this history knows of, as far as anything there can tell."""
        truth = self.world.truth
        known = {truth.launch_of[one] for one in picked.given_up}
        if picked.line is not None:
            head = truth.launch_of[picked.line.head]
            has_line = any(line.head == head.id for line in inventory.lines)
            known |= {head} | (head.knows if has_line else set())
        # Of two launches of one moment the older one may see the newer one's line; it is refused then.
        return {one for one in known if one.order < launch.order}

    def _newest_readable(self, launch: SimLaunch, choice: Choice, *, only_looks: bool = False) -> Instance | None:
        for index, generation in enumerate(choice.candidates):
            chosen = self._read(launch, generation, only_looks)
            if chosen is not None:
                if index:
                    self.world.probes.add("stepped back at load")
                return chosen
        return None

    def _read(self, launch: SimLaunch, generation: Generation, only_looks: bool) -> Instance | None:
        """Verifies one candidate; bad copies are set aside, and their agents hear of it."""
        instances: set[Instance] = set()
        ranks: set[int] = set()
        world_size = 0
        for machine in launch.members:
            for shard, file in list(machine.files.items()):
                if shard.generation != generation:
                    continue
                world_size = shard.world
                if file.good:
                    instances.add(file.instance)
                    ranks.add(shard.rank)
                elif not only_looks and machine.core is not None and not self.world.is_paused(machine):
                    self.world.probes.add("a load finds a bad copy")
                    self.world.feed(machine, Rotten(shard, "crc"))
        if len(instances) > 1:
            raise Violation("NEVER-MIX", f"launch {launch.number}: {generation} is made of {instances}")
        return instances.pop() if len(ranks) == world_size and instances else None

    def evaluate(self, members: list[Machine]) -> None:
        """A load that only reads, beside whatever runs there: an evaluation."""
        world = self.world
        reader = SimLaunch(0, Launch(1 << 40, self.nonce_of()), members, [1] * len(members), False)
        before = [_contents(machine) for machine in members]
        inventory = merge([m.name for m in members], [m.inventory() for m in members])
        facts = (inventory.lines, complete_generations(inventory), inventory.launches())
        try:
            picked = pick(*facts)
        except AmbiguousHistoryError:
            world.truth.on_ambiguous(reader)
            return
        chosen = self._newest_readable(reader, choose(inventory, None, picked), only_looks=True)
        world.truth.on_look(reader, chosen, False)
        if chosen is not None:
            world.probes.add("an evaluation loads")
            if self.reader_claims:
                reader.line, reader.base = picked.line_for(reader.id, chosen.generation), chosen
                for machine in members:
                    self._put(reader, machine)
        if before != [_contents(machine) for machine in members]:
            raise Violation("READ-ONLY", f"an evaluation on {members} changed something")

    def _put_line(self, launch: SimLaunch, machine: Machine) -> None:
        if launch.phase is not Phase.CLAIMING:
            return
        if not self._reach(launch, machine):
            self.after(self._again(machine), self._put_line, launch, machine)
            return
        done = self._put(launch, machine)
        if done is None:
            self.after(0.25, self._put_line, launch, machine)
        elif done:
            launch.claimed.add(machine)
            if len(launch.claimed) == len(launch.members) or self.claims_once:
                self._run(launch)

    def _put(self, launch: SimLaunch, machine: Machine) -> bool | None:
        """Put a launch's line on a node. False: the launch was overtaken, and ends. None: the agent died."""
        base = launch.base.generation if launch.base is not None else None
        effects: list[Effect] | None = self.world.feed(machine, LinePut(launch.id, launch.line, base))
        if effects is not None and any(isinstance(effect, RefuseFenced) for effect in effects):
            self.world.probes.add("a line of an overtaken launch is refused")
            self.kill(launch)
            return False
        return None if effects is None else True

    def _run(self, launch: SimLaunch) -> None:
        launch.phase = Phase.RUNNING
        self.world.truth.on_running(launch)
        self._plan_save(launch)

    def check_put(self, machine: Machine, put: PutOpen) -> None:
        """Of older launches only what this one has loaded is copied any more."""
        launch = next(one for one in self.launches if one.id == put.launch)
        generation = put.shard.generation
        if generation[:2] != launch.order and (launch.base is None or launch.base.generation != generation):
            instance = self.world.truth.instances[generation]
            raise Violation(
                "HEALS-THE-DEAD", f"{machine} takes {instance}, launch {launch.number} loaded {launch.base}"
            )

    def kill(self, launch: SimLaunch) -> None:
        """All trainers of a launch end; the next launch comes by itself where it was the newest."""
        if launch.phase is Phase.DEAD:
            return
        launch.phase = Phase.DEAD
        rng = self.world.rng
        if self.world.trace:
            self.world.say(f"launch {launch.number}: trainers end")
        for rank in sorted(launch.alive):
            self.after(0.2 * rng.random(), self._end_lease, launch, rank)
        launch.alive.clear()
        if launch is self.newest:
            self.after(0.2 + rng.random(), self._relaunch, launch)

    def _relaunch(self, launch: SimLaunch) -> None:
        if launch is self.newest:
            self.start(asked=self.world.swarm.rollback and self.world.faults_on and self.world.rng.random() < 0.5)

    def _end_lease(self, launch: SimLaunch, rank: int) -> None:
        """The agent notices that a trainer is gone. First it looks for what that one sealed without saying so."""
        machine = launch.machine_of[rank]
        if machine.core is None or self.world.is_paused(machine):
            return  # its leases are gone with it
        held = launch.untold.pop(rank, None)
        if held is not None and held.shard in machine.files:
            self.world.probes.add("a trainer dies between seal and word")
            if self.world.swarm.scans_first and self.world.feed(machine, ShardSealed(held)) is None:
                return
        self.world.feed(machine, LeaseEnded(launch.lease(rank)))

    def rank_dies(self, launch: SimLaunch, rank: int) -> None:
        if rank not in launch.alive or launch.phase is Phase.DEAD:
            return
        launch.alive.discard(rank)
        if rank in launch.busy:
            self.world.probes.add("a rank dies while it saves")
        if self.world.trace:
            self.world.say(f"rank {rank} of launch {launch.number} dies")
        self.after(0.1 * self.world.rng.random(), self._end_lease, launch, rank)
        self.after(0.1 + 2.0 * self.world.rng.random(), self.kill, launch)

    # --- saves ----------------------------------------------------------------------------------------------

    def _plan_save(self, launch: SimLaunch) -> None:
        if launch.is_planned:
            return
        launch.is_planned = True
        pause = self.world.swarm.interval
        self.after(pause * (0.3 + self.world.rng.random()), self._save, launch)

    def resume(self, launch: SimLaunch) -> None:
        """Saves go on."""
        if self.world.swarm.stopped:
            self.world.swarm.stopped = False
            if launch.is_running and not launch.busy:
                self._plan_save(launch)

    def _save(self, launch: SimLaunch) -> None:
        world = self.world
        launch.is_planned = False
        is_stopped = world.swarm.stopped and launch.stray_saves is None
        if launch.phase is not Phase.RUNNING or is_stopped or launch.hangs:
            return
        if launch.stray_saves is not None and launch.saves >= launch.stray_saves:
            self.after(0.5 * world.rng.random(), self.kill, launch)
            return
        if world.faults_on and launch.saves >= world.swarm.most_saves:
            launch.is_planned = True
            self.after(1.0, self._save, launch)
            return
        rng = self.world.rng
        if launch.saves and rng.random() < 0.05:
            launch.seq += 1  # the same step again
        else:
            launch.step, launch.seq = launch.step + 1, 1
        launch.saves += 1
        generation = Generation(launch.id.epoch, launch.id.nonce, launch.step, launch.seq)
        instance = Instance(launch, generation, launch.saves)
        self.world.truth.instances[generation] = instance
        if launch is self.newest:
            self.latest = instance
        if self.world.trace:
            self.world.say(f"save {instance}")
        launch.busy = set(launch.alive)
        for rank in sorted(launch.alive):
            self.after(0.2 * rng.random() ** 2, self._want, launch, rank, instance, 0)

    def _is_out(self, launch: SimLaunch, rank: int) -> bool:
        return rank not in launch.alive or not launch.is_running

    def _want(self, launch: SimLaunch, rank: int, instance: Instance, tries: int) -> None:
        if self._is_out(launch, rank):
            return
        world, machine = self.world, launch.machine_of[rank]
        if machine.core is None or world.is_paused(machine):
            if tries < _PATIENCE:
                self.after(self._again(machine), self._want, launch, rank, instance, tries + 1)
            else:
                self._gave_up(launch, rank, instance)
            return
        if not self._claim(launch, machine):
            self.after(0.25, self._want, launch, rank, instance, tries)
            return
        self._number += 1
        wait = world.swarm.waits * world.rng.random()
        now = world.now + machine.offset
        shard = ShardId(instance.generation, rank, launch.world)
        self.requests[self._number] = _Request(launch, rank, instance, machine, now + wait)
        event = SlotWanted(self._number, launch.lease(rank), shard, may_wait=wait > 0, deadline=now + wait)
        world.feed(machine, event)

    def _claim(self, launch: SimLaunch, machine: Machine) -> bool:
        """Before the first shard of a launch that has loaded nothing. False: not yet, or never."""
        in_force = machine.line
        if launch.base is not None or (in_force is not None and in_force.head == launch.id):
            return True
        if in_force is not None and launch.id.is_older_than(in_force.head):
            self.kill(launch)
            return False
        return self._put(launch, machine) is True

    def agent_crashed(self, machine: Machine) -> None:
        """Requests end with the connection; trainers ask again."""
        for number in [n for n, one in self.requests.items() if one.machine is machine]:
            one = self.requests.pop(number)
            self.after(0.5, self._want, one.launch, one.rank, one.instance, 1)

    def check_deadlines(self, machine: Machine) -> None:
        now = self.world.now + machine.offset
        for number, one in self.requests.items():
            if one.machine is machine and one.deadline < now and one.rank in one.launch.alive:
                raise Violation("ANSWERED-IN-TIME", f"{machine}: request {number} of rank {one.rank} is overdue")

    def on_grant(self, machine: Machine, number: int) -> None:
        one = self.requests.pop(number, None)
        if one is None:
            return
        world, launch, rank = self.world, one.launch, one.rank
        if (launch.id.epoch, launch.id.nonce) < machine.heard:
            raise Violation("FENCED-WRITER", f"{machine} grants a slot to launch {launch.number}, which is dead")
        of_launch = sum(s.rank == rank and s.generation[:2] == launch.order for s in machine.files)
        if of_launch >= world.swarm.slots:
            raise Violation("BOUNDED", f"{machine} grants rank {rank} a slot beside {of_launch} shards of its launch")
        if self._is_out(launch, rank):
            return
        if world.faults_on and world.rng.random() < world.swarm.no_space:
            world.probes.add("granted, but no memory")
            self.after(0.01, self._no_space, one, number)
            return
        if world.faults_on and world.rng.random() < world.swarm.fails:
            self.after(0.3 * world.rng.random(), self._gave_up, launch, rank, one.instance)
            return
        self.after(0.02 + world.swarm.write_time * world.rng.random(), self._seal, launch, rank, one.instance)

    def _no_space(self, one: _Request, number: int) -> None:
        if one.machine.core is not None and not self.world.is_paused(one.machine):
            self.world.feed(one.machine, WantDropped(number))
        self._gave_up(one.launch, one.rank, one.instance)

    def on_busy(self, machine: Machine, number: int) -> None:
        one = self.requests.pop(number, None)
        if one is not None:
            self.world.probes.add("a save is skipped: busy")
            self.after(0.005, self._gave_up, one.launch, one.rank, one.instance)

    def on_fenced(self, machine: Machine, number: int) -> None:
        one = self.requests.pop(number, None)
        if one is not None:
            if one.launch.order >= machine.heard:
                raise Violation(
                    "REFUSED-FOR-NOTHING", f"{machine} forgot launch {one.launch.number} of its own trainers"
                )
            self.world.probes.add("a zombie asks for a slot")
            self.after(0.01, self.kill, one.launch)

    def _gave_up(self, launch: SimLaunch, rank: int, instance: Instance) -> None:
        if self._is_out(launch, rank):
            return
        self.given_up.add(instance)
        if self.world.trace:
            self.world.say(f"rank {rank} gives {instance} up")
        self._say_gave_up(launch, rank, instance, 0)
        self._done(launch, rank)

    def _say_gave_up(self, launch: SimLaunch, rank: int, instance: Instance, tries: int) -> None:
        machine = launch.machine_of[rank]
        if machine.core is not None and not self.world.is_paused(machine):
            self.world.feed(machine, GaveUp(instance.generation, rank))
        elif tries < 2:
            self.after(self._again(machine), self._say_gave_up, launch, rank, instance, tries + 1)
        else:
            self.world.probes.add("nobody hears that a rank gave up")

    def _seal(self, launch: SimLaunch, rank: int, instance: Instance) -> None:
        machine = launch.machine_of[rank]
        if self._is_out(launch, rank) or not machine.alive:
            return
        shard = ShardId(instance.generation, rank, launch.world)
        digest = b"%7d.%8d" % (launch.number, rank)
        split = self.world.faults_on and self.world.swarm.splits and self.world.rng.random() < self.world.swarm.splits
        held = Held(shard, digest, 4096, tag=0 if split else 5)
        machine.files[shard] = File(held, instance)
        launch.untold[rank] = held
        if self.world.trace:
            self.world.say(f"{machine}: rank {rank} seals {instance}")
        if machine.heard > (launch.id.epoch, launch.id.nonce):
            self.world.probes.add("a zombie seals")
        self.after(0.02 * self.world.rng.random(), self._say_sealed, launch, rank, held)

    def _say_sealed(self, launch: SimLaunch, rank: int, held: Held) -> None:
        if self._is_out(launch, rank):
            return
        machine = launch.machine_of[rank]
        if machine.core is None or self.world.is_paused(machine):
            self.after(self._again(machine), self._say_sealed, launch, rank, held)
            return
        if held.shard not in machine.files:
            # The agent does not find what it is told of: the save has failed.
            launch.untold.pop(rank, None)
            self._gave_up(launch, rank, self.world.truth.instances[held.shard.generation])
            return
        if self.world.feed(machine, ShardSealed(held)) is not None:
            if launch.untold.get(rank) is held:
                del launch.untold[rank]
        else:
            self.world.probes.add("a seal is told to an agent that dies")
            self.after(0.5, self._say_sealed, launch, rank, held)
            return
        self._done(launch, rank)

    def _done(self, launch: SimLaunch, rank: int) -> None:
        launch.busy.discard(rank)
        if not launch.busy and launch.is_running:
            self._plan_save(launch)

    def on_record(self, record: Record) -> None:
        instance = self.world.truth.instances[record.generation]
        launch = instance.launch
        launch.has_committed = True
        if launch.newest is None or launch.newest.place < instance.place:
            launch.newest = instance

    def on_notify(self, machine: Machine, effect: Notify) -> None:
        self.resolved.add((machine.name, effect.generation))


def _contents(machine: Machine) -> tuple[object, ...]:
    """What a load that only reads must not change."""
    core = machine.core
    lines = None if core is None else (core.lines, core.session, core.records, frozenset(core.held))
    return dict(machine.lines), set(machine.files), machine.session, machine.records, machine.quarantined, lines
