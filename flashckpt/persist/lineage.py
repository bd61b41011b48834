"""Decides which steps of persist_dir a flush may replace or remove, as far as histories are concerned. No torch.

A flush that was overtaken (its node stood still while the job continued elsewhere) commits nothing. A step of a history
that this node's line does not know stays until a person chooses. The line is in persist_dir before the first step of
its launch, so that a job that has only the disk left knows what was abandoned.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flashckpt.errors import CorruptShardError, PersistError
from flashckpt.persist.catalog import look, read_lines, write_line
from flashckpt.persist.names import step_name
from flashckpt.protocol.line import launch_of, name_of
from flashckpt.store.slots import SlotStore

if TYPE_CHECKING:
    from flashckpt.persist.storage import Storage
    from flashckpt.protocol.flush_spec import FlushSpec
    from flashckpt.protocol.line import Line
    from flashckpt.types import Generation

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Lineage:
    """Holds what this node and persist_dir know of the job's histories."""

    own: Line | None  # the line in force on this node
    on_disk: tuple[Line, ...]
    is_damaged: bool = False  # the file in persist_dir cannot be read

    def why_abandoned(self, generation: Generation) -> str:
        """Return why a generation must not be committed any more; "" = it may be."""
        lines = (*self.on_disk, *([] if self.own is None else [self.own]))
        root = next((one.root for one in lines if one.head == launch_of(generation)), None)
        return next(filter(None, (one.why_killed(generation, root) for one in lines)), "")

    def is_known(self, generation: Generation) -> bool:
        """Return True if the generation is of this node's history, or was abandoned by it or by any other one."""
        launch = launch_of(generation)
        root = next((one.root for one in self.on_disk if one.head == launch), None)
        return self.own is None or self.own.cut(launch, root) is not None or bool(self.why_abandoned(generation))

    def is_to_be_written(self) -> bool:
        """Return True if this node's line says more than the steps do, and persist_dir has neither it nor a line that
        continues it.
        """
        own = self.own
        if own is None or self.is_damaged or not (own.listed or own.floor):
            return False
        return not any(one.head == own.head or one.supersedes(own) for one in self.on_disk)


def read_lineage(storage: Storage, spec: FlushSpec) -> Lineage:
    with SlotStore.open(spec.memory_dir, spec.job, create=False) as store:
        own = store.read_line()
    try:
        return Lineage(own, read_lines(storage))
    except CorruptShardError as error:
        _log.warning("%s; what was abandoned is known from memory only", error.message)
        return Lineage(own, (), is_damaged=True)


def check_lineage(storage: Storage, spec: FlushSpec) -> Lineage:
    """Raise PersistError if the job has continued without the generation to be flushed, or if a step of another history
    is in its place. Changes nothing.
    """
    lineage, step = read_lineage(storage, spec), spec.generation.step
    abandoned = lineage.why_abandoned(spec.generation)
    if abandoned:
        raise PersistError(
            f"{spec.generation} is {abandoned}",
            hint="another launch has taken the job over; end this one",
            step=step,
        )
    there = look(storage, step_name(step), step)
    is_ours = there.meta is not None and not there.problem and there.meta.job == spec.job
    if is_ours and not lineage.is_known(there.generation):
        raise PersistError(
            f"{storage.root}/{there.name}: expected nothing, or a step of this history, found one of another history, "
            f"{name_of(launch_of(there.generation))}, that nobody has given up",
            hint="`flashckpt histories` shows both, and load(history=…) chooses one; until then the other's steps stay",
            step=step,
        )
    return lineage


def keep_line(storage: Storage, lineage: Lineage) -> None:
    """Store this node's line before the first step of its launch becomes visible."""
    if lineage.own is not None and lineage.is_to_be_written():
        write_line(storage, lineage.own)
