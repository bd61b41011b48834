"""Recovery from a lost node, phase by phase, beside a plain socket that moves the same bytes; and from own memory.

    python -m bench.bench_recover [--size 1G] [--rounds 3] [--json FILE]

Two nodes on this machine (own agents, own memory directories, loopback), one rank each; that of the second has a state
of that size. Each round saves and replicates it three times, destroys the second node with its memory, starts the job
again with a blank node in its place, and loads. In between, the same number of bytes goes through one TCP connection,
once into memory that is warm, and once into memory that the receiver has to get first. Then the own-node load takes
turns with `dcp.load` from tmpfs. Medians; every load is compared with what was saved.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import statistics
import sys
from pathlib import Path
from typing import Any

from bench import machine
from bench.errors import BenchError
from bench.process import Worker
from bench.run import turn
from bench.scratch import check_room, scratch_directory
from bench.spec import StateSpec, format_size, parse_size
from flashckpt.testing import Cluster

SOCKETS = ("socket", "socket-into-new")
PHASES = ("inventory", "verify", "plan", "retrieve", "read")
_TENSORS = 100
_LOST = 1  # the node
_DEADLINE = 300.0
_REST_SECONDS = 1.0  # after the start of two ranks and two agents on these few cores: the others rest as well
_SAVES = 3  # before the loss: a job that is lost has been saving, and its holders use their memory again


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--size", type=parse_size, default=parse_size("1G"), help="of each rank's state")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    spec = StateSpec.of_size(given.size, _TENSORS)
    # A state, three shards and three replicas of it; the state and what is received of each socket.
    check_room(12 * spec.size_bytes)
    with scratch_directory() as directory:
        lost = _lose_a_node(spec, given.rounds, directory)
    with scratch_directory() as directory:
        own = _load_own(spec, given.rounds, directory)
    result = {
        "machine": dataclasses.asdict(machine.describe()),
        "state_bytes": spec.size_bytes,
        "lost_node": lost,
        "own_node": own,
    }
    print(_told(spec, lost, own))
    if given.json is not None:
        given.json.write_text(json.dumps(result, indent=1) + "\n")


def _lose_a_node(spec: StateSpec, rounds: int, directory: Path) -> dict[str, list[float]]:
    samples: dict[str, list[float]] = {name: [] for name in (*PHASES, "total", *SOCKETS)}
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(Worker(name, spec, directory / name)) for name in SOCKETS]
        for socket in sockets:
            socket.save(1)  # faults everything else in
        for number in range(rounds):
            print(f"node lost: {number + 1} of {rounds}", file=sys.stderr)
            for socket in sockets:
                samples[socket.contender].append(socket.save(2 + number).seconds)
            # A cluster of its own for each round, so that every replacement is as blank as the first.
            with Cluster(2, job="bench") as cluster:
                told = recover_once(cluster, spec, directory / f"round{number}")
            for name in PHASES:
                samples[name].append(told["timings"][name])
            samples["total"].append(told["seconds"])
    return samples


def recover_once(cluster: Cluster, spec: StateSpec, answers: Path) -> dict[str, Any]:
    """Saves, destroys the second node, loads on a blank one; what its rank tells of the load."""
    answers.mkdir()
    arguments = [str(spec.tensors), str(spec.tensor_bytes), str(answers)]
    for doing in ("save", "load"):
        launch = cluster.torchrun(__file__, doing, *arguments)
        codes = launch.wait(_DEADLINE)
        if codes != [0, 0]:
            raise BenchError(f"{doing}: expected both ranks to end well, found {codes}\n{launch.output}")
        if doing == "save":
            cluster[_LOST].replace("blank")
    told: dict[str, Any] = json.loads((answers / f"rank{_LOST}.json").read_text())
    if told["source"] != "peer":
        raise BenchError(f"load on the blank node: expected it to come from a peer, found {told['source']!r}")
    return told


def _load_own(spec: StateSpec, rounds: int, directory: Path) -> dict[str, list[float]]:
    samples: dict[str, list[float]] = {"flashckpt": [], "dcp": []}
    workers = [Worker(name, spec, directory / name) for name in samples]
    try:
        for worker in workers:
            worker.save(1)
            worker.expect()
            worker.load()
        for number in range(rounds):
            print(f"own memory: {number + 1} of {rounds}", file=sys.stderr)
            for worker in turn(workers, number):
                samples[worker.contender].append(worker.load().seconds)
        for worker in workers:
            worker.close()
    finally:
        for worker in workers:
            worker.kill()
    return samples


def _told(spec: StateSpec, lost: dict[str, list[float]], own: dict[str, list[float]]) -> str:
    median = {name: statistics.median(seconds) for name, seconds in (lost | own).items()}
    gigabytes = spec.size_bytes / 1e9
    lines = [f"node lost, {format_size(spec.size_bytes)} fetched from its buddy (median of {len(lost['total'])})"]
    lines += [f"  {name:<12} {median[name] * 1000:9.1f} ms" for name in (*PHASES, "total")]
    for name, what in zip(SOCKETS, ("plain socket", "… into new memory"), strict=True):
        speeds = f"{gigabytes / median['retrieve']:.2f} against {gigabytes / median[name]:.2f} GB/s"
        ratio = median[name] / median["retrieve"]
        lines.append(f"  {what:<17} {median[name] * 1000:9.1f} ms   retrieve is {ratio:.2f} of its speed ({speeds})")
    lines += [
        f"own memory, {format_size(spec.size_bytes)} (median of {len(own['dcp'])})",
        f"  flashckpt    {median['flashckpt'] * 1000:9.1f} ms",
        f"  dcp.load     {median['dcp'] * 1000:9.1f} ms   {median['dcp'] / median['flashckpt']:.1f} times as long",
    ]
    return "\n".join(lines)


# --- what the ranks run


def rank_main(doing: str, tensors: int, tensor_bytes: int, answers: Path) -> None:
    import time

    import torch.distributed as dist

    import flashckpt
    from bench.state import change, digest, make_state, spoil
    from bench.wire import loopback_bytes

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    # The healthy node has next to nothing of its own: reading it would take cores and memory from the transfer's two
    # ends, which share them here and nowhere else.
    state = make_state(StateSpec(tensors, tensor_bytes) if rank == _LOST else StateSpec(1, 4096))
    change(state, 1)
    expected = digest(state)
    saved = {f"rank{rank}": state}
    with flashckpt.Checkpointer(flashckpt.CheckpointConfig()) as checkpointer:
        if doing == "save":
            for step in range(1, _SAVES + 1):
                outcome = checkpointer.save(step, saved).wait("replicated", timeout=_DEADLINE)
                if outcome is not flashckpt.Outcome.OK:
                    raise BenchError(f"save: expected it replicated, found {outcome}")
        else:
            spoil(state)
            time.sleep(_REST_SECONDS)
            before = loopback_bytes()
            began = time.perf_counter()
            result = checkpointer.load(saved)
            seconds = time.perf_counter() - began
            wire_bytes = loopback_bytes() - before
            if result is None or digest(state) != expected:
                raise BenchError(f"rank {rank}: expected what was saved, found {result!r}")
            told = {
                "source": result.source,
                "timings": dataclasses.asdict(result.timings),
                "seconds": seconds,
                "wire_bytes": wire_bytes,
            }
            (answers / f"rank{rank}.json").write_text(json.dumps(told))
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" in os.environ:
        rank_main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
    else:
        main()
