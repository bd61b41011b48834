"""Recover: tries the candidates newest first, all ranks together, until one is in the live tensors."""

from __future__ import annotations

import json
import logging
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from flashckpt.collector import collector_paused
from flashckpt.errors import FlashError, MissingKeyError, NotFoundError, StructureError, UnusableError
from flashckpt.failpoints import failpoint
from flashckpt.load import inventory as inventories
from flashckpt.load import parts
from flashckpt.load.agree import StepBackError, agree
from flashckpt.load.attempt import Attempt
from flashckpt.load.choose import Choice, choose, explain, whole
from flashckpt.load.histories import Pick, anew, pick
from flashckpt.load.inventory import copies_of
from flashckpt.load.live import LiveTensors
from flashckpt.load.plan import Transfer, plan
from flashckpt.load.result import LoadResult
from flashckpt.protocol.line import launch_of, name_of
from flashckpt.rpc.session import decode_session, encode_session
from flashckpt.state.flatten import Flat, flatten, restore
from flashckpt.types import Launch, Loss, Timings, age_order

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping, Sequence

    from flashckpt.load.context import LoadContext
    from flashckpt.load.inventory import Copies, Inventory
    from flashckpt.load.read import Target
    from flashckpt.load.result import SourceName
    from flashckpt.protocol.line import Line
    from flashckpt.save.values import Values
    from flashckpt.state.assumed import Reader
    from flashckpt.state.cover import Index
    from flashckpt.types import Generation, TensorEntry

log = logging.getLogger(__name__)

T = TypeVar("T")

_TOLD = 2  # incomplete generations of which an error says what is whole
_PAUSES = (1.0, 2.0)  # seconds between attempts to fetch the same generation, as long as an agent needs to be back


@dataclass(frozen=True, slots=True)
class Found:
    """What is known of a generation before a tensor of it is read."""

    step: int
    saved_world_size: int
    extra: Any
    keys: frozenset[str]  # that this rank could ask for
    entry: Callable[[str], TensorEntry | None]  # one region of the tensor under a key; None: it is no tensor
    value: Callable[[str], tuple[bool, Any]]  # (found, value) of a key that is no tensor


@dataclass(frozen=True, slots=True)
class Request:
    """What the caller of load() wants."""

    step: int | None = None
    keys: tuple[str, ...] | None = None  # prefixes of flat keys; None = all
    strict: bool = True
    cast: bool = False
    screen: Callable[[Found], Callable[[str], bool]] | None = None  # which keys of what was found; may raise
    keep: Callable[[str], bool] | None = None  # what the screen said

    def selects(self, fqn: str) -> bool:
        if self.keep is not None and not self.keep(fqn):
            return False
        return self.keys is None or any(self.matches(key, fqn) for key in self.keys)

    @staticmethod
    def matches(key: str, fqn: str) -> bool:
        return fqn == key or fqn.startswith(key if key.endswith(".") else key + ".")


class Contents(Protocol):
    """What a generation holds, as one rank may ask for it."""

    def values(self, rank: int) -> Values: ...

    def saved_keys(self, rank: int, stored: Index) -> set[str]: ...

    def value(self, fqn: str, rank: int) -> tuple[bool, Any]: ...


class Readable(Protocol):
    """A generation that is being read. The stages are collective, in this order."""

    generation: Generation
    world: int
    stored: Index

    @property
    def catalogue(self) -> Contents: ...

    @property
    def reader(self) -> Reader: ...

    @property
    def source(self) -> SourceName: ...

    def describe(self) -> None:
        """What it holds; proves that it is all there."""

    def sources(self, keys: Iterable[str]) -> Mapping[str, int]:
        """Returns, for each key that must come from one rank's shard, that rank. Local."""

    @property
    def touched(self) -> bool:
        """Whether this rank's tensors may have been written to."""

    def needs(self, transfers: Sequence[Transfer], targets: Sequence[Target]) -> bytes:
        """For the other ranks. Local."""

    def fetch(self, transfers: Sequence[Transfer], targets: Sequence[Target], needs: Sequence[bytes]) -> None:
        """Brings it near, or straight into the tensors."""

    def read(self, transfers: Sequence[Transfer], targets: Sequence[Target]) -> bytes:
        """Into the live tensors, verified: what is not there yet. Local."""


