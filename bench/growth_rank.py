"""A rank of bench/growth.py, started as by a launcher: `python -m bench.growth_rank BYTES ROUNDS ANSWERS`."""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from pathlib import Path

import torch.distributed as dist

import flashckpt
from bench.errors import BenchError
from bench.growth import WARM_UP
from bench.spec import StateSpec
from bench.state import change, make_state

_TENSORS = 20
_DEADLINE = 120.0


def main(size_bytes: int, rounds: int, answers: Path) -> None:
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    state = make_state(StateSpec.of_size(size_bytes, _TENSORS))
    told: dict[str, list[float]] = {}
    with flashckpt.Checkpointer(flashckpt.CheckpointConfig(on_save_error="raise")) as checkpointer:
        is_alone = os.environ["LOCAL_WORLD_SIZE"] == os.environ["WORLD_SIZE"]
        last = flashckpt.Level.SEALED if is_alone else flashckpt.Level.REPLICATED
        for step in range(1, WARM_UP + rounds + 1):
            change(state, step)
            dist.barrier()  # all save at once, as in a training job
            began = time.perf_counter()
            handle = checkpointer.save(step, {f"rank{rank}": state})
            saved = time.perf_counter() - began
            outcome = handle.wait(last, _DEADLINE)
            whole = time.perf_counter() - began
            if outcome is not flashckpt.Outcome.OK:
                raise BenchError(f"save of step {step}: expected {last.name.lower()}, found {handle!r}")
            if step > WARM_UP:
                told.setdefault("save", []).append(saved)
                if not is_alone:
                    told.setdefault("replicated", []).append(whole)
    (answers / f"rank{rank:03d}.json").write_text(json.dumps(told))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
