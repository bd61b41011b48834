"""Runs a stage of a load on all ranks: it succeeds on all of them, or all hear what went wrong."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from flashckpt.errors import (
    CorruptShardError,
    FlashError,
    IncompatibleError,
    NotFoundError,
    OtherRankError,
    RetrieveError,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from flashckpt.ranks.group import PrivateGroup

_DONE, _FAILED = b"\0", b"\1"
# Problems that another copy or another generation may not have. Every other error would occur there again.
_CURABLE = (CorruptShardError, NotFoundError, IncompatibleError, RetrieveError)


class StepBackError(FlashError):
    """Raised on all ranks alike when an attempt failed. Internal: the load goes on with other copies or generations.

    `bad` names the copies that can't be used, as (node, rank whose shard it is). `passing`: no copy is known to be
    damaged, so that the same attempt may succeed a moment later.
    """

    code = "FC-LOAD-004"


def agree(group: PrivateGroup, node: int, doing: str, call: Callable[[], bytes]) -> list[bytes]:
    """Runs `call` on every rank and returns the results of all ranks. Collective.

    If it fails on one rank, all raise. If the problem is curable, they raise StepBackError. Otherwise the rank raises
    its own error, and the others raise OtherRankError.
    """
    error: Exception | None = None
    message = b""
    try:
        message = _DONE + call()
    except Exception as raised:
        error = raised
        message = _FAILED + json.dumps(_told(error, node)).encode()
    answers = group.gather(message, doing)
    if not any(answer.startswith(_FAILED) for answer in answers):
        return [answer[1:] for answer in answers]
    problems = {rank: json.loads(answer[1:]) for rank, answer in enumerate(answers) if answer.startswith(_FAILED)}
    if error is not None and not isinstance(error, (*_CURABLE, StepBackError)):
        raise error
    for rank, told in problems.items():
        if not told["curable"]:
            raise OtherRankError(f"rank {rank}, {doing}: {told['message']}", ranks=[rank])
    bad = frozenset((node, rank) for told in problems.values() for node, rank in told["bad"])
    reason = "; ".join(f"rank {rank}: {told['message']}" for rank, told in problems.items())
    passing = all(told["passing"] for told in problems.values())
    raise StepBackError(reason, bad=bad, passing=passing) from error


def _told(error: Exception, node: int) -> dict[str, Any]:
    number = getattr(error, "shard_index", None)  # of a copy on this node
    bad = [] if number is None else [[node, number]]
    return {
        "curable": isinstance(error, (*_CURABLE, StepBackError)),
        "message": getattr(error, "message", repr(error)),
        "bad": bad,
        "passing": isinstance(error, RetrieveError),
    }
