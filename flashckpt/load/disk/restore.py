"""Loads the newest usable generation of memory and the persistent tier, which are tried in one order.

Rank 0 alone lists persist_dir, and all ranks decide by its list. Every stage is collective.
"""

from __future__ import annotations

import contextlib
import json
import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from flashckpt.errors import (
    CorruptShardError,
    DeadlineError,
    FlashError,
    NotFoundError,
    PersistError,
    UnusableError,
)
from flashckpt.load.agree import StepBackError, agree
from flashckpt.load.choose import Choice
from flashckpt.load.disk.foreign import open_for_manager
from flashckpt.load.disk.source import CheckpointSource
from flashckpt.persist.catalog import lines_from_json, lines_to_json, read_lines, write_line
from flashckpt.persist.names import step_of
from flashckpt.persist.storage import open_storage
from flashckpt.persist.tenancy import EMPTIED_HINT, check_place, look_around, whose, why_emptied
from flashckpt.protocol.line import launch_of, name_of
from flashckpt.state.assumed import Reader
from flashckpt.types import Generation, age_order
from flashckpt.workers import begin_in_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence

    from flashckpt.load.context import LoadContext
    from flashckpt.load.disk.source import OpenCheckpoint
    from flashckpt.load.histories import Pick
    from flashckpt.load.inventory import Inventory
    from flashckpt.load.plan import Transfer
    from flashckpt.load.read import Target
    from flashckpt.load.recover import Recovery, Request
    from flashckpt.load.result import LoadResult, SourceName
    from flashckpt.persist.storage import Storage
    from flashckpt.protocol.line import Line

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class OnDisk:
    """One step in persist_dir, as all ranks know it."""

    name: str
    generation: Generation
    problem: str


@dataclass(frozen=True, slots=True)
class DiskInventory:
    """The steps and lines of this job in persist_dir."""

    steps: tuple[OnDisk, ...] = ()
    lines: tuple[Line, ...] = ()  # of the launches that have loaded a generation while steps lay here
    problem: str = ""  # why nothing of persist_dir can be used
    hint: str = ""  # what to do about that
    foreign: tuple[tuple[int, str], ...] = ()  # steps that this job did not write, with their owner
    latest: str | None = None
    damage: str = ""  # what is wrong with the line file

    @property
    def highest_epoch(self) -> int:
        return max([0, *(one.generation.epoch for one in self.steps), *(line.head.epoch for line in self.lines)])

    @property
    def whole(self) -> tuple[Generation, ...]:
        return tuple(one.generation for one in self.steps if not one.problem)


@dataclass(frozen=True, slots=True)
class DiskChoice:
    """The steps in the order to try them, and why each other one is no candidate."""

    candidates: tuple[OnDisk, ...]
    passed_over: tuple[str, ...]
    suspects: tuple[OnDisk, ...] = ()  # the damaged ones of those passed over


def look_at(
    persist_dir: str, job: str, timeout: float, *, known: int | None = None, overwrite: bool = False
) -> DiskInventory:
    """Lists persist_dir. Local. Returns a directory that can't be read, or hangs, as a `problem` instead of raising.

    `known` is the newest step that a node remembers to have been there.
    """
    try:
        return _within(timeout, f"listing {persist_dir}", lambda: _look(persist_dir, job, known, overwrite))
    except PersistError as error:
        return DiskInventory(problem=error.message, hint=error.hint)
    except (FlashError, OSError) as error:
        reason = error.message if isinstance(error, FlashError) else str(error)
        return DiskInventory(problem=f"{persist_dir} can't be read: {reason}")


def _look(persist_dir: str, job: str, known: int | None, overwrite: bool) -> DiskInventory:
    check_place(persist_dir)
    storage = open_storage(persist_dir)
    tenancy = look_around(storage, job)
    foreign = tuple((one.step, f"{one.name} of {whose(one)}") for one in tenancy.foreign)
    problem, hint = why_emptied(tenancy, known), EMPTIED_HINT
    if not problem and tenancy.is_others and not tenancy.ours and not overwrite:
        problem, hint = tenancy.why_foreign(), _FOREIGN_HINT
    if problem:
        return DiskInventory(problem=problem, hint=hint, foreign=foreign)
    steps = tuple(OnDisk(one.name, one.generation, one.problem) for one in tenancy.ours)
    lines, damage = ((), "") if tenancy.is_others else _read_lines(storage)
    with contextlib.suppress(OSError):  # a flush reports it
        return DiskInventory(steps, lines, foreign=foreign, latest=storage.latest(), damage=damage)
    return DiskInventory(steps, lines, foreign=foreign, damage=damage)


