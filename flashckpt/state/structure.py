"""The structure of a flattened state: what lies under each key, without its contents."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flashckpt.state.regions import global_form

if TYPE_CHECKING:
    from flashckpt.state.flatten import Flat

Structure = dict[str, str]  # key → what lies there

_VALUE = "a value"


def structure_of(flat: Flat) -> Structure:
    """Return what a load would compare: keys, tensor or value, dtype and global shape, and what is `PerRank`."""
    found = dict.fromkeys(flat.values, _VALUE)
    for key, tensor in flat.tensors.items():
        dtype, shape = global_form(tensor)
        found[key] = f"{dtype} {list(shape)}"
    for key in flat.per_rank:
        found[key] += " of each rank"
    return found


def difference(known: Structure, now: Structure) -> str:
    """Say in which keys two structures differ."""
    more, less = [key for key in now if key not in known], [key for key in known if key not in now]
    changed = [key for key in now if key in known and known[key] != now[key]]
    said = [f"{len(keys)} {what} ({keys[0]!r})" for keys, what in ((more, "more"), (less, "fewer")) if keys]
    said += [f"{changed[0]!r} as {now[changed[0]]} instead of {known[changed[0]]}"] if changed else []
    return f"keys: {', '.join(said)}" if more or less else said[0]


def first_difference(known: Structure, now: Structure) -> str:
    """Return the first key in which they differ."""
    return next(key for key in (*now, *known) if known.get(key) != now.get(key))
