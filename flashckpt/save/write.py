"""Writes one shard: claim a slot → snapshot into it → seal it. Used by Checkpointer and by the DCP writer."""

from __future__ import annotations

import contextlib
import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flashckpt.devices import Copier
from flashckpt.errors import FencedError
from flashckpt.failpoints import failpoint
from flashckpt.format.shard import DEFAULT_CHUNK_BYTES, Geometry, encode_header, geometry, seal_bytes
from flashckpt.protocol.line import begun
from flashckpt.save.handle import SaveTimings
from flashckpt.save.own_slots import Slots, judge_store
from flashckpt.save.retention import GenerationState, GenerationVerdict
from flashckpt.save.snapshot import devices_of, snapshot

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch

    from flashckpt.config import CheckpointConfig
    from flashckpt.protocol.line import Line
    from flashckpt.save.deferred import Deferred
    from flashckpt.save.plan import SavePlan
    from flashckpt.state.flatten import Flat
    from flashckpt.store.slots import Sealed, SlotStore
    from flashckpt.types import Generation, Launch, ShardId

log = logging.getLogger(__name__)

_POLL_SECONDS = 0.002


@dataclass(frozen=True, slots=True)
class WrittenShard:
    """A sealed shard: its size, and how long the save took."""

    size_bytes: int  # of the shard's file; the agent may have released the shard since
    timings: SaveTimings


class ShardWriter:
    """Writes the shards of one rank into its slots."""

    def __init__(self, store: SlotStore, slots: Slots, job: str, config: CheckpointConfig, threads: int) -> None:
        self.slots = slots
        self._store = store
        self._job = job
        self._config = config
        self._threads = threads
        self._copier = Copier(bytes_per_second=config.device_copy_bytes_per_second, threads=threads)
        slots.memory = self._copier
        store.on_unlinked(self._copier.forget)
        self._values_room = 0
        self.due_line: Line | None = None
        """The line that the first shard of this launch puts, after a load that found nothing. None: the launch goes on
        from what lies on this node."""
        self.on_claimed: Callable[[Line], None] = lambda line: None
        """Called with the line, in the thread of the save, once it is put."""

    @property
    def launch(self) -> Launch:
        return self.slots.launch

    @property
    def device_copies(self) -> dict[str, str]:
        """Return device type → way that its tensors are copied into slots (devices/copier.py)."""
        return self._copier.ways

    def expect(self, flat: Flat) -> None:
        """Note the devices of a state to be saved, so that slots made ahead are registered with their drivers."""
        self._copier.expect(devices_of(flat))

    def write(
        self,
        shard: ShardId,
        plan: SavePlan,
        flat: Flat,
        values: bytes,
        deferred: Deferred | None = None,
        ready: Mapping[torch.device, torch.Event] | None = None,
    ) -> WrittenShard:
        """Write and seal a shard. Raises NoSpaceError, BusyError, ChangedError, FencedError. Earlier shards stay.

        `deferred` proves that the copy is the state at save(); None: no proof is needed, because the caller has a copy
        of its own. `ready`: see Copier.copy.
        """
        began = time.perf_counter()
        self._claim_line()
        place = self.geometry(plan, values)
        slot = self.slots.acquire(shard, place.file_length_bytes)
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
                ready=ready,
                deferred=deferred,
            )
            if deferred is not None:
                deferred.stage(data, crcs)
            data.release()
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
            # Again: this process may have been stopped while it copied, and another launch may have begun since.
            self._refuse_if_fenced()
            seal_bytes(slot.view, header, place)
            failpoint("before_seal")
            sealed = self._store.seal(slot, shard, plan.tag)
            failpoint("after_seal")
            self.slots.sealed(sealed)
        except BaseException as error:
            with contextlib.suppress(Exception):
                self._store.abandon(slot)
            if deferred is not None:
                deferred.blame(error)
            raise
        return WrittenShard(
            slot.size_bytes, SaveTimings(0.0, claimed - began, copied - claimed, time.perf_counter() - copied)
        )

    def geometry(self, plan: SavePlan, values: bytes) -> Geometry:
        # The length of the values varies from save to save (a counter gains a digit): leave room, so that the slot
        # keeps its size and its mapping.
        if len(values) > self._values_room:
            self._values_room = (len(values) * 5 // 4 + 4096) // 4096 * 4096
        return geometry(
            len(plan.layout_bytes),
            plan.tensor_bytes + self._values_room,
            self._store.granule_bytes,
            DEFAULT_CHUNK_BYTES,
        )

    def verdicts(self) -> tuple[tuple[Sealed, ...], dict[Generation, GenerationVerdict]]:
        return judge_store(self._store, self.launch)

    def wait_until_settled(self, ranks: Sequence[int]) -> None:
        """Waits up to save_timeout, until all `ranks` of this node have sealed every pending generation."""
        deadline = time.monotonic() + self._config.save_timeout
        while time.monotonic() < deadline:
            scan, verdicts = self.verdicts()
            sealed = {(one.shard.generation, one.shard.rank) for one in scan}
            pending = [g for g, verdict in verdicts.items() if verdict.state is GenerationState.PENDING]
            if not any((generation, rank) not in sealed for generation in pending for rank in ranks):
                return
            time.sleep(_POLL_SECONDS)

    def close(self) -> None:
        self._copier.close()

    def _claim_line(self) -> None:
        """Put the line before the first shard of a launch that has loaded nothing.

        A launch that saves nothing puts no line, and so claims nothing.
        """
        line = self._refuse_if_fenced()
        if line is None or line.head != self.launch:
            due = self.due_line
            if due is None or due.head != self.launch:
                due = line_from_here(self._store, self.launch)
            self.slots.put_line(due, None)
            self.on_claimed(due)

    def _refuse_if_fenced(self) -> Line | None:
        """Return the line in force. Raises FencedError if a newer launch has put it."""
        line = self._store.read_line()
        if line is not None and self.launch.is_older_than(line.head):
            raise FencedError(
                f"job {self._job!r}: a launch of epoch {line.head.epoch} has taken over from this one "
                f"(epoch {self.launch.epoch})",
                hint="this process belongs to a launch that was replaced; end it",
            )
        return line


def line_from_here(store: SlotStore, launch: Launch) -> Line:
    """Return the line of a launch that saves without a load: it goes on from whatever lies on this node.

    This abandons nothing. Older generations are freed once the launch has committed a newer one.
    """
    known = [one.shard.generation for one in store.scan()]
    known += [record.generation for record in store.read_records()]
    return begun(launch).including(store.read_line(), known)