def _read_lines(storage: Storage) -> tuple[tuple[Line, ...], str]:
    """Return the lines, or what is wrong with their file: the steps can be loaded without it."""
    try:
        return read_lines(storage), ""
    except CorruptShardError as error:
        return (), error.message


_FOREIGN_HINT = (
    "name another persist_dir; or, if this is the same run, the same job name (job=…); or load(path=…) or "
    "initial_load_path to start from one of its steps; load(allow_fresh=True) starts anew"
)


def take_disk_inventory(
    context: LoadContext, persist_dir: str | None, timeout: float, *, overwrite: bool = False
) -> DiskInventory:
    """Lists persist_dir on rank 0, and compares it with what the nodes remember. Collective."""
    if persist_dir is None:
        return DiskInventory()

    def remember() -> bytes:
        found = context.store.read_persisted() if context.is_leader else None
        return b"" if found is None or found[0] != persist_dir else json.dumps(list(found[1])).encode()

    doing = f"looking at {persist_dir}"
    remembered = [json.loads(one) for one in agree(context.group, context.node, doing, remember) if one]
    known = max((Generation(*one) for one in remembered), key=age_order, default=None)

    def take() -> bytes:
        if context.rank != 0:
            return b""
        step = None if known is None else known.step
        return _encode(look_at(persist_dir, context.job, timeout, known=step, overwrite=overwrite))

    found = _decode(agree(context.group, context.node, doing, take)[0])
    if context.rank == 0:
        if found.problem:
            log.warning("%s", found.problem)
        if found.damage:
            log.warning(
                "%s; which steps were abandoned is known from memory only. load(step=…) loads the one that you name. "
                "The file is set aside, and written anew when the job goes on",
                found.damage,
            )
        if found.foreign and not found.problem:
            log.warning(
                "%s: steps of other jobs are ignored: %s; load(path=…) or initial_load_path loads one of them",
                persist_dir,
                ", ".join(what for _, what in found.foreign[-4:]),
            )
    return found


def remember_line(persist_dir: str, job: str, line: Line, timeout: float) -> None:
    """Write a launch's line to persist_dir, for a load when all memory is lost. Local.

    Logs errors instead of raising, because the line is in memory already. Writes nothing into another job's directory.
    """

    def write() -> None:
        storage = open_storage(persist_dir)
        tenancy = look_around(storage, job)
        if tenancy.ours and not tenancy.is_others:
            write_line(storage, line)

    try:
        _within(timeout, f"writing to {persist_dir}", write)
    except (FlashError, OSError) as error:
        log.warning(
            "%s: the line of this launch could not be written; if all memory is lost, a load can't tell which steps "
            "were abandoned: %s",
            persist_dir,
            error,
        )


def choose_on_disk(inventory: DiskInventory, picked: Pick, step: int | None) -> DiskChoice:
    """Returns the complete steps of the picked history, newest first; with `step`, only that one. Pure, alike on all
    ranks."""
    candidates: list[OnDisk] = []
    suspects: list[OnDisk] = []
    passed_over = [inventory.problem] if inventory.problem else []
    names = {one.name for one in inventory.steps}
    if inventory.latest is not None and step_of(inventory.latest) is not None and inventory.latest not in names:
        lacking = OnDisk(inventory.latest, Generation(0, 0, step_of(inventory.latest) or 0, 0), _GONE)
        if all(f"{lacking.name} of " not in what for _, what in inventory.foreign):
            suspects.append(lacking)
            passed_over.append(f"{lacking.name} on disk: {_GONE}")
    for one in inventory.steps:
        why_not = picked.why_not(one.generation)
        if why_not:
            passed_over.append(f"{one.name} on disk: {why_not}")
        elif one.problem:
            passed_over.append(f"{one.name} on disk: {one.problem}")
            suspects.append(one)
        elif step is None or one.generation.step == step:
            candidates.append(one)
    candidates.sort(key=lambda one: age_order(one.generation), reverse=True)
    return DiskChoice(tuple(candidates), tuple(passed_over), tuple(suspects))


