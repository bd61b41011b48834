"""The rank of the second node in a replicated run: `python -m bench.companion DIRECTORY`.

It saves a few bytes whenever the first node's rank saves, since a generation is whole only with every rank's shard.
Commands are lines on stdin ("save 7", "load", "close"), each answered with a line.
"""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from bench.agents import JOB
from bench.contenders.flash import LINGER_SECONDS
from flashckpt import CheckpointConfig, Checkpointer, PerRank

if TYPE_CHECKING:
    from bench.state import StateDict

WORLD = 2


def config_of(directory: Path, rank: int) -> CheckpointConfig:
    """As a user has it, but for the names that make two nodes of one machine."""
    return CheckpointConfig(
        job=JOB,
        memory_dir=str(memory_dir(directory, rank)),
        node_id=f"node{rank}",
        agent="auto",
        agent_linger=LINGER_SECONDS,
        on_save_error="raise",
        # All cores, as the other contenders: the second rank does not copy.
        threads=len(os.sched_getaffinity(0)),
    )


def memory_dir(directory: Path, rank: int) -> Path:
    return directory / f"node{rank}"


def rendezvous(directory: Path, rank: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{directory}/rendezvous", rank=rank, world_size=WORLD)


def wrapped(model: dict[str, torch.Tensor], trainer: dict[str, Any]) -> StateDict:
    """Each rank stores its own model: otherwise they would share one and divide it."""
    return {"model": PerRank(model), "trainer": PerRank(trainer)}


def main(directory: Path) -> None:
    warnings.simplefilter("ignore")
    rendezvous(directory, rank=1)
    state = wrapped({"weight": torch.zeros(16)}, {"step": 0})
    with Checkpointer(config_of(directory, rank=1)) as checkpointer:
        for line in sys.stdin:
            command, _, argument = line.strip().partition(" ")
            if command == "close":
                break
            try:
                if command == "save":
                    state["trainer"].value["step"] = int(argument)
                    checkpointer.save(int(argument), state)
                else:
                    checkpointer.load(state)
            except Exception as error:
                _answer(f"{type(error).__name__}: {error}".replace("\n", " "))
            else:
                _answer("ok")
    dist.destroy_process_group()
    _answer("ok")


def _answer(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
