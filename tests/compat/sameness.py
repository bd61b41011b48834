"""Values as nested text that is equal exactly if type, bits and order are."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np


def plain(value: Any) -> Any:
    kind = type(value)
    name = f"{kind.__module__}.{kind.__qualname__}"
    if isinstance(value, np.ndarray | np.generic):
        return name, value.dtype.str, np.shape(value), value.tobytes()
    if kind is float:
        return name, struct.pack("<d", value)
    if kind is complex:
        return name, struct.pack("<dd", value.real, value.imag)
    if isinstance(value, list | tuple):
        return name, [plain(item) for item in value]
    if isinstance(value, dict):
        return name, [(plain(key), plain(item)) for key, item in value.items()]
    if isinstance(value, set | frozenset):
        return name, sorted(repr(plain(item)) for item in value)
    if kind is slice:
        return name, [plain(part) for part in (value.start, value.stop, value.step)]
    return name, value if isinstance(value, int | str | bytes | bytearray | None) else repr(value)
