"""Recover: tries the candidates newest first, all ranks together, until one is in the live tensors."""

from __future__ import annotations

import json
import logging
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from flashckpt.errors import (
    CorruptShardError,
    IncompatibleError,
    MissingKeyError,
    NotFoundError,
    OtherRankError,
    StructureError,
    UnusableError,
)
from flashckpt.failpoints import failpoint
from flashckpt.load import inventory as inventories
from flashckpt.load.attempt import Attempt, UncoveredError
from flashckpt.load.choose import Choice, choose
from flashckpt.load.live import LiveTensors
from flashckpt.load.plan import Transfer, plan
from flashckpt.load.read import read
from flashckpt.load.result import LoadResult
from flashckpt.state.flatten import Flat, flatten, restore
from flashckpt.types import Generation, Timings

if TYPE_CHECKING:
    from collections.abc import MutableMapping, Sequence

    from flashckpt.group import PrivateGroup
    from flashckpt.load.inventory import Inventory
    from flashckpt.store.slots import Sealed, SlotStore
    from flashckpt.topology import Topology

log = logging.getLogger(__name__)

# Problems that another generation may not have; every other error would meet us there again.
_STEP_BACK = (CorruptShardError, UncoveredError, NotFoundError, IncompatibleError)


@dataclass(frozen=True, slots=True)
class Request:
    """What the caller of load() wants."""

    step: int | None = None
    keys: tuple[str, ...] | None = None  # prefixes of flat keys; None = all
    strict: bool = True
    cast: bool = False
    verify: bool = True
    threads: int = 1

    def selects(self, fqn: str) -> bool:
        return self.keys is None or any(self.matches(key, fqn) for key in self.keys)

    @staticmethod
    def matches(key: str, fqn: str) -> bool:
        return fqn == key or fqn.startswith(key if key.endswith(".") else key + ".")


def find_candidates(store: SlotStore, step: int | None) -> list[tuple[Generation, list[Sealed]]]:
    """This node's candidates, newest first, with their shards: the choice without the other ranks."""
    scan = store.scan()
    inventory = inventories.Inventory({one.shard: one.tag for one in scan}, store.read_fence())
    choice = choose(inventory, step)
    return [(g, [one for one in scan if one.shard.generation == g]) for g in choice.candidates]