class Recovery:
    """One load, on all ranks at once."""

    def __init__(self, context: LoadContext) -> None:
        self._context = context
        self._touched = False
        self._attempt: Readable | None = None  # the one that is under way
        self._missing: tuple[tuple[Generation, tuple[int, ...]], ...] = ()
        self._losses: list[Loss] = []  # generations with shards that no node has
        self.picked = Pick(None, {})  # the history that the load goes on with, once the candidates are known
        self.present: set[Launch] = set()  # launches that anything is left of

    def __enter__(self) -> Recovery:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        """Adds a note to an error if tensors had been written to before it."""
        if error is not None and self.touched and not _says_so(error):
            said = "tensors were written to before load() ended: load again, or end the process, before they are used"
            error.add_note(f"flashckpt: {said}")
            log.warning("%s: %s", type(error).__name__, said)

    @property
    def touched(self) -> bool:
        """Whether this rank's tensors may have been written to."""
        return self._touched or (self._attempt is not None and self._attempt.touched)

    def take_inventory(self) -> Inventory:
        """What every node holds; one rank of each node asks its agent. Collective."""
        context = self._context

        def take() -> bytes:
            return inventories.encode(context.memory.inventory(context.timeout)) if context.is_leader else b""

        answers = agree(context.group, context.node, "gathering the inventories", take)
        failpoint("after_inventory")
        nodes = [place.node_id for place in context.places]
        return inventories.merge(nodes, [answers[members[0]] for members in context.members])

    def pick_history(
        self,
        inventory: Inventory,
        step: int | None,
        history: str | None = None,
        disk: Collection[Generation] = (),
        disk_lines: Iterable[Line] = (),
    ) -> Pick:
        """Choose the history to go on with, from what is whole in memory, and on `disk`. Local, alike on all ranks."""
        self.present = inventory.launches() | {launch_of(one) for one in disk}
        lines, there = (*inventory.lines, *disk_lines), [*whole(inventory), *disk]
        self.picked = pick(lines, there, self.present, step=step, history=history)
        for node in inventory.damaged_lines:
            log.warning(
                "node %s: a file that says which history its shards belong to is damaged; it is set aside and replaced "
                "at the next save",
                node,
            )
        return self.picked

    def anew(self, inventory: Inventory, disk: Collection[Generation], disk_lines: Iterable[Line]) -> Pick:
        """Give up everything that is known, because a person starts anew. Local, alike on all ranks."""
        self.present = inventory.launches() | {launch_of(one) for one in disk}
        return anew((*inventory.lines, *disk_lines), self.present)

    def line_for(self, head: Launch, base: Generation) -> Line:
        """Return the line of a launch that goes on from `base`, which was loaded."""
        return self.picked.line_for(head, base)

    def candidates(self, inventory: Inventory, step: int | None) -> Choice:
        """Of the history that was picked. Collective, because what is missing is explained by whoever remembers where
        it was."""
        choice = self._explained(choose(inventory, step, self.picked), inventory)
        reasons = dict(choice.passed_over)
        self._missing = choice.missing
        self._losses = [Loss(one, ranks, reasons.get(one, "")) for one, ranks in choice.missing]
        if step is not None and not choice.candidates:
            steps = sorted({generation.step for generation, _ in inventory.generations})
            others = self._histories_with(inventory, step)
            hint = "leave out step= to load the newest usable one"
            if others:
                hint += f"; load(step={step}, history={others[0]!r}) goes back to what was abandoned"
            raise NotFoundError(
                f"step {step}: not in memory as a whole; steps with shards: {steps or 'none'}{_listed(choice)}",
                hint=hint,
                step=step,
                parts=True,
            )
        return choice

    def _histories_with(self, inventory: Inventory, step: int) -> list[str]:
        """Names of launches that have this step whole, and that the picked history goes on without."""
        found = [one for one in whole(inventory) if one.step == step and self.picked.why_not(one)]
        return sorted({name_of(launch_of(one)) for one in found})

    def keep_losses(self) -> None:
        """Leaves word on this node of what was found to be lost, for `ls` and `status`. Local, and no error."""
        if not self._context.is_leader:
            return
        try:
            if self._losses or self._context.store.read_losses():
                self._context.store.write_losses(self._losses)
        except (FlashError, OSError) as error:
            log.warning("the list of lost generations could not be written: %s", error)

    def _explained(self, choice: Choice, inventory: Inventory) -> Choice:
        """The nodes that a missing shard was on, from one node that remembers that launch. Collective."""
        launches = {Launch(generation.epoch, generation.nonce) for generation, _ in choice.missing}
        tellers = {launch: node for launch, node in inventory.remembered.items() if launch in launches}
        if not tellers:
            return choice
        context = self._context

        def tell() -> bytes:
            if not context.is_leader or context.node not in tellers.values():
                return b"[]"
            past = context.memory.inventory(context.timeout).past
            mine = [encode_session(one).hex() for one in past if tellers.get(one.launch) == context.node]
            return json.dumps(mine).encode()

        answers = agree(context.group, context.node, "asking who had what is missing", tell)
        sessions = [decode_session(bytes.fromhex(one)) for answer in answers for one in json.loads(answer)]
        return explain(choice, {one.launch: one for one in sessions}, inventory.nodes)

    def load(
        self, inventory: Inventory, choice: Choice, state_dict: MutableMapping[Any, Any], request: Request
    ) -> LoadResult | None:
        """The newest candidate that all ranks can read; None where there is none. Collective."""
        if not choice.candidates:
            if choice.passed_over:
                raise self._unusable(choice, ())
            # Before flattening: asking a Stateful for its state dict can change it, and a load that finds nothing must
            # leave no trace.
            return None

        def use(attempt: Attempt) -> LoadResult:
            with attempt:
                return self._try(attempt, state_dict, request)

        result, stepped_over = self._newest(inventory, choice, use)
        newer = [f"{g}: {why}" for g, why in choice.passed_over if age_order(g) > age_order(result.generation)]
        return replace(result, stepped_over=(*newer, *stepped_over))

    def load_from(self, attempt: Readable, state_dict: MutableMapping[Any, Any], request: Request) -> LoadResult:
        """The same from what is not in memory. Collective. StepBackError on all ranks where it can't be used."""
        return self._try(attempt, state_dict, request)

    def load_parts(
        self,
        error: UnusableError | NotFoundError,
        inventory: Inventory,
        state_dict: MutableMapping[Any, Any],
        request: Request,
    ) -> LoadResult:
        """After `error`, which found no generation to load: takes what is whole of the step that was asked for, if the
        request allows parts to be missing; else raises the error with what is whole of the newest ones. Collective.
        """
        if not error.fields.get("parts"):  # raised on all ranks alike, or another error
            raise error
        found = [one for one, _ in self._missing if request.step is None or one.step == request.step]
        takes_parts = request.step is not None and (request.keys is not None or not request.strict)
        lines = []
        for generation in sorted(found, key=age_order, reverse=True)[:_TOLD]:
            copies = copies_of(inventory, generation)
            if not copies.ranks or not copies.agree:
                continue
            try:
                with Attempt(self._context, copies) as attempt:
                    if takes_parts:
                        result = self._try(attempt, state_dict, request)
                        log.warning(
                            "%s: loaded without the shards of ranks %s", generation, dict(self._missing)[generation]
                        )
                        return result
                    attempt.describe()
                    lines.append(f"\n  - {generation}: {self._whole_of(attempt)}")
            except StepBackError as problem:
                log.warning("%s: what is whole of it could not be told: %s", generation, problem.message)
        fields = {name: value for name, value in error.fields.items() if name != "parts"}
        told = f"\n  what is left:{''.join(lines)}" if lines else ""
        raise type(error)(error.message + told, hint=error.hint, **fields) from error

    def _whole_of(self, attempt: Attempt) -> str:
        catalogue = attempt.catalogue
        whole = {fqn for fqn, layout in attempt.stored if layout is None}
        rank_keys = {fqn for fqn, layout in attempt.stored if layout is not None}
        for _, values in catalogue.distinct_values():
            rank_keys |= values.per_rank
            whole |= values.values.keys() - values.per_rank
        return parts.told(attempt.generation.step, sorted(catalogue.lacking), whole, attempt.broken, rank_keys)

    def find(self, step: int | None) -> Attempt:
        """The newest usable generation, described, for somebody who reads by a plan of their own. Collective.

        UnusableError where there is none. The caller closes it.
        """
        inventory = self.take_inventory()
        self.pick_history(inventory, step)
        choice = self.candidates(inventory, step)

        def use(attempt: Attempt) -> Attempt:
            attempt.describe()
            return attempt

        return self._newest(inventory, choice, use)[0]

    def _newest(self, inventory: Inventory, choice: Choice, use: Callable[[Attempt], T]) -> tuple[T, list[str]]:
        """What `use` makes of the newest generation that it can use, and those that it could not. Collective.

        A generation is given up only when one of its shards has no good copy left, or can't be fetched for a while:
        what is stepped over is dead once the next one is loaded, and an agent that is being restarted is no reason.
        """
        stepped_over: list[str] = []
        straight = True
        for generation in choice.candidates:
            copies: Copies | None = copies_of(inventory, generation)
            pauses = list(_PAUSES)
            while copies is not None:
                attempt = Attempt(self._context, copies, straight=straight)
                try:
                    return use(attempt), stepped_over
                except BaseException as error:
                    attempt.close()
                    if not isinstance(error, StepBackError):
                        raise
                    # Agents know where nodes have moved to, and what the launch has heard of them.
                    straight = False
                    if error.fields.get("passing") and pauses:
                        log.warning("%s: %s; trying again", generation, error.message)
                        time.sleep(pauses.pop(0))
                        continue
                    copies = copies.without(error.fields.get("bad", frozenset()))
                    going_on = "trying other copies" if copies is not None else "can't be used"
                    log.warning("%s: %s; %s", generation, error.message, going_on)
                    if copies is None:
                        stepped_over.append(f"{generation}: {error.message}")
        raise self._unusable(choice, stepped_over)

    def _try(self, attempt: Readable, state_dict: MutableMapping[Any, Any], request: Request) -> LoadResult:
        context, generation = self._context, attempt.generation
        began = time.perf_counter()
        self._attempt = attempt
        attempt.describe()
        proved = time.perf_counter()
        plans: list[_ReadPlan] = []

        def make_plan() -> bytes:
            with collector_paused():
                plans.append(_plan(attempt, context.rank, state_dict, request))
                return attempt.needs(plans[0].transfers, plans[0].targets)

        needs = agree(context.group, context.node, f"preparing to load {generation}", make_plan)
        mine = plans[0]
        surplus = self._nobody_wants(mine.unexpected)
        if surplus and request.strict and request.keys is None:
            raise MissingKeyError(
                f"{generation}: {len(surplus)} keys of the checkpoint are in no rank's state dict, "
                f"e.g. {', '.join(map(repr, surplus[:5]))}",
                hint="add them (a fresh optimizer has no state yet: see get_optimizer_state_dict), "
                "or pass strict=False or keys=[…]; a part whose structure changes is saved as flashckpt.Whole(…)",
                keys=surplus,
            )
        planned = time.perf_counter()
        failpoint("after_plan")
        try:
            attempt.fetch(mine.transfers, mine.targets, needs)
            fetched = time.perf_counter()
            agree(
                context.group,
                context.node,
                f"reading {generation}",
                lambda: attempt.read(mine.transfers, mine.targets),
            )
        finally:
            self._touched |= attempt.touched
        failpoint("after_read")
        # The owners' own code: load_state_dict of Stateful objects.
        context.group.together(
            f"handing {generation} to its owners", lambda: restore(state_dict, mine.flat, mine.values, mine.keys)
        )
        return LoadResult(
            step=generation.step,
            generation=generation,
            source=attempt.source,
            saved_world_size=attempt.world,
            extra=mine.extra,
            missing=mine.missing,
            unexpected=tuple(surplus),
            timings=Timings(
                verify=proved - began,
                plan=planned - proved,
                retrieve=fetched - planned,
                read=time.perf_counter() - fetched,
            ),
        )

    def _nobody_wants(self, unexpected: frozenset[str]) -> list[str]:
        """Of the keys that this rank has no use for, those that no other rank has a use for either. Collective."""
        answers = self._context.group.gather(json.dumps(sorted(unexpected)).encode(), "comparing keys")
        return sorted(set.intersection(*(set(json.loads(answer)) for answer in answers)))

    def refuse_if_touched(self, error: UnusableError) -> None:
        """Before a fresh start: raises where tensors of any rank were written to, which would begin with them.
        Collective."""
        answers = self._context.group.gather(bytes([self.touched]), "comparing what was written to")
        if ranks := [rank for rank, answer in enumerate(answers) if answer != b"\0"]:
            raise UnusableError(
                f"{error.message}\n  allow_fresh: expected untouched tensors to start anew with, found that those of "
                f"ranks {ranks[:8]} were written to",
                hint="start the job again: what was found bad is set aside by now, so that it can start anew then",
                touched=True,
            ) from error

    def _unusable(self, choice: Choice, stepped_over: Sequence[str]) -> UnusableError:
        tried = "".join(f"\n  - {line}" for line in stepped_over)
        touched = "; tensors were written to before the damage was found" if self.touched else ""
        return UnusableError(
            f"job {self._context.job!r}: shards exist, but no generation is usable{touched}:{tried}{_listed(choice)}",
            touched=self.touched,
            parts=True,
        )


