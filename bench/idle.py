"""What an agent takes from a machine while it has nothing to do: two nodes that are up, and nobody who saves."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from bench.agents import agent_of
from bench.process import Worker
from bench.replicate import RECEIVER, SENDER, WARM_UP
from bench.samples import SHARE
from bench.scratch import check_room

if TYPE_CHECKING:
    from bench.run import Run
    from bench.spec import StateSpec

CONTENDER = "flashckpt-unlogged"  # debug messages would be counted, too
_COPIES = 6


def idling(run: Run, section: str, spec: StateSpec, windows: int, window_seconds: float) -> None:
    """CPU time of both agents in windows of so many seconds, from /proc: all threads, kernel included.

    The session is warm: it has replicated a few saves, so that what is left is what an agent always does (leases,
    heartbeats, looking for trainers that ended).
    """
    check_room(_COPIES * spec.size_bytes)
    run.samples.state_bytes[section] = spec.size_bytes
    with Worker(CONTENDER, spec, run.directory / CONTENDER) as worker:
        for step in range(1, WARM_UP + 1):
            worker.save(step)
        agents = [agent_of(run.directory / CONTENDER / f"node{node}") for node in (0, 1)]
        for number in range(windows):
            run.tell(f"{section}: {number + 1} of {windows}")
            began, before = time.monotonic(), [agent.cpu_seconds() for agent in agents]
            time.sleep(window_seconds)
            seconds = time.monotonic() - began
            for agent, name, taken in zip(agents, (SENDER, RECEIVER), before, strict=True):
                run.samples.add(section, name, SHARE, (agent.cpu_seconds() - taken) / seconds)
    run.clear()
