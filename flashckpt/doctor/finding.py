"""Defines a finding: the result of one check of this node."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


class Grade(enum.StrEnum):
    OK = "ok"
    WARN = "warn"  # works, but less well or less safely than it could
    FAIL = "fail"  # saving, replicating or loading will not work


@dataclass(frozen=True, slots=True)
class Finding:
    check: str  # a stable name, e.g. memory.room
    state: Grade
    found: str
    advice: str = ""  # what to do; "" if there is nothing to do


def ok(check: str, found: str) -> Finding:
    return Finding(check, Grade.OK, found)


def warn(check: str, found: str, advice: str) -> Finding:
    return Finding(check, Grade.WARN, found, advice)


def fail(check: str, found: str, advice: str) -> Finding:
    return Finding(check, Grade.FAIL, found, advice)


def worst(findings: Iterable[Finding]) -> Grade:
    order = list(Grade)
    return max((one.state for one in findings), key=order.index, default=Grade.OK)
