"""Offers other programs' DCP checkpoints under the names that a CheckpointManager asks for.

Recognised: a model at the top level (TorchTitan) instead of below `model`; an optimizer called `optim` (OLMo-core); its
options flattened by parameter (`param_groups.<name>.lr`) or in groups (`param_groups.0.lr`, `param_groups.0.params`),
where ours has one value per parameter; a scheduler's state key by key. A recognised key has its new name only.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from flashckpt.load.disk.source import CheckpointSource

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from flashckpt.load.disk.source import OpenCheckpoint
    from flashckpt.load.plan import Transfer
    from flashckpt.load.read import Target
    from flashckpt.persist.storage import Storage
    from flashckpt.save.values import Values
    from flashckpt.state.cover import Index

log = logging.getLogger(__name__)

_MODEL, _OPTIMIZER, _SCHEDULER = "model", "optimizer", "lr_scheduler"
# Top-level names that other programs use beside a model's own.
_PARTS = frozenset((_OPTIMIZER, "optim", _SCHEDULER, "dataloader", "train_state", "trainer", "rng", "__rank__"))


def open_for_manager(storage: Storage, name: str, step: int) -> OpenCheckpoint:
    """Opens a step under the names that a CheckpointManager has for its parts, whatever program has written it."""
    source = CheckpointSource(storage, name, step)
    return source if source.meta is not None else ForeignSource(source)


class ForeignSource:
    """An OpenCheckpoint that renames the keys of another one."""

    def __init__(self, source: CheckpointSource) -> None:
        self._source = source
        self.where, self.generation, self.world = source.where, source.generation, source.world
        self.stored: Index = dict(source.stored)
        self._made: dict[str, Callable[[], Any]] = {}  # new name → makes the value when it is read
        self._renamed: set[str] = set()  # original keys that have another name now
        known = source.saved_keys(0, source.stored)
        if not any(key.startswith(f"{_MODEL}.") for key in known):
            self._name_model()
        prefix = next((one for one in (_OPTIMIZER, "optim") if any(k.startswith(f"{one}.") for k in known)), None)
        if prefix is not None:
            self._name_optimizer(prefix, known)
        self._name_scheduler(known)

    def saved_keys(self, rank: int, stored: Index) -> set[str]:
        return (self._source.saved_keys(rank, stored) | self._made.keys()) - self._renamed

    def values(self, rank: int) -> Values:
        return self._source.values(rank)

    def value(self, fqn: str, rank: int) -> tuple[bool, Any]:
        if fqn in self._made:
            return True, self._made[fqn]()
        return self._source.value(fqn, rank)

    def read(
        self,
        transfers: Sequence[Transfer],
        targets: Sequence[Target],
        run: Callable[[Callable[[], torch.Tensor]], torch.Tensor],
    ) -> None:
        self._source.read(transfers, targets, run)

    def _alias(self, name: str, key: str) -> None:
        if name != key:
            self.stored[name, None] = self._source.stored[key, None]
            self.stored.pop((key, None), None)
            self._renamed.add(key)

    def _value(self, key: str) -> Any:
        return self._source.value(key, 0)[1]

    def _name_model(self) -> None:
        loose = [key for key, owner in self._source.stored if owner is None and key.partition(".")[0] not in _PARTS]
        for key in loose:
            self._alias(f"{_MODEL}.{key}", key)
        if loose:
            log.info("%s: %d tensors at the top level are loaded as the model", self.where, len(loose))

    def _name_optimizer(self, prefix: str, known: set[str]) -> None:
        for key, owner in self._source.stored:
            if owner is None and key.startswith(f"{prefix}.state."):
                self._alias(f"{_OPTIMIZER}{key[len(prefix) :]}", key)
        groups = f"{prefix}.param_groups."
        options = sorted(key[len(groups) :] for key in known if key.startswith(groups))
        numbers = [one.removesuffix(".params") for one in options if one.endswith(".params")]
        if numbers and all(number.isdigit() for number in numbers):
            self._name_groups(groups, numbers, options)
            return
        by_parameter: dict[str, list[str]] = {}
        for one in options:
            name, _, option = one.rpartition(".")
            if name:
                by_parameter.setdefault(name, []).append(option)
        for name, found in by_parameter.items():
            self._offer(name, groups + name, found)

    def _name_groups(self, groups: str, numbers: list[str], options: list[str]) -> None:
        for number in numbers:
            names = self._value(f"{groups}{number}.params")
            if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
                log.warning(
                    "%s: the optimizer's state is numbered instead of named (optimizer.state_dict()), so that it can't "
                    "be "
                    "assigned to parameters: save it with get_optimizer_state_dict, or leave it out with "
                    "exclude_from_loading=['optimizer', 'lr_scheduler']",
                    self.where,
                )
                return
            found = [one.removeprefix(f"{number}.") for one in options if one.startswith(f"{number}.")]
            self._renamed.add(f"{groups}{number}.params")
            for name in names:
                self._offer(name, groups + number, [one for one in found if one != "params"])

    def _offer(self, name: str, place: str, options: list[str]) -> None:
        """Offers a parameter's options as one value, and those that are tensors as tensors."""
        numbers = [one for one in options if (f"{place}.{one}", None) not in self._source.stored]
        for option in set(options) - set(numbers):
            self._alias(f"{_OPTIMIZER}.param_group_tensors.{name}.{option}", f"{place}.{option}")
        self._renamed.update(f"{place}.{one}" for one in numbers)
        self._made[f"{_OPTIMIZER}.param_groups.{name}"] = lambda: {
            one: self._value(f"{place}.{one}") for one in numbers
        }

    def _name_scheduler(self, known: set[str]) -> None:
        below = sorted(key for key in known if key.startswith(f"{_SCHEDULER}."))
        first = f"{_SCHEDULER}.0"
        if not below or any(key == first or key.startswith(f"{first}.") for key in below):
            return
        if any((key, None) in self._source.stored for key in below):
            return  # a scheduler has no tensors: this is something else
        paths = {key: key.split(".")[1:] for key in below}
        self._renamed.update(below)
        self._made[first] = lambda: _nested({key: self._value(key) for key in below}, paths)


def _nested(values: dict[str, Any], paths: dict[str, list[str]]) -> Any:
    """Undoes the flattening: makes dicts by name, and lists if the names count from 0."""
    root: dict[str, Any] = {}
    for key, path in paths.items():
        inner = root
        for part in path[:-1]:
            inner = inner.setdefault(part, {})
        inner[path[-1]] = values[key]
    return _with_lists(root)


def _with_lists(found: Any) -> Any:
    if not isinstance(found, dict):
        return found
    inner = {key: _with_lists(value) for key, value in found.items()}
    if inner and set(inner) == {str(number) for number in range(len(inner))}:
        return [inner[str(number)] for number in range(len(inner))]
    return inner
