"""Decides, before a tensor is read, which parts of a checkpoint a load takes."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flashckpt.errors import ConfigError, MissingKeyError
from flashckpt.persist.meta import PERMANENT
from flashckpt.training.assemble import DATALOADER, MODEL, OPTIMIZER, RNG
from flashckpt.training.compat import OnMismatch, guard

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from flashckpt.load.recover import Found
    from flashckpt.training.model import ModelState
    from flashckpt.training.optimizer import OptimizerState

log = logging.getLogger(__name__)

OURS = "flashckpt"  # key of a manager's own entry in `extra`


def wrap_extra(
    extra: Mapping[str, Any] | None,
    parts: Iterable[str],
    compat: Mapping[str, Any] | None,
    permanent: bool = False,
) -> dict[str, Any]:
    """Returns the user's `extra` with the manager's entries added."""
    if extra is not None and not isinstance(extra, Mapping):
        raise ConfigError(f"extra: expected a mapping, found a {type(extra).__name__}")
    if compat is not None and not isinstance(compat, Mapping):
        raise ConfigError(f"compat: expected a mapping, found a {type(compat).__name__}")
    for key in (OURS, PERMANENT):
        if extra is not None and key in extra:
            raise ConfigError(f"extra: the key {key!r} is the manager's own", hint="use another name")
    marked = {PERMANENT: True} if permanent else {}
    return {**(extra or {}), **marked, OURS: {"manager": 1, "parts": list(parts), "compat": dict(compat or {})}}


def unwrap_extra(extra: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns (the user's extra, the manager's entry). The entry is empty if no manager saved it."""
    if not isinstance(extra, Mapping):
        return {}, {}
    user = dict(extra)
    user.pop(PERMANENT, None)
    ours = user.pop(OURS, {})
    return user, ours if isinstance(ours, dict) else {}


@dataclass(frozen=True, slots=True)
class LoadWish:
    """The arguments of a manager's load()."""

    parts: tuple[str, ...]  # of the manager, without those excluded
    kept: tuple[str, ...]  # parts that have no owner yet; loaded if they were saved
    strict: bool
    expect: Mapping[str, Any] | None
    on_mismatch: OnMismatch


def choose_parts(wish: LoadWish, saved: Collection[str], step: int) -> tuple[tuple[str, ...], str]:
    """Returns the parts to load, and why not all. Raises MissingKeyError for a part that must not be missing."""
    absent = [part for part in wish.parts if part not in saved]
    needed = [part for part in absent if part not in (RNG, DATALOADER)]
    if step == 0 and MODEL not in absent:
        return tuple(part for part in wish.parts if part == MODEL), "step 0 is a seed checkpoint: only the model"
    if MODEL in absent or (needed and wish.strict):
        raise MissingKeyError(
            f"step {step}: expected {', '.join(needed)}, found a checkpoint of {_some(saved)}",
            hint="pass exclude_from_loading=[…] to leave a part as it is, or strict=False",
            keys=needed,
            step=step,
        )
    found = tuple(part for part in (*wish.parts, *wish.kept) if part in saved)
    return found, f"not saved: {', '.join(absent)}" if absent else ""


def _some(names: Collection[str]) -> str:
    listed = sorted(names)
    return ", ".join(listed[:8]) + (" and more" if len(listed) > 8 else "") if listed else "nothing"


def screen(
    found: Found, wish: LoadWish, model: ModelState | None, optimizer: OptimizerState | None
) -> Callable[[str], bool]:
    """Checks a generation and returns a function that says which keys to load. The optimizer prepares tensors for
    it."""
    _, ours = unwrap_extra(found.extra)
    guard(found.step, ours.get("compat", {}), wish.expect, wish.on_mismatch)
    saved = set(ours.get("parts", ())) or {key.partition(".")[0] for key in found.keys}
    parts, reason = choose_parts(wish, saved, found.step)
    if reason:
        log.warning("step %d: %s", found.step, reason)
    left = sorted(saved - set(parts)) if len(saved) < 64 else []  # a foreign checkpoint may have no parts at all
    if left:
        log.info("step %d: parts of it that are not loaded: %s", found.step, ", ".join(left))
    chosen = frozenset(parts)
    ignored: frozenset[str] = frozenset()
    if optimizer is not None:
        ignored = optimizer.lay_out(found if OPTIMIZER in chosen else None)
    spare: list[frozenset[str]] = []

    def keep(key: str) -> bool:
        if not spare:  # not earlier: the model finds tied names in state_dict()
            spare.append(_tied_to_others(found.keys, model))
        return key.partition(".")[0] in chosen and key not in spare[0] and key not in ignored

    return keep


def _tied_to_others(keys: Collection[str], model: ModelState | None) -> frozenset[str]:
    """Returns keys that the checkpoint has under another name of the same tensor: tied weights may be stored once."""
    tied = {} if model is None else model.tied
    return frozenset(
        f"{MODEL}.{name}"
        for name, names in tied.items()
        if f"{MODEL}.{name}" not in keys and any(f"{MODEL}.{other}" in keys for other in names)
    )
