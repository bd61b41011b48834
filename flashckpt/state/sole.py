"""A tensor that this rank alone holds, under a key that other ranks need not have."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import MetadataIndex


class SoleTensor(torch.Tensor):
    """Wraps a tensor that only this rank holds, so that this rank stores it and it does not count as the same on all.

    Unlike a value in `PerRank` it has one name for all ranks, so each rank can load it.
    """

    _held: torch.Tensor

    @staticmethod
    def __new__(cls: type[SoleTensor], held: torch.Tensor) -> SoleTensor:
        made: SoleTensor = torch.Tensor._make_wrapper_subclass(
            cls, held.shape, strides=held.stride(), dtype=held.dtype, device=held.device
        )
        made._held = held.detach()
        return made

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(offsets=torch.Size([0] * self.dim()), sizes=self.shape)]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        return self._held

    def __repr__(self, *, tensor_contents: Any = None) -> Any:  # type: ignore[override]
        return f"SoleTensor({self._held!r})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        inner = [one._held if isinstance(one, SoleTensor) else one for one in args]
        return func(*inner, **(kwargs or {}))
