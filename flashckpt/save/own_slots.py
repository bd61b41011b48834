"""Gives a rank the slots that it writes its shards into, and tells the other ranks what it sealed.

`OwnSlots`: this process manages its slots itself (`agent="off"`, one node). `AgentSlots`, in agent_slots.py: the
node's agent manages them, and replicates what is sealed in them.
"""

from __future__ import annotations

import contextlib
import logging
import time
from typing import TYPE_CHECKING, Protocol

from flashckpt.errors import BusyError, ConfigError, FlashError
from flashckpt.failpoints import failpoint
from flashckpt.save.flush_news import FlushNews
from flashckpt.save.patience import Patience
from flashckpt.save.replication_news import ReplicationNews
from flashckpt.save.retention import GenerationState, GenerationVerdict, judge, releasable
from flashckpt.store.owner import Owner, is_dead
from flashckpt.types import age_order

if TYPE_CHECKING:
    from collections.abc import Callable

    from flashckpt.config import CheckpointConfig
    from flashckpt.protocol.line import Line
    from flashckpt.save.handle import SaveHandle
    from flashckpt.store.slots import Sealed, Slot, SlotStore
    from flashckpt.types import Claimant, Generation, Launch, Session, ShardId

log = logging.getLogger(__name__)

_POLL_SECONDS = 0.002


class SlotMemory(Protocol):
    """Keeps views of mapped slots beyond a save, because they are registered with a device's driver."""

    def pin(self, data: memoryview) -> None:
        """Register a slot that was just mapped; it may stay mapped until `keep_only` or the end. Does not raise."""

    def keep_only(self, size_bytes: int) -> None:
        """Release all views of slots of another size: slots of this size are about to replace them."""


class Slots(Protocol):
    """The interface by which a writer uses slots. Every method has a deadline of its own."""

    memory: SlotMemory | None
    """Set by the writer, before any slot is made."""
    patience: Patience
    """Replaced once the ranks know each other."""

    flushes: FlushNews
    """The results of flushes to persist_dir."""

    replication: ReplicationNews
    """The progress of replication."""

    on_overtaken: Callable[[str], None]
    """Called, in any thread, with the reason, once a newer launch has taken the job over from this one."""

    @property
    def launch(self) -> Launch:
        """The launch that shards are written for."""

    @property
    def session(self) -> Session | None:
        """What the agents know of the launch; None without an agent."""

    @property
    def hosted_ranks(self) -> tuple[int, ...]:
        """Ranks of other nodes whose replicas lie on this one."""

    def enter(self, launch: Launch) -> None:
        """Switches to another launch, from the next call on."""

    def claimants(self) -> tuple[Claimant, ...]:
        """Returns this node's live trainers of the launch that its agent works for. Empty without an agent."""

    def begin(self) -> None:
        """Takes the node over for this launch, so that older ones change nothing any more. May be called again."""

    def acquire(self, shard: ShardId, size_bytes: int) -> Slot:
        """Returns a slot with no other writer. Raises BusyError, NoSpaceError, FencedError, AgentError."""

    def sealed(self, sealed: Sealed) -> None:
        """Tells that the shard lies in sealed/. Never raises: others find the shard there even if they are not told."""

    def void(self, generation: Generation) -> None:
        """Tells the others that this rank will not complete the generation, so that they do not wait. Never raises."""

    def prepare(self, size_bytes: int, rank: int) -> None:
        """Makes, maps and faults the slots that this rank still lacks, ahead of the first save. May run in a thread."""

    def follow(self, handle: SaveHandle) -> None:
        """Tells the handle of every further level that its generation reaches."""

    def ended_ranks(self) -> dict[int, str]:
        """Returns the ranks that are known to have ended or closed, and how, for a message. Never raises."""

    def flush(self, step: int | None) -> Generation:
        """Asks for a flush of the newest committed generation, or of that of `step`. Does not wait."""

    def put_line(self, line: Line, base: Generation | None) -> None:
        """Keeps the line on this node: what it abandons is dead. `base` is the generation that was loaded."""

    def close(self, timeout: float) -> None:
        """Closes. What has not ended within `timeout` seconds ends by itself. May be called again."""