class Recovery:
    """One load, on all ranks at once."""

    def __init__(self, store: SlotStore, group: PrivateGroup, topology: Topology, job: str) -> None:
        self._store = store
        self._group = group
        self._topology = topology
        self._job = job
        self._touched = False

    def take_inventory(self) -> Inventory:
        """What every node holds; one rank of each node looks. Collective."""
        mine = b""
        if self._topology.is_leader:
            status = self._store.status()
            tags = {one.shard: one.tag for one in self._store.scan()}
            mine = inventories.encode(inventories.Inventory(tags, self._store.read_fence(), status.quarantined_files))
        gathered = self._group.gather(mine, "gathering the inventories")
        failpoint("after_inventory")
        return inventories.merge(inventories.decode(one) for one in gathered if one)

    def candidates(self, inventory: Inventory, step: int | None) -> Choice:
        choice = choose(inventory, step)
        if step is not None and not choice.candidates:
            steps = sorted({shard.generation.step for shard in inventory.tags})
            raise NotFoundError(
                f"step {step}: not in memory as a whole; steps with shards: {steps or 'none'}{_listed(choice)}",
                hint="leave out step= to load the newest usable one",
                step=step,
            )
        return choice

    def load(self, choice: Choice, state_dict: MutableMapping[Any, Any], request: Request) -> LoadResult | None:
        """The newest candidate that all ranks can read; None where there is none. Collective."""
        if not choice.candidates:
            if choice.passed_over:
                raise self._unusable(choice, ())
            # Before flattening: asking a Stateful for its state dict can change it (torch's optimizer helpers
            # take a step to make room for moments), and a load that finds nothing must leave no trace.
            return None
        sealed: dict[Generation, list[Sealed]] = {}
        for one in self._store.scan():
            sealed.setdefault(one.shard.generation, []).append(one)
        flat, live = self._group.together("reading the live state dict", lambda: _live(state_dict))
        stepped_over: list[str] = []
        for generation in choice.candidates:
            with Attempt(self._store, generation, sealed.get(generation, ()), self._job) as attempt:
                result, problem = self._try(generation, attempt, state_dict, flat, live, request)
            if result is not None:
                return replace(result, stepped_over=tuple(stepped_over))
            stepped_over.append(f"{generation}: {problem}")
            log.warning("%s can't be used: %s", generation, problem)
        raise self._unusable(choice, stepped_over)

    def _try(
        self,
        generation: Generation,
        attempt: Attempt,
        state_dict: MutableMapping[Any, Any],
        flat: Flat,
        live: LiveTensors,
        request: Request,
    ) -> tuple[LoadResult | None, str]:
        rank, verify = self._topology.rank, request.verify
        began = time.perf_counter()
        error: Exception | None = None
        keys, unexpected = set[str](), set[str]()
        missing: tuple[str, ...] = ()
        transfers: list[Transfer] = []
        values: dict[str, Any] = {}
        extra: Any = None
        try:
            attempt.open()
            saved = {fqn for fqn in attempt.saved_keys(rank, verify) if request.selects(fqn)}
            wanted = {fqn for fqn in (*flat.tensors, *flat.values) if request.selects(fqn)}
            keys, unexpected = wanted & saved, saved - wanted
            _refuse_idle_keys(request, wanted | saved)
            missing = _missing(wanted - saved, saved, flat, request, rank, attempt.world)
            transfers = plan([w for w in live.wants if w.fqn in keys], attempt.stored, rank, cast=request.cast)
            for fqn in flat.values:
                found, value = attempt.value(fqn, rank, verify) if fqn in keys else (False, None)
                if found:
                    values[fqn] = value
                elif fqn in keys:
                    raise StructureError(
                        f"key {fqn!r}: expected a value as in the state dict, found a tensor in the checkpoint", key=fqn
                    )
            extra = attempt.values(rank if rank < attempt.world else 0, verify).extra
        except Exception as raised:
            error = raised
        problem = self._agree(generation, attempt, error, "preparing to load")
        if problem:
            return None, problem
        surplus = self._nobody_wants(unexpected)
        if surplus and request.strict and request.keys is None:
            raise MissingKeyError(
                f"{generation}: {len(surplus)} keys of the checkpoint are in no rank's state dict, "
                f"e.g. {', '.join(map(repr, surplus[:5]))}",
                hint="add them (a fresh optimizer has no state yet: see get_optimizer_state_dict), "
                "or pass strict=False or keys=[…]",
                keys=surplus,
            )
        planned = time.perf_counter()
        failpoint("after_plan")
        self._touched = True
        try:
            read(transfers, attempt.shards, live.targets, threads=request.threads, verify=verify)
        except Exception as raised:
            error = raised
        problem = self._agree(generation, attempt, error, "reading")
        if problem:
            return None, problem
        failpoint("after_read")
        # The owners' own code: load_state_dict of Stateful objects.
        self._group.together(f"handing {generation} to its owners", lambda: restore(state_dict, flat, values, keys))
        result = LoadResult(
            step=generation.step,
            generation=generation,
            source="memory",
            saved_world_size=attempt.world,
            extra=extra,
            missing=missing,
            unexpected=tuple(surplus),
            timings=Timings(plan=planned - began, read=time.perf_counter() - planned),
        )
        return result, ""

    def _agree(self, generation: Generation, attempt: Attempt, error: Exception | None, doing: str) -> str:
        """All ranks learn of any rank's error: what stepping back can cure is returned, the rest is raised."""
        kind = "" if error is None else "step back" if isinstance(error, _STEP_BACK) else "raise"
        number = getattr(error, "shard_index", None)
        if isinstance(error, CorruptShardError) and number is not None:
            attempt.quarantine(number, str(error))
        told = json.dumps([kind, getattr(error, "message", repr(error))]) if error is not None else ""
        problems = {rank: json.loads(text) for rank, text in self._group.vote(told, f"{doing} {generation}").items()}
        if error is not None and kind == "raise":
            raise error
        for rank, (kind, message) in problems.items():
            if kind == "raise":
                raise OtherRankError(f"rank {rank} can't load {generation}: {message}", ranks=[rank])
        return "; ".join(f"rank {rank}: {message}" for rank, (_, message) in problems.items())

    def _nobody_wants(self, unexpected: set[str]) -> list[str]:
        """Of the keys that this rank has no use for, those that no other rank has a use for either. Collective."""
        answers = [
            set(json.loads(a)) for a in self._group.gather(json.dumps(sorted(unexpected)).encode(), "comparing keys")
        ]
        return sorted(set.intersection(*answers))

    def _unusable(self, choice: Choice, stepped_over: Sequence[str]) -> UnusableError:
        tried = "".join(f"\n  - {line}" for line in stepped_over)
        touched = "; tensors were written to before the damage was found" if self._touched else ""
        return UnusableError(
            f"job {self._job!r}: shards exist, but no generation is usable{touched}:{tried}{_listed(choice)}",
            touched=self._touched,
        )


def _live(state_dict: MutableMapping[Any, Any]) -> tuple[Flat, LiveTensors]:
    flat = flatten(state_dict)
    return flat, LiveTensors(flat)


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
