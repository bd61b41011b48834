"""Checks, at the first save, that what it stores could be loaded into the state that it comes from.

Compares keys, kinds, shapes, dtypes and plain values, by the rules of a load. Reads no tensor and does no I/O.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import torch

from flashckpt.errors import FlashError, StructureError, UnsupportedValueError
from flashckpt.format.values import Encoded
from flashckpt.save.values import pack, unpack
from flashckpt.state.flatten import Flat, flatten
from flashckpt.state.structure import difference, first_difference, structure_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from flashckpt.state.structure import Structure

# Larger values are neither packed again nor decoded: the check must not delay the training.
MOST_BYTES = 1 << 20

_MAPPINGS, _SEQUENCES, _SETS = (dict, OrderedDict), (list, tuple), (set, frozenset)
WAYS_ON = (
    "state_dict() has to return the same keys, shapes and dtypes when nothing has happened in between; "
    "flashckpt.Whole(object) saves it as one value of any structure, or leave the object out"
)


def outline(state_dict: Mapping[Any, Any]) -> Structure | None:
    """Return the structure that each Stateful object gives now; None if there are none.

    Call it before the state dict is flattened for the save, so that the save stores what the last state_dict() gave.
    """
    flat = flatten(state_dict, keys_only=True)
    return structure_of(flat) if flat.statefuls else None


def check_structure(known: Structure | None, flat: Flat) -> None:
    """Raise StructureError if the state has another structure than `outline` found just before.

    A load calls state_dict() once to learn what to fill. If two calls in a row differ, what one stored does not fit the
    other.
    """
    if known is None or known == (now := structure_of(flat)):
        return
    key = first_difference(known, now)
    owner = max((fqn for fqn in flat.statefuls if _is_below(key, fqn)), key=len, default="")
    where = f"key {owner!r}: state_dict()" if owner else "the state"
    raise StructureError(
        f"{where}: expected the same structure from two calls in a row, because a load can't fill another one; found "
        f"{difference(known, now)}",
        hint=WAYS_ON,
        key=key,
    )


def _is_below(key: str, fqn: str) -> bool:
    return key == fqn or key.startswith(fqn + ".")


def check_values(values: Mapping[str, Any], packed_bytes: int, *, allow_torch_save: bool) -> None:
    """Raise UnsupportedValueError if a value can't be decoded, or comes back with another structure.

    `packed_bytes`: of all values. If they are more than `MOST_BYTES`, without repetitions, none is looked at.
    """
    once = _without_repetitions(values)
    if not once or packed_bytes > MOST_BYTES * max(1, len(values) // len(once)):
        return
    data = pack(Flat(values=once), None, allow_torch_save)
    if len(data) > MOST_BYTES:
        return
    decoded = None
    with contextlib.suppress(Exception):  # a load would raise it too; the loop below finds the key
        decoded = unpack(data).values
    for key, value in once.items():
        problem = _problem_of(key, value, allow_torch_save) if decoded is None else _unlike(value, decoded.get(key))
        if problem:
            raise UnsupportedValueError(
                f"key {key!r}: expected a value that a load gives back as it was, found {problem}",
                hint="save it in another form (plain lists and numbers, or a tensor), or leave it out",
                key=key,
            )


def _without_repetitions(values: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out repetitions of values that were encoded once for many keys, like the options of parameters."""
    seen: set[int] = set()
    once = {}
    for key, value in values.items():
        if type(value) is Encoded:
            if id(value) in seen:
                continue
            seen.add(id(value))
        once[key] = value
    return once


def _problem_of(key: str, value: Any, allow_torch_save: bool) -> str:
    """Say why one value can't be decoded; "" if it can."""
    try:
        unpack(pack(Flat(values={key: value}), None, allow_torch_save))
    except Exception as error:
        return f"one that can't be decoded: {error.message if isinstance(error, FlashError) else repr(error)}"
    return ""


def _unlike(saved: Any, loaded: Any, where: str = "") -> str:
    """Say how the structure of a decoded value differs; "" if it does not. Compares only tensors and containers."""
    kind = type(saved)
    if isinstance(saved, torch.Tensor):
        is_same = isinstance(loaded, torch.Tensor) and (saved.dtype, saved.shape) == (loaded.dtype, loaded.shape)
        return "" if is_same else f"{where or 'it'} as a {type(loaded).__name__} instead of a tensor"
    if kind not in _MAPPINGS and kind not in _SEQUENCES and kind not in _SETS:
        return ""
    if type(loaded) is not kind:
        return f"{where or 'it'} as a {type(loaded).__name__} instead of a {kind.__name__}"
    if len(saved) != len(loaded):
        return f"{where or 'it'} with {len(loaded)} instead of {len(saved)} items"
    if kind in _SETS:
        return ""
    pairs = zip(saved.items(), loaded.items(), strict=True) if kind in _MAPPINGS else ()
    for (key, item), (other_key, other) in pairs:
        problem = _unlike(item, other, f"{where}[{key!r}]")
        if problem or type(key) is not type(other_key):
            return problem or f"{where or 'it'} with the key {other_key!r} instead of {key!r}"
    if kind in _SEQUENCES:
        for index, (item, other) in enumerate(zip(saved, loaded, strict=True)):
            if problem := _unlike(item, other, f"{where}[{index}]"):
                return problem
    return ""
