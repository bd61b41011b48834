"""Writes one shard: claim a slot → snapshot into it → seal it. Used by Checkpointer and by the DCP writer."""

from __future__ import annotations

import contextlib
import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flashckpt.devices import Copier
from flashckpt.errors import BusyError, FencedError, FlashError
from flashckpt.failpoints import failpoint
from flashckpt.format.shard import DEFAULT_CHUNK_BYTES, Geometry, encode_header, geometry, seal_bytes
from flashckpt.save.handle import SaveTimings
from flashckpt.save.retention import State, Verdict, age_order, judge, releasable
from flashckpt.save.snapshot import snapshot
from flashckpt.store.owner import Owner, is_dead

if TYPE_CHECKING:
    from collections.abc import Callable

    from flashckpt.config import CheckpointConfig
    from flashckpt.save.plan import SavePlan
    from flashckpt.state.flatten import Flat
    from flashckpt.store.slots import Sealed, Slot, SlotStore
    from flashckpt.types import Generation, Launch, ShardId

log = logging.getLogger(__name__)

_POLL_SECONDS = 0.002


@dataclass(frozen=True, slots=True)
class Written:
    """A sealed shard and what it cost."""

    sealed: Sealed
    timings: SaveTimings


class ShardWriter:
    """Owns a rank's use of its slots."""

    def __init__(self, store: SlotStore, job: str, launch: Launch, config: CheckpointConfig, threads: int) -> None:
        self.launch = launch
        self._store = store
        self._job = job
        self._config = config
        self._threads = threads
        self._copier = Copier()
        self._values_room = 0
        self._trimmed = False

    def write(
        self,
        shard: ShardId,
        plan: SavePlan,
        flat: Flat,
        values: bytes,
        on_staged: Callable[[], None] = lambda: None,
    ) -> Written:
        """Raises NoSpaceError, BusyError or FencedError; whatever it raises, no earlier shard was touched."""
        began = time.perf_counter()
        self._refuse_if_fenced()
        place = self.geometry(plan, values)
        slot = self._claim(shard, place.file_length_bytes)
        try:
            claimed = time.perf_counter()
            data = slot.view[place.data_offset_bytes :]
            crcs = snapshot(
                data,
                plan,
                flat,
                values,
                chunk_bytes=DEFAULT_CHUNK_BYTES,
                threads=self._threads,
                copier=self._copier,
            )
            data.release()
            on_staged()
            copied = time.perf_counter()
            header = encode_header(
                job=self._job,
                shard=shard,
                layout_bytes=plan.layout_bytes,
                layout_fingerprint=plan.layout_fingerprint,
                values_offset_bytes=plan.tensor_bytes,
                values_length_bytes=len(values),
                chunk_bytes=DEFAULT_CHUNK_BYTES,
                chunk_crcs=crcs,
                saved_at=time.time(),
            )
            failpoint("before_header")
            # Again: this process may have been stopped while it copied, and woken up in another launch's time.
            self._refuse_if_fenced()
            seal_bytes(slot.view, header, place)
            failpoint("before_seal")
            sealed = self._store.seal(slot, shard, plan.tag)
            failpoint("after_seal")
        except BaseException:
            with contextlib.suppress(Exception):
                self._store.abandon(slot)
            raise
        return Written(sealed, SaveTimings(0.0, claimed - began, copied - claimed, time.perf_counter() - copied))

    def geometry(self, plan: SavePlan, values: bytes) -> Geometry:
        # The blob's length wobbles from save to save (a counter gains a digit): leave room, so that the slot
        # keeps its size and its mapping.
        if len(values) > self._values_room:
            self._values_room = (len(values) * 5 // 4 + 4096) // 4096 * 4096
        return geometry(
            len(plan.layout_bytes),
            plan.tensor_bytes + self._values_room,
            self._store.granule_bytes,
            DEFAULT_CHUNK_BYTES,
        )

    def prepare(self, size_bytes: int) -> None:
        """Makes ready as many slots as this rank still lacks."""
        me = Owner.current()
        mine = sum(one.writer == me for one in self._store.scan())
        self._store.prepare(size_bytes, max(0, self._config.slots_per_rank - mine))

    def void(self, generation: Generation) -> None:
        """Tells the other ranks of the node that this one will not complete the generation.

        Where even that can't be done (the directory is gone), they find out at this rank's next save or at a deadline.
        """
        with contextlib.suppress(FlashError, OSError):
            self._store.mark_void(generation)

    def verdicts(self) -> tuple[tuple[Sealed, ...], dict[Generation, Verdict]]:
        """The sealed shards of this node, and the state of each generation among them."""
        scan = self._store.scan()
        tags = {one.shard: one.tag for one in scan}
        return scan, judge(tags, self.launch, self._store.read_fence(), self._store.voids())

    def wait_until_settled(self) -> None:
        """Waits, up to save_timeout, until no generation of this launch is half done: other ranks may lag a little."""
        deadline = time.monotonic() + self._config.save_timeout
        while time.monotonic() < deadline:
            _, verdicts = self.verdicts()
            if not any(verdict.state is State.PENDING for verdict in verdicts.values()):
                return
            time.sleep(_POLL_SECONDS)

    def close(self) -> None:
        self._copier.close()

    def _refuse_if_fenced(self) -> None:
        fence = self._store.read_fence()
        if fence is not None and fence.epoch > self.launch.epoch:
            raise FencedError(
                f"job {self._job!r}: a launch of epoch {fence.epoch} has taken over from this one "
                f"(epoch {self.launch.epoch})",
                hint="this process belongs to a launch that was replaced; end it",
            )

    def _claim(self, shard: ShardId, size_bytes: int) -> Slot:
        """A slot to write into, recycled from what may go; waits or refuses where nothing may go yet."""
        deadline = time.monotonic() + self._config.save_timeout
        me = Owner.current()
        while True:
            scan, verdicts = self.verdicts()
            free = releasable(verdicts)
            mine = [one for one in scan if one.writer == me]
            self._release_left_behind([one for one in scan if one.writer != me], free, shard)
            if len(mine) < self._config.slots_per_rank:
                return self._store.claim(size_bytes)
            if not self._trimmed:
                # All slots of our own: what earlier processes left (of another world size, say) is nobody's any more.
                self._trimmed = True
                self._store.trim()
            oldest = min((one for one in mine if one.shard.generation in free), key=_age, default=None)
            if oldest is not None:
                failpoint("before_recycle")
                self._store.release(oldest)
                return self._store.claim(size_bytes)
            self._wait_or_refuse(shard, verdicts, deadline)

    def _release_left_behind(self, others: list[Sealed], free: set[Generation], shard: ShardId) -> None:
        """Gives shards of processes that are gone back to the pool.

        Each rank takes those of its own number (modulo the world), so that ranks do not race for them and,
        after a restart with the same world, finds a slot of just its size.
        """
        for one in others:
            if one.shard.generation in free and one.shard.rank % shard.world == shard.rank and is_dead(one.writer):
                self._store.release(one)

    def _wait_or_refuse(self, shard: ShardId, verdicts: dict[Generation, Verdict], deadline: float) -> None:
        pending = "; ".join(f"{g}: {v.reason}" for g, v in verdicts.items() if v.state is State.PENDING)
        if self._config.on_busy == "skip" or time.monotonic() > deadline:
            raise BusyError(
                f"{shard}: all {self._config.slots_per_rank} slots hold generations that are still needed; {pending}",
                hint="save less often, raise slots_per_rank, or look for the ranks that lag",
                step=shard.generation.step,
            )
        time.sleep(_POLL_SECONDS)


def _age(sealed: Sealed) -> tuple[int, int, int]:
    return age_order(sealed.shard.generation)
