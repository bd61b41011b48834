"""An FSDP2 training script that survives being killed. What flashckpt adds to it is marked with `# <-`.

    FLASHCKPT_JOB=example torchrun --standalone --nproc-per-node 2 fsdp2_train.py --steps 40

Kill it at any moment, run the same line again, and it goes on from the last snapshot as if nothing had
happened: weights, optimizer, learning rate, position in the data and random numbers are all in the state.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import flashckpt

VOCABULARY, LENGTH, BATCH = 64, 64, 4


def main() -> None:
    options = parse_arguments()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    progress = Progress(options.progress, rank)

    torch.manual_seed(0)  # the same weights on every rank, before they are sharded
    model = Transformer(options.width, options.layers)
    mesh = init_device_mesh("cpu", (world,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=options.steps)
    data = Sequences(seed=1000 + rank)
    torch.manual_seed(2000 + rank)  # from here on each rank draws its own dropout masks

    state = {  #                                                                       <- all that has to come back
        "train": TrainState(model, optimizer),
        "scheduler": scheduler,
        "data": flashckpt.PerRank(data),  #                                            <- each rank has its own
        "random": flashckpt.PerRank(RandomState()),
    }
    with flashckpt.Checkpointer() as checkpointer:  #                                  <- the job's name: FLASHCKPT_JOB
        progress.tell("ready")
        resumed = checkpointer.load(state)  #                                          <- None: nothing saved yet
        if resumed:
            progress.tell("loaded", resumed.step, timings=seconds(resumed.timings), source=resumed.source)
        for step in range(resumed.step + 1 if resumed else 1, options.steps + 1):  #   <- go on behind it
            loss = train_one_step(model, optimizer, scheduler, data)
            progress.tell("step", step, loss=loss.hex())
            if step % options.every == 0:
                handle = checkpointer.save(step, state)  #                             <- a copy in memory
                progress.tell(
                    "saved",
                    step,
                    outcome=handle.outcome,
                    reason=handle.reason,
                    size_bytes=handle.size_bytes,
                    timings=seconds(handle.timings),
                )
        progress.tell("done", options.steps, digest=weights_digest(model))
    dist.destroy_process_group()


def train_one_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: torch.optim.lr_scheduler.LRScheduler, data: Sequences
) -> float:
    """Returns the loss, averaged over the ranks."""
    loss = model(data.next_batch())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    return float(mean) / dist.get_world_size()


class TrainState:
    """Model and optimizer as one part of the state dict, in the form that fits any number of ranks."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )


class RandomState:
    """This rank's random numbers: dropout goes on with the same ones."""

    def state_dict(self) -> dict[str, Any]:
        return {"torch": torch.get_rng_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        torch.set_rng_state(state["torch"])


class Sequences:
    """An endless stream of arithmetic sequences to predict; knows how far it is."""

    def __init__(self, seed: int) -> None:
        self.position = 0
        self.generator = torch.Generator().manual_seed(seed)

    def next_batch(self) -> torch.Tensor:
        start = torch.randint(VOCABULARY, (BATCH, 1), generator=self.generator)
        slope = torch.randint(1, 4, (BATCH, 1), generator=self.generator)
        self.position += BATCH
        return (start + slope * torch.arange(LENGTH + 1)) % VOCABULARY

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]
        self.generator.set_state(state["generator"])


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        x = x + self.drop(self.out(attended))
        return x.add(self.drop(self.down(F.gelu(self.up(self.norm2(x))))))


class Transformer(nn.Module):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The loss of predicting each token from those before it."""
        x = self.tokens(tokens[:, :-1]) + self.positions(torch.arange(LENGTH))
        for block in self.blocks:
            x = block(x)
        loss: torch.Tensor = F.cross_entropy(self.head(x).flatten(0, 1), tokens[:, 1:].flatten())
        return loss


def weights_digest(model: nn.Module) -> str:
    """Of every bit of the unsharded weights; "" on ranks other than 0, which only take part in gathering them."""
    weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if not weights:
        return ""
    digest = hashlib.blake2b(digest_size=16)
    for name, weight in weights.items():
        if isinstance(weight, torch.Tensor):
            digest.update(name.encode() + bytes(weight.contiguous().view(torch.uint8).numpy()))
    return digest.hexdigest()


def seconds(timings: Any) -> dict[str, float]:
    return {name: getattr(timings, name) for name in timings.__dataclass_fields__}


class Progress:
    """Says how far this rank is: in words on the terminal, or as a line of JSON a launcher can follow."""

    def __init__(self, path: str, rank: int) -> None:
        self.rank = rank
        self.fd = os.open(path, os.O_WRONLY | os.O_APPEND) if path else -1

    def tell(self, event: str, step: int = 0, **details: Any) -> None:
        if self.fd >= 0:
            # One write of less than PIPE_BUF: lines of several ranks don't mix.
            os.write(self.fd, json.dumps({"event": event, "rank": self.rank, "step": step, **details}).encode() + b"\n")
        elif self.rank == 0:
            loss = f" loss {float.fromhex(details['loss']):.6f}" if "loss" in details else ""
            print(f"{event} {step or ''}{loss}", flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--every", type=int, default=4, help="steps between snapshots")
    parser.add_argument("--width", type=int, default=192, help="of the model, a multiple of 4")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--progress", default="", help="a file or FIFO that gets a line of JSON for each event")
    return parser.parse_args()


if __name__ == "__main__":
    main()
