"""Raises KeyboardInterrupt at the n-th line of flashckpt on the main thread, as Ctrl-C may at any of them."""

from __future__ import annotations

import contextlib
import dis
import functools
import sys
from dataclasses import dataclass
from pathlib import Path

import flashckpt

ROOT = str(Path(flashckpt.__file__).parent)
# What runs before the first line of a test's call has begun, and failpoints, which are the test's own.
_LEFT_ALONE = ("/testing/", "/failpoints.py")


@dataclass
class Interrupt:
    """What came of it."""

    lines: int = 0  # that were executed, up to the interrupt
    where: str = ""  # file, function and line; "" where there were not so many lines

    @property
    def came(self) -> bool:
        return self.where != ""


@functools.cache
def _leaves_with(code):
    """Offsets at which a `with` calls its `__exit__` after a block that ended well.

    Python looks for signals after calls, at jumps back and where functions begin, and so never there; but it does
    report a line, and an exception at it would skip the exit.
    """
    found = list(dis.get_instructions(code))
    offsets = set()
    for before, first, second, third in zip(found, found[1:], found[2:], found[3:], strict=False):
        if all(one.opname == "LOAD_CONST" and one.argval is None for one in (first, second, third)):
            offsets.add(first.offset)
            if before.opname == "SWAP":  # a `return` within the block: its value waits below
                offsets.add(before.offset)
    return frozenset(offsets)


def _within_del(frame):
    """Python drops what is raised there."""
    while frame is not None:
        if frame.f_code.co_name == "__del__":
            return True
        frame = frame.f_back
    return False


@contextlib.contextmanager
def interrupted_at(number):
    """KeyboardInterrupt at line `number` of the block, from 1 on; it ends here. 0: only counts lines."""
    told = Interrupt()

    def trace(frame, event, _):
        if told.came:
            return None
        name = frame.f_code.co_filename
        if not name.startswith(ROOT) or any(part in name for part in _LEFT_ALONE):
            return None
        if event == "line" and frame.f_lasti not in _leaves_with(frame.f_code):
            told.lines += 1
            if told.lines >= number > 0 and not _within_del(frame):
                told.where = f"{name.removeprefix(ROOT)}:{frame.f_lineno} {frame.f_code.co_name}"
                raise KeyboardInterrupt(told.where)
        return trace

    before = sys.gettrace()
    try:
        sys.settrace(trace)
        try:
            yield told
        finally:
            sys.settrace(before)
    except KeyboardInterrupt:
        if not told.came:
            raise
