"""The same question on a real cluster: `torchrun … -m bench.cluster`, on every node, with or without GPUs.

    torchrun --nnodes 4 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 \\
        -m bench.cluster --size 4G --json out.json

Each rank has a state of its own of that size, on its GPU if there is one. Methods take turns, save by save; every
figure of a save is that of its slowest rank. What was saved is compared with what flashckpt brings back.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse, async_save

import flashckpt
from bench.errors import BenchError
from bench.run import turn
from bench.spec import StateSpec, format_size, parse_size
from bench.state import change, make_state, spoil, tensors_of

if TYPE_CHECKING:
    from collections.abc import Callable

_DEADLINE = 600.0
_TENSORS = 100
Figures = dict[str, float]


def main() -> None:
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(prog="torchrun … -m bench.cluster", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--size", type=parse_size, default=parse_size("1G"), help="of each rank's state")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--warm-up", type=int, default=4)
    parser.add_argument("--dcp-dir", type=Path, help="also measures dcp.async_save into this directory, on every node")
    parser.add_argument("--json", type=Path, help="written by rank 0")
    given = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("expected the variables of torchrun, found no RANK; see the example in bench/README.md")
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    spec = StateSpec.of_size(given.size, _TENSORS)
    state = make_state(spec)
    state["model"] = {name: tensor.to(device) for name, tensor in state["model"].items()}
    with flashckpt.Checkpointer(flashckpt.CheckpointConfig(on_save_error="raise")) as checkpointer:
        methods = _methods(checkpointer, state, given.dcp_dir)
        figures = _take_turns(methods, state, given.warm_up, given.rounds)
        figures["flashckpt: load"] = _load(checkpointer, state, given.rounds)
    if dist.get_rank() == 0:
        _tell(figures, spec, device, given.json)
    dist.destroy_process_group()


def _methods(
    checkpointer: flashckpt.Checkpointer, state: dict[str, Any], dcp_dir: Path | None
) -> dict[str, Callable[[int], Figures]]:
    rank = dist.get_rank()
    own = {f"rank{rank}": state}
    is_alone = os.environ["LOCAL_WORLD_SIZE"] == os.environ["WORLD_SIZE"]
    levels = ("sealed",) if is_alone else ("sealed", "replicated")

    def flash(step: int, *, overlap: bool) -> Figures:
        began = time.perf_counter()
        handle = checkpointer.save(step, own, overlap=overlap)
        told = {"call": time.perf_counter() - began}
        for level in ("staged", *levels):
            if handle.wait(level, _DEADLINE) is not flashckpt.Outcome.OK:
                raise BenchError(f"save of step {step}: expected it {level}, found {handle!r}")
            told[level] = time.perf_counter() - began
        return told

    def dcp_async(step: int) -> Figures:
        assert dcp_dir is not None
        path = dcp_dir / f"step-{step}"
        began = time.perf_counter()
        response = async_save(own, checkpoint_id=path)
        told = {"call": time.perf_counter() - began}
        future = response.upload_completion if isinstance(response, AsyncSaveResponse) else response
        future.result()
        told["written"] = time.perf_counter() - began
        dist.barrier()
        shutil.rmtree(path, ignore_errors=True)
        return told

    methods: dict[str, Callable[[int], Figures]] = {
        "flashckpt": lambda step: flash(step, overlap=False),
        "flashckpt, overlapped": lambda step: flash(step, overlap=True),
    }
    return methods | ({"dcp.async_save": dcp_async} if dcp_dir else {})


def _take_turns(
    methods: dict[str, Callable[[int], Figures]], state: dict[str, Any], warm_up: int, rounds: int
) -> dict[str, list[float]]:
    figures: dict[str, list[float]] = {}
    step = 0
    for number in range(warm_up + rounds):
        for name in turn(list(methods), number):
            step += 1
            change(state, step)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            dist.barrier()
            told = methods[name](step)
            for measure, seconds in told.items():
                slowest = _slowest(seconds)
                if number >= warm_up:
                    figures.setdefault(f"{name}: {measure}", []).append(slowest)
    return figures


def _load(checkpointer: flashckpt.Checkpointer, state: dict[str, Any], rounds: int) -> list[float]:
    own = {f"rank{dist.get_rank()}": state}
    # Whoever had the last turn may not have been flashckpt.
    step = state["trainer"]["step"] + 1
    change(state, step)
    if checkpointer.save(step, own).wait("sealed", _DEADLINE) is not flashckpt.Outcome.OK:
        raise BenchError(f"save of step {step}: expected it sealed")
    expected = [tensor.clone() for tensor in tensors_of(state)]
    figures = []
    for _ in range(max(1, rounds // 3)):
        spoil(state)
        dist.barrier()
        began = time.perf_counter()
        result = checkpointer.load(own)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        figures.append(_slowest(time.perf_counter() - began))
        if result is None or not all(map(torch.equal, tensors_of(state), expected)):
            raise BenchError(f"rank {dist.get_rank()}: expected what was saved last, found {result!r}")
    return figures


def _slowest(seconds: float) -> float:
    told: list[float] = [0.0] * dist.get_world_size()
    dist.all_gather_object(told, seconds)
    return max(told)


def _tell(figures: dict[str, list[float]], spec: StateSpec, device: torch.device, file: Path | None) -> None:
    nodes = int(os.environ["WORLD_SIZE"]) // int(os.environ["LOCAL_WORLD_SIZE"])
    header = f"{nodes} nodes, {dist.get_world_size()} ranks with {format_size(spec.size_bytes)} each on {device.type}"
    lines = [header, f"{'seconds, slowest rank':<36} {'median':>9} {'best':>9} {'worst':>9}  GB/s a rank"]
    for name, values in figures.items():
        median = statistics.median(values)
        speed = spec.size_bytes / median / 1e9
        lines.append(f"{name:<36} {median:9.4f} {min(values):9.4f} {max(values):9.4f}  {speed:9.2f}")
    sys.stdout.write("\n".join(lines) + "\n")
    if file is not None:
        file.write_text(
            json.dumps({"what": header, "state_bytes": spec.size_bytes, "seconds": figures}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
