"""A node's memory as a load sees it: what lies in it, and how what it lacks comes into it."""

from __future__ import annotations

import contextlib
import logging
import os
from typing import TYPE_CHECKING, Protocol

from flashckpt.errors import CorruptShardError, FlashError, NotFoundError, RetrieveError
from flashckpt.move.outgoing import hold
from flashckpt.protocol.node_inventory import Holding, NodeInventory
from flashckpt.types import Level

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from flashckpt.load.holders import Holders
    from flashckpt.store.slots import SlotStore
    from flashckpt.types import Retrieval, ShardId

log = logging.getLogger(__name__)


class NodeMemory(Protocol):
    """What one rank of a node asks on behalf of all its ranks. One call at a time."""

    @property
    def holders(self) -> Callable[[], Holders] | None:
        """How each rank asks other nodes for itself, past this memory. None: it can't, or is not meant to."""

    def inventory(self, timeout: float) -> NodeInventory:
        """What lies here now, heads checked. It may be less by the time it is read: a bad copy is set aside.

        AgentError where there is nobody to ask within `timeout` seconds.
        """

    def retrieve(
        self, retrievals: Sequence[Retrieval], timeout: float, on_progress: Callable[[int, int], None]
    ) -> AbstractContextManager[Mapping[ShardId, str]]:
        """Brings what is asked for into this node's memory, every chunk verified.

        The context gives for each shard where it lies: "" = sealed, as any other (`store.find`, and it stays); else
        the name for `store.open_fetched`. IMPORTANT: such a file has memory only behind its head and the chunks that
        were asked for, reads as zeros elsewhere, and goes when the context is left: every rank of the node has to
        have opened and read it by then.

        `on_progress(bytes done, bytes in all)` is called from this thread while entering, a few times a second.

        Raises while entering, and then nothing is left behind but whole shards: RetrieveError where something can't
        be had, NoSpaceError where there is no memory for it, DeadlineError after `timeout` seconds, AgentError where
        the agent is gone, FencedError where a newer launch has begun.
        """


class OwnMemory:
    """Of a node without an agent: there is nobody to fetch from."""

    holders = None

    def __init__(self, store: SlotStore, job: str, node_id: str) -> None:
        self._store = store
        self._job = job
        self._node_id = node_id

    def inventory(self, timeout: float) -> NodeInventory:
        committed = {record.generation for record in self._store.read_records()}
        holdings = []
        damaged: list[tuple[ShardId, str]] = []
        for sealed in self._store.scan():
            try:
                fd = self._store.open_shard(sealed)
            except NotFoundError:
                continue
            try:
                held = hold(fd, sealed, job=self._job)
            except FlashError as error:
                if isinstance(error, CorruptShardError):
                    self._store.quarantine(sealed, error.message)
                damaged.append((sealed.shard, error.message))
                continue
            finally:
                os.close(fd)
            level = Level.REPLICATED if sealed.shard.generation in committed else Level.SEALED
            holdings.append(Holding(held, level, verified=False))
        quarantined = self._store.status().quarantined_files
        lines, damaged_lines = self._store.read_lines(), len(self._store.damaged_lines())
        return NodeInventory(self._node_id, tuple(holdings), lines, quarantined, tuple(damaged), (), damaged_lines)

    @contextlib.contextmanager
    def retrieve(
        self, retrievals: Sequence[Retrieval], timeout: float, on_progress: Callable[[int, int], None]
    ) -> Iterator[Mapping[ShardId, str]]:
        if retrievals:
            reason = "this node has no agent that could fetch it"
            raise RetrieveError(
                f"{len(retrievals)} shards that node {self._node_id!r} lacks: {reason}, first {retrievals[0].shard}",
                hint="leave agent= at its default to fetch from other nodes",
                problems=tuple((one.shard, (("", reason),)) for one in retrievals),
            )
        yield {}
