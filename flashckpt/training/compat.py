"""Compares what was declared at the save (`compat=`) with what is expected at the load (`expect=`). Pure."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Literal

from flashckpt.errors import ConfigError, MismatchError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

log = logging.getLogger(__name__)

OnMismatch = Literal["raise", "warn"]


def differences(saved: Mapping[str, Any], expected: Mapping[str, Any]) -> list[str]:
    """Returns one line for each key that both have and that differs; nested mappings key by key.

    Only shared keys count at the top: a run may declare more than its older checkpoints do. In a mapping below a shared
    key, keys that only one side has count too.
    """
    lines: list[str] = []
    for key in expected:
        if key in saved:
            lines += _compare(key, saved[key], expected[key])
    return lines


def _compare(key: str, saved: Any, expected: Any) -> Iterator[str]:
    if isinstance(saved, dict) and isinstance(expected, dict):
        both = [name for name in expected if name in saved]
        for name in both:
            yield from _compare(f"{key}.{name}", saved[name], expected[name])
        for name in saved:
            if name not in expected:
                yield f"{key}.{name}: {saved[name]!r} in the checkpoint, absent now"
        for name in expected:
            if name not in saved:
                yield f"{key}.{name}: absent in the checkpoint, {expected[name]!r} now"
    elif _plain(saved) != _plain(expected):
        yield f"{key}: {saved!r} in the checkpoint, {expected!r} now"


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def guard(step: int, saved: Mapping[str, Any], expected: Mapping[str, Any] | None, on_mismatch: OnMismatch) -> None:
    """Raises MismatchError if the two differ; with `on_mismatch` "warn", logs a warning instead."""
    if on_mismatch not in ("raise", "warn"):
        raise ConfigError(f"on_mismatch: expected 'raise' or 'warn', found {on_mismatch!r}")
    lines = differences(saved, expected or {})
    if not lines:
        return
    listed = "".join(f"\n  - {line}" for line in lines)
    if on_mismatch == "warn":
        log.warning(
            "step %d does not fit what is expected (compat= at save, expect= now), and is loaded:%s", step, listed
        )
        return
    raise MismatchError(
        f"step {step} does not fit what is expected (compat= at save, expect= now):{listed}",
        hint="set up the model as it was when it was saved, or pass on_mismatch='warn' to load it nevertheless",
        step=step,
        differences=lines,
    )
