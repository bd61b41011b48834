"""Connections of one rank to the agents of other nodes, to fetch what its node lacks."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from flashckpt.agent.bundle_file import read_bundle
from flashckpt.errors import CorruptShardError, PeerError
from flashckpt.move.transports.grpc.client import PeerClient
from flashckpt.protocol.wire import GetOpen
from flashckpt.rpc.session import decode_session

if TYPE_CHECKING:
    from collections.abc import Iterable

    from flashckpt.agent.process import Options
    from flashckpt.move.seam import Taker
    from flashckpt.protocol.wire import GetRefused
    from flashckpt.store.slots import SlotStore
    from flashckpt.types import ChunkRange, Member, Session, ShardId


class Holders:
    """Asks holders in the name of this rank's node, with its agent's credentials. Any thread; a context manager.

    Only reads. Reports of bad copies, and everything else that agents tell or send each other, do not pass here.
    """

    def __init__(self, store: SlotStore, members: Iterable[Member], options: Options) -> None:
        """`members`: the nodes that load. Raises PeerError if the node has no credentials, or its agent no session.

        IMPORTANT: requests name the launch that the node's agent works for. Holders adopt every newer launch that they
        hear of; that of a reader beside the training would end the training's saves.
        """
        kept, session = read_bundle(store), _session_of(store)
        if kept is None or session is None:
            raise PeerError(f"{options.node_id}: expected credentials to speak to other nodes with, found none")
        self._bundle = kept[0]
        self._launch, self._line = session.launch, store.read_line()
        self._addresses = {member.node_id: member.address for member in (*members, *session.members)}
        self._options = options
        self._lock = threading.Lock()  # protects what follows
        self._clients: dict[str, PeerClient] = {}

    def ask(
        self,
        node_id: str,
        shard: ShardId,
        digest: bytes,
        ranges: tuple[ChunkRange, ...],
        taker: Taker,
        timeout: float,
    ) -> GetRefused | None:
        """Fetches chunks of a shard from one holder into `taker`. Returns the refusal, if there is one
        (move/fetch.py)."""
        get = GetOpen(self._options.node_id, self._launch, self._line, shard, digest, not ranges, ranges)
        return self._client(node_id).get(get, taker, timeout)

    def _client(self, node_id: str) -> PeerClient:
        options = self._options
        with self._lock:
            if node_id not in self._clients:
                address = self._addresses.get(node_id)
                if not address:
                    raise PeerError(f"node {node_id!r}: expected an address, found none", peer=node_id)
                self._clients[node_id] = PeerClient(
                    address,
                    self._bundle,
                    options.job,
                    node_id,
                    stall_timeout=options.peer_timeout,
                    lanes=options.lane_policy,
                )
            return self._clients[node_id]

    def __enter__(self) -> Holders:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends running calls. May be called twice."""
        with self._lock:
            clients = list(self._clients.values())
        for client in clients:
            client.close()


def _session_of(store: SlotStore) -> Session | None:
    """Returns the session that the node's agent has kept; None if there is none, or it can't be read."""
    data = store.read_session()
    try:
        return None if data is None else decode_session(data)
    except CorruptShardError:
        return None
