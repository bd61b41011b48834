"""Holds the internals of a Checkpointer, which CheckpointManager and flashckpt.dcp use too."""

from __future__ import annotations

import contextlib
import logging
import os
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flashckpt.collector import resume_collector
from flashckpt.errors import ClosedError, ConfigError, ConflictError, NotFoundError
from flashckpt.load.context import LoadContext
from flashckpt.load.readback import read_back
from flashckpt.save.outcomes import Outcomes
from flashckpt.save.saver import Saver
from flashckpt.start.closing import Parts
from flashckpt.start.job_claim import JobClaim
from flashckpt.start.opening import open_all
from flashckpt.start.turns import Turn, Turns
from flashckpt.store.owner import Owner
from flashckpt.types import ShardId

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch.distributed as dist

    from flashckpt.config import Settings
    from flashckpt.load.memory import NodeMemory
    from flashckpt.ranks.group import PrivateGroup
    from flashckpt.ranks.topology import Topology
    from flashckpt.save.flush_news import FlushNews
    from flashckpt.save.handle import SaveHandle
    from flashckpt.save.own_slots import Slots
    from flashckpt.save.replication_news import ReplicationNews
    from flashckpt.store.slots import SlotStore
    from flashckpt.types import Launch, Session

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DcpOrigin:
    """Describes a trainer to a process that DCP spawned for it, so that the process can write in the trainer's name."""

    settings: Settings
    launch: Launch
    topology: Topology
    session: Session | None  # None if there is no agent
    process: str  # identity of the trainer