_GONE = "`latest` names it, but it is not there"


def _stepped_over(disk: DiskInventory, choice: DiskChoice, loaded: Generation) -> list[str]:
    """Return and log the steps on disk that are newer than the loaded one and can't be used.

    A damaged step whose launch is unknown is newer if its step number is higher.
    """
    found = [disk.problem] if disk.problem else []
    for one in choice.suspects:
        unknown = one.generation.epoch == 0
        if one.generation.step > loaded.step if unknown else age_order(one.generation) > age_order(loaded):
            found.append(f"{one.name} on disk: {one.problem}")
    for reason in found:
        log.warning("step %d was loaded instead of a newer one: %s", loaded.step, reason)
    return found


class DiskAttempt:
    """Tries to load a persisted step (`load.recover.Readable`). Every rank reads what it needs by itself."""

    def __init__(
        self,
        context: LoadContext,
        persist_dir: str,
        one: OnDisk,
        opener: Callable[[Storage, str, int], OpenCheckpoint] = CheckpointSource,
    ) -> None:
        """`opener` opens the step; CheckpointSource opens what DCP or flashckpt has written."""
        self._context = context
        self._opener = opener
        self._persist_dir = persist_dir
        self._one = one
        self.generation = one.generation
        self.world = 0
        self.stored: Any = {}
        self.touched = False
        self.catalogue: OpenCheckpoint

    @property
    def reader(self) -> Reader:
        rank = self._context.rank
        return Reader(rank, rank if rank < self.world else None)

    @property
    def source(self) -> SourceName:
        return "persist"

    def describe(self) -> None:
        def open_it() -> bytes:
            self.catalogue = self._opener(open_storage(self._persist_dir), self._one.name, self.generation.step)
            # Another generation than rank 0 listed: the step was replaced in the meantime.
            if self.catalogue.generation != self.generation:
                raise NotFoundError(f"{self.catalogue.where}: expected {self.generation}, found that it was replaced")
            return b""

        self._agree("opening", open_it)
        self.world, self.stored = self.catalogue.world, self.catalogue.stored

    def sources(self, keys: Iterable[str]) -> Mapping[str, int]:
        return {}  # a step on disk has every element once

    def needs(self, transfers: Sequence[Transfer], targets: Sequence[Target]) -> bytes:
        return b""

    def fetch(self, transfers: Sequence[Transfer], targets: Sequence[Target], needs: Sequence[bytes]) -> None:
        """Does nothing: read() reads from persist_dir directly."""

    def read(self, transfers: Sequence[Transfer], targets: Sequence[Target]) -> bytes:
        # IMPORTANT: another thread may only wait for the disk. Streams, and whether gradients are recorded, are
        # settings of this thread.
        self.touched = True
        what, timeout = f"reading {self.catalogue.where}", self._context.timeout
        self.catalogue.read(transfers, targets, lambda load: _within(timeout, what, load))
        return b""

    def _agree(self, doing: str, call: Callable[[], bytes]) -> None:
        what = f"{doing} {self._one.name} on disk"
        agree(self._context.group, self._context.node, what, lambda: _within(self._context.timeout, what, call))


