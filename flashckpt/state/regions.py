"""Finds the rectangular regions of each global tensor that this rank holds, and the ranks that hold the same ones."""

from __future__ import annotations

import itertools
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Partial, Replicate, Shard, _StridedShard

from flashckpt.errors import UnsupportedValueError
from flashckpt.format.dtypes import ITEMSIZE
from flashckpt.types import Box

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


class Region(NamedTuple):
    """One box of the global tensor and where it begins in one of this rank's local tensors."""

    box: Box
    part: int  # index into local_parts(tensor)
    local_offsets: tuple[int, ...]


class TensorSpec(NamedTuple):
    """The place of this rank's data in one global tensor."""

    dtype: str
    global_shape: tuple[int, ...]
    regions: tuple[Region, ...]
    # Global ranks that hold exactly these regions. None: all ranks, by assumption. (): no other rank that is known.
    holders: tuple[int, ...] | None
    # True: only the key suggests that other ranks hold the same values. The tensor is whole and no DTensor.
    is_assumed: bool = False


_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)


def signature(tensor: Any) -> tuple[Any, ...]:
    """Returns a value that is equal for tensors with equal specs. Cheap, because every save calls it for every
    tensor."""
    if type(tensor) in _PLAIN_TYPES:
        return (tensor.dtype, tensor.shape)
    if isinstance(tensor, DTensor):
        spec, local = tensor._spec, tensor._local_tensor
        # tensor_meta has the global shape and dtype: the DTensor's own properties are three times as slow.
        # The mesh itself and not its id, which another mesh may get after this one is freed.
        return (spec.tensor_meta, spec.placements, _shard_order(spec), spec.mesh, local.dtype, local.shape)
    if isinstance(tensor, ShardedTensor):
        shards = tuple((tuple(s.metadata.shard_offsets), tuple(s.metadata.shard_sizes)) for s in tensor.local_shards())
        return (_dtype(tensor), tensor.metadata().size, shards)
    if hasattr(tensor, "__create_chunk_list__"):
        chunks = tuple((tuple(c.offsets), tuple(c.sizes)) for c in tensor.__create_chunk_list__())
        return (tensor.dtype, tensor.shape, chunks)
    return (tensor.dtype, tensor.shape)


def global_form(tensor: Any) -> tuple[str, tuple[int, ...]]:
    """Return dtype and global shape."""
    shape = tensor.metadata().size if isinstance(tensor, ShardedTensor) else tensor.shape
    return _dtype_name(_dtype(tensor)), tuple(shape)


def _shard_order(spec: Any) -> Any:
    return getattr(spec, "shard_order", None)


def plain_local(tensor: Any) -> torch.Tensor | None:
    """Returns the only local tensor, if it is an ordinary one; None: use `local_parts`.

    Nearly every leaf has one, and `local_parts` would take several times as long at every save.
    """
    local: torch.Tensor = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return local if type(local) in _PLAIN_TYPES else None


def address_of(tensor: torch.Tensor) -> int:
    """Return the address of the local tensor's memory; 0 for a wrapper of several tensors, and without memory."""
    local = plain_local(tensor)
    return 0 if local is None else local.data_ptr()


def local_parts(fqn: str, tensor: Any) -> list[torch.Tensor]:
    """Returns the local tensors that hold the regions: detached, on their device, of any stride."""
    if isinstance(tensor, DTensor):
        local = tensor._local_tensor
        if isinstance(local, AsyncCollectiveTensor):
            local = local.wait()
        if hasattr(local, "__tensor_flatten__"):
            raise _unsupported(fqn, tensor, f"a DTensor whose local tensor is a {type(local).__name__}")
        return [local.detach()]
    if isinstance(tensor, ShardedTensor):
        return [shard.tensor.detach() for shard in tensor.local_shards()]
    if hasattr(tensor, "__create_chunk_list__"):
        return [_checkpointable_part(fqn, tensor, chunk) for chunk in tensor.__create_chunk_list__()]
    if isinstance(tensor, AsyncCollectiveTensor):
        return [tensor.wait()]
    return [tensor]


def narrow(part: torch.Tensor, offsets: Iterable[int], sizes: Iterable[int]) -> torch.Tensor:
    """Returns a view of one box of a local tensor."""
    for dim, (start, size) in enumerate(zip(offsets, sizes, strict=True)):
        if start or size != part.shape[dim]:
            part = part.narrow(dim, start, size)
    return part


