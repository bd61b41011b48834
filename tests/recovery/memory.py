"""What lies in the memory of a cluster's nodes, as files: who holds which shard; and how one goes bad."""

import contextlib
import itertools
import os
from pathlib import Path

from flashckpt.errors import NotFoundError
from flashckpt.format.shard import read_header
from flashckpt.store.slots import SlotStore


def scan(node):
    """All sealed shards on a node, with the path of each."""
    with contextlib.suppress(NotFoundError), SlotStore.open(node.memory_dir, node.job, create=False) as store:
        (sealed,) = Path(node.memory_dir).glob("*/sealed")
        return {one.shard: sealed / one.name for one in store.scan()}
    return {}


def holders(cluster, step):
    """{rank: names of the nodes that hold its shard of the newest generation of `step`}; empty where nobody has any."""
    held = {node.name: [shard for shard in scan(node) if shard.generation.step == step] for node in cluster.nodes}
    there = (shard.generation for shards in held.values() for shard in shards)
    newest = max(there, key=lambda one: one.epoch, default=None)
    found = {}
    for name, shards in held.items():
        for shard in shards:
            if shard.generation == newest:
                found.setdefault(shard.rank, set()).add(name)
    return found


def fatal_pairs(cluster, step):
    """Pairs of nodes whose loss together takes every copy of some shard; and the other pairs."""
    held = holders(cluster, step)
    pairs = list(itertools.combinations(cluster.nodes, 2))
    fatal = [pair for pair in pairs if any(names <= {node.name for node in pair} for names in held.values())]
    return fatal, [pair for pair in pairs if pair not in fatal]


def flip_bit(node, rank, step):
    """In the middle of the largest tensor of the node's copy of that shard.

    Chunks at the ends of the data are read before any tensor is written to: they hold assumed tensors and values.
    """
    ((shard, path),) = [
        (shard, path) for shard, path in scan(node).items() if (shard.rank, shard.generation.step) == (rank, step)
    ]
    fd = os.open(path, os.O_RDWR)
    try:
        header = read_header(fd, expect=shard, job=node.job)
        largest = max(header.layout.entries, key=lambda entry: entry.length_bytes)
        place = header.data_offset_bytes + largest.offset_bytes + largest.length_bytes // 2
        byte = os.pread(fd, 1, place)[0]
        os.pwrite(fd, bytes([byte ^ 0x10]), place)
    finally:
        os.close(fd)