class Internals:
    """Holds what a rank keeps open from the start of its Checkpointer to its end. Get it with `internals_of`.

    It has two stages, `saver` and `claim`. If FLASHCKPT_DISABLE is set, nothing is open: check `disabled` first.
    """

    settings: Settings  # `job` is the one that the group agreed on
    group: PrivateGroup
    store: SlotStore
    topology: Topology
    threads: int
    slots: Slots
    saver: Saver
    claim: JobClaim
    _memory: NodeMemory

    def __init__(self, settings: Settings, process_group: dist.ProcessGroup | None) -> None:
        self.settings = settings
        self.outcomes = Outcomes(settings.config)
        self.raises_late_failures = True  # save() raises them with on_save_error="raise"; a manager does it itself
        self.turns = Turns(lambda broken: None, resume_collector)
        self.closed = self._all_closed = False
        self._parts: Parts | None = None  # None: FLASHCKPT_DISABLE is set
        self._dropped: weakref.finalize[[], Internals] | None = None
        if settings.disabled:
            log.warning("FLASHCKPT_DISABLE is set: nothing is saved or loaded")
            return
        undo = contextlib.ExitStack()
        try:
            self._open(process_group, undo)
        except BaseException:
            self.closed = self._all_closed = True
            undo.close()
            resume_collector()
            raise

    def _open(self, process_group: dist.ProcessGroup | None, undo: contextlib.ExitStack) -> None:
        opened = open_all(self.settings, process_group, undo)
        settings = self.settings = opened.settings
        self.group, self.store, self.topology = opened.group, opened.store, opened.topology
        self.threads, self.slots, self._memory = opened.threads, opened.slots, opened.memory
        self.outcomes.belong_to(f"job {settings.job!r}, rank {opened.topology.rank}")
        self.slots.on_overtaken = self.outcomes.note_overtaken
        self.saver = Saver(settings, self.topology, self.group, self.store, self.slots, self.threads, self.outcomes)
        self.claim = JobClaim(settings, self.group, self.topology, self.slots, self.store, self.saver)
        self.turns = Turns(*_repairs(self.group, self.saver))
        self._parts = Parts(
            settings.job,
            self.group,
            self.slots,
            self.saver.writer,
            self.store,
            self.saver.overlap,
            self.saver.prewarming,
        )
        self._dropped = weakref.finalize(self, self._parts.drop)
        self._dropped.atexit = False  # when the process exits, the agent notices that

    # --- calls ----------------------------------------------------------------------------------------------

    def turn(self, doing: str) -> Turn:
        """Return the context in which a public call runs. No other call runs in it, and it first repairs what an
        interrupted call left."""
        self.check_open()
        if not self.disabled:
            self.group.refuse_if_replaced(doing)
        return self.turns.take(doing, 0 if self.disabled else self.group.rounds)

    @property
    def is_busy(self) -> bool:
        """Return True if a call is under way, in this thread or another."""
        return self.turns.is_busy

    def check_open(self) -> None:
        """Raise ClosedError if this was closed, and ConflictError in a forked child."""
        if self.closed:
            raise ClosedError("this Checkpointer was closed")
        if self.is_forked:
            raise ConflictError(
                f"this Checkpointer belongs to the process that made it, but its fork {os.getpid()} used it",
                hint="make a Checkpointer of its own in the child",
            )

    def check_enabled(self) -> None:
        """Raise ClosedError if FLASHCKPT_DISABLE is set, and as `check_open` does."""
        self.check_open()
        if self.disabled:
            raise ClosedError("disabled by FLASHCKPT_DISABLE", hint="unset FLASHCKPT_DISABLE")

    def refuse_to_write(self, doing: str) -> None:
        """Raise ConfigError if `load_only` is set."""
        if self.settings.config.load_only:
            raise ConfigError(
                f"{doing}: expected a job that may be written to, found load_only=True",
                hint="leave load_only out of CheckpointConfig",
            )

    def reads_only(self, read_only: bool | None, take_over: bool) -> bool:
        """Return True if a load with these arguments leaves the job as it is."""
        chosen = self.settings.config.load_only if read_only is None else read_only
        if chosen and take_over:
            why = "config.load_only" if read_only is None else "read_only=True"
            raise ConfigError(f"load: expected {why} or take_over=True, found both", hint="leave one of them out")
        return chosen

    # --- stages ---------------------------------------------------------------------------------------------

    def settle(self, timeout: float | None = None) -> None:
        """Wait until no overlapped save is under way. Raise what that save raised. Local."""
        if not self.disabled:
            self.saver.settle(timeout)

    def context(self, *, alone: bool = False) -> LoadContext:
        """Return what a load needs. With `alone` it works without the other ranks, from this node's memory."""
        self.check_enabled()
        config = self.settings.config
        options: dict[str, Any] = {
            "job": self.settings.job,
            "verify": self.settings.verifies,
            "threads": self.threads,
            # Less than the group waits, so that the rank that fails reports the error before the others time out.
            "timeout": 0.9 * config.start_timeout,
            "warns": config.same_on_ranks == "check",
        }
        if alone:
            return LoadContext.alone(self.topology, self.store, self._memory, **options)
        return LoadContext.together(self.topology, self.group, self.store, self._memory, **options)

    def read_back(self, handle: SaveHandle) -> int:
        """Read this rank's shard of a sealed save, check every byte, and return the number of bytes."""
        with self.turn("read_back"):
            self.check_enabled()
            if handle.generation is None:
                raise NotFoundError(f"step {handle.step}: {handle.reason or 'was not saved'}", step=handle.step)
            shard = ShardId(handle.generation, self.topology.rank, self.topology.world)
            return read_back(self.store, shard, self.settings.job, self.threads)

    def raise_late_failure(self, handle: SaveHandle | None) -> None:
        """Do what `Saver.raise_late_failure` does. Does nothing if FLASHCKPT_DISABLE is set."""
        if not self.disabled:
            self.saver.raise_late_failure(handle)

    def origin(self) -> DcpOrigin:
        """Return what a process that DCP spawns needs to write in this trainer's name."""
        self.check_enabled()
        process = Owner.current().identity
        return DcpOrigin(self.settings, self.slots.launch, self.topology, self.slots.session, process)

    # --- views ----------------------------------------------------------------------------------------------

    @property
    def disabled(self) -> bool:
        """Return True if FLASHCKPT_DISABLE is set."""
        return self.settings.disabled

    @property
    def launch_name(self) -> tuple[str, int]:
        """Return a name that all ranks of this launch share and no other launch has, and the number of these ranks."""
        return f"{self.settings.job}/{self.slots.launch.nonce:016x}", self.topology.world

    @property
    def flush_news(self) -> FlushNews | None:
        """Return the news of flushes, or None if FLASHCKPT_DISABLE is set."""
        return None if self.disabled else self.slots.flushes

    @property
    def replication_news(self) -> ReplicationNews | None:
        """Return the news of replication, or None if FLASHCKPT_DISABLE is set."""
        return None if self.disabled else self.slots.replication

    # --- end ------------------------------------------------------------------------------------------------

    @property
    def is_forked(self) -> bool:
        """Return True in a forked child. Its copy belongs to the parent and can only be closed."""
        return self._parts is not None and self._parts.is_forked

    def close(self, timeout: float | None) -> None:
        """Do what `Checkpointer.close` says."""
        self.closed = True
        if self._all_closed:
            return
        if self._parts is not None:
            missed = None if self._parts.is_forked else self.group.roll.missed()
            if missed is not None:
                who = f"job {self.settings.job!r}, rank {self.topology.rank} of {self.topology.world}"
                log.error("%s: %s", who, missed.why)
            self._parts.close(self.settings.config.save_timeout if timeout is None else timeout)
            if not self._parts.is_forked:
                self.outcomes.say_goodbye()
        self._all_closed = True
        if self._dropped is not None:
            self._dropped.detach()


def _repairs(group: PrivateGroup, saver: Saver) -> tuple[Callable[[Turn], None], Callable[[], None]]:
    """Return a function that repairs what an interrupted call left, and a function that every call begins with.

    Neither refers to the Internals, so that these are freed as soon as the last reference to them is dropped.
    """

    def mend(broken: Turn) -> None:
        if not broken.has_failed:
            group.leave(broken.doing, broken.since)
        saver.mend(broken.doing)

    def begin() -> None:
        resume_collector()  # an exception may have ended a call before it resumed it
        saver.settle()

    return mend, begin
