"""Run by torchrun on two nodes: uses a CheckpointManager as its guide says; every rank writes what it saw to a file.

everyday_worker.py OUT_DIR PERSIST_DIR HF_DIR first|second
"""

import json
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import flashckpt

NAMES = {"layers.{}": "model.layers.{}.mlp"}
STEPS = 30


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


class Ema:
    """A state of the user's."""

    def __init__(self):
        self.value = torch.zeros(3)

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


class Loader:
    def __init__(self, rank):
        self.rank, self.position = rank, 0

    def state_dict(self):
        return {"rank": self.rank, "position": self.position}

    def load_state_dict(self, state):
        self.rank, self.position = state["rank"], state["position"]


def main():
    out, persist_dir, hf, which = sys.argv[1:]
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    seen = {"events": {}, "steps": []}
    torch.manual_seed(7 + (which == "second"))
    model = Model()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    optimizers = [torch.optim.AdamW(decayed, lr=1e-3), torch.optim.SGD(others, lr=1e-2, momentum=0.9)]
    schedulers = [torch.optim.lr_scheduler.StepLR(one, 5) for one in optimizers]
    ema = Ema()
    config = flashckpt.CheckpointConfig(
        persist_dir=persist_dir,
        interval=2,
        save_cooldown=0.05,
        keep_memory=2,
        keep_latest_k=2,
        initial_load_path=hf,
        initial_load_in_hf=True,
        initial_load_key_mapping=NAMES,
        save_timeout=60,
        peer_timeout=10,
    )

    def note(event):
        seen["events"][event.kind] = seen["events"].get(event.kind, 0) + 1

    manager = flashckpt.CheckpointManager(
        config,
        model=model,
        optimizer=optimizers,
        lr_scheduler=schedulers,
        states={"ema": ema, "count": {"steps": 0}},
        on_event=note,
    )
    with manager:
        seen["peeked"] = manager.peek_saved_step()
        resumed = manager.load(expect={"width": 16})
        seen["resumed"] = None if resumed is None else [resumed.step, resumed.source, resumed.extra]
        seen["initial"] = None if manager.initial_load is None else manager.initial_load.step
        full = {name: p.full_tensor().sum().item() for name, p in model.named_parameters()}
        seen["weights"] = full
        loader = Loader(rank)
        seen["pending"] = sorted(manager.pending_states)
        manager.apply_dataloader_state(loader)
        seen["loader"] = [loader.rank, loader.position]
        seen["ema"] = ema.value.tolist()
        seen["lrs"] = [one.param_groups[0]["lr"] for one in optimizers]
        seen["moments"] = len(optimizers[0].state)
        start = resumed.step + 1 if resumed else 1
        for step in range(start, start + STEPS):
            model(torch.randn(4, 16)).square().mean().backward()
            for one, schedule in zip(optimizers, schedulers, strict=True):
                one.step()
                one.zero_grad()
                schedule.step()
            with manager.lock():  # nothing copies in here
                ema.value += 1
            loader.position += 1
            handle = manager.save(step, extra={"tokens": 10 * step}, compat={"width": 16}, permanent=step == 7 or None)
            if handle is not None:
                seen["steps"].append(step)
            time.sleep(0.005 if rank else 0.02)  # clocks and speeds that differ
        last = manager.save(start + STEPS, last_step=True, extra={"tokens": -1}, compat={"width": 16})
        seen["steps"].append(start + STEPS)
        seen["persisted"] = str(last.wait("persisted", timeout=400))
        metrics = manager.metrics()
        seen["age"] = metrics.age_seconds
        seen["newest"] = metrics.newest_step
        seen["saves"] = metrics.saves
        seen["bytes"] = metrics.saved_bytes
        seen["held"] = metrics.blocked_seconds
        seen["all_steps"] = list(manager.all_steps())
        seen["latest"] = manager.latest_step()
        seen["is_pending"] = manager.is_pending
        if rank == 0:
            seen["file"] = manager.write_file(f"notes-{which}.txt", "hello")
    with open(f"{out}/{which}{rank}.json", "w") as file:
        json.dump(seen, file)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
