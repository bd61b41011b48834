"""Keeps the lines of one job on this node: a small checksummed file per launch of which something is left here.

Each is a file of its own, `line-<epoch>-<nonce>`, named after its head, written aside and renamed. The one with the
newest head is in force. One file that every process replaces would not do: a process that was paused between reading
the old one and renaming its own would replace a newer line by an older one when it continues.

The others say to which history the shards of their launch belong. A line is removed when nothing of its launch is left
here and the line in force knows of it.

A file that can't be trusted is ignored with a warning, and set aside by the next write, which puts a good one beside
it. Until then an explicit `load(step=…)` still finds the steps.

Failpoints: `before_line` · `mid_line` (written, not yet in force) · `after_line`.
"""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING

from flashckpt.errors import UnsafeDirectoryError
from flashckpt.failpoints import failpoint
from flashckpt.protocol.line import by_head, decode, encode, launch_of, newer, order
from flashckpt.store.directory import SlotState
from flashckpt.store.names import (
    Draft,
    damaged_line_name,
    line_name,
    parse_line_name,
    parse_sealed_name,
)
from flashckpt.store.reserve import retire
from flashckpt.store.small_files import frame, read_framed, write_aside

if TYPE_CHECKING:
    from flashckpt.protocol.line import Line
    from flashckpt.store.directory import Directory
    from flashckpt.store.owner import Owner
    from flashckpt.types import Launch

_log = logging.getLogger(__name__)
_MAGIC = b"FCLINE01"


def read_line(directory: Directory) -> Line | None:
    """Return the line in force: of the files that can be trusted, the one with the newest head."""
    while True:
        names = sorted(_names(directory), key=lambda one: order(one[1]), reverse=True)
        try:
            return next((line for name, head in names if (line := _read_one(directory, name, head))), None)
        except FileNotFoundError:
            continue  # a line is removed only after a newer one has been written: look again


def read_lines(directory: Directory) -> tuple[Line, ...]:
    """Return all lines, the one in force last."""
    while True:
        lines, _, vanished = _read_all(directory)
        if not vanished:
            return tuple(by_head(lines).values())
        # A line is removed only after a newer one has been written: look again.


def read_damaged(directory: Directory) -> tuple[str, ...]:
    """Return the names of the files that can't be trusted."""
    return _read_all(directory)[1]


def write_line(directory: Directory, line: Line, writer: Owner) -> Line:
    """Keep a line. Return the one that is in force now: this one, joined with the line of its launch that was here, or
    a newer one."""
    lines, damaged, _ = _read_all(directory)
    found = by_head(lines)
    known = found.get(line.head)
    joined = line if known is None else newer(known, line)
    if joined is not None and joined != known:
        failpoint("before_line")
        content = frame(_MAGIC, encode(joined), directory.job)
        write_aside(directory, line_name(line.head), content, Draft.LINE, writer, pass_failpoint="mid_line")
        failpoint("after_line")
    for name in damaged:
        if name != line_name(line.head):
            directory.move(None, name, None, damaged_line_name(name))
            _log.warning("line %s/%s is torn or foreign and was set aside", directory.path, name)
    in_force = read_line(directory) or line
    _remove_idle(directory, in_force)
    return in_force


def _remove_idle(directory: Directory, in_force: Line) -> None:
    """Remove the lines of launches of which nothing is left here, if the line in force knows of them."""
    parsed = (parse_sealed_name(name) for name in directory.names(SlotState.SEALED))
    present = {launch_of(one.shard.generation) for one in parsed if one is not None}
    for name, head in _names(directory):
        if head in present or head == in_force.head:
            continue
        with contextlib.suppress(FileNotFoundError):  # another process was quicker
            line = _read_one(directory, name, head)
            if line is not None and in_force.supersedes(line):
                retire(directory, None, name)


def _read_all(directory: Directory) -> tuple[list[Line], tuple[str, ...], bool]:
    """Return the lines, the names of files that can't be trusted, and whether a file vanished meanwhile."""
    lines: list[Line] = []
    damaged: list[str] = []
    vanished = False
    for name, head in _names(directory):
        try:
            line = _read_one(directory, name, head)
        except FileNotFoundError:
            vanished = True
            continue
        if line is None:
            damaged.append(name)
        else:
            lines.append(line)
    return lines, tuple(damaged), vanished


def _read_one(directory: Directory, name: str, head: Launch) -> Line | None:
    try:
        payload = read_framed(directory, name, _MAGIC)
    except UnsafeDirectoryError as error:
        _log.warning("line ignored: %s", error)
        return None
    line = None if payload is None else decode(payload)
    if line is None or line.head != head:
        _log.warning("line %s/%s is torn or foreign; ignored", directory.path, name)
        return None
    return line


def _names(directory: Directory) -> list[tuple[str, Launch]]:
    parsed = ((name, parse_line_name(name)) for name in directory.names(None))
    return [(name, head) for name, head in parsed if head is not None]