class OwnSlots:
    """Slots that this process manages. Ranks of a node see each other's progress in the directory they share."""

    def __init__(self, store: SlotStore, launch: Launch, config: CheckpointConfig) -> None:
        self._launch = launch
        self._store = store
        self._config = config
        self._trimmed = False
        self.memory: SlotMemory | None = None
        self.flushes = FlushNews()
        self.replication = ReplicationNews()
        self.patience = Patience()
        self.on_overtaken: Callable[[str], None] = lambda reason: None

    @property
    def launch(self) -> Launch:
        return self._launch

    @property
    def session(self) -> None:
        return None

    @property
    def hosted_ranks(self) -> tuple[int, ...]:
        return ()

    def enter(self, launch: Launch) -> None:
        self._launch = launch

    def claimants(self) -> tuple[Claimant, ...]:
        return ()

    def begin(self) -> None:
        """Does nothing: without an agent, put_line() takes the node over."""

    def acquire(self, shard: ShardId, size_bytes: int) -> Slot:
        """Recycles a slot whose shard may be freed; waits or refuses if none may be freed yet."""
        if self.memory is not None:
            self.memory.keep_only(size_bytes)
        began = time.monotonic()
        me = Owner.current()
        while True:
            scan, verdicts = judge_store(self._store, self.launch)
            free = releasable(verdicts, self._config.keep_memory)
            mine = [one for one in scan if one.writer == me]
            self._release_left_behind([one for one in scan if one.writer != me], free, shard)
            if len(mine) < self._config.slots:
                self.patience.served()
                return self._store.claim(size_bytes)
            if not self._trimmed:
                # All slots of this rank exist: free slots that earlier processes left are not needed any more.
                self._trimmed = True
                self._store.trim()
            oldest = min((one for one in mine if one.shard.generation in free), key=_age, default=None)
            if oldest is not None:
                failpoint("before_recycle")
                self._store.release(oldest)
                self.patience.served()
                return self._store.claim(size_bytes)
            self._wait_or_refuse(shard, verdicts, began)

    def sealed(self, sealed: Sealed) -> None:
        """Does nothing: the others see the shard in the directory."""

    def void(self, generation: Generation) -> None:
        """Marks the generation. If that fails (the directory is gone), the others find out at this rank's next save."""
        with contextlib.suppress(FlashError, OSError):
            self._store.mark_void(generation)

    def prepare(self, size_bytes: int, rank: int) -> None:
        on_mapped = None
        if self.memory is not None:
            self.memory.keep_only(size_bytes)
            on_mapped = self.memory.pin
        self._store.prepare(size_bytes, lacking(self._store, rank, self._config.slots), on_mapped)

    def follow(self, handle: SaveHandle) -> None:
        """Does nothing: without an agent, no level above SEALED is reached."""

    def ended_ranks(self) -> dict[int, str]:
        """Returns nothing: without an agent, nothing watches the processes."""
        return {}

    def flush(self, step: int | None) -> Generation:
        raise ConfigError(
            "flush: expected an agent, which writes the persistent tier, found agent='off'",
            hint="leave CheckpointConfig(agent=…) and FLASHCKPT_AGENT at their defaults",
        )

    def put_line(self, line: Line, base: Generation | None) -> None:
        self._store.write_line(line)

    def close(self, timeout: float) -> None:
        pass

    def _release_left_behind(self, others: list[Sealed], free: set[Generation], shard: ShardId) -> None:
        """Gives the slots of ended processes back to the pool.

        Each rank takes those of its own number (modulo the world), so that ranks do not race for them. After a restart
        with the same world, a rank finds a slot of its own size.
        """
        for one in others:
            if one.shard.generation in free and one.shard.rank % shard.world == shard.rank and is_dead(one.writer):
                self._store.release(one)

    def _wait_or_refuse(self, shard: ShardId, verdicts: dict[Generation, GenerationVerdict], began: float) -> None:
        step, waited = shard.generation.step, time.monotonic() - began
        may_wait = self._config.on_busy == "wait" and self.patience.is_left
        in_time = may_wait and waited < self._config.save_timeout
        if in_time and self.patience.look(step, waited, lambda: _pending(verdicts)):
            time.sleep(_POLL_SECONDS)
            return
        if may_wait:
            self.patience.exhaust()
        raise BusyError(
            f"{shard}: all {self._config.slots} slots hold generations that are still needed; {_pending(verdicts)}"
            f"{self.patience.who(step)}",
            hint="save less often, raise slots_per_rank, or look for the ranks that lag",
            step=step,
        )


def _pending(verdicts: dict[Generation, GenerationVerdict]) -> str:
    return "; ".join(f"{g}: {v.reason}" for g, v in verdicts.items() if v.state is GenerationState.PENDING)


def lacking(store: SlotStore, rank: int, slots: int) -> int:
    """Returns how many of its slots a rank does not have yet. Shards of earlier launches count: their slots are
    reused."""
    return max(0, slots - sum(one.shard.rank == rank for one in store.scan()))


def judge_store(store: SlotStore, launch: Launch) -> tuple[tuple[Sealed, ...], dict[Generation, GenerationVerdict]]:
    """Returns the sealed shards of this node, and the verdict on each generation among them."""
    scan = store.scan()
    tags = {one.shard: one.tag for one in scan}
    lines = store.read_lines()
    roots = {line.head: line.root for line in lines}
    return scan, judge(tags, launch, lines[-1] if lines else None, store.voids(), roots)


def _age(sealed: Sealed) -> tuple[int, int, int, int]:
    return age_order(sealed.shard.generation)
