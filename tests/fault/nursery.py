"""A process that has imported torch once and forks jobs of a few ranks from it: a job costs a fork, not an import.

Reads one JSON request a line ({"ranks", "environment", "task", "arguments"}), answers with one JSON line
({"codes", "outputs"}). Like a launcher, it kills a job's other ranks as soon as one of them was killed; where one ended
by an error, the others have some seconds to meet the same one, and to say so.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import sys
import tempfile
import time
import traceback

import torch
import torch._dynamo  # distribute_tensor imports it: once here, not in every job
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import flashckpt
import flashckpt.dcp
import flashckpt.failpoints
from tests.fault import tasks

LAST_WORDS_SECONDS = 5.0


@functools.cache
def whole_mesh():
    return init_device_mesh("cpu", (dist.get_world_size(),))


def state_at(step, scale):
    """The whole state as a function of the step, in layouts that exercise sharing, sharding and values."""
    generator = torch.Generator().manual_seed(1000 + step)
    rank, mesh = dist.get_rank(), whole_mesh()
    matrix = torch.randn(64 * scale, 96, generator=generator)
    return {
        "sharded": distribute_tensor(matrix, mesh, [Shard(0)], src_data_rank=None),
        "replicated": distribute_tensor(
            torch.randn(33, 7, generator=generator), mesh, [Replicate()], src_data_rank=None
        ),
        "plain": {f"p{i}": torch.randn(10 + i, generator=generator) for i in range(8)},
        "transposed": torch.randn(32, 20, generator=generator).t(),
        "own": flashckpt.PerRank({"noise": torch.full((5,), float(rank * 1000 + step))}),
        "step": step,
        "history": list(range(step)),
    }


def equal(a, b):
    if isinstance(a, flashckpt.PerRank):
        return equal(a.value, b.value)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, DTensor):
        return torch.equal(a.to_local(), b.to_local())
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    return a == b


def work(memory_dir, first, steps, scale=1, via_dcp=False, timeout=20, check=True, allow_fresh=False):
    """Resumes if it can, proves that what it got is exactly one step's state, and goes on saving."""
    config = flashckpt.CheckpointConfig(job="work", memory_dir=memory_dir, save_timeout=timeout, start_timeout=60)
    with flashckpt.Checkpointer(config) as checkpointer:
        state = state_at(0, scale)
        resumed = checkpointer.load(state, allow_fresh=allow_fresh)
        if resumed is not None:
            print("resumed", resumed.step, flush=True)
            wanted = state_at(resumed.step, scale)
            if dist.get_rank() >= resumed.saved_world_size:
                wanted["own"] = state_at(0, scale)["own"]  # nobody saved this rank's
            if not equal(state, wanted):
                raise SystemExit(f"what was loaded is not the state of step {resumed.step}")
        start = resumed.step + 1 if resumed else first
        for step in range(start, steps + 1):
            state = state_at(step, scale)
            if via_dcp:
                state.pop("own")
                dcp.save(state, checkpoint_id=f"step-{step}", storage_writer=flashckpt.dcp.FlashWriter(checkpointer))
                print("saved", step, "ok", flush=True)
            else:
                handle = checkpointer.save(step, state)
                print("saved", step, handle.outcome, handle.reason.replace("\n", " "), flush=True)
            # What the caller does to its tensors after save() must not show.
            state["plain"]["p0"].fill_(-1.0)
            dist.barrier()
        if check and dist.get_rank() == 0:
            problems = checkpointer.store.check()
            if problems:
                raise SystemExit("; ".join(problems))
        dist.barrier()


def stages(memory_dir, own_keys=False, part_at=None):
    """Plain tensors that all ranks have. `own_keys`: beside others that only one has; `part_at`: rank 1 drops one."""
    rank = dist.get_rank()
    config = flashckpt.CheckpointConfig(job="stages", memory_dir=memory_dir, save_timeout=10, start_timeout=60)

    def state(step):
        common = {f"common.{i}": torch.full((2000,), float(step + i)) for i in range(4)}
        own = {f"stage{rank}.w": torch.full((500,), float(step * 10 + rank))} if own_keys else {}
        if part_at is not None and step >= part_at and rank == 1:
            common.pop("common.3")
        return {**common, **own, "step": step}

    with flashckpt.Checkpointer(config) as checkpointer:
        for step in range(1, 6):
            print("saved", step, checkpointer.save(step, state(step)).outcome, flush=True)
            dist.barrier()
            for generation, verdict, _ in checkpointer.status().generations:
                if generation.step == step:
                    print("generation", step, verdict, flush=True)
            dist.barrier()
        live = state(5)
        for value in live.values():
            if isinstance(value, torch.Tensor):
                value.zero_()
        result = checkpointer.load(live)
        print("loaded", result.step, equal(live, state(result.step)), flush=True)
        sizes = sorted({sealed.size_bytes for sealed in checkpointer.store.scan()})
        if rank == 0:
            print("sizes", *sizes, flush=True)


def strangers(memory_dir, what):
    """Ranks of one group that name different jobs or directories, or differ in what all have to do alike."""
    name = f"{what}{dist.get_rank()}"
    # Without an agent persist_dir is only loaded from, and has to be said to be.
    disk = {"persist_dir": f"{memory_dir}.{name}", "persist_on_exit": False}
    config = flashckpt.CheckpointConfig(
        job=name if what == "job" else "work",
        memory_dir=f"{memory_dir}/{name}" if what == "memory_dir" else memory_dir,
        interval=10 + dist.get_rank() if what == "interval" else 1,
        start_timeout=60,
        **(disk if what == "persist_dir" and dist.get_rank() == 0 else {}),
    )
    try:
        flashckpt.Checkpointer(config)
    except flashckpt.IncompatibleError as error:
        print("refused", error, flush=True)


