"""Keeps the list of generations that can't be loaded, because no node that answered at the last check had some shard.

One file, replaced as a whole, by the agent and by trainers that load. It changes no decision: it is for people, who see
the same in `ls` and `status` whether an agent runs or not, and after a launch that failed for it.
"""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING

from flashckpt.errors import UnsafeDirectoryError
from flashckpt.store.names import LOSSES_NAME, Draft
from flashckpt.store.small_files import frame, read_framed, write_aside
from flashckpt.types import Generation, Loss

if TYPE_CHECKING:
    from collections.abc import Iterable

    from flashckpt.store.directory import Directory
    from flashckpt.store.owner import Owner

_log = logging.getLogger(__name__)
_MAGIC = b"FCLOSSE1"
_KEPT = 16
_SHOWN_RANKS = 16


def read_losses(directory: Directory) -> tuple[Loss, ...]:
    """Return the list; a file that can't be trusted counts as empty."""
    try:
        payload = read_framed(directory, LOSSES_NAME, _MAGIC)
    except FileNotFoundError:
        return ()
    except UnsafeDirectoryError as error:
        _log.warning("list of lost generations ignored: %s", error)
        return ()
    try:
        rows = json.loads(payload or b"")
        return tuple(Loss(Generation(*map(int, row[0])), tuple(map(int, row[1])), str(row[2])) for row in rows)
    except (ValueError, TypeError, LookupError):
        _log.warning("list of lost generations %s/%s is torn or foreign; ignored", directory.path, LOSSES_NAME)
        return ()


def write_losses(directory: Directory, losses: Iterable[Loss], writer: Owner) -> None:
    """Replace the list by its newest 16; an empty one needs no file."""
    kept = sorted(losses, key=lambda one: one.generation)[-_KEPT:]
    if not kept:
        directory.remove(None, LOSSES_NAME)
        return
    payload = json.dumps([[list(one.generation), one.ranks[:_SHOWN_RANKS], one.reason] for one in kept]).encode()
    write_aside(directory, LOSSES_NAME, frame(_MAGIC, payload, directory.job), Draft.LOSSES, writer)
