"""The private gloo group, which only start, first save and load use: no user's group, and no other thread."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import struct
import time
import weakref
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from flashckpt.errors import ConflictError, DeadlineError, IncompatibleError, OtherRankError
from flashckpt.ranks.roll import LOOK_SECONDS, NOTICE_SECONDS, Roll

if TYPE_CHECKING:
    import contextlib
    from collections.abc import Callable, Mapping

    from flashckpt.ranks.roll import Board

log = logging.getLogger(__name__)


T = TypeVar("T")

_LENGTH = struct.Struct("<Q")
_AT_ONCE_BYTES = 120  # enough for a purpose and a short answer; under 10 MB for 80,000 ranks
_HEAD_BYTES = _LENGTH.size + _AT_ONCE_BYTES

# The rolls at which ranks meet before they have a group, for as long as torch's default group lives.
_openings: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], Roll]] = weakref.WeakKeyDictionary()


class PrivateGroup:
    """All ranks of one Checkpointer. With one process it needs no torch.distributed."""

    def __init__(
        self, process_group: dist.ProcessGroup | None, timeout: float, undo: contextlib.ExitStack | None = None
    ) -> None:
        """`undo` gets a callback that closes the group, before the group is made."""
        self._group: dist.ProcessGroup | None = None
        if undo is not None:
            undo.callback(self.close)
        self._timeout = timeout
        self._rounds = 0
        self._left = ""  # the collective call that an exception has ended; "": none
        self.rank, self.world = 0, 1
        self.global_ranks: tuple[int, ...] = (0,)
        self.spans_the_world = True
        self._roll = Roll(None, 0, 1)
        self._ended: Callable[[], Mapping[int, str]] = dict
        default = _default_group()  # only a weak reference is kept: the user may destroy the group
        self._default: weakref.ref[dist.ProcessGroup] | None = None if default is None else weakref.ref(default)
        if not (dist.is_available() and dist.is_initialized()):
            if process_group is not None:
                raise IncompatibleError("process_group given, but torch.distributed is not initialised")
            return
        self.rank = dist.get_rank(process_group)
        self.world = dist.get_world_size(process_group)
        if self.rank < 0:
            raise IncompatibleError(
                "this process is not a member of process_group",
                hint="make the Checkpointer on its members only",
            )
        self.global_ranks = tuple(dist.get_process_group_ranks(process_group or dist.group.WORLD))
        self.spans_the_world = self.world == dist.get_world_size()
        if self.world > 1:
            _opening_roll(self.global_ranks, self.rank).meet("Checkpointer", "", timeout)
            _outlive_forks(self)
            self._group = self._checked(
                "making the private group",
                lambda: dist.new_group(
                    list(self.global_ranks),
                    timeout=timedelta(seconds=timeout),
                    backend="gloo",
                    # Only the members of a sub-group make it; the other ranks take no part.
                    use_local_synchronization=process_group is not None,
                ),
            )

    @classmethod
    def alone(cls) -> PrivateGroup:
        """Return a group of this process only, even if torch.distributed has more ranks."""
        group = cls.__new__(cls)
        group._timeout, group._group = 0.0, None
        group._rounds, group._left = 0, ""
        group._default = None
        group.rank, group.world, group.global_ranks, group.spans_the_world = 0, 1, (0,), False
        group._roll, group._ended = Roll(None, 0, 1), dict
        return group

    def enroll(self, name: str) -> None:
        """Call the roll from now on under `name`, which all ranks share and no other group has."""
        self._roll = Roll(_board(f"roll/{name}"), self.rank, self.world, ended=self._look_for_ended)

    def watch(self, ended: Callable[[], Mapping[int, str]]) -> None:
        """Have waits ask `ended` for the ranks whose processes have ended, and how."""
        self._ended = ended

    @property
    def roll(self) -> Roll:
        return self._roll

    def meet(self, call: str, arguments: str, timeout: float, *, step: int | None = None) -> None:
        """Return once all ranks have made this call, see Roll.meet. Collective."""
        if self._group is not None:
            self._refuse_if_left(call)
            self._roll.meet(call, arguments, timeout, step=step)

    def _refuse_if_left(self, doing: str) -> None:
        if self._left:
            raise ConflictError(
                f"{doing}: on rank {self.rank} of {self.world} an exception ended an earlier collective call "
                f"({self._left}), so that this rank is out of step with the others",
                hint="close this Checkpointer and make another one on all ranks, or end the job's processes and start "
                "them again; saves that are local go on",
                rank=self.rank,
            )

    def _look_for_ended(self) -> Mapping[int, str]:
        return self._ended()

    def gather(self, payload: bytes, doing: str) -> list[bytes]:
        """Return every rank's payload, in rank order. Collective.

        `doing` is sent along. So a rank that is in another call (because an exception made it miss one) is found here,
        and its bytes are not misinterpreted.
        """
        if self._group is None:
            return [payload]
        self._refuse_if_destroyed(doing)
        self._refuse_if_left(doing)
        self._rounds += 1
        self._left = doing
        purpose = doing.encode()
        message = struct.pack("<I", len(purpose)) + purpose + payload
        # The first round sends lengths and short messages. A second one sends the rest, if any message is longer.
        heads = self._exchange(_LENGTH.pack(len(message)) + message[:_AT_ONCE_BYTES], _HEAD_BYTES, doing)
        lengths = [_LENGTH.unpack_from(head)[0] for head in heads]
        messages = [head[_LENGTH.size :] for head in heads]
        if (longest := max(lengths)) > _AT_ONCE_BYTES:
            rests = self._exchange(message[_AT_ONCE_BYTES:], longest - _AT_ONCE_BYTES, doing)
            messages = [begin + rest for begin, rest in zip(messages, rests, strict=True)]
        self._left = ""
        messages = [one[:length] for one, length in zip(messages, lengths, strict=True)]
        purposes = [one[4 : 4 + int.from_bytes(one[:4], "little")].decode() for one in messages]
        if set(purposes) != {doing}:
            elsewhere = {rank: other for rank, other in enumerate(purposes) if other != doing}
            raise ConflictError(
                f"rank {self.rank} is {doing}, other ranks are elsewhere: {elsewhere}",
                hint="all ranks have to make the same calls in the same order; did an exception make one miss a call?",
            )
        return [one[4 + len(purpose) :] for one in messages]

    def _exchange(self, data: bytes, size_bytes: int, doing: str) -> list[bytes]:
        """Return every rank's data, padded with zeros to `size_bytes`, the same on all ranks. Collective."""
        mine = torch.frombuffer(bytearray(data.ljust(size_bytes, b"\0")), dtype=torch.uint8)
        gathered = [torch.empty_like(mine) for _ in range(self.world)]
        self._checked(
            doing, lambda: self._wait(dist.all_gather(gathered, mine, group=self._group, async_op=True), doing)
        )
        return [one.numpy().tobytes() for one in gathered]

    def together(self, doing: str, call: Callable[[], T]) -> T:
        """Run `call` on every rank; if it raises on one, all ranks raise. Collective."""
        try:
            result = call()
        except Exception as error:
            self.vote(f"{type(error).__name__}: {error}", doing)
            raise
        problems = self.vote("", doing)
        if problems:
            raise OtherRankError(f"{doing}: failed on {_who(problems)}", ranks=sorted(problems))
        return result

    def vote(self, problem: str, doing: str) -> dict[int, str]:
        """Gather each rank's problem ("" = none). Return those of the ranks that have one. Collective."""
        answers = self.gather(problem.encode(), doing)
        return {rank: text.decode(errors="replace") for rank, text in enumerate(answers) if text}

    @property
    def rounds(self) -> int:
        """The number of collective rounds so far."""
        return self._rounds

    def leave(self, doing: str, since: int) -> None:
        """Record that an exception ended a call that began at `since` rounds.

        If there were rounds since, the other ranks go on without this one, and every further use raises ConflictError.
        """
        if self._group is not None and self._rounds > since:
            self._left = self._left or doing

    def refuse_if_replaced(self, doing: str) -> None:
        """Raise ConflictError if torch has another default group now, whose ranks may be others."""
        now = _default_group()
        if now is None or now is self._default_now():
            return
        if self.world == 1 and (not self.spans_the_world or dist.get_world_size() == 1):
            return  # a group of this process alone, now and before
        raise ConflictError(
            f"{doing}: expected torch's process group to be the one that this Checkpointer was made over, found that "
            f"it was replaced by another one, of {dist.get_world_size()} ranks",
            hint="close the Checkpointer or manager before destroy_process_group(), and make another one after "
            "init_process_group(), on all ranks",
        )

    def _default_now(self) -> dist.ProcessGroup | None:
        """Return torch's default group that this one was made over. None: there was none, or it was destroyed."""
        return None if self._default is None else self._default()

    def _refuse_if_destroyed(self, doing: str) -> None:
        """Raise ConflictError if torch's default group was destroyed, which ends this group, too."""
        if self._default_now() is None or _default_group() is None:
            raise ConflictError(
                f"{doing}: expected torch's process group, which this Checkpointer was made over, found that it was "
                "destroyed",
                hint="close the Checkpointer or manager before destroy_process_group(); to load, make another one "
                "after init_process_group(), on all ranks",
            )

    def close(self) -> None:
        """Destroy the group, unless torch has destroyed it with its default group. May be called twice."""
        if self._group is not None and dist.is_initialized():
            try:
                dist.destroy_process_group(self._group)
            except (ValueError, RuntimeError, AssertionError) as error:
                log.info("the private group was destroyed before: %s", error)
        self._group = None

    def _wait(self, work: dist.Work, doing: str) -> None:
        """Wait for a collective. Raises RuntimeError if it fails, or takes longer than the group's timeout."""
        began = time.monotonic()
        pause, is_late = NOTICE_SECONDS, False
        while True:
            try:
                work.wait(timedelta(seconds=pause))
            except RuntimeError:
                waited = time.monotonic() - began
                if work.is_completed() or waited >= self._timeout:
                    raise
                ended = self._ended()
                if ended:
                    raise RuntimeError("; ".join(ended.values())) from None
                if not is_late:
                    # Ranks that wait here note it on the board. A rank without the note after the next second is
                    # missing.
                    is_late, pause = True, LOOK_SECONDS
                    self._roll.note(f"{doing}, {self._rounds}")
                elif is_late and pause == LOOK_SECONDS:
                    pause = NOTICE_SECONDS
                    log.warning("%s: has waited %.0f s for %s", doing, waited, self._named_late(doing))
            else:
                return

    def _late(self, doing: str) -> list[int]:
        here = f"{doing}, {self._rounds}"
        notes = self._roll.last_notes()
        return [rank for rank in range(self.world) if rank != self.rank and notes.get(rank) != here]

    def _named_late(self, doing: str) -> str:
        notes = self._roll.last_notes()
        late = self._late(doing)
        return (
            ", ".join(f"rank {rank} (last seen at: {notes.get(rank, 'not known')})" for rank in late[:8]) or "no rank"
        )

    def _checked(self, doing: str, call: Callable[[], T]) -> T:
        began = time.monotonic()
        try:
            return call()
        except RuntimeError as error:
            self._left = ""  # gloo itself refuses further calls
            waited = time.monotonic() - began
            ended = self._ended()
            late = sorted(ended) or self._late(doing) or [r for r in range(self.world) if r != self.rank]
            found = "; ".join(ended.values()) or str(error)
            raise DeadlineError(
                f"{doing}: rank {self.rank} of {self.world} waited {waited:.1f} s (limit {self._timeout:.0f} s) "
                f"for ranks {late}: {found}",
                hint="all ranks have to make the same calls in the same order; look for a rank that died or lags",
                rank=self.rank,
            ) from error


