"""Calls the roll before a collective call: all ranks begin it or none does, and missing ranks are named.

Ranks sign in at a board that they share (the store that torch.distributed keeps for the job) before they enter a
collective. The last one to sign in writes the verdict "go"; one that has waited too long writes that the call is off.
The first verdict holds for all ranks, so that no rank waits in a collective that another one has given up.
"""

from __future__ import annotations

import json
import logging
import time
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from flashckpt.errors import DeadlineError, FlashError, OtherRankError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

log = logging.getLogger(__name__)

NOTICE_SECONDS = 5.0
"""A rank that waits longer logs which ranks it waits for."""
LOOK_SECONDS = 1.0
"""A rank that waits asks this often whether a missing rank has ended."""
VAIN_SAVES = 2
"""After this many saves that waited in vain, saves do not wait until the missing ranks are seen again."""

_LONGEST_PAUSE = 0.25
_SHOWN = 8
_MOST_NAMED = 64
_GO = "go"


class Board(Protocol):
    """The methods of torch's Store that a roll uses. Each returns soon, and raises RuntimeError if the store is
    gone."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def multi_get(self, keys: list[str]) -> list[bytes]: ...
    def add(self, key: str, amount: int) -> int: ...
    def check(self, keys: list[str]) -> bool: ...
    def compare_set(self, key: str, expected: str, desired: str) -> bytes: ...


@dataclass(frozen=True, slots=True)
class CalledOff:
    """The verdict on a round in which ranks were missing."""

    missing: tuple[int, ...]
    vain: int  # number of saves in a row, this one included, that waited in vain
    why: str
    step: int | None = None  # of the save that was called off

    def encode(self) -> str:
        return json.dumps([self.missing, self.vain, self.why, self.step])

    @classmethod
    def decode(cls, text: str) -> CalledOff:
        missing, vain, why, step = json.loads(text)
        return cls(tuple(missing), vain, why, step)


class Roll:
    """One rank's use of the board. Used by the training thread alone."""

    def __init__(
        self,
        board: Board | None,
        rank: int,
        world: int,
        *,
        ended: Callable[[], Mapping[int, str]] = dict,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`ended` returns the ranks whose processes have ended, and how. No board: `meet` returns at once."""
        self._board = board if world > 1 else None
        self._rank = rank
        self._world = world
        self.ended = ended
        self._clock = clock
        self._sleep = sleep
        self._round = 0
        self._has_signed = False  # this rank has signed in at the present round
        self._vain = 0
        self._missing: tuple[int, ...] = ()
        self._missed: CalledOff | None = None  # the last verdict that names this rank as missing

    def meet(self, call: str, arguments: str, timeout: float, *, step: int | None = None) -> None:
        """Return once all ranks have called `call`, with the same arguments. Collective.

        Raises DeadlineError or OtherRankError, on every rank that called it, if a rank is missing for `timeout`
        seconds or has ended, and OtherRankError if their arguments differ. With `step`, of a save, it raises at once
        after VAIN_SAVES calls in vain, until the missing ranks are seen again.
        """
        if self._board is None:
            return
        try:
            self._meet(self._board, call, arguments, timeout, step)
        except RuntimeError as error:
            log.warning(
                "%s(): missing ranks can't be named any more, the store of torch.distributed is gone: %s", call, error
            )
            self._board = None

    def note(self, text: str) -> None:
        """Note on the board what this rank does. Does not wait."""
        self._put(f"at/{self._rank}", text)

    def note_step(self, step: int) -> None:
        """Note on the board the step that this rank saves. Does not wait."""
        self._put(f"step/{self._rank}", str(step))

    def _put(self, key: str, text: str) -> None:
        if self._board is not None:
            try:
                self._board.set(key, text)
            except RuntimeError as error:
                log.info("the store of torch.distributed is gone: %s", error)
                self._board = None

    def behind(self, step: int) -> dict[int, int | None]:
        """Return the ranks that have not called save() for `step` yet, each with the last step that it called it for.

        If some ranks never called it, returns only these.
        """
        if self._board is None:
            return {}
        try:
            absent = _absent(self._board, "step/", 0, self._world)
            if absent:
                return dict.fromkeys(rank for rank in absent if rank != self._rank)
            last = map(int, self._board.multi_get([f"step/{rank}" for rank in range(self._world)]))
            return {rank: one for rank, one in enumerate(last) if one < step and rank != self._rank}
        except RuntimeError:
            return {}

    def last_notes(self) -> dict[int, str]:
        """Return what each rank noted last; ranks that noted nothing are left out."""
        if self._board is None:
            return {}
        try:
            keys = {rank: f"at/{rank}" for rank in range(self._world)}
            return {rank: self._read(self._board, key) for rank, key in keys.items() if self._board.check([key])}
        except RuntimeError:
            return {}

    def missed(self) -> CalledOff | None:
        """Return the verdict if the other ranks waited in vain for this one, and it has made no such call since."""
        if self._board is None:
            return self._missed
        try:
            verdict = self._verdict(self._board)
        except RuntimeError:
            verdict = None
        return verdict if isinstance(verdict, CalledOff) and self._rank in verdict.missing else self._missed

    def _meet(self, board: Board, call: str, arguments: str, timeout: float, step: int | None) -> None:
        if step is not None and self._vain >= VAIN_SAVES and not self._are_all_back(board, step):
            raise self._not_waiting(call)
        if not self._sign_in(board, call, arguments, step):
            return
        verdict = self._wait(board, call, timeout, step)
        signed, self._round, self._has_signed = self._round, self._round + 1, False
        if isinstance(verdict, CalledOff):
            self._vain, self._missing = verdict.vain, verdict.missing
            raise DeadlineError(
                f"{call}(): {verdict.why}", hint=_hint(call), missing=list(verdict.missing), rank=self._rank
            )
        self._vain, self._missing = 0, ()
        self._compare(board, signed, call, arguments)

    def _sign_in(self, board: Board, call: str, arguments: str, step: int | None) -> bool:
        """Sign in at the present round. Returns False if the board's contents are from an earlier use and mean
        nothing."""
        while isinstance(verdict := self._verdict(board), CalledOff):
            # The others waited for this rank in vain: go on with the round that they are at.
            self._missed = verdict if step is None and self._rank in verdict.missing else None
            # "next" may be written later, or never if the rank that called the round off has died.
            newest = int(self._read(board, "next")) if board.check(["next"]) else 0
            self._round = max(self._round + 1, newest)
            self._has_signed = False
            last = CalledOff.decode(self._read(board, f"{self._round - 1}/verdict"))
            if step is not None and last.vain >= VAIN_SAVES and self._verdict(board) is None:
                self._missing = tuple(rank for rank in last.missing if rank != self._rank)
                self._vain = last.vain if self._missing else 0
                board.set(f"{self._round}/back/{self._rank}", str(step))
                raise OtherRankError(
                    f"{call}(): the other ranks waited in vain for {_ranks(last.missing)}, including this one, and "
                    "wait "
                    "again from the next step on",
                    hint=_hint(call),
                    ranks=list(last.missing),
                )
            if step is not None and last.step is not None and last.step >= step:
                # The others have gone on to the next step, where they may wait for this rank in the user's collective.
                raise OtherRankError(
                    f"{call}(): the other ranks gave step {last.step} up: {last.why}",
                    hint=_hint(call),
                    ranks=list(last.missing),
                )
        board.set(f"at/{self._rank}", f"{call}({arguments})")
        if step is not None:
            self._missed = None
            board.set(f"step/{self._rank}", str(step))
        if self._has_signed:
            return True  # an exception ended the wait
        if verdict == _GO:
            self._board = None
            return False
        self._has_signed = True
        prefix = f"{self._round}/"
        board.set(f"{prefix}said/{self._rank}", f"{call}({arguments})")
        board.add(f"{prefix}sum", _hash(f"{call}({arguments})"))
        signed = board.add(f"{prefix}count", 1)
        if signed > self._world:
            self._board = None
            return False
        if signed == self._world:
            board.compare_set(f"{prefix}verdict", "", _GO)
        return True

    def _wait(self, board: Board, call: str, timeout: float, step: int | None) -> str | CalledOff:
        began = self._clock()
        has_told, look, pause = False, LOOK_SECONDS, 0.0005
        while (verdict := self._verdict(board)) is None:
            waited = self._clock() - began
            if not has_told and waited >= NOTICE_SECONDS:
                has_told = True
                why = self._why(board, call, self._missing_now(board), waited)
                log.warning("%s() waits, at most %.0f s: %s", call, timeout, why)
            gone: dict[int, str] = {}
            if waited >= look:
                look = waited + max(LOOK_SECONDS, 0.2 * waited)
                ended = self.ended()
                gone = {rank: ended[rank] for rank in self._missing_now(board) if rank in ended}
            if gone or waited >= timeout:
                return self._call_off(board, call, waited, gone, step)
            self._sleep(min(pause, max(0.0, timeout - waited)))
            pause = min(_LONGEST_PAUSE, max(pause, 0.1 * waited))
        return verdict

    def _call_off(
        self, board: Board, call: str, waited: float, gone: Mapping[int, str], step: int | None
    ) -> str | CalledOff:
        missing = self._missing_now(board)
        why = "; ".join(gone.values()) if gone else self._why(board, call, missing, waited)
        vain = max(VAIN_SAVES, self._vain + 1) if gone else self._vain + 1
        mine = CalledOff(tuple(gone) or missing, vain, why, step)
        text = board.compare_set(f"{self._round}/verdict", "", mine.encode()).decode()
        if text == _GO:
            return _GO
        board.set("next", str(self._round + 1))
        return CalledOff.decode(text)

    def _compare(self, board: Board, signed: int, call: str, arguments: str) -> None:
        if board.add(f"{signed}/sum", 0) == self._world * _hash(f"{call}({arguments})"):
            return
        by_call: dict[str, list[int]] = {}
        for rank in range(self._world):
            by_call.setdefault(self._read(board, f"{signed}/said/{rank}"), []).append(rank)
        sides = ", ".join(f"{said} on {_ranks(ranks)}" for said, ranks in by_call.items())
        raise OtherRankError(
            f"the ranks made different calls: {sides}",
            hint="make the same calls with the same steps, intervals and policies on all ranks",
            ranks=[rank for ranks in by_call.values() for rank in ranks if self._rank not in ranks],
        )

    def _are_all_back(self, board: Board, step: int) -> bool:
        """Return True if the missing ranks were seen at an earlier step, so that all ranks know it by now."""
        keys = [f"{self._round}/back/{rank}" for rank in self._missing]
        if not keys:
            return True
        return board.check(keys) and step > max(int(self._read(board, key)) for key in keys)

    def _not_waiting(self, call: str) -> FlashError:
        return OtherRankError(
            f"{call}(): did not wait for {_ranks(self._missing)}, for which the last {self._vain} saves waited in vain",
            hint=f"{_hint(call)}; saves wait again once these ranks are seen",
            ranks=list(self._missing),
        )

    def _missing_now(self, board: Board) -> tuple[int, ...]:
        return tuple(_absent(board, f"{self._round}/said/", 0, self._world))

    def _why(self, board: Board, call: str, missing: Sequence[int], waited: float) -> str:
        if not missing:
            return f"all ranks have called {call}(), {waited:.0f} s after this one"
        verb = "has" if len(missing) == 1 else "have"
        at = f"at/{missing[0]}"
        last = f" (its last call: {self._read(board, at)})" if len(missing) == 1 and board.check([at]) else ""
        return f"{_ranks(missing)} {verb} not called {call}(){last} for {waited:.0f} s; call it on every rank"

    def _verdict(self, board: Board) -> str | CalledOff | None:
        key = f"{self._round}/verdict"
        if not board.check([key]):
            return None
        text = self._read(board, key)
        return _GO if text == _GO else CalledOff.decode(text)

    @staticmethod
    def _read(board: Board, key: str) -> str:
        return board.get(key).decode()


def _absent(board: Board, prefix: str, first: int, end: int) -> list[int]:
    """Return the numbers whose keys `prefix` + number are missing; the first ones, if there are many.

    Searches by halves, because thousands of ranks look for thousands of keys.
    """
    if board.check([f"{prefix}{number}" for number in range(first, end)]):
        return []
    if end - first == 1:
        return [first]
    middle = (first + end) // 2
    found = _absent(board, prefix, first, middle)
    return found if len(found) >= _MOST_NAMED else found + _absent(board, prefix, middle, end)


def _hint(call: str) -> str:
    return f"call {call}() on every rank, at the same steps"


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    more = f" and {len(ranks) - _SHOWN} more" if len(ranks) > _SHOWN else ""
    return f"ranks {list(ranks[:_SHOWN])}{more}"


def _hash(text: str) -> int:
    return zlib.crc32(text.encode())
