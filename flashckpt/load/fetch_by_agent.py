"""This node's memory, used through its agent, which fetches from other nodes."""

from __future__ import annotations

import contextlib
import logging
import time
from typing import TYPE_CHECKING

from flashckpt.errors import AgentError, DeadlineError, RetrieveError
from flashckpt.rpc.api import Retrieved, RetrieveFailed, RetrieveProgress

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Mapping, Sequence

    from flashckpt.agent.link import AgentLink
    from flashckpt.load.holders import Holders
    from flashckpt.protocol.node_inventory import NodeInventory
    from flashckpt.rpc.agent_client import AgentClient
    from flashckpt.rpc.api import RetrieveNews, ShardProblem
    from flashckpt.store.slots import SlotStore
    from flashckpt.types import Retrieval, ShardId

log = logging.getLogger(__name__)

_TRIES = 2  # if an agent ends during a retrieval, its successor is asked once; a second end is an error
_SHOWN = 4


class AgentMemory:
    """Implements NodeMemory by calls to the node's agent."""

    def __init__(self, link: AgentLink, store: SlotStore, holders: Callable[[], Holders] | None = None) -> None:
        """`holders`: makes the connections by which a rank fetches from other nodes itself; None: it does not."""
        self._link = link
        self._store = store
        self._holders = holders

    @property
    def holders(self) -> Callable[[], Holders] | None:
        return self._holders

    def inventory(self, timeout: float) -> NodeInventory:
        return self._link.call(
            lambda client, ticket, left: client.inventory(ticket, left), timeout, "asking for this node's inventory"
        )

    @contextlib.contextmanager
    def retrieve(
        self, retrievals: Sequence[Retrieval], timeout: float, on_progress: Callable[[int, int], None]
    ) -> Iterator[Mapping[ShardId, str]]:
        if not retrievals:
            yield {}
            return
        attempt = _Attempt(retrievals, timeout, on_progress)
        try:
            answer = self._link.call(attempt.run, timeout, f"fetching {len(retrievals)} shards from other nodes")
            if isinstance(answer, Exception):
                raise answer
            yield dict(answer.places)
        finally:
            self._link.release(attempt.close)


class _Attempt:
    """One retrieval, by one agent or, if that ends before it is done, by its successor."""

    def __init__(
        self, retrievals: Sequence[Retrieval], timeout: float, on_progress: Callable[[int, int], None]
    ) -> None:
        self._retrievals = retrievals
        self._timeout = timeout
        self._deadline = time.monotonic() + timeout
        self._on_progress = on_progress
        self._news: Generator[RetrieveNews] | None = None
        self._tries = 0

    def run(self, client: AgentClient, ticket: bytes, left: float) -> Retrieved | Exception:
        """Runs the retrieval once. Returns, instead of raising, an error after which link.call() must not try again."""
        self.close()
        began = False
        self._news = client.retrieve(ticket, self._retrievals, left)
        try:
            for one in self._news:
                if not began:
                    began = True
                    self._tries += 1
                match one:
                    case RetrieveProgress(done_bytes, total_bytes):
                        self._on_progress(done_bytes, total_bytes)
                    case Retrieved():
                        return one
                    case RetrieveFailed():
                        return retrieve_error(one.problems)
        except AgentError as error:
            if time.monotonic() >= self._deadline:
                return self._late(error)
            if began and self._tries >= _TRIES:
                return error
            raise
        raise AgentError(
            "fetching from other nodes: expected a result, found that the agent ended the call without one"
        )

    def close(self) -> None:
        """Ends the call. The agent then unlinks the files in `fetched/`."""
        news, self._news = self._news, None
        if news is not None:
            news.close()

    def _late(self, error: AgentError) -> DeadlineError:
        late = DeadlineError(
            f"expected {len(self._retrievals)} shards from other nodes within {self._timeout:g} s, "
            f"found no answer of this node's agent: {error.message}",
            hint=error.hint,
        )
        late.__cause__ = error
        return late


def retrieve_error(problems: Sequence[ShardProblem]) -> RetrieveError:
    lines = [
        f"\n  - {problem.shard}: " + "; ".join(f"{node or 'here'}: {reason}" for node, reason in problem.reasons)
        for problem in problems[:_SHOWN]
    ]
    more = f"\n  - and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
    return RetrieveError(
        f"expected parts of {len(problems)} shards from other nodes, found no holder that gives them:"
        f"{''.join(lines)}{more}",
        problems=tuple((problem.shard, problem.reasons) for problem in problems),
    )
