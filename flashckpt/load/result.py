"""What a load tells its caller."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from flashckpt.types import Generation, Timings

SourceName = Literal["memory", "peer", "persist"]


@dataclass(frozen=True, slots=True)
class LoadResult:
    """Which generation every rank now holds, and how it got there."""

    step: int
    generation: Generation
    source: SourceName
    saved_world_size: int
    extra: Any = None
    """What this rank (else the lowest that did) passed as `extra` when saving."""
    missing: tuple[str, ...] = ()
    """Keys of the state dict that the checkpoint does not have; they keep their values."""
    unexpected: tuple[str, ...] = ()
    """Keys of the checkpoint that no rank's state dict has; only with strict=False or keys=."""
    stepped_over: tuple[str, ...] = ()
    """Newer generations that could not be used, each with the reason."""
    timings: Timings = field(default_factory=Timings)
