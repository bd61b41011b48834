"""Keeps a rank's marks that it will not complete a generation, for the other ranks of the node.

Marks are empty files, so that they can be created on a full filesystem: that is when saves fail. A mark lasts while
shards of its generation lie here, or slower ranks may still follow its writer.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

from flashckpt.errors import FlashError
from flashckpt.store.directory import Directory, SlotState
from flashckpt.store.names import parse_sealed_name, parse_void_name, void_name

if TYPE_CHECKING:
    from collections.abc import Callable

    from flashckpt.store.owner import Owner
    from flashckpt.types import Generation

_log = logging.getLogger(__name__)


def mark_void(directory: Directory, generation: Generation, writer: Owner) -> None:
    """Mark a generation. Never raises for lack of inodes: it is called when a save has failed already."""
    # Generations that this launch has passed are recognized by its later ones; their marks can be removed.
    _drop(directory, lambda old, _: old[:2] == generation[:2] and old.seq < generation.seq)
    try:
        os.close(directory.create_file(None, void_name(generation, writer)))
    except FileExistsError:
        pass
    except OSError as error:
        if isinstance(error, FlashError):
            raise
        _log.warning("%s: could not mark %s as void: %s", directory.path, generation, error.strerror)


def read_voids(directory: Directory) -> frozenset[Generation]:
    parsed = (parse_void_name(name) for name in directory.names(None))
    return frozenset(found.generation for found in parsed if found is not None)


def drop_stale(directory: Directory, is_dead: Callable[[Owner], bool]) -> int:
    """Remove the marks of dead writers. Return how many."""
    return _drop(directory, lambda _, writer: is_dead(writer))


def _drop(directory: Directory, condition: Callable[[Generation, Owner], bool]) -> int:
    """Remove marks, but only if no shard of their generation is left: without its mark, a shard would be waited for
    again."""
    marks = [(name, found) for name in directory.names(None) if (found := parse_void_name(name)) is not None]
    if not marks:
        return 0
    sealed = (parse_sealed_name(name) for name in directory.names(SlotState.SEALED))
    present = {found.shard.generation for found in sealed if found is not None}
    return sum(
        directory.remove(None, name)
        for name, found in marks
        if found.generation not in present and condition(found.generation, found.writer)
    )
