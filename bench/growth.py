"""What a save costs against what there is to save: tensors, bytes, ranks of a node, nodes.

Each axis alone, the others held. The two cores of a small machine are shared by all ranks and agents on it: there, cost
that grows in step with ranks and nodes is the machine's; what would be flashckpt's own is a bend upwards.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bench.errors import BenchError
from bench.process import Worker
from bench.scratch import check_room
from bench.spec import MIB, StateSpec, format_size
from flashckpt.testing import Cluster

if TYPE_CHECKING:
    from bench.run import Run

OURS = "flashckpt"
WARM_UP = 3
_ROOT = Path(__file__).resolve().parent.parent
_DEADLINE = 300.0


@dataclass(frozen=True, slots=True)
class Axes:
    tensors: tuple[int, ...]
    tensors_bytes: int  # of the state whose tensors grow in number
    sizes_bytes: tuple[int, ...]
    ranks: tuple[int, ...]
    nodes: tuple[int, ...]
    rank_bytes: int  # of each rank's state, for ranks and nodes
    rounds: int

    @property
    def steps(self) -> int:
        return len(self.tensors) + len(self.sizes_bytes) + len(self.ranks) + len(self.nodes)


FULL = Axes(
    tensors=(10, 100, 1_000, 3_000, 10_000, 30_000, 100_000),
    tensors_bytes=64 * MIB,
    sizes_bytes=tuple(MIB << power for power in (0, 2, 4, 6, 7, 8, 9, 10, 11, 12)),
    ranks=(1, 2, 3, 4),
    nodes=(1, 2, 3, 4, 5, 6),
    rank_bytes=128 * MIB,
    rounds=5,
)
QUICK = Axes(
    tensors=(10, 1_000),
    tensors_bytes=8 * MIB,
    sizes_bytes=(MIB, 16 * MIB),
    ranks=(1, 2),
    nodes=(2,),
    rank_bytes=4 * MIB,
    rounds=3,
)


def growing(run: Run, axes: Axes) -> None:
    for count in axes.tensors:
        run.tell(f"growth: {count:,} tensors")
        spec = StateSpec.of_size(axes.tensors_bytes, count)
        _one_rank(run, "tensors", count, spec, axes.rounds)
    for size_bytes in axes.sizes_bytes:
        run.tell(f"growth: {format_size(size_bytes)}")
        spec = StateSpec.of_size(size_bytes, 100)
        try:
            _one_rank(run, "bytes", size_bytes, spec, axes.rounds)
        except BenchError as error:  # a machine that can't hold the largest state still shows the others
            if "take a smaller --size" not in str(error):
                raise
            run.samples.left_out["growth", f"{format_size(size_bytes)}"] = str(error)
    for count in axes.ranks:
        run.tell(f"growth: {count} ranks of one node")
        _launch(run, "ranks", count, Cluster(1, ranks_per_node=count, job="bench"), axes)
    for count in axes.nodes:
        run.tell(f"growth: {count} nodes")
        _launch(run, "nodes", count, Cluster(count, job="bench"), axes)


def _one_rank(run: Run, axis: str, x: float, spec: StateSpec, rounds: int) -> None:
    check_room(3 * spec.size_bytes)
    directory = run.directory / "growth"
    with Worker(OURS, spec, directory) as worker:
        for step in range(1, WARM_UP + 1):
            worker.save(step)
        for step in range(WARM_UP + 1, WARM_UP + 1 + rounds):
            run.samples.add_growth(axis, "save", x, worker.save(step).seconds)
        worker.expect()
        worker.load()
        for _ in range(max(1, rounds // 3)):
            run.samples.add_growth(axis, "load", x, worker.load().seconds)
    run.clear()


def _launch(run: Run, axis: str, count: int, cluster: Cluster, axes: Axes) -> None:
    check_room(6 * count * axes.rank_bytes)
    answers = run.directory / "answers"
    answers.mkdir()
    argv = [sys.executable, "-m", "bench.growth_rank", str(axes.rank_bytes), str(axes.rounds), str(answers)]
    with cluster:
        launch = cluster.start(argv, environment={"PYTHONPATH": str(_ROOT)})
        codes = launch.wait(_DEADLINE)
        if any(codes):
            raise BenchError(f"growth, {count} {axis}: expected every rank to end well, found {codes}\n{launch.output}")
    told = [json.loads(path.read_text()) for path in sorted(answers.glob("rank*.json"))]
    for measure in told[0]:
        # A save of the job is over when its last rank's is.
        for seconds in zip(*(one[measure] for one in told), strict=True):
            run.samples.add_growth(axis, measure, count, max(seconds))
    run.clear()
