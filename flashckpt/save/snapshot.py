"""Snapshot: the state's bytes into a slot, checksummed on the way."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any

import torch

from flashckpt import native
from flashckpt.devices import Copier, DeviceCopy, native_address
from flashckpt.failpoints import failpoint
from flashckpt.save.plan import SavePlan, local_source

if TYPE_CHECKING:
    from flashckpt.state.flatten import Flat

_PLAIN = (torch.Tensor, torch.nn.Parameter)


def snapshot(
    data: memoryview,
    plan: SavePlan,
    flat: Flat,
    values: bytes,
    *,
    chunk_bytes: int,
    threads: int,
    copier: Copier,
) -> bytes:
    """Fills the data area and returns its chunk CRCs. Once this returns the tensors may be mutated.

    Contiguous host memory is copied and checksummed in one native pass; what torch has to copy (accelerators,
    odd strides) is put in place first and only checksummed there. Gaps become zero.
    """
    pieces: list[int] = []
    by_torch: list[DeviceCopy] = []
    keep: list[torch.Tensor] = []  # SAFETY: the native pass reads addresses; these must outlive it
    fqns: list[str] = list(flat.tensors)
    tensors: list[Any] = list(flat.tensors.values())
    for source in plan.sources:
        tensor = tensors[source.tensor]
        if not (source.whole and type(tensor) in _PLAIN):
            tensor = local_source(fqns[source.tensor], tensor, source)
            keep.append(tensor)
        address = native_address(tensor)
        if address is None:
            by_torch.append(DeviceCopy(tensor, source.offset_bytes, source.length_bytes))
            address = 0
        pieces += (address, source.offset_bytes, source.length_bytes)
    failpoint("before_copy")
    copier.copy(data, by_torch)
    start = plan.tensor_bytes
    data[start : start + len(values)] = values
    pieces += (0, start, len(values))
    failpoint("mid_copy")
    crcs = native.scatter_copy(data, array("q", pieces), chunk_bytes, threads)
    failpoint("after_copy")
    return crcs
