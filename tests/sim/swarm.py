"""Each seed draws a world of its own: sizes, rates, which faults there are; then runs it in two phases.

First anything goes, and safety is checked at every step. Then faults end, and the job must get on by itself.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from flashckpt.protocol.core import AgentCore
from flashckpt.protocol.line import KEPT
from tests.sim.faults import FAULTS
from tests.sim.job import Job
from tests.sim.truth import Violation
from tests.sim.world import World

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.sim.job import SimLaunch

SAFETY_SECONDS = 8.0
CONVERGE_SECONDS = 30.0
QUIET_SECONDS = 4.2  # two beats without news


@dataclass(slots=True)
class Swarm:
    """What one seed drew. Probabilities are per chance, times in seconds."""

    nodes: int
    shares: tuple[int, ...]  # ranks of each node
    replicas: int
    domains: int
    strategy: str
    slots: int
    interval: float
    most_saves: int  # of a launch while there are faults
    waits: float  # how long a save may wait for a slot; 0 = skip
    write_time: float
    push_time: float
    faults: tuple[str, ...]
    fault_count: int
    lossy: float
    duplicates: float
    reorder: float
    breaks: float
    fails: float
    no_space: float
    splits: float  # a rank disagrees with others on what they share
    crash_points: float
    clock_lags: bool
    rollback: bool
    heals_first: bool  # redundancy has to return before the next save
    most_listed: int  # launches that a line lists of which nothing is left
    scans_first: bool = True
    stopped: bool = False  # no new saves

    @property
    def keep(self) -> int:
        """Committed generations that stay: as many as fit beside the one that is written."""
        return self.slots - 1


def draw(rng: random.Random) -> Swarm:
    nodes = rng.choice((1, 2, 2, 2, 3, 3, 3, 4, 4, 5))
    most = rng.choice((1, 1, 2, 3)) if nodes < 5 else 1
    kinds = rng.sample(sorted(FAULTS), rng.randint(1, 5))

    def maybe(share: float, value: float) -> float:
        return value * rng.random() if rng.random() < share else 0.0

    return Swarm(
        nodes=nodes,
        shares=tuple(rng.randint(1, most) for _ in range(nodes)),
        replicas=rng.choice((0, 1, 1, 1, 1, 2)),
        domains=rng.choice((0, 0, 2, 3)),
        strategy=rng.choice(("ring", "ring", "group")),
        slots=rng.choice((2, 2, 3)),
        interval=rng.choice((0.2, 0.5, 1.0)),
        most_saves=rng.choice((2, 4, 6)),
        waits=rng.choice((0.0, 0.0, 1.5, 4.0)),
        write_time=rng.choice((0.05, 0.5)),
        push_time=rng.choice((0.05, 0.8)),
        faults=tuple(kinds),
        fault_count=rng.randint(0, 6),
        lossy=maybe(0.3, 0.3),
        duplicates=maybe(0.3, 0.5),
        reorder=maybe(0.3, 0.3),
        breaks=maybe(0.4, 0.5),
        fails=maybe(0.3, 0.15),
        no_space=maybe(0.2, 0.1),
        splits=maybe(0.1, 0.3),
        crash_points=maybe(0.3, 0.04),
        clock_lags=rng.random() < 0.3,
        rollback=rng.random() < 0.3,
        heals_first=rng.random() < 0.4,
        most_listed=rng.choice((1, 2, 3, KEPT)),
    )


@dataclass(slots=True)
class Outcome:
    """How one seed went."""

    seed: int
    violation: str = ""
    story: str = ""
    events: int = 0
    launches: int = 0
    commits: int = 0
    probes: set[str] = field(default_factory=set)
    log: list[str] = field(default_factory=list)


def run(
    seed: int, core: type[AgentCore] = AgentCore, trace: bool = False, adjust: Callable[[World], None] | None = None
) -> Outcome:
    rng = random.Random(seed)
    swarm = draw(rng)
    world = World(rng, swarm, core, trace)
    job = Job(world)
    if adjust is not None:
        adjust(world)
    outcome = Outcome(seed)
    try:
        _safety(world, job)
        _liveness(world, job)
    except Violation as violation:
        outcome.violation, outcome.story = violation.invariant, str(violation)
        world.say(f"VIOLATION {violation}")
    outcome.events, outcome.probes, outcome.log = world.events, world.probes, world.log
    outcome.launches, outcome.commits = world.truth.launches, world.truth.commits
    if trace:
        outcome.log.insert(0, str(swarm))
    return outcome


def _safety(world: World, job: Job) -> None:
    swarm, rng = world.swarm, world.rng
    for _ in range(swarm.nodes):
        world.add_machine()
    world.allow_crashes_between_effects(swarm.crash_points)
    job.start()
    for _ in range(swarm.fault_count):
        world.after(rng.random() * SAFETY_SECONDS, FAULTS[rng.choice(swarm.faults)], world)
    world.run_until(SAFETY_SECONDS)


def _liveness(world: World, job: Job) -> None:
    """Faults end; the newest launch, or one more, must save, commit and clean up."""
    world.faults_on = False
    world.cut.clear()
    for machine in world.machines:
        machine.isolated = False
        machine.paused_until = 0.0
    if world.trace:
        world.say("faults end")
    launch = job.newest
    if launch is not None and launch.is_running and launch.hangs:
        _wait_healed(world, job, launch)
    if launch is None or (launch.is_running and len(launch.alive) < launch.world):
        job.kill(launch) if launch is not None else job.start()
    if world.swarm.heals_first:
        _heal_first(world, job)
    end = world.now + CONVERGE_SECONDS
    commits = None
    while world.now < end:
        world.run_until(world.now + 0.25)
        launch = job.newest
        if launch is None or not launch.is_running:
            commits = None
        elif commits is None:
            commits = launch.newest
        elif launch.newest is not commits:
            break
    else:
        stuck = {m.name: _waits(m) for m in launch.members} if launch is not None else {}
        raise Violation("LIVENESS", f"no commit within {CONVERGE_SECONDS} s after the last fault: {stuck}")
    world.swarm.stopped = True
    end = world.now + CONVERGE_SECONDS
    while world.now < end:
        world.run_until(world.now + 1.0)
        launch = job.newest
        if launch.newest is None:
            # Its trainers ended late, of a fault before: the next launch has to commit as well.
            job.resume(launch)
            continue
        world.swarm.stopped = True
        quiet = world.now - world.last_news > QUIET_SECONDS or _is_left_open(job)
        if not launch.busy and quiet and not _unfinished(world, job):
            return
    raise Violation("LIVENESS", f"the job does not come to rest: {_unfinished(world, job) or 'messages go on'}")


def _heal_first(world: World, job: Job) -> None:
    """Without a single save, what the next launch stands on gets its copies back."""
    world.swarm.stopped = True
    end = world.now + CONVERGE_SECONDS
    while world.now < end:
        world.run_until(world.now + 0.25)
        launch = job.newest
        if launch is not None and launch.is_running and not launch.busy:
            _wait_healed(world, job, launch)
            if job.newest is launch and launch.is_running:
                break
    job.resume(job.newest)


def _wait_healed(world: World, job: Job, launch: SimLaunch) -> None:
    lacked = bool(_lacking(world, launch))
    end = world.now + CONVERGE_SECONDS
    while (lacking := _lacking(world, launch)) and job.newest is launch and launch.is_running:
        if world.now > end:
            raise Violation("HEALS", f"no redundancy within {CONVERGE_SECONDS} s after the last fault: {lacking}")
        world.run_until(world.now + 0.5)
    if lacked and job.newest is launch and launch.is_running:
        world.probes.add("healed while trainers hang" if launch.hangs else "healed before the first save")


def _lacking(world: World, launch: SimLaunch) -> list[str]:
    """Shards of what is kept that have fewer copies than they could have."""
    kept = launch.newest or launch.base
    live = [m for m in launch.members if m.core is not None]
    if kept is None or any(m.core.is_fenced for m in live):
        return []
    copies = {rank: [m for m in live if world.truth.is_good(m, kept, rank)] for rank in range(kept.launch.world)}
    goal = min(world.swarm.replicas + 1, len(live))
    return [f"rank {rank} of {kept} is on {nodes}" for rank, nodes in copies.items() if 0 < len(nodes) < goal]


def _waits(machine) -> object:
    core = machine.core
    return (
        None if core is None else (len(core.held), core.backlog()[:2], core.granting.waiting, sorted(core.voids)[-2:])
    )


def _is_left_open(job: Job) -> bool:
    """A rank gave the last attempt up, and perhaps its agent died before it could pass that on. The rank's next save
    would tell; without one, nodes go on asking, and waits for that attempt end at their own deadline."""
    return job.latest in job.given_up


def _unfinished(world: World, job: Job) -> list[str]:
    """What should be done by now and is not."""
    launch = job.newest
    found = []
    if launch is None or launch.newest is None:
        return ["no launch"]
    for machine in launch.members:
        core = machine.core
        if core is None:
            found.append(f"{machine} is down")
            continue
        if core.backlog():
            found.append(f"{machine} still pushes {core.backlog()[0]}")
        if set(core.held) != set(machine.files):
            found.append(f"{machine} holds other shards than it believes")
        for shard, file in machine.files.items():
            older = file.instance.launch in launch.knows or (
                file.instance.launch is launch and file.instance.place < launch.newest.place
            )
            if not older and file.instance.launch is not launch:
                continue  # another history's: it stays until a person chooses
            kept = core.threshold.keeps if core.threshold is not None else ()
            if older and shard.generation not in kept:
                found.append(f"{machine} still holds rank {shard.rank} of {file.instance}")
            elif file.instance is launch.newest or (file.instance is job.latest and _is_left_open(job)):
                continue
            elif shard.generation in kept:
                continue  # nobody waits for it any more: a newer one has got further
            elif (machine.name, shard.generation) not in job.resolved:
                found.append(f"{machine} never says what becomes of {file.instance}")
    for rank in range(launch.world):
        owner = launch.machine_of[rank]
        others = [m for m in launch.members if m is not owner and world.truth.is_good(m, launch.newest, rank)]
        if launch.replicas == 0 and {"rot", "vanish"} & set(world.swarm.faults):
            continue  # the only copy may be gone, and nobody promised more
        if len(others) < launch.replicas or not world.truth.is_good(owner, launch.newest, rank):
            found.append(f"rank {rank} of {launch.newest} lacks copies")
    return found
