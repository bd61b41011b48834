"""Reads one persisted step: its index, its values, and parts of its tensors, each verified.

The step may be a foreign DCP checkpoint. That has no checksums; its values are loaded with `weights_only=True`.
"""

from __future__ import annotations

import functools
import io
import json
import logging
import os
import stat
from typing import TYPE_CHECKING, Any, Protocol

import torch

from flashckpt import native
from flashckpt.errors import (
    CorruptShardError,
    IncompatibleError,
    NotFoundError,
    UnsafeDirectoryError,
    UnsupportedValueError,
)
from flashckpt.load.disk.unpickle import MAX_INDEX_BYTES, read_index
from flashckpt.load.read import copy_to_target
from flashckpt.persist.catalog import look
from flashckpt.persist.names import METADATA, parse_per_rank_key, rank_of_data
from flashckpt.persist.storage import is_url
from flashckpt.save.values import Values, unpack
from flashckpt.state.cover import Piece, uncovered
from flashckpt.types import TensorEntry

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from flashckpt.load.disk.unpickle import DcpIndex, Location
    from flashckpt.load.plan import Transfer
    from flashckpt.load.read import Target
    from flashckpt.persist.storage import Storage
    from flashckpt.state.cover import Index
    from flashckpt.types import Generation

_log = logging.getLogger(__name__)


# If others may write to a checkpoint, loading it logs a warning.


_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def check_owner(root: str, name: str) -> None:
    """Raises UnsafeDirectoryError if the step belongs to neither this user nor root. Warns if others may write to it.

    An object store has no owners. Who may write there is set in the store itself.
    """
    if is_url(root):
        return
    for path in (os.path.join(root, name), os.path.join(root, name, METADATA)):
        found = os.stat(path)
        if found.st_uid not in (os.geteuid(), 0):
            raise UnsafeDirectoryError(
                f"{path}: expected owner uid {os.geteuid()} or root, found uid {found.st_uid}",
                hint="check where it comes from; if you trust it, chown it",
                path=path,
            )
        if found.st_mode & _OTHERS_WRITE:
            mode = stat.S_IMODE(found.st_mode)
            _log.warning("%s: mode %04o lets others write: they can change what is loaded", path, mode)


_MAX_CHECKSUMS_BYTES = 4 << 30


class OpenCheckpoint(Protocol):
    """The interface of a checkpoint on disk that is open for reading."""

    where: str
    generation: Generation
    world: int
    stored: Index

    def saved_keys(self, rank: int, stored: Index) -> set[str]: ...

    def values(self, rank: int) -> Values: ...

    def value(self, fqn: str, rank: int) -> tuple[bool, Any]: ...

    def read(
        self,
        transfers: Sequence[Transfer],
        targets: Sequence[Target],
        run: Callable[[Callable[[], torch.Tensor]], torch.Tensor],
    ) -> None:
        """Reads into the live tensors, and verifies as far as the format allows. `run` carries out each read."""


