"""Tries the candidates, newest first, on all ranks together, until one is loaded into the live tensors."""

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
from flashckpt.load.choose import Choice, choose, complete_generations, explain
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

_TOLD = 2  # number of incomplete generations of which an error says what is complete
_PAUSES = (1.0, 2.0)  # seconds between attempts to fetch the same generation: an agent needs this long to restart


@dataclass(frozen=True, slots=True)
class Found:
    """A generation as a screen sees it, before a tensor of it is read."""

    step: int
    saved_world_size: int
    extra: Any
    keys: frozenset[str]  # the keys that this rank could ask for
    entry: Callable[[str], TensorEntry | None]  # one region of the tensor under a key; None: it is no tensor
    value: Callable[[str], tuple[bool, Any]]  # (found, value) of a key that is no tensor


@dataclass(frozen=True, slots=True)
class Request:
    """What the caller of load() wants."""

    step: int | None = None
    keys: tuple[str, ...] | None = None  # prefixes of flat keys; None = all
    strict: bool = True
    cast: bool = False
    screen: Callable[[Found], Callable[[str], bool]] | None = None  # returns which keys to load of it; may raise
    keep: Callable[[str], bool] | None = None  # what the screen returned

    def selects(self, fqn: str) -> bool:
        if self.keep is not None and not self.keep(fqn):
            return False
        return self.keys is None or any(self.matches(key, fqn) for key in self.keys)

    @staticmethod
    def matches(key: str, fqn: str) -> bool:
        return fqn == key or fqn.startswith(key if key.endswith(".") else key + ".")


class Contents(Protocol):
    """The keys and values of a generation, by rank."""

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
        """Learns what the generation holds, and proves that no element is missing."""

    def sources(self, keys: Iterable[str]) -> Mapping[str, int]:
        """Returns, for each key that must come from one rank's shard, that rank. Local."""

    @property
    def touched(self) -> bool:
        """Returns True if this rank's tensors may have been written to."""

    def needs(self, transfers: Sequence[Transfer], targets: Sequence[Target]) -> bytes:
        """Encodes, for the other ranks, what this rank has to fetch. Local."""

    def fetch(self, transfers: Sequence[Transfer], targets: Sequence[Target], needs: Sequence[bytes]) -> None:
        """Fetches to this node, or into the tensors."""

    def read(self, transfers: Sequence[Transfer], targets: Sequence[Target]) -> bytes:
        """Reads and verifies, into the live tensors, what fetch() has not put there. Local."""


