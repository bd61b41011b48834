"""Flattens nested state dicts to keys, and restores them. Keys are DCP's, so that either side can read the other's."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping, MutableMapping, MutableSequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from flashckpt.errors import StructureError
from flashckpt.format.values import Encoded

Path = tuple[str | int, ...]

# Nearly every leaf has one of these types. They are never made of other tensors, so that no save needs to check.
_WHOLE_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter, DTensor, ShardedTensor})
_NEVER_STATEFUL = frozenset({type(None), Encoded, dict, list, tuple, set, torch.Size, torch.Tensor})


class PerRank:
    """Marks a part of the state dict of which every rank has its own version.

    A plain tensor under one key counts as the same on all ranks: the lowest rank of each node stores it, and all ranks
    get back that of one rank. Wrap what differs (`{"noise": PerRank({"generator": state})}`) and each rank gets back
    what it saved.
    """

    def __init__(self, value: Any) -> None:
        self.value = value

    def __repr__(self) -> str:
        return f"PerRank({self.value!r})"


class OneValue:
    """Marks a part that is saved as one value: its structure may differ between save and load.

    A load replaces `value`. Users have `Whole`, which a load fills in place.
    """

    def __init__(self, value: Any) -> None:
        self.value = value

    def taken(self) -> Any:
        """Return the value to save."""
        return self.value

    def give_back(self, value: Any) -> None:
        """Replace the value by the loaded one."""
        self.value = value

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.value!r})"


class Whole(OneValue):
    """Marks a part of the state dict that is saved as one value: its structure may differ at each save and load.

    Without it, each tensor in a list or mapping is saved under a key of its own, and a load expects the same keys and
    shapes. Wrap in `Whole(…)` what changes its structure: a replay buffer that grows, the history of a metric, an
    optimizer that gets more state at a step. It may hold plain tensors, containers and plain values, at most 1 GiB of
    them per rank.

    A load passes to an object's `load_state_dict` what its `state_dict` returned; it fills a list, dict or set in
    place; it replaces any other `value`. Tensors are loaded into host memory.
    """

    def taken(self) -> Any:
        """Return the value to save."""
        return self.value.state_dict() if _is_stateful(self.value) else self.value

    def give_back(self, value: Any) -> None:
        """Load `value` into the held object, in place if that is possible."""
        held = self.value
        if isinstance(held, PerRank):
            held = held.value
        if _is_stateful(held):
            held.load_state_dict(value)
        elif isinstance(held, list) and type(held) is type(value):
            held[:] = value
        elif isinstance(held, (dict, set)) and type(held) is type(value):
            held.clear()
            held.update(value)
        elif isinstance(self.value, PerRank):
            self.value.value = value
        else:
            self.value = value


@dataclass(slots=True)
class Flat:
    """The leaves of a state dict in the order of its traversal."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    paths: dict[str, Path] = field(default_factory=dict)  # see path_of
    per_rank: set[str] = field(default_factory=set)
    statefuls: dict[str, Any] = field(default_factory=dict)  # key of a Stateful object → the state dict it returned
    wrappers: dict[str, list[torch.Tensor]] = field(default_factory=dict)  # key → tensors that are made of this one
    keys_only: bool = False  # True: parts marked as one value were not read

    def path(self, fqn: str) -> Path:
        return path_of(fqn, self.paths)


def path_of(fqn: str, paths: Mapping[str, Path]) -> Path:
    """Returns the nested key that was flattened to `fqn`. `paths` has those that are not simply its components."""
    return paths.get(fqn) or tuple(fqn.split("."))


def flatten(state_dict: Mapping[Any, Any], *, keys_only: bool = False) -> Flat:
    """Flattens mappings, Stateful objects, and lists or tuples that hold tensors or mappings.

    With `keys_only`, parts marked as one value are not read: None takes their place.
    """
    flat = Flat(keys_only=keys_only)
    for key, value in state_dict.items():
        _walk(flat, str(key), (str(key),), value, False)
    return flat


