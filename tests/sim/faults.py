"""What goes wrong: each kind is one function of the world, drawn by the swarm."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flashckpt.protocol.events import Gone, Rotten
from tests.sim.job import Phase

if TYPE_CHECKING:
    from collections.abc import Callable

    from flashckpt.types import ShardId
    from tests.sim.machine import Machine
    from tests.sim.world import World


def _members(world: World) -> list[Machine]:
    launch = world.job.newest
    return [m for m in launch.members if m.alive and not m.isolated] if launch is not None else []


def _end_launches_on(world: World, machine: Machine) -> None:
    """A launch ends some time after one of its machines is gone; until then its other ranks go on."""
    for launch in world.job.launches:
        if machine in launch.members and launch.phase is not Phase.DEAD:
            for rank in launch.ranks_of[machine]:
                launch.alive.discard(rank)
                launch.busy.discard(rank)
            world.after(0.1 + 1.5 * world.rng.random(), world.job.kill, launch)


def _lose(world: World) -> Machine | None:
    members = _members(world)
    if not members:
        return None
    machine = world.rng.choice(members)
    if world.trace:
        world.say(f"{machine}: LOST with its memory")
    for file in machine.files.values():
        world.truth.fault(machine, file)
    machine.alive = False
    machine.core = None
    machine.incarnation += 1
    machine.wipe()
    world.job.agent_crashed(machine)
    return machine


def machine_lost(world: World) -> None:
    machine = _lose(world)
    if machine is not None:
        _end_launches_on(world, machine)


def machine_lost_quietly(world: World) -> None:
    """The others hang in a collective: nobody ends them, and nobody saves."""
    machine = _lose(world)
    launch = world.job.newest
    if machine is None or launch is None or machine not in launch.members:
        return
    launch.hangs = True
    launch.alive.difference_update(launch.ranks_of[machine])
    launch.busy.difference_update(launch.ranks_of[machine])


def machine_away(world: World) -> None:
    """Cut off with its memory, its agent and its trainers; it comes back later."""
    members = _members(world)
    if members:
        _cut_off(world, [world.rng.choice(members)])


def all_away(world: World) -> None:
    """The whole place is cut off; the job goes on elsewhere, on blank machines."""
    members = _members(world)
    if members:
        world.probes.add("all machines are cut off at once")
        _cut_off(world, members)


def _cut_off(world: World, machines: list[Machine], *, goes_on: bool = True) -> None:
    for machine in machines:
        machine.isolated = True
        world.after(1.0 + 6.0 * world.rng.random(), _machine_back, world, machine)
        if world.trace:
            world.say(f"{machine}: CUT OFF with its memory")
    launch = world.job.newest
    if goes_on and launch is not None and launch.phase is not Phase.DEAD:
        # Whoever launches the job gives the whole launch up; trainers beyond the cut may not hear of it.
        launch.is_zombie = world.rng.random() < 0.5
        if launch.is_zombie:
            world.after(0.1 + world.rng.random(), _launch_beside, world, launch)
        else:
            world.after(0.1 + 1.5 * world.rng.random(), world.job.kill, launch)


def _launch_beside(world: World, launch: object) -> None:
    if world.job.newest is launch:
        world.job.start()


def _machine_back(world: World, machine: Machine) -> None:
    if machine.alive and machine.isolated:
        machine.isolated = False
        world.probes.add("a machine comes back with its memory")
        if world.trace:
            world.say(f"{machine}: IS BACK")


def link_cut(world: World) -> None:
    there = [m for m in world.machines if m.alive]
    if len(there) < 2:
        return
    a, b = world.rng.sample(there, 2)
    pairs = [(a, b)] if world.rng.random() < 0.5 else [(a, b), (b, a)]
    world.cut.update(pairs)
    if world.trace:
        world.say(f"link {a} {'→' if len(pairs) == 1 else '↔'} {b} is cut")
    world.after(0.5 + 3.0 * world.rng.random(), world.cut.difference_update, pairs)


def agent_crashes(world: World) -> None:
    there = [m for m in world.machines if m.core is not None]
    if there:
        world.crash_agent(world.rng.choice(there))


def agent_pauses(world: World) -> None:
    there = [m for m in world.machines if m.core is not None]
    if there:
        machine = world.rng.choice(there)
        machine.paused_until = world.now + 0.3 + 3.0 * world.rng.random()
        if world.trace:
            world.say(f"{machine}: agent is paused")


def _some_file(world: World) -> tuple[Machine, ShardId] | None:
    there = [m for m in world.machines if m.files and m.alive]
    if not there:
        return None
    machine = world.rng.choice(there)
    return machine, world.rng.choice(list(machine.files))


def rot(world: World) -> None:
    found = _some_file(world)
    if found is None:
        return
    machine, shard = found
    file = machine.files[shard]
    if not file.good:
        return
    world.truth.fault(machine, file)
    file.good = False
    if world.trace:
        world.say(f"{machine}: rank {shard.rank} of {file.instance} ROTS")
    world.after(0.1 + 2.0 * world.rng.random(), _scrub, world, machine, shard)


def _scrub(world: World, machine: Machine, shard: ShardId) -> None:
    file = machine.files.get(shard)
    if file is None or file.good:
        return
    if machine.core is None or world.is_paused(machine):
        world.after(0.5, _scrub, world, machine, shard)
        return
    _probe_loss(world, machine, shard)
    world.feed(machine, Rotten(shard, "crc"))


def vanish(world: World) -> None:
    found = _some_file(world)
    if found is None:
        return
    machine, shard = found
    file = machine.files.pop(shard)
    if file.good:
        world.truth.fault(machine, file)
    if world.trace:
        world.say(f"{machine}: rank {shard.rank} of {file.instance} VANISHES")
    world.after(0.1 + world.rng.random(), _notice, world, machine, shard)


def _notice(world: World, machine: Machine, shard: ShardId) -> None:
    if shard not in machine.files and machine.core is not None and not world.is_paused(machine):
        world.feed(machine, Gone(shard))


def _probe_loss(world: World, machine: Machine, shard: ShardId) -> None:
    core = machine.core
    if core is None or core.session is None:
        return
    if core.owns(shard):
        world.probes.add("an owner's copy is bad" if core.acks.get(shard) else "an owner's copy is bad, no ack known")
    if any(record.generation == shard.generation for record in core.records):
        world.probes.add("a committed copy is bad")


def trainers_end(world: World) -> None:
    launch = world.job.newest
    if launch is not None:
        world.job.kill(launch)


def rank_ends(world: World) -> None:
    launch = world.job.newest
    if launch is not None and launch.alive and launch.is_running:
        ranks = sorted(launch.busy & launch.alive) or sorted(launch.alive)
        world.job.rank_dies(launch, world.rng.choice(ranks))


def second_launch(world: World) -> None:
    """Somebody starts the job again while it runs: the older trainers go on until they are told."""
    launch = world.job.newest
    if launch is not None:
        launch.is_zombie = True
        world.probes.add("two launches at once") if launch.phase is not Phase.DEAD else None
        world.job.start()


def twin_launches(world: World) -> None:
    """Two at the same moment: with the same epoch, only their names tell them apart."""
    second_launch(world)
    if world.job.newest is not None:
        world.job.newest.is_zombie = True
        world.job.start()


def rollback(world: World) -> None:
    """A person goes back to an older step."""
    launch = world.job.newest
    if launch is not None:
        world.job.kill(launch)
        world.job.start(asked=True)


def rollback_without_one(world: World) -> None:
    """The same while one machine is away, which comes back later with what was given up."""
    members = _members(world)
    if members:
        _cut_off(world, [world.rng.choice(members)], goes_on=False)
        rollback(world)


def wrong_nodes(world: World) -> None:
    """A person starts the job on other nodes, or on some of the right ones, and notices it later."""
    launch = world.job.newest
    if launch is not None:
        launch.is_zombie = True
        world.job.start(is_wrong=True)
        wrong = world.job.newest
        if wrong is not None:
            world.after(0.5 + 3.0 * world.rng.random(), world.job.kill, wrong)


def stray_launch(world: World) -> None:
    """Somebody starts the job beside itself, on blank nodes or a part of its own ones; it saves little or nothing."""
    rng = world.rng
    members = [m for m in world.machines if m.alive and not m.isolated and m.core is not None]
    if rng.random() < 0.8:
        # Beside live trainers it is refused, unless that person insists.
        busy = {launch.machine_of[rank] for launch in world.job.launches for rank in launch.alive}
        members = [m for m in members if m not in busy]
    some = rng.sample(members, min(len(members), rng.choice((0, 0, 1, 2))))
    while len(some) < rng.choice((1, 2)):
        some.append(world.add_machine())
    world.job.start_stray(some, rng.choice((0, 0, 1, 2)))


def evaluation(world: World) -> None:
    """A load that only reads, beside the training."""
    members = [m for m in _members(world) if m.core is not None and not world.is_paused(m)]
    if members:
        world.job.evaluate(members)


FAULTS: dict[str, Callable[[World], None]] = {
    "machine_lost": machine_lost,
    "machine_lost_quietly": machine_lost_quietly,
    "machine_away": machine_away,
    "all_away": all_away,
    "link_cut": link_cut,
    "agent_crashes": agent_crashes,
    "agent_pauses": agent_pauses,
    "rot": rot,
    "vanish": vanish,
    "trainers_end": trainers_end,
    "rank_ends": rank_ends,
    "second_launch": second_launch,
    "twin_launches": twin_launches,
    "rollback": rollback,
    "rollback_without_one": rollback_without_one,
    "wrong_nodes": wrong_nodes,
    "stray_launch": stray_launch,
    "evaluation": evaluation,
}
