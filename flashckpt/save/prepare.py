"""Prepares a save, before bytes are copied: flatten → pack values → plan → agree with the other ranks on the plan."""

from __future__ import annotations

import contextlib
import logging
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from flashckpt.collector import collector_paused
from flashckpt.errors import ConfigError, FlashError, OtherRankError
from flashckpt.save.plan import Planner, SavePlan
from flashckpt.save.round_trip import check_structure, check_values, outline
from flashckpt.save.same import NOTHING, Comparer, Summary
from flashckpt.save.values import KnownPaths, pack
from flashckpt.state.flatten import Flat, flatten

if TYPE_CHECKING:
    from collections.abc import Callable

    from flashckpt.config import CheckpointConfig
    from flashckpt.ranks.group import PrivateGroup
    from flashckpt.ranks.topology import Topology
    from flashckpt.save.write import ShardWriter
    from flashckpt.store.slots import SlotStore
    from flashckpt.types import Generation

log = logging.getLogger(__name__)

_AGREEMENT = struct.Struct("<IQQQ")  # tag, bytes that this rank's slots need, names and digest (save/same.py)
_COMPARING = "comparing save plans"


@dataclass(frozen=True, slots=True)
class Prepared:
    """The state that a rank is about to write, with its plan and packed values."""

    flat: Flat
    plan: SavePlan
    values: bytes
    extra: Mapping[str, Any] | None = None  # packed into `values`, like the sample
    sample: tuple[int, ...] = ()
    saves: bool = False  # False: only slots are made for it


