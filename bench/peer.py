"""Restoring from a peer: from nothing but live tensors to the state that another node holds.

The limit is one TCP connection that fills the live tensors. torchft fetches from a healthy replica that is training;
flashckpt from the replica that a lost node's buddy keeps, with all that belongs to it: who holds what, which
generation, checksums, and the copy into place.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from bench.bench_recover import PHASES, recover_once
from bench.contenders import CONTENDERS
from bench.environments import Unavailable, prepare
from bench.errors import BenchError
from bench.process import Worker
from bench.run import turn
from bench.scratch import check_room
from bench.wire import loopback_bytes
from flashckpt.testing import Cluster

if TYPE_CHECKING:
    from bench.run import Run
    from bench.spec import StateSpec

LIMIT, OURS = "socket", "flashckpt"
OTHERS = ("torchft-http", "torchft-pg")
WARM_UP = 2


def restoring(run: Run, section: str, spec: StateSpec, rounds: int) -> None:
    # Of each transport both ends, and what HTTP receives; of flashckpt two states, their shards and replicas.
    check_room(16 * spec.size_bytes)
    run.samples.state_bytes[section] = spec.size_bytes
    with contextlib.ExitStack() as stack:
        workers = {LIMIT: stack.enter_context(Worker(LIMIT, spec, run.directory / LIMIT))}
        for name in OTHERS:
            prepared = prepare(CONTENDERS[name].environment or "", run.note)
            if isinstance(prepared, Unavailable):
                run.samples.left_out[section, name] = prepared.reason
                continue
            try:
                worker = Worker(name, spec, run.directory / name, python=prepared.python)
            except BenchError as error:
                run.samples.left_out[section, name] = f"failed: {str(error).splitlines()[-1]}"
                continue
            workers[name] = stack.enter_context(worker)
        for worker in workers.values():
            worker.save(1)
            worker.expect()
            for _ in range(WARM_UP):
                worker.load()
        for number in range(rounds):
            run.tell(f"{section}: {number + 1} of {rounds}")
            medians = {}
            for name in turn([*workers, OURS], number):
                if name == OURS:
                    medians[name] = _recover(run, section, spec, number)
                else:
                    before = loopback_bytes()
                    medians[name] = workers[name].load().seconds
                    run.samples.add(section, name, "on the wire", loopback_bytes() - before)
                    run.samples.add(section, name, "load", medians[name])
            for name, seconds in medians.items():
                for other in (LIMIT, OURS):
                    run.samples.add_ratio(section, name, "load", other, seconds / medians[other])
    run.clear()


def _recover(run: Run, section: str, spec: StateSpec, number: int) -> float:
    with Cluster(2, job="bench") as cluster:
        told = recover_once(cluster, spec, run.directory / f"recover{number}")
    seconds: float = told["seconds"]
    run.samples.add(section, OURS, "load", seconds)
    run.samples.add(section, OURS, "on the wire", told["wire_bytes"])
    for phase in PHASES:
        run.samples.add(section, OURS, f"load: {phase}", told["timings"][phase])
    return seconds
