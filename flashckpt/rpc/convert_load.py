"""Converts the messages of a load: inventories, retrievals, reads of other nodes' shards.

As in convert.py: what arrives is checked here, and protobuf types are used no further.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flashckpt.protocol import wire
from flashckpt.protocol.node_inventory import Holding, NodeInventory
from flashckpt.rpc import checks, convert
from flashckpt.rpc.api import Retrieved, RetrieveFailed, RetrieveProgress, ShardProblem
from flashckpt.rpc.checks import printable, shorten
from flashckpt.store.names import parse_fetched_name
from flashckpt.types import ChunkRange, Held, Level, Portion, Retrieval
from flashckpt.v1 import agent_pb2, common_pb2, peer_pb2

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from flashckpt.rpc.api import RetrieveNews
    from flashckpt.types import ShardId

# Per Get. A reader with more asks again: the holder checks all of them before it answers.
MAX_GET_RANGES = 4096
_MAX_RANGES = 1 << 20
_MAX_PORTIONS = 1 << 12
_MAX_SOURCES = 1 << 10
_MAX_RETRIEVALS = 1 << 16
_MAX_LINES = 4096
_MAX_PROBLEMS = 64  # problems that are told; each has a line per source
_MAX_REASON_BYTES = 1024
_MAX_TAG = (1 << 32) - 1


# --- between agents


def to_get(get: wire.GetOpen, receiver: str, lanes: int = 0) -> peer_pb2.GetRequest:
    return peer_pb2.GetRequest(
        lanes=lanes,
        sender=get.sender,
        receiver=receiver,
        launch=convert.to_launch(get.launch),
        line=checks.maybe(get.line, convert.to_line),
        shard=convert.to_shard(get.shard),
        digest=get.digest,
        with_head=get.with_head,
        ranges=map(_to_range, get.ranges),
    )


def from_get(message: peer_pb2.GetRequest) -> tuple[wire.GetOpen, str]:
    """Return the request, and the node that is meant."""
    get = wire.GetOpen(
        checks.name(message.sender, "sender"),
        checks.needed(message, "launch", convert.from_launch),
        checks.optional(message, "line", convert.from_line),
        checks.needed(message, "shard", convert.from_shard),
        checks.digest16(message.digest),
        message.with_head,
        _ranges(checks.bounded(message.ranges, "ranges", MAX_GET_RANGES)),
    )
    return get, checks.name(message.receiver, "receiver")


def to_info(info: wire.GetInfo, lanes: peer_pb2.Lanes | None = None) -> peer_pb2.GetOpened:
    return peer_pb2.GetOpened(
        size_bytes=info.size_bytes,
        head_bytes=info.head_bytes,
        chunk_bytes=info.chunk_bytes,
        tag=info.tag,
        lanes=lanes,
    )


def from_info(message: peer_pb2.GetOpened) -> wire.GetInfo:
    return wire.GetInfo(
        checks.positive(message.size_bytes, "size_bytes"),
        checks.positive(message.head_bytes, "head_bytes"),
        checks.positive(message.chunk_bytes, "chunk_bytes"),
        message.tag,
    )


def to_get_refused(refused: wire.GetRefused) -> peer_pb2.GetRefused:
    return peer_pb2.GetRefused(
        reason=shorten(refused.reason, checks.MAX_TEXT_BYTES),
        retry=refused.retry,
        launch=checks.maybe(refused.launch, convert.to_launch),
        line=checks.maybe(refused.line, convert.to_line),
    )


def from_get_refused(message: peer_pb2.GetRefused) -> wire.GetRefused:
    return wire.GetRefused(
        checks.line(message.reason, "reason"),
        message.retry,
        checks.optional(message, "launch", convert.from_launch),
        checks.optional(message, "line", convert.from_line),
    )


# --- between a trainer and its agent


def to_inventory(inventory: NodeInventory) -> agent_pb2.InventoryResponse:
    return agent_pb2.InventoryResponse(
        node_id=inventory.node_id,
        holdings=[
            agent_pb2.Holding(
                shard=convert.to_shard(one.held.shard),
                digest=one.held.digest,
                size_bytes=one.held.size_bytes,
                tag=one.held.tag,
                level=agent_pb2.Level.Name(one.level),
                verified=one.verified,
            )
            for one in inventory.holdings
        ],
        lines=map(convert.to_line, inventory.lines),
        quarantined=inventory.quarantined,
        past=map(convert.to_session, inventory.past),
        damaged=[
            agent_pb2.Damaged(shard=convert.to_shard(shard), reason=shorten(reason, _MAX_REASON_BYTES))
            for shard, reason in inventory.damaged
        ],
        damaged_lines=inventory.damaged_lines,
    )


def from_inventory(message: agent_pb2.InventoryResponse) -> NodeInventory:
    return NodeInventory(
        checks.name(message.node_id, "node_id"),
        tuple(map(_from_holding, message.holdings)),
        tuple(map(convert.from_line, checks.bounded(list(message.lines), "lines", _MAX_LINES))),
        message.quarantined,
        tuple((checks.needed(one, "shard", convert.from_shard), printable(one.reason)) for one in message.damaged),
        tuple(map(convert.from_session, message.past)),
        message.damaged_lines,
    )


def _from_holding(message: agent_pb2.Holding) -> Holding:
    held = Held(
        checks.needed(message, "shard", convert.from_shard),
        checks.digest16(message.digest),
        checks.positive(message.size_bytes, "size_bytes"),
        _tag(message.tag),
    )
    level = int(message.level)
    if not Level.SEALED <= level <= Level.PERSISTED:
        raise checks.refused("level", "one that a shard in memory can have", level)
    return Holding(held, Level(level), message.verified)


def to_retrieve(retrievals: Sequence[Retrieval], timeout: float) -> agent_pb2.RetrieveRequest:
    return agent_pb2.RetrieveRequest(retrievals=map(_to_retrieval, retrievals), timeout=timeout)


def from_retrieve(message: agent_pb2.RetrieveRequest) -> tuple[tuple[Retrieval, ...], float]:
    retrievals = tuple(map(_from_retrieval, checks.bounded(message.retrievals, "retrievals", _MAX_RETRIEVALS)))
    shards = {one.shard for one in retrievals}
    if len(shards) != len(retrievals):
        raise checks.refused("retrievals", "a shard each", f"{len(retrievals)} of {len(shards)} shards")
    return retrievals, checks.seconds(message.timeout, "timeout")


def _to_retrieval(one: Retrieval) -> agent_pb2.Retrieval:
    return agent_pb2.Retrieval(
        shard=convert.to_shard(one.shard),
        digest=one.digest,
        tag=one.tag,
        size_bytes=one.size_bytes,
        whole=one.whole,
        portions=[
            agent_pb2.Portion(ranges=map(_to_range, portion.ranges), sources=portion.sources)
            for portion in one.portions
        ],
    )


def _from_retrieval(message: agent_pb2.Retrieval) -> Retrieval:
    portions = checks.bounded(message.portions, "portions", _MAX_PORTIONS)
    if not portions:
        raise checks.refused("portions", "at least one", "none")
    return Retrieval(
        checks.needed(message, "shard", convert.from_shard),
        checks.digest16(message.digest),
        _tag(message.tag),
        checks.positive(message.size_bytes, "size_bytes"),
        message.whole,
        tuple(map(_from_portion, portions)),
    )


def _from_portion(message: agent_pb2.Portion) -> Portion:
    sources = checks.bounded(message.sources, "sources", _MAX_SOURCES)
    if not sources:
        raise checks.refused("sources", "at least one node", "none")
    ranges = _ranges(checks.bounded(message.ranges, "ranges", _MAX_RANGES))
    return Portion(ranges, tuple(checks.name(one, "sources") for one in sources))


def to_news(news: RetrieveNews) -> agent_pb2.RetrieveResponse:
    match news:
        case RetrieveProgress(done_bytes, total_bytes):
            progress = agent_pb2.RetrieveProgress(done_bytes=done_bytes, total_bytes=total_bytes)
            return agent_pb2.RetrieveResponse(progress=progress)
        case Retrieved(places):
            fetched = [agent_pb2.Fetched(shard=convert.to_shard(shard), name=name) for shard, name in places]
            return agent_pb2.RetrieveResponse(retrieved=agent_pb2.Retrieved(fetched=fetched))
        case RetrieveFailed(problems):
            told = [_to_problem(one) for one in problems[:_MAX_PROBLEMS]]
            return agent_pb2.RetrieveResponse(failed=agent_pb2.RetrieveFailed(problems=told))


def from_news(message: agent_pb2.RetrieveResponse) -> RetrieveNews:
    match message.WhichOneof("part"):
        case "progress":
            return RetrieveProgress(message.progress.done_bytes, message.progress.total_bytes)
        case "retrieved":
            return Retrieved(tuple(map(_from_fetched, message.retrieved.fetched)))
        case "failed":
            return RetrieveFailed(tuple(map(_from_problem, message.failed.problems)))
        case _:
            raise checks.refused("part", "one that this version knows", "none")


def _from_fetched(message: agent_pb2.Fetched) -> tuple[ShardId, str]:
    shard = checks.needed(message, "shard", convert.from_shard)
    # The name becomes a file's name.
    if message.name and parse_fetched_name(message.name) is None:
        raise checks.refused("name", "one of a fetched file, or none", message.name)
    return shard, message.name


def _to_problem(problem: ShardProblem) -> agent_pb2.ShardProblem:
    sources = [
        agent_pb2.SourceProblem(node_id=node_id, reason=shorten(reason, _MAX_REASON_BYTES))
        for node_id, reason in problem.reasons
    ]
    return agent_pb2.ShardProblem(shard=convert.to_shard(problem.shard), sources=sources)


def _from_problem(message: agent_pb2.ShardProblem) -> ShardProblem:
    reasons = tuple((one.node_id, printable(one.reason)) for one in message.sources)
    return ShardProblem(checks.needed(message, "shard", convert.from_shard), reasons)


# --- parts of the above


def _to_range(one: ChunkRange) -> common_pb2.ChunkRange:
    return common_pb2.ChunkRange(first=one.first, count=one.count)


def _ranges(messages: Iterable[common_pb2.ChunkRange]) -> tuple[ChunkRange, ...]:
    """Convert ranges.

    IMPORTANT: they have to be ascending and must not overlap: otherwise a reader could have a chunk read a thousand
    times.
    """
    ranges: list[ChunkRange] = []
    end = 0
    for message in messages:
        first = checks.integer(message.first, "first chunk")
        count = checks.positive(message.count, "count of chunks")
        if ranges and first < end:
            raise checks.refused("ranges", f"the next one from chunk {end} on", f"one from {first} on")
        end = checks.integer(first + count, "end of a range of chunks")
        ranges.append(ChunkRange(first, count))
    return tuple(ranges)


def _tag(value: int) -> int:
    if value > _MAX_TAG:
        raise checks.refused("tag", f"at most {_MAX_TAG}", value)
    return value
