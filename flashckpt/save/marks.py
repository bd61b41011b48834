"""Finds tensors that changed between saves, by their address, their version and the checksums of their chunks."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from torch.distributed._shard.sharded_tensor.api import ShardedTensor

from flashckpt.format.caps import CRC_BYTES, DEFAULT_CHUNK_BYTES
from flashckpt.state.regions import local_parts, plain_local

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    import torch


# The copy of a tensor that does not change between saves is proved by the chunk checksums of earlier shards.


class FrozenEntry(NamedTuple):
    """Names a byte range of the data area that holds a tensor, or one box of it."""

    key: str
    offset_bytes: int
    length_bytes: int


class FrozenChunks:
    """Remembers the chunk checksums of tensors whose copy was proved once and whose mark has not changed since.

    Their chunks must have the same checksums in all later shards. So no save has to read the tensors once more. Even a
    change that was undone is found, such as adapters that were merged into a frozen base through .data and taken out
    again.
    """

    def __init__(self) -> None:
        self._known: dict[str, dict[FrozenEntry, bytes]] = {}

    def knows(self, entry: FrozenEntry) -> bool:
        return entry in self._known.get(entry.key, ())

    def learn(self, entries: list[FrozenEntry], crcs: bytes) -> None:
        """Remember the chunks of entries whose copy is proved. `crcs` are the checksums of the complete data area."""
        for entry in entries:
            self._known.setdefault(entry.key, {})[entry] = _inner(entry, crcs)

    def forget(self, key: str) -> None:
        self._known.pop(key, None)

    def differing(self, entries: list[FrozenEntry], crcs: bytes) -> list[str]:
        """Return the keys of known entries whose chunks now have other checksums."""
        known = ((entry, self._known.get(entry.key, {}).get(entry)) for entry in entries)
        return list(dict.fromkeys(entry.key for entry, was in known if was not in (None, _inner(entry, crcs))))


def _inner(entry: FrozenEntry, crcs: bytes) -> bytes:
    """Return the checksums of the chunks that hold only this entry."""
    first = -(-entry.offset_bytes // DEFAULT_CHUNK_BYTES)
    end = (entry.offset_bytes + entry.length_bytes) // DEFAULT_CHUNK_BYTES
    return crcs[CRC_BYTES * first : CRC_BYTES * end]


# Marks (address and version) show most changes. They also show immediate tensors that change while they are copied.


class Mark(NamedTuple):
    """Holds address and version of a tensor at a save. If the mark is equal at the next save, the tensor may be
    deferred."""

    address: int
    version: int


def parts_of(key: str, tensor: torch.Tensor) -> list[torch.Tensor]:
    local = plain_local(tensor)
    return local_parts(key, tensor) if local is None else [local]


def has_versions(key: str, tensor: torch.Tensor) -> bool:
    """Return False for an inference tensor. It has no version counter, so nothing would show that it was changed."""
    return not any(part.is_inference() for part in parts_of(key, tensor))


def is_shared(key: str, tensor: torch.Tensor) -> bool:
    """Return True if another process can write to the tensor's memory. Version counters count the changes of one
    process only."""
    return any(part.is_cpu and part.untyped_storage().is_shared() for part in parts_of(key, tensor))


def counters_of(tensor: torch.Tensor, others: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return tensors whose version counters show changes that those of the tensor's parts do not show.

    torch counts an operation on a DTensor, or on another tensor that is made of tensors, only on that tensor. It counts
    an operation on a local tensor only on the local tensor. A state dict has aliases: a DTensor's alias has another
    local tensor, and `.data` has a counter of its own. So the `others` are needed too: the parameter that `tensor` is
    an alias of, and the tensors that are made of it.
    """
    found: list[torch.Tensor] = []
    if tensor is not plain_local(tensor):
        found.append(tensor)
    for other in others:
        if other is tensor:
            continue
        found.append(other)
        local = plain_local(other)
        if local is not None and local is not other:
            found.append(local)
    return [one for one in found if _has_counter(one)]


def _has_counter(tensor: torch.Tensor) -> bool:
    # A ShardedTensor may not be asked; its parts are local tensors, which have counters.
    return not isinstance(tensor, ShardedTensor) and not tensor.is_inference()


def version_of(tensor: torch.Tensor, others: Iterable[torch.Tensor]) -> int:
    """Return the sum of all version counters of a tensor. Counters only grow, so an equal sum shows that none has
    grown."""
    local = plain_local(tensor)
    counters = counters_of(tensor, others)
    return sum(one._version for one in (counters if local is None else [local, *counters]))


def marks_of(parts: Sequence[torch.Tensor], counters: Iterable[torch.Tensor]) -> list[Mark]:
    return [*(Mark(part.data_ptr(), part._version) for part in parts), *(Mark(0, one._version) for one in counters)]


class ImmediateMarks:
    """Finds immediate tensors that another thread changed while save() copied them."""

    def __init__(
        self,
        fqns: list[str],
        leaves: list[torch.Tensor],
        indices: Sequence[int],
        others_of: Callable[[int], Iterable[torch.Tensor]],
    ) -> None:
        self.leaves = leaves
        self._fqns = fqns
        self._others_of = others_of
        self._marks: dict[int, list[Mark]] = {}
        self.note([i for i in indices if has_versions(fqns[i], leaves[i])])

    def note(self, indices: Iterable[int]) -> None:
        """Remember the current marks of these tensors, just before they are copied."""
        for i in indices:
            self._marks[i] = self._now(i)

    def changed(self, indices: Collection[int]) -> list[int]:
        """Return those of these tensors whose marks have changed since."""
        return [i for i, known in self._marks.items() if i in indices and self._now(i) != known]

    def all_but(self, left: frozenset[int]) -> frozenset[int]:
        return frozenset(self._marks) - left

    def keys(self, indices: Iterable[int]) -> list[str]:
        return [self._fqns[i] for i in indices]

    def _now(self, i: int) -> list[Mark]:
        leaf = self.leaves[i]
        return marks_of(parts_of(self._fqns[i], leaf), counters_of(leaf, self._others_of(i)))
