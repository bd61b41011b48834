"""Marks of tensors, address and version, which show most changes; and immediate tensors that change while copied."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from flashckpt.state.regions import local_parts, plain_local

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    import torch


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


def marks_of(parts: Sequence[torch.Tensor]) -> list[Mark]:
    return [Mark(part.data_ptr(), part._version) for part in parts]


class ImmediateMarks:
    """Finds immediate tensors that another thread changed while save() copied them."""

    def __init__(self, fqns: list[str], leaves: list[torch.Tensor], indices: Sequence[int]) -> None:
        self.leaves = leaves
        self._fqns = fqns
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
        return marks_of(parts_of(self._fqns[i], self.leaves[i]))
