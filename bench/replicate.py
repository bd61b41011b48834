"""Replication between two agents of this machine, taking turns with a plain socket that moves the same bytes."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from bench.agents import agent_of
from bench.process import UNTIL_REPLICATED, Worker
from bench.run import turn
from bench.scratch import check_room
from bench.wire import loopback_bytes

if TYPE_CHECKING:
    from bench.run import Run
    from bench.spec import StateSpec

CONTENDER, LIMITS = "flashckpt-replicated", ("socket", "socket-tls")
SENDER, RECEIVER = "agent that sends", "agent that receives"
# Both nodes' slots are faulted by then: two of the rank, three of the node that keeps its replicas.
WARM_UP = 4
# The state, two shards, three replicas; and for each socket the state and what was received.
_COPIES = 6 + 2 * len(LIMITS)
_WATCHED = 2


def replicating(run: Run, section: str, spec: StateSpec, rounds: int) -> None:
    """From SEALED to REPLICATED at the trainer, and the push within it; the CPU time of both agents, slots included."""
    check_room(_COPIES * spec.size_bytes)
    run.samples.state_bytes[section] = spec.size_bytes
    with contextlib.ExitStack() as stack:
        names = (CONTENDER, *LIMITS)
        workers = [stack.enter_context(Worker(name, spec, run.directory / name)) for name in names]
        for step in range(1, WARM_UP + 1):
            for worker in workers:
                worker.save(step)
        for number in range(rounds):
            run.tell(f"{section}: {number + 1} of {rounds}")
            took = {}
            for worker in turn(workers, number):
                if worker.contender == CONTENDER:
                    took[CONTENDER] = _replicate(run, section, worker, WARM_UP + 1 + number)
                else:
                    before = loopback_bytes()
                    took[worker.contender] = worker.save(WARM_UP + 1 + number).seconds
                    run.samples.add(section, worker.contender, "on the wire", loopback_bytes() - before)
                run.samples.add(section, worker.contender, "replicate", took[worker.contender])
            for name, seconds in took.items():
                run.samples.add_ratio(section, name, "replicated", LIMITS[0], seconds / took[LIMITS[0]])
        for worker in workers:  # what was moved was the state
            worker.expect()
            worker.load()
    run.clear()


def _replicate(run: Run, section: str, worker: Worker, step: int) -> float:
    agents = [agent_of(run.directory / CONTENDER / f"node{node}") for node in (0, 1)]
    before, on_wire = [agent.cpu_seconds() for agent in agents], loopback_bytes()
    answer = worker.save(step)
    run.samples.add(section, CONTENDER, "on the wire", loopback_bytes() - on_wire)
    for agent, name, seconds in zip(agents, (SENDER, RECEIVER), before, strict=True):
        run.samples.add(section, name, "cpu: replicate", agent.cpu_seconds() - seconds)
    run.samples.add(section, CONTENDER, "push", agents[0].push_seconds(rank=0, step=step))
    run.samples.add(section, CONTENDER, "save", answer.seconds)
    return answer.details[UNTIL_REPLICATED]


def watched_agents(run: Run, section: str, spec: StateSpec) -> None:
    """The memory of both agents while they replicate, without the slots. Apart from the clocks: looking costs time."""
    check_room(6 * spec.size_bytes)
    run.samples.state_bytes[section] = spec.size_bytes
    run.tell(f"{section}: agents")
    with Worker(CONTENDER, spec, run.directory / CONTENDER) as worker:
        for step in range(1, WARM_UP + 1):
            worker.save(step)
        agents = [agent_of(run.directory / CONTENDER / f"node{node}") for node in (0, 1)]
        for step in range(WARM_UP + 1, WARM_UP + 1 + _WATCHED):
            peaks = worker.save(step, watch_others=[agent.pid for agent in agents]).others_bytes
            for name, peak in zip((SENDER, RECEIVER), peaks, strict=True):
                run.samples.add(section, name, "replication, own memory", peak)
    run.clear()
