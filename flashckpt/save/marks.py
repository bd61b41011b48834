"""What shows that a tensor changed between saves: its address, its version, and its chunks' checksums."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from flashckpt.format.caps import CRC_BYTES, DEFAULT_CHUNK_BYTES
from flashckpt.state.regions import local_parts, plain_local

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    import torch


# Proves copies of tensors that do not change from save to save by the chunk checksums of earlier shards.


class FrozenEntry(NamedTuple):
    """A byte range of the data area that holds a tensor, or one box of it."""

    key: str
    offset_bytes: int
    length_bytes: int


class FrozenChunks:
    """Remembers the chunk checksums of tensors that were proved once and have kept their mark since.

    Their chunks must have the same checksums in all later shards. So no save has to read the tensors once more, and a
    change is found that was undone before anybody looked: adapters merged into a frozen base through .data, and out of
    it again.
    """

    def __init__(self) -> None:
        self._known: dict[str, dict[FrozenEntry, bytes]] = {}

    def knows(self, entry: FrozenEntry) -> bool:
        return entry in self._known.get(entry.key, ())

    def learn(self, entries: list[FrozenEntry], crcs: bytes) -> None:
        """Remember the chunks of entries whose copy is proved. `crcs` are those of the whole data area."""
        for entry in entries:
            self._known.setdefault(entry.key, {})[entry] = _inner(entry, crcs)

    def forget(self, key: str) -> None:
        self._known.pop(key, None)

    def differing(self, entries: list[FrozenEntry], crcs: bytes) -> list[str]:
        """Return the keys of known entries whose chunks have other checksums than they had."""
        known = ((entry, self._known.get(entry.key, {}).get(entry)) for entry in entries)
        return list(dict.fromkeys(entry.key for entry, was in known if was not in (None, _inner(entry, crcs))))


def _inner(entry: FrozenEntry, crcs: bytes) -> bytes:
    """Return the checksums of the chunks that hold nothing but this entry."""
    first = -(-entry.offset_bytes // DEFAULT_CHUNK_BYTES)
    end = (entry.offset_bytes + entry.length_bytes) // DEFAULT_CHUNK_BYTES
    return crcs[CRC_BYTES * first : CRC_BYTES * end]


# Marks of tensors, address and version, which show most changes; and immediate tensors that change while copied.


class Mark(NamedTuple):
    """Address and version of a tensor at a save. An equal mark at the next save allows deferring the tensor."""

    address: int
    version: int


def parts_of(key: str, tensor: torch.Tensor) -> list[torch.Tensor]:
    local = plain_local(tensor)
    return local_parts(key, tensor) if local is None else [local]


def has_versions(key: str, tensor: torch.Tensor) -> bool:
    """Return False for an inference tensor: it has no version counter, so nothing would show that it was changed."""
    return not any(part.is_inference() for part in parts_of(key, tensor))


def is_shared(key: str, tensor: torch.Tensor) -> bool:
    """Return True if another process can write to the tensor's memory. Version counters are of one process each."""
    return any(part.is_cpu and part.untyped_storage().is_shared() for part in parts_of(key, tensor))


def counters_of(tensor: torch.Tensor, owner: torch.Tensor | None) -> list[torch.Tensor]:
    """Return tensors whose version counters show changes that those of the tensor's parts do not show.

    torch counts an operation on a DTensor only there, and one on its local tensor only there. A state dict has aliases:
    a DTensor's alias has another local tensor, and `.data` has a counter of its own. So those of the parameter that
    `tensor` is an alias of are needed too, the `owner`.
    """
    found: list[torch.Tensor] = []
    if tensor is not plain_local(tensor):
        found.append(tensor)
    if owner is not None and owner is not tensor:
        found.append(owner)
        local = plain_local(owner)
        if local is not None and local is not owner:
            found.append(local)
    return [one for one in found if not one.is_inference()]


def version_of(tensor: torch.Tensor, owner: torch.Tensor | None) -> int:
    """Return the sum of all version counters of a tensor. They only grow, so an equal sum shows that none has grown."""
    local = plain_local(tensor)
    counters = counters_of(tensor, owner)
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
        owner_of: Callable[[torch.Tensor], torch.Tensor | None],
    ) -> None:
        self.leaves = leaves
        self._fqns = fqns
        self._owner_of = owner_of
        self._marks: dict[int, list[Mark]] = {}
        self.note([i for i in indices if has_versions(fqns[i], leaves[i])])

    def note(self, indices: Iterable[int]) -> None:
        """Remember the marks of these tensors, which are copied from now on."""
        for i in indices:
            self._marks[i] = self._now(i)

    def changed(self, indices: Collection[int]) -> list[int]:
        """Return which of these tensors have other marks by now."""
        return [i for i, known in self._marks.items() if i in indices and self._now(i) != known]

    def all_but(self, left: frozenset[int]) -> frozenset[int]:
        return frozenset(self._marks) - left

    def keys(self, indices: Iterable[int]) -> list[str]:
        return [self._fqns[i] for i in indices]

    def _now(self, i: int) -> list[Mark]:
        leaf = self.leaves[i]
        return marks_of(parts_of(self._fqns[i], leaf), counters_of(leaf, self._owner_of(leaf)))
