"""Tasks of ranks that do not go in step, run by the nursery."""

from __future__ import annotations

import os
import signal
import time

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import flashckpt


def opened(memory_dir, job):
    settings = {"save_timeout": 8, "start_timeout": 40}
    return flashckpt.Checkpointer(flashckpt.CheckpointConfig(job=job, memory_dir=memory_dir, **settings))


def spread(tensor, placement):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return distribute_tensor(tensor, mesh, [placement], src_data_rank=None)


def replicated(value):
    return spread(torch.full((6, 2), float(value)), Replicate())


def order_of_keys(memory_dir, kind):
    """Replicated tensors whose order, keys or ties differ between ranks: everything must be stored by somebody."""
    rank = dist.get_rank()

    def state(step):
        if kind == "tie":
            one = torch.full((6,), float(step))
            return {"a": one, "b": one if rank == 0 else one.clone()}
        names = {"order": (["a", "b"], ["b", "a"]), "extra key": (["a", "b"], ["0", "a", "b"])}[kind][rank]
        return {name: replicated(step + ord(name)) for name in names}

    def local(value):
        return value.to_local() if isinstance(value, DTensor) else value

    with opened(memory_dir, "order") as checkpointer:
        for step in (1, 2, 3):
            print("saved", step, checkpointer.save(step, state(step)).outcome, flush=True)
            dist.barrier()
        live = state(0)
        loaded = checkpointer.load(live).step
        print("loaded", loaded, all(torch.equal(local(live[k]), local(v)) for k, v in state(3).items()), flush=True)


def one_rank_misses_a_save(memory_dir, first):
    """Rank 1 is refused at one step, and its caller goes on; later saves must not suffer."""
    with opened(memory_dir, "miss") as checkpointer:
        for step in range(1, 7):
            bad = {"bad": object()} if dist.get_rank() == 1 and step == (1 if first else 3) else {}
            began = time.monotonic()
            try:
                outcome = checkpointer.save(step, {"t": torch.full((5,), float(step)), **bad}).outcome
            except flashckpt.UnsupportedValueError:
                outcome = "refused"
            print("saved", step, outcome, round(time.monotonic() - began, 1), flush=True)
            dist.barrier()
        live = {"t": torch.zeros(5)}
        print("loaded", checkpointer.load(live).step, live["t"][0].item(), flush=True)


def one_rank_cannot_load(memory_dir):
    """Rank 1's state dict raises while loading; all ranks raise, and the next load works on all of them."""

    class Thing:
        broken = False

        def state_dict(self):
            if self.broken:
                raise ValueError("not now")
            return {"t": torch.zeros(3)}

        def load_state_dict(self, state):
            pass

    with opened(memory_dir, "broken") as checkpointer:
        thing = Thing()
        checkpointer.save(1, {"thing": thing})
        dist.barrier()
        thing.broken = dist.get_rank() == 1
        try:
            checkpointer.load({"thing": thing})
        except (ValueError, flashckpt.OtherRankError) as error:
            print("raised", type(error).__name__, flush=True)
        thing.broken = False
        print("loaded", checkpointer.load({"thing": thing}).step, flush=True)


def only_part_of_the_world(memory_dir):
    """DCP on rank 0 alone must not replace what both ranks saved."""
    with opened(memory_dir, "part") as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, {"t": torch.full((4,), float(step))})
            dist.barrier()
        if dist.get_rank() == 0:
            try:
                writer = flashckpt.dcp.FlashWriter(checkpointer)
                dcp.save({"t": torch.zeros(4)}, checkpoint_id="step-3", storage_writer=writer, no_dist=True)
            except BaseException as error:  # DCP's exception is no Exception
                print("raised", "FC-CFG-001" in str(error), flush=True)
        dist.barrier()
        live = {"t": torch.zeros(4)}
        print("loaded", checkpointer.load(live).step, live["t"][0].item(), flush=True)