class Recovery:
    """One load, on all ranks at once."""

    def __init__(self, context: LoadContext) -> None:
        self._context = context
        self._touched = False
        self._attempt: Readable | None = None  # the one that is under way
        self._missing: tuple[tuple[Generation, tuple[int, ...]], ...] = ()
        self._losses: list[Loss] = []  # generations of which no node has some shards
        self.picked = Pick(None, {})  # the history that the load goes on with, once the candidates are known
        self.present: set[Launch] = set()  # launches of which a shard or a step on disk is left

    def __enter__(self) -> Recovery:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        """Adds a note to an error if tensors had been written to before it."""
        if error is not None and self.touched and not _mentions_writes(error):
            said = "tensors were written to before load() failed: before you use them, load again or end the process"
            error.add_note(f"flashckpt: {said}")
            log.warning("%s: %s", type(error).__name__, said)

    @property
    def touched(self) -> bool:
        """Returns True if this rank's tensors may have been written to."""
        return self._touched or (self._attempt is not None and self._attempt.touched)

    def take_inventory(self) -> Inventory:
        """Gathers what every node holds; one rank of each node asks its agent. Collective."""
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
        """Choose the history to go on with, from what is complete in memory and on `disk`. Local, alike on all
        ranks."""
        self.present = inventory.launches() | {launch_of(one) for one in disk}
        lines, there = (*inventory.lines, *disk_lines), [*complete_generations(inventory), *disk]
        self.picked = pick(lines, there, self.present, step=step, history=history)
        for node in inventory.damaged_lines:
            log.warning(
                "node %s: a line file, which says to which history its shards belong, is damaged; it is set aside, and "
                "the next save writes a new one",
                node,
            )
        return self.picked

    def anew(self, inventory: Inventory, disk: Collection[Generation], disk_lines: Iterable[Line]) -> Pick:
        """Return a pick that gives up all known launches, because a person starts anew. Local, alike on all ranks."""
        self.present = inventory.launches() | {launch_of(one) for one in disk}
        return anew((*inventory.lines, *disk_lines), self.present)

    def line_for(self, head: Launch, base: Generation) -> Line:
        """Return the line of a launch that goes on from `base`, which was loaded."""
        return self.picked.line_for(head, base)

    def candidates(self, inventory: Inventory, step: int | None) -> Choice:
        """Returns the candidates of the picked history. Collective: nodes that remember where missing shards were tell
        the others."""
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
                f"step {step}: not complete in memory; steps with shards: {steps or 'none'}{_listed(choice)}",
                hint=hint,
                step=step,
                parts=True,
            )
        return choice

    def _histories_with(self, inventory: Inventory, step: int) -> list[str]:
        """Returns the names of launches that have this step complete, and that the picked history goes on without."""
        found = [one for one in complete_generations(inventory) if one.step == step and self.picked.why_not(one)]
        return sorted({name_of(launch_of(one)) for one in found})

    def keep_losses(self) -> None:
        """Writes a list of the lost generations on this node, for `ls` and `status`. Local; logs errors instead of
        raising."""
        if not self._context.is_leader:
            return
        try:
            if self._losses or self._context.store.read_losses():
                self._context.store.write_losses(self._losses)
        except (FlashError, OSError) as error:
            log.warning(
                "the list of lost generations could not be written, so that `ls` and `status` lack it: %s", error
            )

    def _explained(self, choice: Choice, inventory: Inventory) -> Choice:
        """Adds the nodes that had the missing shards, as a node that remembers that launch tells them. Collective."""
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

        answers = agree(context.group, context.node, "asking which nodes had the missing shards", tell)
        sessions = [decode_session(bytes.fromhex(one)) for answer in answers for one in json.loads(answer)]
        return explain(choice, {one.launch: one for one in sessions}, inventory.nodes)

    def load(
        self, inventory: Inventory, choice: Choice, state_dict: MutableMapping[Any, Any], request: Request
    ) -> LoadResult | None:
        """Loads the newest candidate that all ranks can read; returns None if nothing was saved. Collective."""
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
        """Loads what is not in memory. Collective. Raises StepBackError on all ranks if it can't be used."""
        return self._try(attempt, state_dict, request)

    def load_parts(
        self,
        error: UnusableError | NotFoundError,
        inventory: Inventory,
        state_dict: MutableMapping[Any, Any],
        request: Request,
    ) -> LoadResult:
        """Loads what is complete of the requested step, after `error` said that no generation can be loaded.
        Collective.

        If the request does not allow parts to be missing, raises the error with what is complete of the newest ones.
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
                    lines.append(f"\n  - {generation}: {self._describe_parts(attempt)}")
            except StepBackError as problem:
                log.warning("%s: can't tell which parts are complete: %s", generation, problem.message)
        fields = {name: value for name, value in error.fields.items() if name != "parts"}
        told = f"\n  what is left:{''.join(lines)}" if lines else ""
        raise type(error)(error.message + told, hint=error.hint, **fields) from error

    def _describe_parts(self, attempt: Attempt) -> str:
        catalogue = attempt.catalogue
        complete = {fqn for fqn, layout in attempt.stored if layout is None}
        rank_keys = {fqn for fqn, layout in attempt.stored if layout is not None}
        for _, values in catalogue.distinct_values():
            rank_keys |= values.per_rank
            complete |= values.values.keys() - values.per_rank
        step, lacking = attempt.generation.step, sorted(catalogue.lacking)
        return parts.describe_parts(step, lacking, complete, attempt.broken, rank_keys)

    def find(self, step: int | None) -> Attempt:
        """Returns the newest usable generation, described, for a caller that makes the read plan itself. Collective.

        Raises UnusableError if there is none. The caller closes the attempt.
        """
        inventory = self.take_inventory()
        self.pick_history(inventory, step)
        choice = self.candidates(inventory, step)

        def use(attempt: Attempt) -> Attempt:
            attempt.describe()
            return attempt

        return self._newest(inventory, choice, use)[0]

    def _newest(self, inventory: Inventory, choice: Choice, use: Callable[[Attempt], T]) -> tuple[T, list[str]]:
        """Returns what `use` made of the newest generation that it could use, and why it could not use newer ones.
        Collective.

        A generation is given up only if one of its shards has no good copy left, or can't be fetched for a while. It is
        dead once an older one is loaded, so an agent that is being restarted must not be the reason.
        """
        stepped_over: list[str] = []
        into_tensors = True
        for generation in choice.candidates:
            copies: Copies | None = copies_of(inventory, generation)
            pauses = list(_PAUSES)
            while copies is not None:
                attempt = Attempt(self._context, copies, into_tensors=into_tensors)
                try:
                    return use(attempt), stepped_over
                except BaseException as error:
                    attempt.close()
                    if not isinstance(error, StepBackError):
                        raise
                    # Fetch by the agents: they know the present addresses of the nodes, which a rank may not.
                    into_tensors = False
                    if error.fields.get("passing") and pauses:
                        log.warning("%s: %s; trying the same copies again", generation, error.message)
                        time.sleep(pauses.pop(0))
                        continue
                    copies = copies.without(error.fields.get("bad", frozenset()))
                    going_on = "trying other copies" if copies is not None else "it can't be used"
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
        # Runs the owners' code: load_state_dict of Stateful objects.
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
        """Returns the keys that neither this rank nor any other one wants. Collective."""
        answers = self._context.group.gather(json.dumps(sorted(unexpected)).encode(), "comparing keys")
        return sorted(set.intersection(*(set(json.loads(answer)) for answer in answers)))

    def refuse_if_touched(self, error: UnusableError) -> None:
        """Raises if tensors of any rank were written to: a fresh start would begin with their values. Collective."""
        answers = self._context.group.gather(bytes([self.touched]), "comparing what was written to")
        if ranks := [rank for rank, answer in enumerate(answers) if answer != b"\0"]:
            raise UnusableError(
                f"{error.message}\n  allow_fresh: expected untouched tensors to start anew with, found that those of "
                f"ranks {ranks[:8]} were written to",
                hint="start the job again: the bad copies are set aside by now, so that it can start anew then",
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


def _mentions_writes(error: BaseException) -> bool:
    return isinstance(error, UnusableError) and bool(error.fields.get("touched"))


@dataclass(frozen=True, slots=True)
class _ReadPlan:
    """What one rank reads, and what it hands to the owners of its state."""

    flat: Flat  # of the live state dict
    targets: list[Target]
    transfers: list[Transfer]
    values: dict[str, Any]
    extra: Any
    keys: set[str]
    missing: tuple[str, ...]
    unexpected: frozenset[str]


def _plan(attempt: Readable, rank: int, state_dict: MutableMapping[Any, Any], request: Request) -> _ReadPlan:
    """Makes the read plan of one rank. Local. Raises what only the caller can fix: keys and shapes that do not fit.

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
    """Refuses prefixes that select nothing: they are typos, and what they meant would silently not be loaded."""
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
    """Returns the keys that keep their values; raises if the request does not allow that."""
    # An empty dict where the checkpoint has keys (a fresh optimizer's "state") does not count as a missing key: the
    # keys below it are reported instead.
    empty = {fqn for fqn in absent if isinstance(flat.values.get(fqn), dict) and not flat.values[fqn]}
    absent = absent - {fqn for fqn in empty if any(key.startswith(fqn + ".") for key in saved)}
    # A rank that did not exist when the generation was saved has no per-rank state in it.
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
