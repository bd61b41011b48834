"""Writes an export: Hugging Face safetensors, one torch file, or a DCP checkpoint. The export appears when it is
complete.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import time
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

from flashckpt.errors import ConfigError, ExistsError, MissingKeyError
from flashckpt.persist.names import IMPORTED
from flashckpt.store.rename import rename_exchange

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from flashckpt.export.source import SavedStep, TensorInfo

Form = Literal["hf", "torch", "dcp"]
FORMS = ("hf", "torch", "dcp")
DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float64": torch.float64,
}
_INDEX = "model.safetensors.index.json"
_SHARD_BYTES = 5 << 30  # the size of file that the Hugging Face hub recommends


@dataclass(frozen=True, slots=True)
class Exported:
    step: int
    tensors: int
    size_bytes: int
    files: tuple[str, ...]


def export(
    source: SavedStep,
    out: str,
    *,
    form: Form = "hf",
    dtype: torch.dtype | None = None,
    part: str = "model",
    shard_bytes: int = _SHARD_BYTES,
    overwrite: bool = False,
    rename: Callable[[str], str] | None = None,
    keep_part: bool = False,
) -> Exported:
    """Write the tensors below `part` to `out`, under their names without it (or, with `keep_part`, with it).

    `dtype` converts floating point tensors, `rename` changes names (without `part`). Raises ExistsError if `out`
    exists, unless `overwrite`.
    """
    if form not in FORMS:
        raise ConfigError(f"form: expected one of {FORMS}, found {form!r}")
    prefix = f"{part}."
    chosen = {key: info for key, info in source.tensors().items() if key.startswith(prefix)}
    if not chosen:
        parts = sorted({key.partition(".")[0] for key in source.tensors()})
        raise MissingKeyError(f"step {source.step}: no tensor below {part!r}; there are {', '.join(parts) or 'none'}")
    if os.path.lexists(out) and not overwrite:
        raise ExistsError(f"{out}: it already exists", hint="choose another directory, or pass overwrite")
    os.makedirs(os.path.dirname(os.path.abspath(out)), exist_ok=True)
    aside = f"{out.rstrip('/')}.tmp-{secrets.token_hex(4)}"
    os.mkdir(aside)
    try:
        plan = _Plan(source, chosen, _names(chosen, prefix, rename, keep_part), dtype)
        if form == "hf":
            _write_safetensors(plan, aside, shard_bytes)
        elif form == "torch":
            torch.save(plan.everything(), os.path.join(aside, "model.pt"))
        else:
            _write_dcp(plan.everything(), aside)
            if keep_part:
                # In a job's persist_dir it counts as the job's, because a person put it there.
                with open(os.path.join(aside, IMPORTED), "w") as file:
                    json.dump({"imported_at": time.time()}, file)
        files = tuple(sorted(os.listdir(aside)))
        size = sum(os.path.getsize(os.path.join(aside, name)) for name in files)
        _publish(aside, out)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    return Exported(source.step, len(chosen), size, files)


class _Plan:
    def __init__(
        self, source: SavedStep, chosen: dict[str, TensorInfo], names: dict[str, str], dtype: torch.dtype | None
    ) -> None:
        self._source, self._chosen, self._names, self._dtype = source, chosen, names, dtype

    def target_dtype(self, info: TensorInfo) -> torch.dtype:
        return self._dtype if self._dtype is not None and info.dtype.is_floating_point else info.dtype

    def groups(self, limit_bytes: int) -> Iterator[list[str]]:
        """Split the keys, in order, into groups that fit into one file each."""
        group: list[str] = []
        size = 0
        for key, info in self._chosen.items():
            length = torch.Size(info.shape).numel() * self.target_dtype(info).itemsize
            if group and size + length > limit_bytes:
                yield group
                group, size = [], 0
            group.append(key)
            size += length
        yield group

    def read(self, keys: list[str]) -> dict[str, torch.Tensor]:
        return {self._names[key]: self._source.read(key).to(self.target_dtype(self._chosen[key])) for key in keys}

    def everything(self) -> dict[str, torch.Tensor]:
        return self.read(list(self._chosen))


def _names(chosen: Iterable[str], prefix: str, rename: Callable[[str], str] | None, keep_part: bool) -> dict[str, str]:
    """Return the name of each key in the export. ConfigError if two names would be the same."""
    found: dict[str, str] = {}
    taken: dict[str, str] = {}
    for key in chosen:
        name = key.removeprefix(prefix)
        name = name if rename is None else rename(name)
        other = taken.setdefault(name, key)
        if other != key:
            raise ConfigError(f"key mapping: {other!r} and {key!r} would both be {name!r}", key=key)
        found[key] = f"{prefix}{name}" if keep_part else name
    return found


def _write_safetensors(plan: _Plan, directory: str, shard_bytes: int) -> None:
    try:
        from safetensors.torch import save_file
    except ImportError as error:
        raise ConfigError(
            "form 'hf': expected the package safetensors, found none", hint="pip install 'flashckpt[hf]'"
        ) from error
    groups = list(plan.groups(shard_bytes))
    weight_map: dict[str, str] = {}
    total = 0
    for number, keys in enumerate(groups, 1):
        name = "model.safetensors" if len(groups) == 1 else f"model-{number:05}-of-{len(groups):05}.safetensors"
        tensors = plan.read(keys)
        save_file(tensors, os.path.join(directory, name), metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, name)
        total += sum(one.numel() * one.itemsize for one in tensors.values())
    index: dict[str, Any] = {"metadata": {"total_size": total}, "weight_map": weight_map}
    with open(os.path.join(directory, _INDEX), "w") as file:
        json.dump(index, file, indent=2, sort_keys=True)


def _write_dcp(tensors: dict[str, torch.Tensor], directory: str) -> None:
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # on purpose
        save(tensors, storage_writer=FileSystemWriter(directory), no_dist=True)


def _publish(aside: str, out: str) -> None:
    """Make the files durable, then visible in one rename."""
    for name in os.listdir(aside):
        _sync(os.path.join(aside, name))
    _sync(aside)
    if os.path.lexists(out):
        rename_exchange(aside, out)
        shutil.rmtree(aside)
    else:
        os.rename(aside, out)
    _sync(os.path.dirname(os.path.abspath(out)))


def _sync(path: str) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