def _says_so(error: BaseException) -> bool:
    return isinstance(error, UnusableError) and bool(error.fields.get("touched"))


@dataclass(frozen=True, slots=True)
class _ReadPlan:
    """What one rank is going to read and hand over."""

    flat: Flat  # of the live state dict
    targets: list[Target]
    transfers: list[Transfer]
    values: dict[str, Any]
    extra: Any
    keys: set[str]
    missing: tuple[str, ...]
    unexpected: frozenset[str]


def _plan(attempt: Readable, rank: int, state_dict: MutableMapping[Any, Any], request: Request) -> _ReadPlan:
    """Local. Raises errors that only the caller can fix: keys and shapes that do not fit.

    The screen is called before the state dict is flattened: a Stateful can lay out what the generation holds.
    """
    catalogue = attempt.catalogue
    extra = catalogue.values(rank if rank < attempt.world else 0).extra
    every = catalogue.saved_keys(rank, attempt.stored)
    if request.screen is not None:
        there = Found(
            attempt.generation.step,
            attempt.world,
            extra,
            frozenset(every),
            entry=lambda fqn: _entry(attempt.stored, fqn),
            value=lambda fqn: catalogue.value(fqn, rank),
        )
        request = replace(request, keep=request.screen(there))
    flat = flatten(state_dict)
    live = LiveTensors(flat)
    saved = {fqn for fqn in every if request.selects(fqn)}
    wanted = {fqn for fqn in (*flat.tensors, *flat.values) if request.selects(fqn)}
    keys = wanted & saved
    _refuse_idle_keys(request, wanted | saved)
    missing = _missing(wanted - saved, saved, flat, request, rank, attempt.world)
    wants = [want for want in live.wants if want.fqn in keys]
    shared = dict.fromkeys(want.fqn for want in wants if not want.per_rank)
    transfers = plan(wants, attempt.stored, attempt.reader, attempt.sources(shared), cast=request.cast)
    values: dict[str, Any] = {}
    for fqn in flat.values:
        found, value = catalogue.value(fqn, rank) if fqn in keys else (False, None)
        if found:
            values[fqn] = value
        elif fqn in keys:
            raise StructureError(
                f"key {fqn!r}: expected a value as in the state dict, found a tensor in the checkpoint", key=fqn
            )
    return _ReadPlan(flat, live.targets, transfers, values, extra, keys, missing, frozenset(saved - wanted))