def _board(prefix: str) -> Board | None:
    try:
        # torch has no public name for it; torchft and torchelastic reach it the same way.
        return cast("Board", PrefixStore(f"flashckpt/{prefix}", dist.distributed_c10d._get_default_store()))
    except (RuntimeError, ValueError) as error:
        log.info("the ranks share no store, so that missing ranks are named later: %s", error)
        return None


def _opening_roll(ranks: tuple[int, ...], rank: int) -> Roll:
    default = dist.group.WORLD
    if default is None:
        return Roll(None, 0, 1)
    rolls = _openings.setdefault(default, {})
    if ranks not in rolls:
        name = hashlib.blake2b(repr(ranks).encode(), digest_size=8).hexdigest()
        rolls[ranks] = Roll(_board(f"open/{name}"), rank, len(ranks))
    return rolls[ranks]


_of_this_process: weakref.WeakSet[PrivateGroup] = weakref.WeakSet()
_looks_after_forks: list[bool] = []


def _outlive_forks(group: PrivateGroup) -> None:
    """Keep the group, and torch's default one, alive in every forked child until the child ends.

    The destructor of a gloo group waits for its threads. A child has none of them, so that it would hang or abort at
    its end.
    """
    if not _looks_after_forks:
        _looks_after_forks.append(True)
        os.register_at_fork(after_in_child=_keep_for_ever)
    _of_this_process.add(group)


def _keep_for_ever() -> None:
    groups = [group._group for group in list(_of_this_process)]
    for group in (*groups, _default_group()):
        if group is not None:
            # Add a reference that is never given back, not even when the interpreter clears its modules.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def _default_group() -> dist.ProcessGroup | None:
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None


def _who(problems: dict[int, str]) -> str:
    return "; ".join(f"rank {rank}: {problem}" for rank, problem in problems.items())
