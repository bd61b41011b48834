"""Builds DCP's `.metadata` for what was written: the pickled index that plain `dcp.load` reads."""

from __future__ import annotations

import pickle
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from flashckpt.errors import InternalError
from flashckpt.persist.names import parse_per_rank_key, per_rank_key

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from flashckpt.persist.plan import PersistPlan
    from flashckpt.persist.write import Placed

_VERSION = "1.0.0"  # version of DCP's own metadata


def encode_index(
    plan: PersistPlan, placed: Iterable[Placed], value_paths: Mapping[str, tuple[str | int, ...]]
) -> bytes:
    """Build the index. `value_paths` maps the keys of values to nested keys. InternalError if a planned part was not
    written.
    """
    lying = {(one.key, one.offsets): one for one in placed}
    state: dict[str, Any] = {}
    paths: dict[str, tuple[Any, ...]] = {}
    storage: dict[MetadataIndex, _StorageInfo] = {}

    def locate(key: str, offsets: tuple[int, ...] | None, index: int | None) -> None:
        one = lying.pop((key, offsets), None)
        if one is None:
            raise InternalError(f"key {key!r} at {offsets}: planned, but not written")
        storage[MetadataIndex(key, offsets, index)] = _StorageInfo(one.file, one.offset_bytes, one.length_bytes)

    for item in plan.tensors:
        entry = item.entry
        if item.key not in state:
            properties = TensorProperties(dtype=getattr(torch, entry.dtype))
            state[item.key] = TensorStorageMetadata(properties, torch.Size(entry.global_shape), [])
            paths[item.key] = _path(item.key, entry.path)
        chunks = state[item.key].chunks
        locate(item.key, item.box.offsets, len(chunks))
        chunks.append(ChunkStorageMetadata(torch.Size(item.box.offsets), torch.Size(item.box.sizes)))
    for value in plan.values:
        state[value.key] = BytesStorageMetadata()
        paths[value.key] = _path(value.key, value_paths.get(value.key) or tuple(value.fqn.split(".")))
        locate(value.key, None, None)
    if lying:
        raise InternalError(f"{len(lying)} parts were written, but not planned, e.g. {next(iter(lying))}")
    # Older versions of torch do not number their metadata.
    version = {"version": _VERSION} if any(one.name == "version" for one in fields(Metadata)) else {}
    metadata = Metadata(
        state_dict_metadata=state, planner_data=paths, storage_data=storage, storage_meta=StorageMeta(), **version
    )
    return pickle.dumps(metadata)


def _path(key: str, path: tuple[str | int, ...]) -> tuple[str | int, ...]:
    """Return where DCP's tools put the key when they build a nested state dict."""
    own = parse_per_rank_key(key)
    return path if own is None else (*per_rank_key(own[0], "x").split(".")[:2], *path)
