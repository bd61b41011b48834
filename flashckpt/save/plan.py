"""The save plan: which bytes of which tensor go where in the shard. Local, deterministic, cached by structure."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from torch.distributed.tensor import DTensor

from flashckpt.errors import InternalError, UnsupportedValueError
from flashckpt.format.dtypes import ITEMSIZE
from flashckpt.format.layout import encode_layout, fingerprint
from flashckpt.save.dedup import HeldRegion, share
from flashckpt.state.regions import Region, TensorSpec, describe, local_parts, plain_local, signature
from flashckpt.state.sole import SoleTensor
from flashckpt.types import Box, Layout, TensorEntry

if TYPE_CHECKING:
    from flashckpt.ranks.topology import Topology
    from flashckpt.state.flatten import Flat

ALIGN_BYTES = 64


def aligned(offset_bytes: int) -> int:
    return -(-offset_bytes // ALIGN_BYTES) * ALIGN_BYTES


class TensorSource(NamedTuple):
    """Where the bytes of one entry come from: a box of one local tensor."""

    tensor: int  # index into the flat tensors
    part: int
    whole: bool  # the box is the whole local tensor
    local_offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    offset_bytes: int
    length_bytes: int


@dataclass(frozen=True, slots=True)
class SavePlan:
    """The plan of one structure of the state."""

    sources: tuple[TensorSource, ...]
    layout_bytes: bytes
    layout_fingerprint: bytes
    tensor_bytes: int  # end of the last tensor in the data area; the packed values follow
    tag: int  # names the set of tensors this plan leaves to other ranks of the node; 0: none
    # End of the assumed tensors (state/regions.py) that this shard stores: they come first in the data area.
    assumed_bytes: int = 0
    assumed: tuple[int, ...] = ()  # indices of all assumed tensors of this rank, including those that others store


class Planner:
    """Makes plans, and keeps that of the last structure: an unchanged state costs one signature per tensor."""

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._cached: tuple[list[Any], SavePlan] | None = None
        self.dedup = True

    def plan(self, flat: Flat) -> SavePlan:
        tensors = list(flat.tensors.values())
        aliases = _aliases(tensors, [fqn in flat.per_rank for fqn in flat.tensors])
        structure = [self.dedup, list(flat.tensors), flat.per_rank, flat.paths, aliases, list(map(signature, tensors))]
        if self._cached is None or self._cached[0] != structure:
            self._cached = structure, _make_plan(flat, self._topology, self.dedup, aliases)
        return self._cached[1]


def _make_plan(flat: Flat, topology: Topology, dedup: bool, aliases: list[int]) -> SavePlan:
    specs = [describe(fqn, tensor) for fqn, tensor in flat.tensors.items()]
    node_ranks = topology.node_ranks
    per_rank = [fqn in flat.per_rank for fqn in flat.tensors]
    for (fqn, tensor), own in zip(flat.tensors.items(), per_rank, strict=True):
        _refuse_what_cannot_be_whole(fqn, tensor, own, topology)
    # Tied tensors are one set of bytes; the later key becomes an entry with the same range.
    originals = [i for i, alias in enumerate(aliases) if alias == i]
    is_assumed = [spec.is_assumed and not own for spec, own in zip(specs, per_rank, strict=True)]
    # Assumed tensors come first: the checksums of the chunks they lie in then say whether two shards hold the same.
    originals.sort(key=lambda i: not is_assumed[i])
    pairs = [(i, region) for i in originals for region in specs[i].regions]
    regions = [
        HeldRegion(
            size_bytes=_region_bytes(specs[i], region),
            rows=_rows(region),
            holders=_holders(specs[i], per_rank[i], topology, node_ranks, dedup),
            certain=not is_assumed[i],
        )
        for i, region in pairs
    ]
    fqns = list(flat.tensors)
    sources: list[TensorSource] = []
    placed: dict[int, list[tuple[Box, int, int]]] = {}
    offset = assumed_bytes = 0
    for (i, region), mine in zip(pairs, share(regions, topology.rank), strict=True):
        if mine is None:
            continue
        box, local_offsets = _cut(region, mine.start, mine.stop)
        length = box.volume * ITEMSIZE[specs[i].dtype]
        offset = aligned(offset)
        sources.append(
            TensorSource(
                tensor=i,
                part=region.part,
                whole=mine.stop - mine.start == _rows(region) and len(specs[i].regions) == _parts(specs[i]),
                local_offsets=local_offsets,
                sizes=box.sizes,
                offset_bytes=offset,
                length_bytes=length,
            )
        )
        placed.setdefault(i, []).append((box, offset, length))
        offset += length
        if is_assumed[i]:
            assumed_bytes = offset
    _check_parts(flat, sources)
    entries = [
        TensorEntry(
            fqn=fqns[i],
            path=flat.path(fqns[i]),
            dtype=specs[i].dtype,
            global_shape=specs[i].global_shape,
            box=box,
            offset_bytes=start,
            length_bytes=length,
            per_rank=per_rank[i],
        )
        for i in range(len(fqns))
        for box, start, length in placed.get(aliases[i], ())
    ]
    # A tensor without elements has no region, but its key and shape have to come back.
    entries += [
        TensorEntry(
            fqn=fqns[i],
            path=flat.path(fqns[i]),
            dtype=spec.dtype,
            global_shape=spec.global_shape,
            box=Box((0,) * len(spec.global_shape), spec.global_shape),
            offset_bytes=aligned(offset),
            length_bytes=0,
            per_rank=per_rank[i],
        )
        for i, spec in enumerate(specs)
        if 0 in spec.global_shape
    ]
    entries.sort(key=lambda entry: entry.offset_bytes)
    undivided = [own or isinstance(flat.tensors[fqn], SoleTensor) for fqn, own in zip(fqns, per_rank, strict=True)]
    layout_bytes = encode_layout(Layout(tuple(entries)))
    return SavePlan(
        sources=tuple(sources),
        layout_bytes=layout_bytes,
        layout_fingerprint=fingerprint(layout_bytes),
        tensor_bytes=aligned(offset),
        tag=_tag(fqns, specs, undivided, aliases) if dedup and topology.shares_nodes else 0,
        assumed_bytes=assumed_bytes,
        assumed=tuple(i for i in originals if is_assumed[i] and specs[i].regions),
    )


def _refuse_what_cannot_be_whole(fqn: str, tensor: Any, own: bool, topology: Topology) -> None:
    """Refuses a tensor if other processes have parts of it: without these, no generation would be usable."""
    if not isinstance(tensor, DTensor) or all(placement.is_replicate() for placement in tensor.placements):
        return
    if own:
        raise UnsupportedValueError(
            f"key {fqn!r}: PerRank holds a DTensor that is sharded over {tensor.device_mesh}",
            hint="leave sharded tensors out of PerRank: they come back to each rank by themselves",
            key=fqn,
        )
    outside = sorted(set(tensor.device_mesh.mesh.reshape(-1).tolist()) - set(topology.global_ranks))
    if outside:
        raise UnsupportedValueError(
            f"key {fqn!r}: sharded over ranks {outside} too, which this Checkpointer does not span",
            hint="make the Checkpointer with a process_group that holds the whole mesh",
            key=fqn,
        )


def _check_parts(flat: Flat, sources: list[TensorSource]) -> None:
    # The fast path copies length_bytes from the local tensor's address: the tensor has to be exactly that long.
    leaves = list(flat.tensors.items())
    for source in sources:
        fqn, tensor = leaves[source.tensor]
        plain = plain_local(tensor)
        shape = tuple((local_parts(fqn, tensor)[source.part] if plain is None else plain).shape)
        if shape == source.sizes and source.whole and not any(source.local_offsets):
            continue
        ends = tuple(a + n for a, n in zip(source.local_offsets, source.sizes, strict=True))
        if len(shape) != len(ends) or (source.whole and shape != source.sizes) or any(map(int.__gt__, ends, shape)):
            raise InternalError(f"key {fqn!r}: local tensor of shape {shape}, expected to hold {source.sizes}", key=fqn)


def _holders(
    spec: TensorSpec, per_rank: bool, topology: Topology, node_ranks: tuple[int, ...], dedup: bool
) -> tuple[int, ...]:
    """Returns the ranks of this node that have the region; only this rank if no other one can be relied on."""
    if per_rank or spec.holders == () or not dedup:
        return (topology.rank,)
    if spec.holders is None:
        return node_ranks
    return topology.on_node(spec.holders)


def _rows(region: Region) -> int:
    return region.box.sizes[0] if region.box.sizes else 1


def _parts(spec: TensorSpec) -> int:
    return len({region.part for region in spec.regions})


def _region_bytes(spec: TensorSpec, region: Region) -> int:
    return region.box.volume * ITEMSIZE[spec.dtype]


def _cut(region: Region, start: int, stop: int) -> tuple[Box, tuple[int, ...]]:
    box = region.box
    if not box.sizes:
        return box, region.local_offsets
    return (
        Box((box.offsets[0] + start, *box.offsets[1:]), (stop - start, *box.sizes[1:])),
        (region.local_offsets[0] + start, *region.local_offsets[1:]),
    )


def _tag(fqns: list[str], specs: list[TensorSpec], undivided: list[bool], aliases: list[int]) -> int:
    """Returns a hash of the tensors whose storage the ranks of a node divide among themselves, and of their order.

    All ranks of a generation must have the same tag, else a rank relied on a tensor that no rank stored.
    """
    digest = hashlib.blake2b(digest_size=4)
    for fqn, spec, own, alias in zip(fqns, specs, undivided, aliases, strict=True):
        if not own:
            digest.update(f"{fqn}\0{spec.dtype}\0{spec.global_shape}\0{fqns[alias]}\0{spec.holders is None}\0".encode())
    return int.from_bytes(digest.digest(), "little") or 1


def _aliases(tensors: list[Any], per_rank: list[bool]) -> list[int]:
    """Returns, for each tensor, the index of the first one in exactly the same memory: its own if there is no other."""
    first: dict[tuple[int, bool], int] = {}
    aliases = []
    for i, tensor in enumerate(tensors):
        local = plain_local(tensor)
        try:
            pointer = local.data_ptr() if local is not None else 0
        except RuntimeError:  # no storage: describe() raises an error that says why
            pointer = 0
        alias = first.setdefault((pointer, per_rank[i]), i) if pointer else i
        if alias != i and not _same(tensors[alias], tensor):
            alias = i
        aliases.append(alias)
    return aliases


def _same(a: Any, b: Any) -> bool:
    x, y = plain_local(a), plain_local(b)
    return (
        x is not None
        and y is not None
        and type(a) is type(b)
        and signature(a) == signature(b)
        and x.stride() == y.stride()
        and x.device == y.device
        and x.is_conj() == y.is_conj()
        and x.is_neg() == y.is_neg()
    )
