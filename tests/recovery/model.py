"""A small transformer in every layout that a job may train it in, and data that depends on the step alone."""

import torch
import torch.distributed as dist
import torch.nn.functional as functional
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

LAYOUTS = ("fsdp", "hsdp", "tp", "fsdp_tp", "ddp")
VOCABULARY, WIDTH, HEADS, LAYERS, LENGTH = 64, 32, 4, 2, 8
BATCH = 60  # sequences in a step, on all ranks together: 1 to 6 ranks get equal parts


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x):
        normed = self.before(x)
        # Heads as many as this rank has: with tensor parallelism a part of them.
        heads = [
            one(normed).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for one in (self.query, self.key, self.value)
        ]
        mixed = functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.dropout(self.out(mixed.transpose(1, 2).flatten(2)))
        return x + self.dropout(self.down(functional.gelu(self.up(self.between(x)))))


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def build(layout):
    """The model, and which part of the data (number, of how many) this rank trains it with."""
    torch.manual_seed(0)
    model = Transformer()
    rank, world = dist.get_rank(), dist.get_world_size()
    if layout == "ddp":
        return DistributedDataParallel(model), rank, world
    if layout == "fsdp":
        return _shard(model, init_device_mesh("cpu", (world,))), rank, world
    if layout == "hsdp":
        return _shard(model, init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("copy", "part"))), rank, world
    ways = world if layout == "tp" else 2
    mesh = init_device_mesh("cpu", (world // ways, ways), mesh_dim_names=("data", "tensor"))
    split = {name: ColwiseParallel() for name in ("query", "key", "value", "up")}
    for block in model.blocks:
        parallelize_module(block, mesh["tensor"], {**split, "out": RowwiseParallel(), "down": RowwiseParallel()})
    return (model if layout == "tp" else _shard(model, mesh["data"])), rank // ways, world // ways


def _shard(model, mesh):
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def batch(step, part, parts):
    """This part of the step's sequences: each token of one follows from the one before it."""
    start = torch.randint(VOCABULARY, (BATCH, 1), generator=torch.Generator().manual_seed(step))
    tokens = (start * 5 + torch.arange(LENGTH + 1) * 3) % VOCABULARY
    mine = tokens[BATCH * part // parts : BATCH * (part + 1) // parts]
    return mine[:, :-1], mine[:, 1:]