class CheckpointSource:
    """A step in DCP's format, open for reading. Takes the place of the catalogue of a generation in memory."""

    def __init__(self, storage: Storage, name: str, step: int) -> None:
        """Raises CorruptShardError or NotFoundError if the step is incomplete, and DeniedError or UnsafeDirectoryError
        if it is not to be trusted."""
        self._storage = storage
        self._name = name
        self.where = f"{storage.root}/{name}"
        found = look(storage, name, step)
        if found.problem:
            raise CorruptShardError(f"{self.where}: {found.problem}")
        check_owner(storage.root, name)
        self.meta = found.meta
        self.generation = found.generation
        marker = storage.read(f"{name}/{METADATA}", 0, MAX_INDEX_BYTES)
        if marker is None:
            raise NotFoundError(f"{self.where}/{METADATA}: expected a file, found none")
        if self.meta is not None:
            self._check(METADATA, marker)
        self._index: DcpIndex = read_index(marker, f"{self.where}/{METADATA}")
        self._sums = self._checksums()
        self._values: dict[int, Values] = {}
        self._own: dict[int, set[str]] = {}  # rank → keys of its per-rank values
        self._shared: set[str] = set()
        for key in self._index.values:
            own = parse_per_rank_key(key)
            if own is None:
                self._shared.add(key)
            else:
                self._own.setdefault(own[0], set()).add(own[1])
        self.world = self._world()
        self.stored = self._entries()
        problems = uncovered(self.stored)
        if problems:
            raise CorruptShardError(f"{self.where}: {'; '.join(problems[:4])}")

    # --- as a catalogue -------------------------------------------------------------------------------------

    def layout_of(self, rank: int) -> int:
        return rank

    def saved_keys(self, rank: int, stored: Mapping[tuple[str, int | None], Any]) -> set[str]:
        keys = {fqn for fqn, owner in stored if owner in (None, rank)}
        return keys | self._shared | self._own.get(rank, set())

    def values(self, rank: int) -> Values:
        """Returns the values that one rank saved; none for a foreign checkpoint, whose values value() reads one by
        one."""
        if rank not in self._values:
            name = self.meta.values.get(rank) if self.meta is not None else None
            self._values[rank] = Values() if name is None else unpack(self._whole(name))
        return self._values[rank]

    def value(self, fqn: str, rank: int) -> tuple[bool, Any]:
        """Returns (found, value): what this rank saved under the key, else what the lowest rank that has it saved."""
        mine = self.values(rank).values if rank < self.world else {}
        if fqn in mine:
            return True, mine[fqn]
        for key in (f"__rank__.{rank}.{fqn}", fqn):
            place = self._index.locations.get((key, None))
            if key not in self._index.values or place is None:
                continue
            writer = rank_of_data(place.file)
            if self.meta is not None and writer is not None and fqn in self.values(writer).values:
                return True, self.values(writer).values[fqn]
            return True, self._load_value(key, place)
        return False, None

    # --- tensors --------------------------------------------------------------------------------------------

    def read(
        self,
        transfers: Sequence[Transfer],
        targets: Sequence[Target],
        run: Callable[[Callable[[], torch.Tensor]], torch.Tensor],
    ) -> None:
        """Reads into the live tensors. Reads a part that several wants share once. `run` carries out each read."""
        by_part: dict[int, list[Transfer]] = {}
        for transfer in transfers:
            by_part.setdefault(id(transfer.entry), []).append(transfer)
        for group in by_part.values():
            entry = group[0].entry
            whole = run(functools.partial(self._load_tensor, entry))
            for transfer in group:
                overlap = transfer.overlap
                part = whole
                for dim, (at, size) in enumerate(zip(overlap.offsets, overlap.sizes, strict=True)):
                    part = part.narrow(dim, at - entry.box.offsets[dim], size)
                copy_to_target(part, overlap, targets[transfer.want.target])

    def _load_tensor(self, entry: TensorEntry) -> torch.Tensor:
        place = self._places[id(entry)]
        what = f"{self.where}/{place.file}: key {entry.fqn!r}"
        found = self._load(place, what)
        dtype = getattr(torch, entry.dtype)
        if not isinstance(found, torch.Tensor):
            raise CorruptShardError(f"{what}: expected a tensor, found a {type(found).__name__}")
        if found.dtype == torch.uint8 and dtype != torch.uint8 and dtype.itemsize == 1:
            found = found.view(dtype)  # torch.save does not support the dtype: its bytes were saved as uint8
        if found.dtype != dtype or tuple(found.shape) != entry.box.sizes:
            raise CorruptShardError(
                f"{what}: expected {entry.dtype} {entry.box.sizes}, found {found.dtype} {tuple(found.shape)}"
            )
        return found

    def _load_value(self, key: str, place: Location) -> Any:
        return self._load(place, f"{self.where}/{place.file}: key {key!r}")

    def _load(self, place: Location, what: str) -> Any:
        if place.transforms:
            raise IncompatibleError(f"{what}: expected plain bytes, found {list(place.transforms)} to be undone first")
        data = self._storage.read(f"{self._name}/{place.file}", place.offset_bytes, place.length_bytes)
        if data is None or len(data) != place.length_bytes:
            raise CorruptShardError(f"{what}: expected {place.length_bytes} bytes, found {len(data or b'')}")
        expected = self._sums.get((place.file, place.offset_bytes, place.length_bytes))
        if expected is not None and (crc := native.crc32c(data)) != expected:
            raise CorruptShardError(f"{what}: expected crc32c {expected:#010x}, found {crc:#010x}")
        try:
            return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except Exception as error:
            raise UnsupportedValueError(
                f"{what}: expected what loads with weights_only=True, found: {str(error)[:300]}",
                hint="leave the key out (keys=, strict=False), or declare its class with add_safe_globals",
            ) from error

    # --- files beside the index -----------------------------------------------------------------------------

    def _check(self, name: str, data: bytes) -> None:
        info = self.meta.files.get(name) if self.meta is not None else None
        if info is None or len(data) != info.size_bytes or native.crc32c(data) != info.crc32c:
            raise CorruptShardError(f"{self.where}/{name}: its size or crc32c differs from what meta.json says")

    def _whole(self, name: str) -> bytes:
        data = self._storage.read(f"{self._name}/{name}")
        if data is None:
            raise NotFoundError(f"{self.where}/{name}: expected a file, found none")
        self._check(name, data)
        return data

    def _checksums(self) -> dict[tuple[str, int, int], int]:
        names = [one for one in (self.meta.files if self.meta is not None else ()) if one.startswith("__checksums")]
        if not names:
            return {}
        found = json.loads(self._whole(names[0]))
        return {(file, start, length): crc for file, parts in found.items() for start, length, crc in parts}

    def _world(self) -> int:
        if self.meta is not None:
            return self.meta.world
        ranks = [rank_of_data(place.file) for place in self._index.locations.values()]
        return 1 + max((rank for rank in ranks if rank is not None), default=0)

    def _entries(self) -> Index:
        stored: Index = {}
        self._places: dict[int, Location] = {}
        for key, tensor in self._index.tensors.items():
            own = parse_per_rank_key(key)
            rank, fqn = own if own is not None else (None, key)
            for box in tensor.boxes:
                place = self._index.locations.get((key, box.offsets))
                if place is None:
                    raise CorruptShardError(
                        f"{self.where}: key {key!r}: expected a location of the part at {box}, found none"
                    )
                entry = TensorEntry(fqn, (fqn,), tensor.dtype, tensor.shape, box, 0, 0, own is not None)
                self._places[id(entry)] = place
                stored.setdefault((fqn, rank), []).append(Piece((rank or 0,), entry))
        return stored
