"""Refuses a save of a state that a load could not fill, because its structure is another one than when it was new."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from flashckpt.errors import UnsupportedValueError
from flashckpt.state.flatten import flatten

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from flashckpt.state.flatten import Flat

log = logging.getLogger(__name__)

Structure = dict[str, str]  # key → what lies there

_VALUE = "a value"


class Structures:
    """Knows how the entries of `states` looked when load() was called, or at the last save.

    A load fills what it finds, key by key. A process that is started anew has what this one had at its load(): what
    has other keys or shapes by the time of a save could not be loaded.
    """

    def __init__(self) -> None:
        self._known: dict[str, Structure] = {}
        self._when: dict[str, str] = {}
        self._checked: tuple[object, list[str]] | None = None  # plan and values of the last save

    def note(self, states: Mapping[str, Any], when: str) -> None:
        """Note how entries look that a load is about to fill. An entry that can't be read yet is left out."""
        for name, state in states.items():
            try:
                structure = _of(flatten({name: state}))
            except Exception as error:  # the user's own state_dict(), or what a save would refuse too
                log.info("states[%r] can't be read yet: %r", name, error)
                continue
            self._known[name], self._when[name] = structure, when
        self._checked = None

    def check(self, names: Collection[str], flat: Flat, plan: object, step: int) -> None:
        """Raise UnsupportedValueError if an entry has another structure than known. Note entries that are not."""
        values = list(flat.values)
        if not names or (self._checked is not None and self._checked[0] is plan and self._checked[1] == values):
            return
        found = _of(flat)
        for name in names:
            now = {key: what for key, what in found.items() if key == name or key.startswith(f"{name}.")}
            known = self._known.setdefault(name, now)
            when = self._when.setdefault(name, f"at the save of step {step}")
            if known != now:
                raise UnsupportedValueError(
                    f"states[{name!r}]: expected the structure that it had {when}, because a process that is started "
                    f"anew can load only into that; found {_difference(known, now)}",
                    hint=f"states={{{name!r}: flashckpt.Whole(…)}} saves it as one value of any structure",
                    key=name,
                )
        self._checked = plan, values


def _of(flat: Flat) -> Structure:
    tensors = {key: f"{str(one.dtype)[6:]} {list(one.shape)}" for key, one in flat.tensors.items()}
    return {**tensors, **dict.fromkeys(flat.values, _VALUE)}


def _difference(known: Structure, now: Structure) -> str:
    more, less = [key for key in now if key not in known], [key for key in known if key not in now]
    changed = [key for key in now if key in known and known[key] != now[key]]
    said = [f"{len(keys)} {what} ({keys[0]!r})" for keys, what in ((more, "more"), (less, "fewer")) if keys]
    said += [f"{changed[0]!r} as {now[changed[0]]} instead of {known[changed[0]]}"] if changed else []
    return f"keys: {', '.join(said)}" if more or less else said[0]