class Preparer:
    """Local, except for the comparisons at the first save, and at a prewarm before it."""

    def __init__(
        self,
        config: CheckpointConfig,
        topology: Topology,
        group: PrivateGroup,
        store: SlotStore,
        writer: ShardWriter,
        job: str,
    ) -> None:
        self._config = config
        self._topology = topology
        self._group = group
        self._store = store
        self._writer = writer
        self._planner = Planner(topology)
        self._paths = KnownPaths()
        self._agreed = False  # the ranks have compared what they store
        self._checked = False  # the first save was found to fit into its own state
        self._comparer = Comparer(topology, store, job, enabled=config.same_on_ranks == "check")

    @property
    def is_collective(self) -> bool:
        """Return True if the next save is collective: the first one. The same on all ranks."""
        return not self._agreed or self._comparer.is_due

    @property
    def is_agreed(self) -> bool:
        """Return True if the ranks have compared what they store, so that a prewarm is local."""
        return self._agreed

    def prepare(
        self,
        state_dict: Mapping[Any, Any],
        extra: Mapping[str, Any] | None,
        generation: Generation | None = None,
        inspect: Callable[[Flat, SavePlan], None] | None = None,
    ) -> Prepared:
        """Prepare a state dict, which causes any error. `generation`: what is saved; None: only slots are made.

        `inspect` may refuse it by raising. The first save is checked as a load would (save/round_trip.py).
        """
        checks = generation is not None and not self._checked
        try:
            check_mapping("state dict", state_dict)
            check_mapping("extra", {} if extra is None else extra)
            with collector_paused():
                known = outline(state_dict) if checks else None
                flat = flatten(state_dict)
                if checks:
                    check_structure(known, flat)
                plan = self._planner.plan(flat)
                if inspect is not None:
                    inspect(flat, plan)
                sample: tuple[int, ...] = ()
                if self._agreed and generation is not None:
                    sample = self._sampled(flat, plan, generation)
                prepared = self._packed(Prepared(flat, plan, b"", extra, sample, generation is not None))
                if checks:
                    for values in (flat.values, {} if extra is None else {"extra": dict(extra)}):
                        check_values(values, len(prepared.values), allow_torch_save=self._config.allow_torch_save)
                    self._checked = True
                return prepared
        except Exception:
            if generation is not None or not self._agreed:
                self.withdraw()
            raise

    def withdraw(self) -> None:
        """Take part in the comparison with nothing, so that the other ranks do not wait. Collective, like `agree`.

        Never raises: the caller has an error of its own to raise.
        """
        with contextlib.suppress(FlashError):
            if not self._agreed:
                self._group.gather(b"", _COMPARING)
            elif self._comparer.is_due:
                self._comparer.meet(self._group, None, None)

    def agree(self, prepared: Prepared) -> Prepared:
        """Compare, at the first call, the shared tensors and the needed memory on all ranks: collective, then local.

        The first save compares values too (save/same.py), so that it is collective also where a prewarm came before.
        """
        flat, plan = prepared.flat, prepared.plan
        if self._agreed:
            if self._comparer.is_due and prepared.saves:
                self._comparer.meet(self._group, flat, plan)
            self._comparer.look_back()
            self._stop_sharing_if_split()
            if plan.tag and not self._planner.dedup:
                return self._packed(replace(prepared, plan=self._planner.plan(flat)))
            return prepared
        summary = self._comparer.summary(flat, plan) if prepared.saves else NOTHING
        for _ in range(2):
            need = self._writer.geometry(plan, prepared.values).file_length_bytes * self._config.slots
            gathered = self._group.gather(_AGREEMENT.pack(plan.tag, need, *summary), _COMPARING)
            failed = [rank for rank, answer in enumerate(gathered) if not answer]
            if failed:
                raise OtherRankError(f"ranks {failed} could not plan this save; see their logs", ranks=failed)
            answers = [_AGREEMENT.unpack(one) for one in gathered]
            if len({answer[0] for answer in answers}) == 1:
                break
            log.warning("keys differ between ranks: each rank stores all of its own tensors")
            self._planner.dedup = False
            plan = self._planner.plan(flat)
            prepared = self._packed(replace(prepared, plan=plan))
        if prepared.saves:
            self._comparer.compare(self._group, [Summary(*answer[2:]) for answer in answers], flat, plan)
        self._agreed = True
        here = (*self._topology.node_ranks, *self._writer.slots.hosted_ranks)
        self._store.check_budget(sum(answers[rank][1] for rank in here))
        return prepared

    def _sampled(self, flat: Flat, plan: SavePlan, generation: Generation) -> tuple[int, ...]:
        """Return checksums for the comparison between ranks; none, with a warning, if they can't be taken."""
        try:
            return self._comparer.sample(flat, plan, generation)
        except Exception as error:
            log.warning(
                "step %d: tensors are not compared between ranks, their checksums failed: %r", generation.step, error
            )
            return ()

    def _packed(self, prepared: Prepared) -> Prepared:
        """Return `prepared` with its values packed for its plan."""
        values = pack(
            prepared.flat,
            prepared.extra,
            self._config.allow_torch_save,
            self._paths,
            assumed_bytes=prepared.plan.assumed_bytes,
            sample=prepared.sample,
        )
        return replace(prepared, values=values)

    def _stop_sharing_if_split(self) -> None:
        """Stops dividing the storage once the tags of a generation show that ranks relied on tensors that others lack.

        From then on such a rank stores everything, under tag 0. A rank that sees tag 0 stops too, even if the shards of
        that generation are recycled by then.
        """
        node_ranks = self._topology.node_ranks
        if not self._planner.dedup or len(node_ranks) == 1:
            return
        tags: dict[Generation, set[int]] = {}
        for one in self._store.scan():
            if one.shard.generation.nonce == self._writer.launch.nonce and one.shard.rank in node_ranks:
                tags.setdefault(one.shard.generation, set()).add(one.tag)
        if any(len(found) > 1 or 0 in found for found in tags.values()):
            log.warning("keys no longer agree between ranks: from now on each rank stores all of its own tensors")
            self._planner.dedup = False


def check_mapping(what: str, value: object) -> None:
    """Raise ConfigError if `value` is no mapping."""
    if not isinstance(value, Mapping):
        raise ConfigError(f"{what}: expected a mapping, found a {type(value).__name__}")
