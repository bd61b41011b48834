"""Opens what a Checkpointer needs: group → store → topology → launch → agents → slots. Collective."""

from __future__ import annotations

import dataclasses
import logging
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch.distributed as dist

from flashckpt.errors import ConfigError
from flashckpt.load.memory import OwnMemory
from flashckpt.ranks.group import PrivateGroup
from flashckpt.save.own_slots import OwnSlots
from flashckpt.save.patience import Patience
from flashckpt.start.launch import agree_launch, agree_topology
from flashckpt.start.take_over import highest_epoch
from flashckpt.store.slots import SlotStore
from flashckpt.workers import on_main_thread, run_in_thread

if TYPE_CHECKING:
    import contextlib

    from flashckpt.config import Settings
    from flashckpt.load.memory import NodeMemory
    from flashckpt.ranks.topology import Topology
    from flashckpt.save.own_slots import Slots
    from flashckpt.types import Launch

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Opened:
    """The parts that a rank holds until its Checkpointer is closed."""

    settings: Settings  # with the job that the group saves for
    group: PrivateGroup
    store: SlotStore
    topology: Topology
    threads: int
    slots: Slots
    memory: NodeMemory


def open_all(settings: Settings, process_group: dist.ProcessGroup | None, undo: contextlib.ExitStack) -> Opened:
    """Opens all parts. `undo`, which the caller owns, gets callbacks that close what is open if anything fails."""
    config = settings.config
    _refuse_lonely_rank(settings, process_group)
    group = PrivateGroup(process_group, config.start_timeout, undo)
    settings = dataclasses.replace(settings, job=_job_of(group, settings))
    store = SlotStore.open(
        settings.memory_dir,
        settings.job,
        budget_bytes=config.memory_budget_bytes,
        threads=config.threads or 2,
        undo=undo,
    )
    undo.callback(store.close)
    topology = agree_topology(group, settings, store.directory_id)
    threads = config.threads or default_threads(len(topology.node_ranks))
    launch = agree_launch(group, topology, highest_epoch(store, 0))
    group.enroll(f"{settings.job}/{launch.nonce:016x}")
    slots, memory = _open_slots(group, settings, topology, store, launch, undo)
    group.watch(slots.ended_ranks)
    slots.patience = Patience(group.roll, slots.ended_ranks)
    return Opened(settings, group, store, topology, threads, slots, memory)


def _refuse_lonely_rank(settings: Settings, process_group: dist.ProcessGroup | None) -> None:
    """Refuse a rank of a launcher that has no process group: each would be a job of one, under the same name."""
    is_initialized = dist.is_available() and dist.is_initialized()
    if process_group is not None:
        return
    if settings.single_process:
        if is_initialized and dist.get_world_size() > 1:
            raise ConfigError(
                f"single_process: expected no process group, found one of {dist.get_world_size()} ranks",
                hint="leave single_process out, or pass a process_group of this rank alone",
            )
    elif settings.launcher_world > 1 and not is_initialized:
        raise ConfigError(
            f"job {settings.job!r}: expected a process group of {settings.launcher_world} ranks (WORLD_SIZE), found "
            "that torch.distributed is not initialised: each rank would save and load alone",
            hint="call torch.distributed.init_process_group() before you make the Checkpointer or manager, or pass "
            "process_group=; a tool that works alone beside the ranks sets single_process=True "
            "(FLASHCKPT_SINGLE_PROCESS=1)",
        )


def default_threads(ranks_on_node: int) -> int:
    """Returns this rank's share of the cores that this process may use: 1 to 8."""
    return max(1, min(8, len(os.sched_getaffinity(0)) // ranks_on_node))


def _job_of(group: PrivateGroup, settings: Settings) -> str:
    """Returns the job's name. A group of only some ranks of the world gets its ranks added, if the user named no
    job."""
    if settings.config.job is not None or group.spans_the_world:
        return settings.job
    return f"{settings.job}-ranks-{'-'.join(map(str, group.global_ranks[:8]))}-of-{group.world}"


def _open_slots(
    group: PrivateGroup,
    settings: Settings,
    topology: Topology,
    store: SlotStore,
    launch: Launch,
    undo: contextlib.ExitStack,
) -> tuple[Slots, NodeMemory]:
    if settings.uses_agent:
        group.together("starting the agents", lambda: _start_agent(settings, topology))
        from flashckpt.start.join import join

        return join(group, settings, topology, store, launch, undo)
    reclaimed = store.reclaim()
    if reclaimed.files:
        log.info("reclaimed %d slots (%d bytes) of processes that have ended", reclaimed.files, reclaimed.bytes)
    return OwnSlots(store, launch, settings.config), OwnMemory(store, settings.job, settings.node_id)


def _start_agent(settings: Settings, topology: Topology) -> None:
    """Starts this node's agent, on the node's lowest rank, and meanwhile imports what joining it needs.

    Runs in a thread: an exception inside gRPC, or inside its import, would leave gRPC unusable in this process.
    """

    def start() -> None:
        # Imported here: without an agent no gRPC is needed.
        from flashckpt.agent.start import ensure_agent, options_of, stage_timeout
        from flashckpt.rpc.settings import prepare_trainer

        prepare_trainer()
        if topology.is_leader:
            ensure_agent(options_of(settings), stage_timeout(settings.config.start_timeout), meanwhile=_load_join)
        else:
            _load_join()

    if on_main_thread():
        run_in_thread(start, "flashckpt-start")
    else:
        start()


def _load_join() -> None:
    import flashckpt.start.join  # noqa: F401
