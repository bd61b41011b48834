"""A node's memory by way of its agent."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flashckpt.load.memory import OwnMemory

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import AbstractContextManager

    from flashckpt.agent.link import AgentLink
    from flashckpt.store.slots import SlotStore
    from flashckpt.types import NodeInventory, Retrieval, ShardId


class AgentMemory:
    """What the agent holds; see NodeMemory."""

    def __init__(self, link: AgentLink, store: SlotStore) -> None:
        self._own = OwnMemory(store, link.job, link.lease.node_id)

    def inventory(self, timeout: float) -> NodeInventory:
        return self._own.inventory(timeout)

    def retrieve(
        self, retrievals: Sequence[Retrieval], timeout: float, on_progress: Callable[[int, int], None]
    ) -> AbstractContextManager[Mapping[ShardId, str]]:
        return self._own.retrieve(retrievals, timeout, on_progress)