def _walk(flat: Flat, fqn: str, path: Path, value: Any, per_rank: bool) -> None:
    if type(value) in _WHOLE_TENSORS:
        _put(flat, flat.tensors, fqn, path, value, per_rank)
    elif isinstance(value, torch.Tensor):
        if _is_wrapper(value):
            before = len(flat.tensors)
            for name in value.__tensor_flatten__()[0]:  # type: ignore[attr-defined]
                _walk(flat, f"{fqn}.{name}", (*path, name), getattr(value, name), per_rank)
            for key in islice(reversed(flat.tensors), len(flat.tensors) - before):
                flat.wrappers.setdefault(key, []).append(value)
            return
        _put(flat, flat.tensors, fqn, path, value, per_rank)
    elif isinstance(value, Mapping) and value:
        for key, item in value.items():
            _walk(flat, f"{fqn}.{key}", (*path, str(key)), item, per_rank)
    elif isinstance(value, (list, tuple)) and _holds_tensors(value):
        for index, item in enumerate(value):
            _walk(flat, f"{fqn}.{index}", (*path, index), item, per_rank)
    elif isinstance(value, PerRank):
        _walk(flat, fqn, path, value.value, True)
    elif isinstance(value, OneValue):
        own = isinstance(value.value, PerRank)
        taken = None
        if not flat.keys_only:
            taken = type(value)(value.value.value).taken() if own else value.taken()
        _put(flat, flat.values, fqn, path, taken, per_rank or own)
    elif _is_stateful(value):
        flat.statefuls[fqn] = value.state_dict()
        _walk(flat, fqn, path, flat.statefuls[fqn], per_rank)
    else:
        _put(flat, flat.values, fqn, path, value, per_rank)


def _put(flat: Flat, where: dict[str, Any], fqn: str, path: Path, value: Any, per_rank: bool) -> None:
    if fqn in flat.tensors or fqn in flat.values:
        raise StructureError(
            f"key {fqn!r}: two entries of the state dict flatten to it",
            hint="keys that differ only in type (1 and '1') or in the place of a dot can't be told apart; rename one",
            key=fqn,
        )
    where[fqn] = value
    if per_rank:
        flat.per_rank.add(fqn)
    # Keep only paths that can't be computed from the key.
    if fqn.count(".") + 1 != len(path) or any(type(part) is int for part in path):
        flat.paths[fqn] = path


def _is_wrapper(value: Any) -> bool:
    """Returns True for a tensor that is made of other tensors (e.g. a quantized weight), which are saved one by one."""
    return is_traceable_wrapper_subclass(value) and not isinstance(value, (DTensor, ShardedTensor))


def _holds_tensors(value: Any) -> bool:
    for item in value:
        if isinstance(item, (torch.Tensor, Mapping, PerRank, OneValue)) or _is_stateful(item):
            return True
        if isinstance(item, (list, tuple)) and _holds_tensors(item):
            return True
    return False


def _is_stateful(value: Any) -> bool:
    # `isinstance(value, Stateful)` walks the protocol and costs microseconds per leaf: rule out the common types.
    if type(value) in _NEVER_STATEFUL or isinstance(value, (int, float, str, bytes)):
        return False
    return isinstance(value, Stateful) and not isinstance(value, type)


def restore(
    state_dict: MutableMapping[Any, Any], flat: Flat, values: Mapping[str, Any], loaded: Collection[str]
) -> None:
    """Puts loaded values into the live structure, in place. Tensors were written to already.

    `flat` is the result of `flatten(state_dict)`. `values` maps flat keys to new leaves; absent keys keep theirs. A
    Stateful object gets the state dict that it returned to `flatten`, unless none of its keys is among `loaded`.
    """
    owners = _owners(flat.statefuls, loaded)
    for key in list(state_dict):
        state_dict[key] = _rebuild(flat, values, owners, str(key), state_dict[key])


def _owners(statefuls: Iterable[str], loaded: Collection[str]) -> set[str]:
    """Returns the Stateful objects that have a key among `loaded`. Searches, because both lists can be long."""
    ordered = sorted(loaded) if statefuls else []
    owners = set()
    for fqn in statefuls:
        at = bisect_left(ordered, fqn)
        below = bisect_left(ordered, fqn + ".")
        own = at < len(ordered) and ordered[at] == fqn
        if own or (below < len(ordered) and ordered[below].startswith(fqn + ".")):
            owners.add(fqn)
    return owners


def _rebuild(flat: Flat, values: Mapping[str, Any], owners: Collection[str], fqn: str, value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, PerRank):
        value.value = _rebuild(flat, values, owners, fqn, value.value)
        return value
    if isinstance(value, OneValue):
        if fqn in values:
            value.give_back(values[fqn])
        return value
    if isinstance(value, Mapping) and value:
        rebuilt = {key: _rebuild(flat, values, owners, f"{fqn}.{key}", item) for key, item in value.items()}
        if not isinstance(value, MutableMapping):
            return type(value)(rebuilt)  # type: ignore[call-arg]
        for key, item in rebuilt.items():
            value[key] = item  # not update(): a Counter's adds
        return value
    if isinstance(value, (list, tuple)) and _holds_tensors(value):
        items = [_rebuild(flat, values, owners, f"{fqn}.{index}", item) for index, item in enumerate(value)]
        if isinstance(value, MutableSequence):
            value[:] = items
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if fqn in flat.statefuls:
        if fqn in owners:
            value.load_state_dict(_rebuild(flat, values, owners, fqn, flat.statefuls[fqn]))
        return value
    return values.get(fqn, value)
