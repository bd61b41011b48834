"""Trains an FSDP2 model whose whole state is in a CheckpointManager. The lines for flashckpt are marked.

FLASHCKPT_JOB=example2 torchrun --standalone --nproc-per-node 2 examples/train_manager.py --steps 200
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import flashckpt

WIDTH, BATCH = 64, 16


class Batches:
    """Yields an endless stream of noise to denoise, and knows its position."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def __next__(self) -> torch.Tensor:
        return torch.randn(BATCH, WIDTH, generator=self.generator)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.generator.set_state(state["generator"])


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains a small model; kill it and start it again.")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--persist-dir", help="also keep every 50th step here")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * WIDTH, WIDTH))
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=options.steps)
    batches = Batches(seed=rank)
    torch.manual_seed(1000 + rank)  # each rank draws its own dropout masks

    config = flashckpt.CheckpointConfig(  #                                          <- how often, and where
        interval=5, persist_dir=options.persist_dir, persist_interval=50 if options.persist_dir else None
    )
    with flashckpt.CheckpointManager(  #                                             <- all that has to come back
        config, model=model, optimizer=optimizer, lr_scheduler=scheduler, dataloader=batches
    ) as manager:
        flashckpt.install_signal_handlers(manager, deadline=30)  #                   <- a last snapshot on SIGTERM
        resumed = manager.load()  #                                                  <- None: nothing saved yet
        if resumed and rank == 0:
            print(f"resumed after step {resumed.step} from {resumed.source}", flush=True)
        for step in range(resumed.step + 1 if resumed else 1, options.steps + 1):
            batch = next(batches)
            loss = (model(batch) - batch.roll(1, dims=1)).pow(2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            manager.save(step)  #                                                    <- every step; it decides itself
            if step % 20 == 0 and rank == 0:
                held = 1000 * manager.metrics().blocked_seconds / step
                print(f"step {step} loss {loss.item():.6f}, held {held:.2f} ms per step", flush=True)
            if manager.stop_requested:  #                                            <- signalled, and saved
                break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
