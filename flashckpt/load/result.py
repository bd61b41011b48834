"""The result of a load."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from flashckpt.types import Generation, Timings

SourceName = Literal["memory", "peer", "persist"]


@dataclass(frozen=True, slots=True)
class LoadResult:
    """The generation that every rank now holds, and where it came from."""

    step: int
    generation: Generation
    source: SourceName
    saved_world_size: int
    extra: Any = None
    """The `extra` that this rank passed to save(); if it saved none, that of the lowest rank."""
    missing: tuple[str, ...] = ()
    """Keys of the state dict that the checkpoint does not have; they keep their values."""
    unexpected: tuple[str, ...] = ()
    """Keys of the checkpoint that no rank's state dict has; only with strict=False or keys=."""
    stepped_over: tuple[str, ...] = ()
    """Newer generations that could not be used, each with the reason."""
    timings: Timings = field(default_factory=Timings)
