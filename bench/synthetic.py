"""Inventories and layouts of clusters that nobody has here: hybrid-sharded training on thousands of nodes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from bench.errors import BenchError
from flashckpt.format.layout import encode_layout
from flashckpt.load.catalogue import SHARD, Catalogue, Description
from flashckpt.load.choose import choose
from flashckpt.load.inventory import copies_of, encode, merge
from flashckpt.load.plan import Want, plan
from flashckpt.load.sources import Fetcher, Needs, NodePlace, needs_of, plan_retrievals
from flashckpt.protocol.node_inventory import Holding, NodeInventory
from flashckpt.save.values import pack
from flashckpt.state.assumed import Reader
from flashckpt.state.cover import index, uncovered
from flashckpt.state.flatten import Flat
from flashckpt.types import Box, Generation, Held, Layout, Level, Retrieval, ShardId, TensorEntry

RANKS_PER_NODE = 8
GENERATION = Generation(1_700_000_000_000, 7, 110, 1)
_ROWS = 1024  # of each tensor; every rank of a node has its share of them
_CHUNK_BYTES = 1 << 18


@dataclass(frozen=True, slots=True)
class Cluster:
    """Each node shards the model over its ranks; all nodes hold the same. One buddy a node, the next one."""

    nodes: int
    items: int  # tensors of a rank

    @property
    def world(self) -> int:
        return self.nodes * RANKS_PER_NODE

    @property
    def places(self) -> list[NodePlace]:
        return [NodePlace(f"node-{number}", "") for number in range(self.nodes)]


def inventories(cluster: Cluster, lost: frozenset[int] = frozenset()) -> list[bytes]:
    """What every node tells: two whole generations and one that is being written, own shards and replicas."""
    encoded = []
    for node in range(cluster.nodes):
        holdings = []
        for step, sealed in ((100, True), (110, True), (120, False)):
            generation = GENERATION._replace(step=step)
            owners = [(node, Level.REPLICATED), ((node - 1) % cluster.nodes, Level.REPLICATED)]
            for owner, level in owners[: 2 if sealed else 1]:
                for local in range(RANKS_PER_NODE if sealed else RANKS_PER_NODE - 1):
                    rank = owner * RANKS_PER_NODE + local
                    digest = rank.to_bytes(8, "little") + step.to_bytes(8, "little")
                    held = Held(ShardId(generation, rank, cluster.world), digest, 1 << 30, 7)
                    holdings.append(Holding(held, level, verified=True))
        kept = () if node in lost else tuple(holdings)
        encoded.append(encode(NodeInventory(f"node-{node}", kept, (), 0, (), ())))
    return encoded


def description(cluster: Cluster) -> Description:
    """What the nodes tell of the shards: one layout for each place within a node."""
    rows = -(-_ROWS // RANKS_PER_NODE)
    length = rows * 1024 * 4
    layouts = []
    for local in range(RANKS_PER_NODE):
        entries = tuple(
            TensorEntry(
                f"layers.{number}.weight",
                ("layers", str(number), "weight"),
                "float32",
                (_ROWS, 1024),
                Box((local * rows, 0), (rows, 1024)),
                number * length,
                length,
            )
            for number in range(cluster.items)
        )
        layouts.append(encode_layout(Layout(entries)))
    table = np.zeros(cluster.world, dtype=SHARD)
    table["rank"] = np.arange(cluster.world)
    table["layout"] = table["rank"] % RANKS_PER_NODE
    table["chunk_bytes"] = _CHUNK_BYTES
    table["data_offset_bytes"] = 1 << 20
    table["data_length_bytes"] = cluster.items * length
    table["values_offset_bytes"] = cluster.items * length
    return Description(table.tolist(), layouts, [pack(Flat(), None, allow_torch_save=False)], {})


def needs_of_a_blank_node(cluster: Cluster, described: Description) -> Needs:
    """What the ranks of node 0 tell when all of its memory is gone."""
    needs: Needs = {}
    catalogue = Catalogue(GENERATION, cluster.world, [described])
    stored = index(catalogue.layouts, catalogue.ranks)
    for rank in range(RANKS_PER_NODE):
        reader = Reader(rank, catalogue.layout_of(rank))
        transfers = plan(_wants(catalogue, rank), stored, reader, cast=False)
        needs.update(needs_of(transfers, catalogue, frozenset()))
    return needs


def decide(
    cluster: Cluster, encoded: list[bytes], described: Description, needs: Needs, rank: int
) -> tuple[Retrieval, ...]:
    """All that one rank computes between the inventory and the first byte; returns the retrievals of node 0.

    Merge, choice, proof of coverage and the choice of sources are for the whole cluster: every rank computes them.
    """
    inventory = merge([place.node_id for place in cluster.places], encoded)
    copies = copies_of(inventory, choose(inventory, None).candidates[0])
    catalogue = Catalogue(copies.generation, cluster.world, [described])
    stored = index(catalogue.layouts, catalogue.ranks)
    if problems := uncovered(stored):
        raise BenchError(problems[0])
    near = copies.on(rank // RANKS_PER_NODE)
    reader = Reader(rank, catalogue.layout_of(rank), tuple(near))
    needs_of(plan(_wants(catalogue, rank), stored, reader, cast=False), catalogue, frozenset(near))
    blank = Fetcher(0, 0, into_tensors=False)
    return plan_retrievals({blank: needs}, copies, catalogue, cluster.places)[blank]


def _wants(catalogue: Catalogue, rank: int) -> list[Want]:
    entries = catalogue.layouts[catalogue.layout_of(rank)].entries
    return [Want(e.fqn, False, e.dtype, e.global_shape, e.box, number) for number, e in enumerate(entries)]
