"""Lists the regions of this rank's live tensors that a load has to fill."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flashckpt.load.plan import Want
from flashckpt.load.read import Target
from flashckpt.state.regions import TensorSpec, describe, local_parts, narrow
from flashckpt.types import Box

if TYPE_CHECKING:
    from flashckpt.state.flatten import Flat


class LiveTensors:
    """The regions to fill (`wants`) and their tensors (`targets`). Each want's `target` is an index into `targets`."""

    def __init__(self, flat: Flat) -> None:
        self.targets: list[Target] = []
        self.wants: list[Want] = []
        for fqn, tensor in flat.tensors.items():
            spec = describe(fqn, tensor)
            parts = local_parts(fqn, tensor)
            for region in spec.regions:
                part = narrow(parts[region.part], region.local_offsets, region.box.sizes)
                self._want(fqn, flat, spec, Target(part, region.box))
            if 0 in spec.global_shape:
                # Nothing to fill, but its shape and dtype are checked like any other's.
                self._want(fqn, flat, spec, Target(parts[0], Box((0,) * len(spec.global_shape), spec.global_shape)))

    def _want(self, fqn: str, flat: Flat, spec: TensorSpec, target: Target) -> None:
        self.wants.append(Want(fqn, fqn in flat.per_rank, spec.dtype, spec.global_shape, target.box, len(self.targets)))
        self.targets.append(target)