def describe(fqn: str, tensor: Any) -> TensorSpec:
    """Returns the regions of one leaf. Raises UnsupportedValueError for a tensor without bytes of its own."""
    dtype = _dtype_name(_dtype(tensor))
    if dtype not in ITEMSIZE:
        raise _unsupported(fqn, tensor, f"dtype {dtype}")
    if type(tensor) in _PLAIN_TYPES and tensor.is_cpu and tensor.layout == torch.strided:
        return _describe_whole(tensor, dtype)
    if isinstance(tensor, ShardedTensor):
        return _describe_sharded(tensor, dtype)
    if tensor.layout != torch.strided:
        raise _unsupported(fqn, tensor, f"layout {tensor.layout}")
    if tensor.device.type == "meta":
        raise _unsupported(fqn, tensor, "the meta device, which holds no data")
    if isinstance(tensor, DTensor):
        return _describe_dtensor(fqn, tensor, dtype)
    if hasattr(tensor, "__create_chunk_list__"):
        chunks = tensor.__create_chunk_list__()
        boxes = [Box(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in chunks]
        is_whole = [box.sizes for box in boxes] == [tuple(tensor.shape)]
        return TensorSpec(dtype, tuple(tensor.shape), _whole_parts(boxes), holders=(), is_assumed=is_whole)
    return _describe_whole(tensor, dtype)


def _describe_whole(tensor: torch.Tensor, dtype: str) -> TensorSpec:
    shape = tuple(tensor.shape)
    origin = (0,) * len(shape)
    regions = () if 0 in shape else (Region(Box(origin, shape), 0, origin),)
    return TensorSpec(dtype, shape, regions, holders=None, is_assumed=True)


@cache
def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype(tensor: Any) -> torch.dtype:
    # A ShardedTensor's own property logs at every save that the class is deprecated.
    return tensor.metadata().tensor_properties.dtype if isinstance(tensor, ShardedTensor) else tensor.dtype


def _describe_sharded(tensor: ShardedTensor, dtype: str) -> TensorSpec:
    boxes = [
        Box(tuple(shard.metadata.shard_offsets), tuple(shard.metadata.shard_sizes)) for shard in tensor.local_shards()
    ]
    return TensorSpec(dtype, tuple(tensor.metadata().size), _whole_parts(boxes), holders=())


def _whole_parts(boxes: list[Box]) -> tuple[Region, ...]:
    return tuple(Region(box, part, (0,) * len(box.sizes)) for part, box in enumerate(boxes) if box.volume)


def _describe_dtensor(fqn: str, tensor: DTensor, dtype: str) -> TensorSpec:
    mesh, placements, shape = tensor.device_mesh, tensor.placements, tuple(tensor.shape)
    if any(isinstance(placement, Partial) for placement in placements):
        raise _unsupported(fqn, tensor, f"placements {placements}: a Partial is not reduced yet")
    order = _shard_order(tensor._spec)
    if order is not None and order != type(tensor._spec).compute_default_shard_order(placements):
        raise _unsupported(fqn, tensor, f"placements {placements} applied in another order than the mesh's: {order}")
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return TensorSpec(dtype, shape, (), holders=())
    same_shard = tuple(
        slice(None) if isinstance(placement, Replicate) else coordinate[dim] for dim, placement in enumerate(placements)
    )
    holders = tuple(int(rank) for rank in mesh.mesh[same_shard].reshape(-1))
    if any(isinstance(placement, _StridedShard) for placement in placements):
        return TensorSpec(dtype, shape, _strided_regions(tensor, coordinate), holders)
    sizes, offsets = compute_local_shape_and_global_offset(shape, mesh, placements)
    return TensorSpec(dtype, shape, _whole_parts([Box(tuple(offsets), tuple(sizes))]), holders)


def _strided_regions(tensor: DTensor, coordinate: Sequence[int]) -> tuple[Region, ...]:
    """Returns the real regions of a strided shard, whose local rows are not neighbours in the global tensor.

    Placements act on each tensor dimension separately. So torch's own splitting of an index range gives the global
    indices that this rank has in each dimension; the regions are the product of their runs of neighbours.
    """
    runs_by_dim = []
    for dim, size in enumerate(tensor.shape):
        indices = torch.arange(size)
        for mesh_dim, placement in enumerate(tensor.placements):
            if getattr(placement, "dim", None) == dim:
                one_dim: Any = (
                    _StridedShard(0, split_factor=placement.split_factor)
                    if isinstance(placement, _StridedShard)
                    else Shard(0)
                )
                pieces, _ = one_dim._split_tensor(
                    indices, tensor.device_mesh.size(mesh_dim), with_padding=False, contiguous=True
                )
                indices = pieces[coordinate[mesh_dim]]
        runs_by_dim.append(_runs(indices.tolist()))
    regions = []
    for runs in itertools.product(*runs_by_dim):
        box = Box(tuple(run[1] for run in runs), tuple(run[2] for run in runs))
        regions.append(Region(box, 0, tuple(run[0] for run in runs)))
    return tuple(regions)


def _runs(indices: list[int]) -> list[tuple[int, int, int]]:
    """Returns (local start, global start, length) of each run of consecutive global indices."""
    runs: list[tuple[int, int, int]] = []
    for local, index in enumerate(indices):
        if runs and runs[-1][1] + runs[-1][2] == index:
            start, first, length = runs[-1]
            runs[-1] = (start, first, length + 1)
        else:
            runs.append((local, index, 1))
    return runs


def _checkpointable_part(fqn: str, tensor: Any, chunk: Any) -> torch.Tensor:
    from torch.distributed.checkpoint.metadata import MetadataIndex

    part = tensor.__get_tensor_shard__(MetadataIndex(fqn, chunk.offsets))
    if not isinstance(part, torch.Tensor):
        raise _unsupported(fqn, tensor, "__get_tensor_shard__ that gives no tensor")
    return part.detach()


def _unsupported(fqn: str, tensor: Any, found: str) -> UnsupportedValueError:
    return UnsupportedValueError(
        f"key {fqn!r}: expected a strided tensor with bytes of its own, found {type(tensor).__name__} with {found}",
        hint="convert it before saving (e.g. .to_dense(), .dequantize(), .redistribute())",
        key=fqn,
    )