def _entry(stored: Index, fqn: str) -> TensorEntry | None:
    pieces = stored.get((fqn, None))
    return pieces[0].entry if pieces else None


def _refuse_idle_keys(request: Request, known: set[str]) -> None:
    """A prefix that selects nothing is a typo, and would be a fresh start that nobody asked for."""
    if request.keys is None:
        return
    idle = [key for key in request.keys if not any(request.matches(key, fqn) for fqn in known)]
    if idle or not request.keys:
        raise MissingKeyError(
            f"keys={list(request.keys)!r}: no key of the state dict or the checkpoint begins with {idle or 'nothing'}",
            keys=idle,
        )


def _missing(
    absent: set[str], saved: set[str], flat: Flat, request: Request, rank: int, saved_world: int
) -> tuple[str, ...]:
    """Keys that keep their values; raises where that must not be."""
    # An empty dict where the checkpoint has keys (a fresh optimizer's "state") is not a key of its own: the keys
    # below it are the ones to speak of.
    empty = {fqn for fqn in absent if isinstance(flat.values.get(fqn), dict) and not flat.values[fqn]}
    absent = absent - {fqn for fqn in empty if any(key.startswith(fqn + ".") for key in saved)}
    # A rank that did not exist when the generation was saved has no per-rank state to get back.
    excused = {fqn for fqn in absent if fqn in flat.per_rank and rank >= saved_world}
    if excused:
        log.warning(
            "rank %d is new (saved by %d ranks): %d per-rank keys keep their values",
            rank,
            saved_world,
            len(excused),
        )
    rest = sorted(absent - excused)
    if rest and request.strict:
        raise MissingKeyError(
            f"{len(rest)} keys of the state dict are not in the checkpoint, e.g. {', '.join(map(repr, rest[:5]))}",
            hint="pass strict=False to keep their present values, or keys=[…] to load a part",
            keys=rest,
        )
    return tuple(sorted(absent))


def _listed(choice: Choice) -> str:
    return "".join(f"\n  - {generation}: {reason}" for generation, reason in choice.passed_over[:8])
