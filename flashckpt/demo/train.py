"""Trains an FSDP2 transformer that resumes when its processes die, and when whole nodes are lost.

    FLASHCKPT_JOB=run1 torchrun --standalone --nproc-per-node 2 train_fsdp.py

On several nodes, run the same lines on each of them (node1 is one that the others reach):

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # else a running torchrun cannot admit a new node
    FLASHCKPT_JOB=run1 torchrun --nnodes 4 --nproc-per-node 8 --max-restarts 3 \
        --rdzv-backend c10d --rdzv-id run1 --rdzv-endpoint node1:29400 train_fsdp.py

When it dies, start it again by the same lines: each node reads its own memory. When a node is lost, start the same
lines on another one in its place: it fetches what it lacks from the others. flashckpt needs only the lines marked `<-`.
"""

import argparse
import hashlib
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import flashckpt

VOCABULARY, LENGTH, BATCH, WIDTH, HEADS, LAYERS = 64, 32, 4, 128, 4, 2


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=5, help="steps between checkpoints")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)  # the same weights on every rank, before they are sharded
    model = Transformer()
    mesh = init_device_mesh("cpu", (world,))
    for part in (*model.blocks, model):
        fully_shard(part, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=options.steps)
    data = Sequences(seed=1000 + rank)
    torch.manual_seed(2000 + rank)  # from here on each rank draws its own dropout masks

    config = flashckpt.CheckpointConfig(interval=options.every)  #           <- the job's name comes from FLASHCKPT_JOB
    manager = flashckpt.CheckpointManager(  #                                <- all that has to come back
        config, model=model, optimizer=optimizer, lr_scheduler=scheduler, dataloader=data
    )
    with manager:
        resumed = manager.load()  #                                          <- memory, else peers; None: a fresh start
        if resumed:
            print(f"rank {rank}: resumed step {resumed.step} from {resumed.source} in {resumed.timings.total:.3f} s")
        for step in range(resumed.step + 1 if resumed else 1, options.steps + 1):
            loss = model(data.next_batch())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            mean = loss.detach() / world
            dist.all_reduce(mean)
            print(f"rank {rank}: step {step} loss {float(mean)!r}", flush=True)  # every digit: runs can be compared
            manager.save(step)  #                                            <- when due: copied, then sent to buddies
    print(f"rank {rank}: weights {digest(model)}", flush=True)
    dist.destroy_process_group()


class Sequences:
    """Yields this rank's endless stream of arithmetic sequences to predict, and knows its position."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def next_batch(self) -> torch.Tensor:
        start, slope = torch.randint(1, 8, (2, BATCH, 1), generator=self.generator).unbind()
        return (start + slope * torch.arange(LENGTH + 1)) % VOCABULARY

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.generator.set_state(state["generator"])


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        layers = (nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, 0.1, batch_first=True) for _ in range(LAYERS))
        self.blocks = nn.ModuleList(layers)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Compute the loss of predicting each token from those before it."""
        x = self.tokens(tokens[:, :-1]) + self.positions(torch.arange(LENGTH))
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), tokens[:, 1:].flatten())


def digest(model: nn.Module) -> str:
    """Return a digest of every bit of this rank's weights."""
    weights = (weight.to_local().contiguous() for weight in model.state_dict().values())
    return hashlib.sha256(b"".join(bytes(one.view(torch.uint8).numpy()) for one in weights)).hexdigest()[:16]


if __name__ == "__main__":
    main()
