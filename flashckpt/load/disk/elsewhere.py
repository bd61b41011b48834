"""Loads a checkpoint by its path: another run's, or another program's. Never changes it."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from flashckpt.discover import dir_is_checkpoint, find_checkpoints
from flashckpt.errors import FlashError, IncompatibleError, MissingKeyError, NotFoundError, UnusableError
from flashckpt.load.agree import StepBackError
from flashckpt.load.disk.foreign import open_for_manager
from flashckpt.load.disk.restore import DiskAttempt, OnDisk
from flashckpt.load.disk.safetensors import SafetensorsSource, is_safetensors
from flashckpt.load.disk.source import CheckpointSource
from flashckpt.load.plan import Transfer, Want
from flashckpt.load.read import Target
from flashckpt.persist.catalog import look
from flashckpt.persist.meta import MAX_META_BYTES
from flashckpt.persist.names import META_JSON, METADATA, step_of
from flashckpt.persist.storage import is_url, open_storage
from flashckpt.types import Box, Generation

if TYPE_CHECKING:
    from collections.abc import MutableMapping, Sequence

    from flashckpt.load.context import LoadContext
    from flashckpt.load.disk.source import OpenCheckpoint
    from flashckpt.load.recover import Recovery, Request
    from flashckpt.load.result import LoadResult
    from flashckpt.persist.storage import Storage
    from flashckpt.ranks.group import PrivateGroup

_OLMO = "model_and_optim"


@dataclass(frozen=True, slots=True)
class CheckpointPlace:
    """The place of a checkpoint, and its format."""

    root: str
    name: str  # the checkpoint's directory in root
    generation: Generation
    is_hf: bool = False  # a Hugging Face model in safetensors: a model and nothing else

    def open(self, storage: Storage, name: str, step: int) -> OpenCheckpoint:
        return SafetensorsSource(storage, name, step) if self.is_hf else CheckpointSource(storage, name, step)

    def open_for_manager(self, storage: Storage, name: str, step: int) -> OpenCheckpoint:
        """Opens it under the names that a CheckpointManager has for its parts, whatever program has written it."""
        return self.open(storage, name, step) if self.is_hf else open_for_manager(storage, name, step)


def resolve_path(path: str) -> CheckpointPlace:
    """Returns the checkpoint at `path`, or the newest one in that directory. Raises NotFoundError if there is none."""
    path = os.fspath(path)
    where = path.rstrip("/") if is_url(path) else os.path.abspath(path)
    if not dir_is_checkpoint(where):
        inside = list(find_checkpoints(where))
        if not inside:
            raise NotFoundError(
                f"{path}: expected a checkpoint, or a directory of checkpoints, found none that is complete",
                hint="flashckpt.find_checkpoints lists what is in a directory",
            )
        where = inside[-1][1]
    root, _, name = where.rpartition("/")
    storage = open_storage(root or "/")
    step = step_of(os.path.basename(where), foreign=True) or 0
    files = storage.list(name) or {}
    if METADATA not in files:
        if is_safetensors(files):
            return CheckpointPlace(root or "/", name, Generation(0, 0, step, 0), is_hf=True)
        if METADATA not in (storage.list(f"{name}/{_OLMO}") or {}):
            raise IncompatibleError(f"{where}: expected a DCP checkpoint or safetensors, found one of another kind")
        root, name, storage = where, _OLMO, open_storage(where)
    data = storage.read(f"{name}/{META_JSON}", 0, MAX_META_BYTES)
    if data is not None:
        step = int(json.loads(data).get("step", step))
    found = look(storage, name, step)
    if found.problem:
        raise UnusableError(f"{where}: {found.problem}")
    return CheckpointPlace(root or "/", name, found.generation)


def agree_path(group: PrivateGroup, path: str) -> CheckpointPlace:
    """Resolves the path on rank 0 and returns the result on all ranks. Collective.

    A shared filesystem may show the ranks different things.
    """
    answer: dict[str, Any] = {}
    error: FlashError | None = None
    if group.rank == 0:
        try:
            place = resolve_path(path)
            answer = {"place": [place.root, place.name, list(place.generation), place.is_hf]}
        except FlashError as raised:
            error, answer = raised, {"problem": raised.message, "class": type(raised).__name__}
        except (OSError, ValueError) as raised:
            answer = {"problem": f"{path}: {raised}", "class": "UnusableError"}
    told = json.loads(group.gather(json.dumps(answer).encode(), f"looking at {path}")[0])
    if error is not None:
        raise error
    if "problem" in told:
        classes = {one.__name__: one for one in (NotFoundError, IncompatibleError, UnusableError)}
        raise classes.get(told["class"], UnusableError)(told["problem"])
    root, name, generation, is_hf = told["place"]
    return CheckpointPlace(root, name, Generation(*generation), is_hf)


def load_path(
    recovery: Recovery,
    context: LoadContext,
    path: str,
    state_dict: MutableMapping[Any, Any],
    request: Request,
    *,
    only_hf: bool = False,
) -> LoadResult:
    """Fills the state dict from the checkpoint at `path`, on all ranks or on none. Collective."""
    place = agree_path(context.group, path)
    if only_hf and not place.is_hf:
        raise IncompatibleError(f"{path}: expected a Hugging Face model (safetensors), found a DCP checkpoint")
    if place.is_hf:
        # Most models are published in bfloat16, whatever dtype the training uses. Quantized ones are refused.
        request = replace(request, cast=True)
    opener = place.open if request.screen is None else place.open_for_manager
    attempt = DiskAttempt(context, place.root, OnDisk(place.name, place.generation, ""), opener)
    try:
        return recovery.load_from(attempt, state_dict, request)
    except StepBackError as error:
        raise UnusableError(f"{path}: {error.message}", hint="name another checkpoint") from error


def open_path(path: str) -> OpenCheckpoint:
    """Opens the checkpoint at `path` in this process alone."""
    place = resolve_path(path)
    return place.open(open_storage(place.root), place.name, place.generation.step)


def read_tensor(source: OpenCheckpoint, key: str) -> torch.Tensor:
    """Reads a whole tensor to the CPU."""
    pieces = source.stored[(key, None)]
    first = pieces[0].entry
    everything = Box((0,) * len(first.global_shape), first.global_shape)
    want = Want(key, False, first.dtype, first.global_shape, everything, 0)
    whole = torch.empty(first.global_shape, dtype=getattr(torch, first.dtype))
    transfers = [Transfer(0, piece.entry, want, piece.entry.box) for piece in pieces]
    source.read(transfers, [Target(whole, everything)], lambda load: load())
    return whole


def load_keys(path: str, keys: Sequence[str]) -> dict[str, Any]:
    """Returns tensors (whole, on the CPU) and values below `keys`, by their flat names. In this process alone.

    A key may be a whole name or its leading parts. Raises MissingKeyError if one of them names nothing.
    """
    source = open_path(path)
    tensors = {fqn for fqn, owner in source.stored if owner is None}
    known = sorted(tensors | source.saved_keys(0, {}))
    wanted: list[str] = []
    for key in keys:
        below = [fqn for fqn in known if fqn == key or fqn.startswith(key + ".")]
        if not below:
            raise MissingKeyError(
                f"{source.where}: no key is, or begins with, {key!r}; keys are like {known[:4]}", key=key
            )
        wanted += below
    return {
        fqn: read_tensor(source, fqn) if fqn in tensors else source.value(fqn, 0)[1] for fqn in dict.fromkeys(wanted)
    }
