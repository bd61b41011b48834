"""Run by torchrun: trains a small FSDP2 model with everything in the checkpoint; the digest of each step is printed.

train_worker.py MEMORY_DIR STEPS SAVE_EVERY
"""

import hashlib
import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import flashckpt
from flashckpt.checkpointer import internals_of

memory_dir, steps, every = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 33), torch.nn.Dropout(0.1), torch.nn.ReLU(), torch.nn.Linear(33, 5))
for layer in model:
    if isinstance(layer, torch.nn.Linear):
        fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
torch.manual_seed(100 + rank)


def say(line):
    # One write a line: the ranks share a pipe.
    os.write(1, f"{line}\n".encode())


def capture():
    weights, moments = get_state_dict(model, optimizer)
    return {
        "model": weights,
        "optimizer": moments,
        "schedule": schedule.state_dict(),
        "rng": flashckpt.PerRank(torch.get_rng_state()),
    }


def digest(state):
    parts = hashlib.blake2b(digest_size=8)
    for key, value in sorted(state["model"].items()):
        parts.update(key.encode() + value.to_local().numpy().tobytes())
    parts.update(torch.get_rng_state().numpy().tobytes())
    return parts.hexdigest()


with flashckpt.Checkpointer(flashckpt.CheckpointConfig(job="train", memory_dir=memory_dir)) as checkpointer:
    state = capture()
    resumed = checkpointer.load(state)
    if resumed:
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        schedule.load_state_dict(state["schedule"])
        torch.set_rng_state(state["rng"].value)
        say(f"resumed {rank} {resumed.step}")
    for step in range(resumed.step + 1 if resumed else 1, steps + 1):
        loss = model(torch.randn(8, 16)).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        say(f"step {rank} {step} {digest(capture())} {loss.item().hex()}")
        if step % every == 0:
            handle = checkpointer.save(step, capture())
            say(f"saved {rank} {step} {handle.outcome}")
    dist.barrier()
    problems = internals_of(checkpointer).store.check() if rank == 0 else []
    dist.barrier()
dist.destroy_process_group()
sys.exit("; ".join(problems) if problems else 0)
