"""What a forked rank of the campaign does: loads, proves what it got, trains and saves until it is told to stop.

Its state is a few KiB that follow from a *mark*: a digest of the mark before, the launch and the step. So every state
that was ever saved has a name of its own, a load is judged without a copy, and no two histories have a state in common.

Events go to DIRECTORY/rank<N>.jsonl: started; loaded (mark null: nothing was there) or refused; saving; saved; level;
ended.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import os
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import flashckpt
from flashckpt.checkpointer import internals_of
from flashckpt.errors import FlashError
from flashckpt.testing.trainer import Journal
from tests.campaign.oracle import ROOT_MARK, next_mark

_BYTES = 2048


def tensor(*key):
    seed = int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=7).digest(), "little")
    return torch.randint(-128, 127, (_BYTES,), dtype=torch.int8, generator=torch.Generator().manual_seed(seed))


def make_state(mark, rank):
    return {"mark": mark, "shared": tensor(mark), "mine": flashckpt.PerRank({"own": tensor(mark, rank)})}


def is_of(state, mark, rank, saved_world):
    """Whether every bit is what was saved under that mark; a rank that is new has nothing of its own."""
    own = rank >= saved_world or torch.equal(state["mine"].value["own"], tensor(mark, rank))
    return own and torch.equal(state["shared"], tensor(mark))


def main(spec):
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    directory = Path(spec["directory"])
    journal = Journal(directory / f"rank{rank}.jsonl", rank)
    journal.tell("started", pid=os.getpid(), world=world)
    torch.set_num_threads(1)
    if world > 1:
        dist.init_process_group("gloo", timeout=timedelta(seconds=spec["patience"]))
    with flashckpt.Checkpointer(flashckpt.CheckpointConfig.from_dict(spec["config"])) as checkpointer:
        begin = load(spec, journal, checkpointer, rank)
        if begin is not None and spec["train"]:
            train(spec, directory, journal, checkpointer, rank, world, *begin)
    if world > 1:
        dist.barrier()
        dist.destroy_process_group()
    journal.tell("ended")


def load(spec, journal, checkpointer, rank):
    """(step, mark) to go on from; None where the load was refused."""
    state = make_state(ROOT_MARK, rank)
    try:
        if spec["fresh"]:
            checkpointer.start_fresh()
            result = None
        else:
            how = {"read_only": True} if spec["read_only"] else {}
            result = checkpointer.load(state, spec["step"], history=spec["history"], **how)
    except FlashError as error:
        histories = list(getattr(error, "histories", ()))
        told = {"type": type(error).__name__, "code": error.code, "message": str(error)[:2000]}
        journal.tell("refused", histories=histories, **told)
        return None
    name = internals_of(checkpointer).launch_name[0].rpartition("/")[2]
    if result is None:
        journal.tell("loaded", mark=None, step=None, name=name)
        return 0, ROOT_MARK
    mark = state["mark"]
    journal.tell(
        "loaded",
        mark=mark,
        name=name,
        step=result.step,
        source=result.source,
        intact=is_of(state, mark, rank, result.saved_world_size),
        generation=list(result.generation),
        stepped_over=list(result.stepped_over),
    )
    return result.step, mark


def train(spec, directory, journal, checkpointer, rank, world, step, mark):
    handles = {}
    last = None if spec["saves"] is None else step + spec["saves"]
    while not agree_to_stop(directory, world) and step != last:
        step += 1
        parent, mark = mark, next_mark(mark, spec["launch"], step)
        journal.tell("saving", step=step, mark=mark, parent=parent)
        handle = checkpointer.save(step, make_state(mark, rank))
        journal.tell(
            "saved",
            step=step,
            mark=mark,
            parent=parent,
            outcome=handle.outcome,
            reason=handle.reason[:300],
            generation=list(handle.generation or ()),
        )
        if handle.generation is None:
            continue
        handles[step] = [handle, "none"]
        tell_levels(journal, handles, 400 if "persist_dir" in spec["config"] else 40)
        if step % 10 == 5 and rank == 0 and "persist_dir" in spec["config"]:
            with contextlib.suppress(FlashError):  # nothing is committed yet, or the agent is just being replaced
                checkpointer.flush()
                handle.wait("persisted", 0.02)  # then the flush is not nice
        if step % 20 == 0:
            journal.tell("objects", objects=count_objects())
        time.sleep(spec["pause"])
    deadline = time.monotonic() + spec["linger"]
    while time.monotonic() < deadline and any(handles[one][1] in ("none", "sealed") for one in sorted(handles)[-3:]):
        tell_levels(journal, handles)
        time.sleep(0.05)


def count_objects():
    """What the collector knows of, once what is garbage is gone."""
    gc.collect()
    return len(gc.get_objects())


def tell_levels(journal, handles, kept=400):
    """`kept`: as many are looked at; a flush takes its time."""
    for step, one in list(handles.items()):
        handle, said = one
        level = handle.level.name.lower()
        if level != said:
            one[1] = level
            journal.tell("level", step=step, level=level, generation=list(handle.generation))
        if step < max(handles) - kept:
            del handles[step]


def agree_to_stop(directory, world):
    stop = torch.tensor([(directory / "stop").exists()], dtype=torch.int32)
    if world > 1:
        dist.all_reduce(stop, op=dist.ReduceOp.MAX)
    return bool(stop.item())
