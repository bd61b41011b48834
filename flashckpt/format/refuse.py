"""Raises CorruptShardError in one form: where, what was expected, what was found."""

from __future__ import annotations

import reprlib
from typing import Any, NoReturn

from flashckpt.errors import CorruptShardError

_HINT = "this copy can't be used; another holder may have a good one"
_LONGEST = 80
_brief = reprlib.Repr()
_brief.maxstring = _brief.maxother = _LONGEST


def shorten(value: Any) -> str:
    """Returns the `repr` of a hostile value, cut so that it can't flood a log. Never raises."""
    try:
        text = _brief.repr(value[:_LONGEST] if isinstance(value, str | bytes) else value)
    except Exception:  # an integer too long for decimal digits, or a class whose repr raises
        return f"<{type(value).__name__}>"
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"


def corrupt_because(where: str, reason: str) -> NoReturn:
    """Raises for a rule that the writer checks too: the reason already says what was expected and found."""
    raise CorruptShardError(f"{where}: {reason}", hint=_HINT, where=where)


def corrupt(where: str, expected: str, found: Any) -> NoReturn:
    found = found if isinstance(found, str) else shorten(found)
    raise CorruptShardError(
        f"{where}: expected {expected}, found {found}",
        hint=_HINT,
        where=where,
        expected=expected,
        found=found,
    )
