"""What a check of this node has to say."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


class State(enum.StrEnum):
    OK = "ok"
    WARN = "warn"  # works, but not as well or as safely as it could
    FAIL = "fail"  # saving, replicating or loading will not work


@dataclass(frozen=True, slots=True)
class Finding:
    check: str  # a stable name, e.g. memory.room
    state: State
    found: str
    advice: str = ""  # what to do; "" where there is nothing to be done


def ok(check: str, found: str) -> Finding:
    return Finding(check, State.OK, found)


def warn(check: str, found: str, advice: str) -> Finding:
    return Finding(check, State.WARN, found, advice)


def fail(check: str, found: str, advice: str) -> Finding:
    return Finding(check, State.FAIL, found, advice)


def worst(findings: Iterable[Finding]) -> State:
    order = list(State)
    return max((one.state for one in findings), key=order.index, default=State.OK)
