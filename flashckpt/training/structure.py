"""Refuses to save a state whose structure has changed since load(): a restarted process could not load it."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from flashckpt.errors import FlashError, StructureError, UnsupportedValueError
from flashckpt.state.flatten import OneValue, PerRank, flatten
from flashckpt.state.structure import difference, first_difference, structure_of
from flashckpt.training.assemble import MODEL

if TYPE_CHECKING:
    from collections.abc import Collection

    from flashckpt.state.flatten import Flat
    from flashckpt.state.structure import Structure
    from flashckpt.training.model import ModelState

log = logging.getLogger(__name__)


class Structures:
    """Remembers the structure of the entries of `states` when load() was called, or at the last save.

    A load fills the live entries key by key. A restarted process has the structure that this one had at its load().
    So a save with other keys or shapes could not be loaded.
    """

    def __init__(self, model: ModelState | None = None) -> None:
        self._model = model  # None: there is none, or it was checked already
        self._new: dict[str, Structure] = {}  # when the manager was made; only of entries that note_new() may read
        self._known: dict[str, Structure] = {}
        self._when: dict[str, str] = {}
        self._checked: tuple[object, list[str]] | None = None  # plan and values of the last save

    def note_new(self, states: Mapping[str, Any]) -> None:
        """Note the structure of entries when the manager is made, without calling the user's own state_dict()."""
        for name, state in states.items():
            if _is_plain(state):
                with contextlib.suppress(FlashError):  # a save will refuse it, if it is still there
                    self._new[name] = structure_of(flatten({name: state}, keys_only=True))

    def note(self, states: Mapping[str, Any], when: str) -> None:
        """Note the structure of entries that a load is about to fill. Leaves out an entry that can't be read yet."""
        for name, state in states.items():
            try:
                structure = structure_of(flatten({name: state}, keys_only=True))
            except Exception as error:  # the user's own state_dict(), or what a save would refuse too
                log.info("states[%r] can't be read yet: %r", name, error)
                continue
            self._known[name], self._when[name] = structure, when
        self._checked = None

    def check(self, names: Collection[str], flat: Flat, plan: object, step: int) -> None:
        """Raise UnsupportedValueError if an entry has another structure than noted. Note entries that are new.

        The first call checks the model too.
        """
        if self._model is not None:
            _check_model(self._model, flat)
            self._model = None
        values = list(flat.values)
        if not names or (self._checked is not None and self._checked[0] is plan and self._checked[1] == values):
            return
        found = structure_of(flat)
        for name in names:
            now = {key: what for key, what in found.items() if key == name or key.startswith(f"{name}.")}
            if name not in self._known and self._new.get(name, now) != now:
                # No error: a process that loads may make the same change before its load().
                log.warning(
                    "states[%r] has another structure than when the manager was made: %s. A process that is started "
                    "anew can load step %d only if it has these keys before load(); flashckpt.Whole(…) saves the entry "
                    "as one value of any structure",
                    name,
                    difference(self._new[name], now),
                    step,
                )
            known = self._known.setdefault(name, now)
            when = self._when.setdefault(name, f"at the save of step {step}")
            if known != now:
                raise UnsupportedValueError(
                    f"states[{name!r}]: expected the structure that it had {when}, because a process that is started "
                    f"anew can load only into that; found {difference(known, now)}",
                    hint=f"states={{{name!r}: flashckpt.Whole(…)}} saves it as one value of any structure",
                    key=name,
                )
        self._checked = plan, values


def _check_model(model: ModelState, flat: Flat) -> None:
    """Raise StructureError if two calls in a row of the model's state_dict() give different keys or shapes.

    Only the extra state of modules can do that, not parameters and buffers.
    """
    if not model.has_extra_state:
        return
    known = structure_of(flatten({MODEL: model.capture()}))
    now = {key: what for key, what in structure_of(flat).items() if key == MODEL or key.startswith(f"{MODEL}.")}
    if known != now:
        raise StructureError(
            "model: expected the same structure from two calls of state_dict() in a row, because a load can't fill "
            "another "
            f"one; found {difference(known, now)}",
            hint="let get_extra_state() of the module return the same keys and shapes at each call",
            key=first_difference(known, now),
        )


def _is_plain(value: Any) -> bool:
    """Return True if flattening runs no code of the user: containers, tensors, values and torch's optimizers."""
    if isinstance(value, (PerRank, OneValue)):
        return isinstance(value, OneValue) or _is_plain(value.value)
    if isinstance(value, torch.optim.Optimizer):
        return type(value).state_dict is torch.optim.Optimizer.state_dict
    if isinstance(value, Mapping):
        return all(map(_is_plain, value.values()))
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return not hasattr(type(value), "state_dict")