def per_rank_through_dcp(memory_dir):
    with opened(memory_dir, "own") as checkpointer:
        own = {"noise": torch.full((3,), 7.0 + dist.get_rank())}
        checkpointer.save(1, {"own": flashckpt.PerRank(own)})
        dist.barrier()
        live = {"own": {"noise": torch.zeros(3)}}
        dcp.load(live, storage_reader=flashckpt.dcp.FlashReader(checkpointer))
        print("loaded", live["own"]["noise"][0].item(), flush=True)


def never_whole(memory_dir):
    """Tensors of which this generation could never hold every part."""
    sharded = spread(torch.zeros(4, 2), Shard(0))
    with opened(memory_dir, "whole") as checkpointer:
        try:
            checkpointer.save(1, {"own": flashckpt.PerRank(sharded)})
        except flashckpt.UnsupportedValueError as error:
            print("refused", "PerRank" in str(error), flush=True)
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    config = flashckpt.CheckpointConfig(job=f"alone-{dist.get_rank()}", memory_dir=memory_dir)
    with flashckpt.Checkpointer(config, process_group=groups[dist.get_rank()]) as checkpointer:
        try:
            checkpointer.save(1, {"w": sharded})
        except flashckpt.UnsupportedValueError as error:
            print("refused", "does not span" in str(error), flush=True)


def only_some_save(memory_dir, agent, savers, first=1, last=6, again=99, timeout=6):
    """All train; from step `first` on only `ranks` call save(), from `again` on all ranks do again."""
    config = flashckpt.CheckpointConfig(
        job="some", memory_dir=memory_dir, agent=agent, save_timeout=timeout, start_timeout=40, agent_linger=1
    )
    rank = dist.get_rank()
    with flashckpt.Checkpointer(config) as checkpointer:
        for step in range(1, last + 1):
            dist.barrier()
            if rank in savers or not first <= step < again:
                began = time.monotonic()
                handle = checkpointer.save(step, {"t": torch.full((10,), float(step))})
                reason = handle.reason.replace("\n", " ")
                print("saved", step, handle.outcome, round(time.monotonic() - began, 1), reason, flush=True)
        dist.barrier()
        live = {"t": torch.zeros(10)}
        result = checkpointer.load(live)
        print("loaded", result and result.step, flush=True)


def one_ends(memory_dir, nodes, when):
    """Rank 1 is killed before it saves step `when`; rank 0 goes on, and then loads."""
    rank = dist.get_rank()
    config = flashckpt.CheckpointConfig(
        job="ends",
        memory_dir=f"{memory_dir}/{rank % nodes}",
        node_id=f"node{rank % nodes}",
        agent="auto",
        save_timeout=40,
        start_timeout=40,
    )
    with flashckpt.Checkpointer(config) as checkpointer:
        for step in range(1, 8):
            if rank == 1 and step == when:
                os.kill(os.getpid(), signal.SIGKILL)
            began = time.monotonic()
            handle = checkpointer.save(step, {"t": torch.full((10,), float(step))})
            reason = handle.reason.replace("\n", " ")
            print("saved", step, handle.outcome, round(time.monotonic() - began, 1), reason, flush=True)
        began = time.monotonic()
        try:
            checkpointer.load({"t": torch.zeros(10)})
        except flashckpt.FlashError as error:
            print("load", round(time.monotonic() - began, 1), error.message, flush=True)


def different_steps(memory_dir):
    """Rank 1 counts from another step."""
    with opened(memory_dir, "steps") as checkpointer:
        for step in (1, 2):
            handle = checkpointer.save(step + 10 * dist.get_rank(), {"t": torch.zeros(3)})
            print("saved", step, handle.outcome, 0, handle.reason.replace("\n", " "), flush=True)


TASKS = (
    order_of_keys,
    one_rank_misses_a_save,
    one_rank_cannot_load,
    only_part_of_the_world,
    per_rank_through_dcp,
    never_whole,
    only_some_save,
    one_ends,
    different_steps,
)
