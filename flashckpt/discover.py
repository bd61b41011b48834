"""Finds checkpoints of any program in a directory or below a URL, without torch and without opening them."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

from flashckpt.errors import FlashError, NotFoundError
from flashckpt.persist.catalog import list_steps
from flashckpt.persist.names import META_JSON, METADATA, step_name, step_of
from flashckpt.persist.storage import is_url, open_storage

if TYPE_CHECKING:
    from collections.abc import Iterator

    from flashckpt.persist.storage import Storage

# The files that mark a checkpoint as complete: DCP's, and those of Hugging Face.
_MARKERS = (METADATA, "model.safetensors.index.json", "model.safetensors")
_NESTED = "model_and_optim"
_MAX_JSON_BYTES = 64 << 20


def checkpoint_dirname(step: int) -> str:
    """Returns the name of a step's directory in persist_dir."""
    return step_name(step)


def dir_is_checkpoint(path: str) -> bool:
    """Returns True if `path` itself is a complete checkpoint: DCP's, Hugging Face's or OLMo's."""
    storage = _open(path)
    files = storage.list() or {}
    return any(marker in files for marker in _MARKERS) or METADATA in (storage.list(_NESTED) or {})


def find_checkpoints(path: str) -> Iterator[tuple[int, str]]:
    """Yields (step, path) of every complete checkpoint in `path`, oldest first.

    Recognised names: step-N, step_N, stepN, checkpoint-N.
    """
    storage = _open(path)
    ours = {one.name: one for one in list_steps(storage)}
    names = ((step_of(name, foreign=True), name) for name in storage.list() or {})
    others = sorted((step, name) for step, name in names if step is not None and name not in ours)
    complete = [(one.step, one.name) for one in ours.values() if not one.problem]
    # A checkpoint of another kind has no DCP index at its top level.
    incomplete = [(one.step, one.name) for one in ours.values() if one.problem and one.meta is None] + others
    found = complete + [(step, name) for step, name in incomplete if dir_is_checkpoint(_join(path, name))]
    yield from ((step, _join(path, name)) for step, name in sorted(found))


def contains_checkpoint(path: str) -> bool:
    return next(find_checkpoints(path), None) is not None


def latest_checkpoint(path: str) -> str:
    """Returns the newest complete checkpoint in `path`. Raises NotFoundError, a FileNotFoundError, if there is none."""
    found = list(find_checkpoints(path))
    if not found:
        raise NotFoundError(f"{path}: expected a checkpoint, found none that is complete")
    return found[-1][1]


def peek(path: str) -> int | None:
    """Returns the step of the checkpoint at `path`, or of the newest one in it; None if it is not known. Never
    raises."""
    try:
        storage = _open(path)
        for name in (META_JSON, "metadata.json"):
            data = storage.read(name, 0, _MAX_JSON_BYTES)
            step = json.loads(data).get("step") if data else None
            if isinstance(step, int) and not isinstance(step, bool):
                return step
        if dir_is_checkpoint(path):
            return step_of(os.path.basename(path.rstrip("/")), foreign=True)
        return max((step for step, _ in find_checkpoints(path)), default=None)
    except (FlashError, OSError, ValueError, AttributeError):
        return None


def _open(path: str) -> Storage:
    path = os.fspath(path)
    return open_storage(path if is_url(path) else os.path.abspath(path))


def _join(path: str, name: str) -> str:
    return f"{os.fspath(path).rstrip('/')}/{name}"
