"""A node's memory as a load uses it: its inventory, and the retrieval of what it lacks."""

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
    """The interface that one rank of a node uses on behalf of all its ranks. One call at a time."""

    @property
    def holders(self) -> Callable[[], Holders] | None:
        """Makes the connections by which a rank fetches into its tensors. None: ranks fetch by this memory only."""

    def inventory(self, timeout: float) -> NodeInventory:
        """Lists the shards of this node, with checked heads. Some may be gone when they are read: bad copies are
        quarantined.

        Raises AgentError if no agent answers within `timeout` seconds.
        """

    def retrieve(
        self, retrievals: Sequence[Retrieval], timeout: float, on_progress: Callable[[int, int], None]
    ) -> AbstractContextManager[Mapping[ShardId, str]]:
        """Fetches the retrievals into this node's memory, and verifies every chunk.

        The context gives for each shard where it lies: "" = sealed, like any other shard (`store.find`; it stays); else
        the name for `store.open_fetched`. IMPORTANT: such a file has memory only behind its head and the chunks that
        were asked for, reads as zeros elsewhere, and is unlinked when the context is left: every rank of the node has
        to have opened and read it by then.

        `on_progress(bytes done, bytes in all)` is called from this thread while entering, a few times per second.

        Raises only while entering; then complete shards stay, and everything else is removed: RetrieveError if no
        holder gives a chunk, NoSpaceError if there is no memory for it, DeadlineError after `timeout` seconds,
        AgentError if the agent ended, FencedError if a newer launch has begun.
        """


class OwnMemory:
    """The memory of a node without an agent. It can't fetch from other nodes."""

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