def absent(memory_dir, from_start=False):
    """Rank 1 does not come to the load, or already to the start."""
    config = flashckpt.CheckpointConfig(job="work", memory_dir=memory_dir, start_timeout=1)
    if from_start:
        if dist.get_rank() == 0:
            try:
                flashckpt.Checkpointer(config)
            except flashckpt.DeadlineError as error:
                print("gave", "up", error.message, flush=True)
        return
    with flashckpt.Checkpointer(config) as checkpointer:
        if dist.get_rank() == 0:
            try:
                checkpointer.load({"n": 0})
            except flashckpt.DeadlineError as error:
                print("gave", "up", error.message, flush=True)
        dist.barrier()


def busy(memory_dir, on_busy, late):
    """Rank 1 lags behind by `late` seconds at step 3; rank 0 runs ahead."""
    config = flashckpt.CheckpointConfig(
        job="busy", memory_dir=memory_dir, on_busy=on_busy, save_timeout=20, start_timeout=60
    )
    with flashckpt.Checkpointer(config) as checkpointer:
        for step in range(1, 6):
            if step == 3 and dist.get_rank() == 1:
                time.sleep(late)
            handle = checkpointer.save(step, {"t": torch.full((10,), float(step))})
            print(
                "saved",
                step,
                handle.outcome,
                round(handle.timings.claim, 2),
                handle.reason.replace("\n", " "),
                flush=True,
            )
        dist.barrier()
        live = {"t": torch.zeros(10)}
        print("loaded", checkpointer.load(live).step, live["t"][0].item(), flush=True)


def one_rank_is_out_of_room(memory_dir):
    """Rank 1's budget is too small for its larger state at step 3 and 4; the others must not wait for it."""
    rank = dist.get_rank()
    config = flashckpt.CheckpointConfig(job="room", memory_dir=memory_dir, save_timeout=15, start_timeout=60)
    with flashckpt.Checkpointer(config) as checkpointer:
        for step in range(1, 8):
            size = 1 << 28 if rank == 1 and step in (3, 4) else 1000
            own = flashckpt.PerRank({"t": torch.full((size,), float(step))})
            began = time.monotonic()
            handle = checkpointer.save(step, {"own": own})
            print("saved", step, handle.outcome, round(time.monotonic() - began, 1), flush=True)
            dist.barrier()
        live = {"own": flashckpt.PerRank({"t": torch.zeros(1000)})}
        print("loaded", checkpointer.load(live).step, live["own"].value["t"][0].item(), flush=True)


def frozen(memory_dir, ready):
    """Saves once, tells that it is about to copy into its next slot, and is stopped there by the test."""
    with flashckpt.Checkpointer(flashckpt.CheckpointConfig(job="work", memory_dir=memory_dir)) as checkpointer:
        live = state_at(0, 1)
        result = checkpointer.load(live)
        step = result.step if result else 0
        handle = checkpointer.save(step + 1, state_at(step + 1, 1))
        print("woke", handle.outcome, handle.reason.replace("\n", " "), flush=True)


OWN_TASKS = (work, stages, strangers, absent, busy, one_rank_is_out_of_room, frozen)
TASKS = {task.__name__: task for task in (*OWN_TASKS, *tasks.TASKS)}


def child(rank, request, store, out):
    os.setpgid(0, 0)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.environ.update(request["environment"])
    only = request.get("only_rank")
    if only is None or only == rank:
        flashckpt.failpoints.arm()
    torch.set_num_threads(1)
    code = 1
    try:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=request["ranks"])
        TASKS[request["task"]](**request["arguments"])
        dist.destroy_process_group()
        code = 0
    except SystemExit as error:
        print("exit", error, flush=True)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def run(request):
    with tempfile.TemporaryDirectory() as folder:
        outs = [os.open(f"{folder}/{rank}", os.O_RDWR | os.O_CREAT) for rank in range(request["ranks"])]
        children = []
        for rank, out in enumerate(outs):
            pid = os.fork()
            if pid == 0:
                child(rank, request, f"{folder}/store", out)
            children.append(pid)
        codes = wait_all(children, request, lambda: any(os.fstat(out).st_size for out in outs))
        outputs = []
        for rank, out in enumerate(outs):
            os.close(out)
            with open(f"{folder}/{rank}", errors="replace") as file:
                outputs.append(file.read())
        return {"codes": codes, "outputs": outputs}


def wait_all(children, request, has_spoken):
    codes = {}
    deadline = time.monotonic() + request.get("timeout", 90)
    kill_at = None
    while len(codes) < len(children):
        for pid in children:
            if pid not in codes:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    codes[pid] = os.waitstatus_to_exitcode(status)
        if kill_at is None and "kill_after" in request and has_spoken():
            kill_at = time.monotonic() + request["kill_after"]
        if any(code > 0 for code in codes.values()):
            deadline = min(deadline, time.monotonic() + LAST_WORDS_SECONDS)
        late = time.monotonic() > deadline
        if (
            late
            or (any(code < 0 for code in codes.values()) and not request.get("spares"))
            or (kill_at is not None and time.monotonic() > kill_at)
        ):
            for pid in children:
                if pid not in codes:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
        time.sleep(0.002)
    return [codes[pid] for pid in children]


def main():
    for line in sys.stdin:
        print(json.dumps(run(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