def load_newest(
    recovery: Recovery,
    context: LoadContext,
    memory: Inventory,
    disk: DiskInventory,
    persist_dir: str | None,
    state_dict: MutableMapping[Any, Any],
    request: Request,
) -> LoadResult | None:
    """Loads from memory or disk, whichever has the newer usable generation. Collective.

    Returns None if neither has anything. Raises like a load from memory, with the reasons of both.
    """
    missing: NotFoundError | None = None
    try:
        choice = recovery.candidates(memory, request.step)
    except NotFoundError as error:
        missing, choice = error, Choice((), ())
    on_disk = choose_on_disk(disk, recovery.picked, request.step)
    if missing is not None and persist_dir is None:
        raise missing
    if persist_dir is None or (missing is None and not (on_disk.candidates or on_disk.passed_over)):
        return recovery.load(memory, choice, state_dict, request)
    problems: list[str] = []

    def newer(result: LoadResult) -> LoadResult:
        on_disk_newer = _stepped_over(disk, on_disk, result.generation) if request.step is None else []
        return replace(result, stepped_over=(*problems, *result.stepped_over, *on_disk_newer))

    for turn in _in_order(choice.candidates, on_disk.candidates):
        try:
            if isinstance(turn, OnDisk):
                opener = CheckpointSource if request.screen is None else open_for_manager
                result = recovery.load_from(DiskAttempt(context, persist_dir, turn, opener), state_dict, request)
                problems += [
                    f"{g}: {why}" for g, why in choice.passed_over if age_order(g) > age_order(turn.generation)
                ]
                return newer(result)
            found = recovery.load(memory, replace(choice, candidates=turn), state_dict, request)
        except (StepBackError, UnusableError) as error:
            log.warning("%s; trying the next older generation", error.message)
            problems.append(error.message)
        else:
            return None if found is None else newer(found)
    raise _nothing(missing, choice, disk, on_disk, problems, request.step, recovery.picked)


def _in_order(memory: tuple[Generation, ...], disk: tuple[OnDisk, ...]) -> Iterator[tuple[Generation, ...] | OnDisk]:
    """Yields the candidates, newest first: consecutive ones in memory together, and memory before disk for the same
    one."""
    left = list(memory)
    for one in disk:
        newer = tuple(g for g in left if age_order(g) >= age_order(one.generation))
        if newer:
            yield newer
        left = left[len(newer) :]
        yield one
    if left:
        yield tuple(left)


def _nothing(
    missing: NotFoundError | None,
    choice: Choice,
    disk: DiskInventory,
    on_disk: DiskChoice,
    problems: list[str],
    step: int | None,
    picked: Pick,
) -> FlashError:
    reasons = [*problems, *on_disk.passed_over, *(f"{generation}: {why}" for generation, why in choice.passed_over)]
    if step is not None and not problems:
        abandoned = sorted(
            name_of(launch_of(one.generation))
            for one in disk.steps
            if one.generation.step == step and not one.problem and picked.why_not(one.generation)
        )
        foreign = [f"{what} was not written by this job" for number, what in disk.foreign if number == step]
        why = "".join(f"; {one}" for one in (disk.problem, *foreign) if one)
        hint = "load(path=…) loads it" if foreign else ""
        if abandoned:
            hint = f"load(step={step}, history={abandoned[-1]!r}) goes back to what was abandoned"
        if missing is not None:
            return NotFoundError(
                f"{missing.message}; nor on disk{why}", hint=hint or missing.hint, step=step, parts=True
            )
        return NotFoundError(f"step {step}: neither in memory nor on disk{why}", hint=hint, step=step, parts=True)
    listed = "".join(f"\n  - {reason}" for reason in reasons[:16])
    return UnusableError(f"generations were saved, but none is usable:{listed}", hint=disk.hint, parts=True)


def _within(timeout: float, what: str, call: Callable[[], T]) -> T:
    """Runs `call` in a thread, and raises DeadlineError if it takes longer than `timeout`: a hanging disk must not hang
    the job. The thread is left behind."""
    pending = begin_in_thread(call, "flashckpt-disk")
    if not pending.wait(timeout):
        raise DeadlineError(f"{what}: expected it to take at most {timeout:g} s, found that it hangs")
    return pending.result()


def _encode(inventory: DiskInventory) -> bytes:
    return json.dumps(
        {
            "steps": [[one.name, list(one.generation), one.problem] for one in inventory.steps],
            "lines": lines_to_json(inventory.lines),
            "problem": inventory.problem,
            "hint": inventory.hint,
            "foreign": [list(one) for one in inventory.foreign],
            "latest": inventory.latest,
            "damage": inventory.damage,
        }
    ).encode()


def _decode(data: bytes) -> DiskInventory:
    found = json.loads(data)
    steps = tuple(OnDisk(name, Generation(*generation), problem) for name, generation, problem in found["steps"])
    return DiskInventory(
        steps,
        lines_from_json(found["lines"]),
        found["problem"],
        found["hint"],
        tuple((step, what) for step, what in found["foreign"]),
        found["latest"],
        found["damage"],
    )
