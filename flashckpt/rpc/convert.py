"""Converts between protobuf messages and the project's types. Checks what arrives; protobuf types are used no further.

Encoding takes our own values. Decoding takes anybody's: every length, range and presence that the protos name is
checked, and what does not fit is an IncompatibleError that names the field.
"""

from __future__ import annotations

import functools
import itertools
import math
from typing import TYPE_CHECKING, Protocol, TypeVar

from google.protobuf.message import DecodeError

from flashckpt.errors import IncompatibleError
from flashckpt.protocol import wire
from flashckpt.protocol.line import MAX_LISTED, Ancestor, Line
from flashckpt.protocol.line import decode as decode_line
from flashckpt.protocol.line import encode as encode_line
from flashckpt.protocol.verdict import Change, ChangeKind
from flashckpt.rpc.api import GenerationProgress, Hello, Lease, Overtaken, TrainerState
from flashckpt.rpc.checks import DIGEST_BYTES as DIGEST_BYTES
from flashckpt.rpc.checks import MAX_TEXT_BYTES as _MAX_TEXT_BYTES
from flashckpt.rpc.checks import address as _address
from flashckpt.rpc.checks import bounded as _bounded
from flashckpt.rpc.checks import digest16 as digest16
from flashckpt.rpc.checks import integer as _integer
from flashckpt.rpc.checks import line as _line
from flashckpt.rpc.checks import maybe as maybe
from flashckpt.rpc.checks import name as name
from flashckpt.rpc.checks import needed as needed
from flashckpt.rpc.checks import optional as optional
from flashckpt.rpc.checks import positive as positive
from flashckpt.rpc.checks import printable, shorten
from flashckpt.rpc.checks import refused as _refused
from flashckpt.rpc.checks import seconds as seconds
from flashckpt.rpc.checks import world as _world
from flashckpt.rpc.credentials import Bundle
from flashckpt.rpc.ids import from_generation as from_generation
from flashckpt.rpc.ids import from_launch as from_launch
from flashckpt.rpc.ids import from_shard as from_shard
from flashckpt.rpc.ids import to_generation as to_generation
from flashckpt.rpc.ids import to_launch as to_launch
from flashckpt.rpc.ids import to_shard as to_shard
from flashckpt.rpc.session import from_session as from_session
from flashckpt.rpc.session import to_session as to_session
from flashckpt.store.owner import Owner
from flashckpt.types import (
    MAX_KEEPS,
    Claimant,
    Generation,
    Level,
    Record,
)
from flashckpt.v1 import agent_pb2, common_pb2, peer_pb2

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from flashckpt.rpc.api import WatchNews

_MAX_PEM_BYTES = 64 << 10
_MAX_MEMBERS = 1 << 16
# A message's lists are searched under the agent's lock: this is as long as an honest list gets.
_MAX_HOLDERS = 1 << 10
_MAX_VOIDS = 1 << 10
_MAX_HELD = 1 << 16
_MAX_TRAINERS = 1 << 16
_MAX_COPIES = 1 << 8
_MAX_SHOWN = 1 << 7  # entries of a list in a summary for people
_MAX_TICKET_BYTES = 64


_M = TypeVar("_M", covariant=True)


class _Parser(Protocol[_M]):
    def FromString(self, data: bytes, /) -> _M: ...  # noqa: N802 - protobuf's name


def parse(cls: _Parser[_M], data: bytes, what: str) -> _M:
    try:
        return cls.FromString(data)
    except DecodeError as error:
        raise IncompatibleError(
            f"{what}: expected a message of protocol version 1, found {len(data)} bytes that are none",
            hint="run the same version of flashckpt on all nodes",
        ) from error


# --- ids


@functools.lru_cache(maxsize=16)  # every message has the same one
def to_line(line: Line) -> common_pb2.Line:
    listed = [_to_ancestor(one) for one in line.listed]
    floor = maybe(line.floor, _to_ancestor)
    return common_pb2.Line(head=to_launch(line.head), root=to_launch(line.root), listed=listed, floor=floor)


def from_line(message: common_pb2.Line) -> Line:
    return _decode_line(message.SerializeToString())


@functools.lru_cache(maxsize=64)
def _decode_line(data: bytes) -> Line:
    """Decode a line. Raise IncompatibleError if it is none: launches out of order, or not older than the head."""
    message = common_pb2.Line.FromString(data)
    head = needed(message, "head", from_launch)
    listed = tuple(map(_from_ancestor, _bounded(list(message.listed), "listed", MAX_LISTED)))
    line = Line(head, from_launch(message.root), listed, optional(message, "floor", _from_ancestor))
    if decode_line(encode_line(line)) != line:
        raise _refused("line", "launches in order, older than the head, with steps from -1 on", str(line)[:200])
    return line


def _to_ancestor(one: Ancestor) -> common_pb2.Ancestor:
    return common_pb2.Ancestor(launch=to_launch(one.launch), step=one.step)


def _from_ancestor(message: common_pb2.Ancestor) -> Ancestor:
    return Ancestor(needed(message, "launch", from_launch), message.step)


def to_record(record: Record) -> common_pb2.Record:
    return common_pb2.Record(
        generation=to_generation(record.generation),
        world=record.world,
        replicas=record.replicas,
        committed_at=record.committed_at,
        keeps=map(to_generation, record.keeps),
    )


def from_record(message: common_pb2.Record) -> Record:
    generation = needed(message, "generation", from_generation)
    if not math.isfinite(message.committed_at):
        raise _refused("committed_at", "seconds since 1970", message.committed_at)
    keeps = tuple(map(from_generation, _bounded(message.keeps, "keeps", MAX_KEEPS)))
    return Record(generation, _world(message.world), message.replicas, message.committed_at, keeps)


# --- the agent's own service


def to_owner(owner: Owner) -> agent_pb2.Owner:
    return agent_pb2.Owner(
        pid=owner.pid, start_ticks=owner.start_ticks, boot_id8=owner.boot_id8, pid_namespace=owner.pid_namespace
    )


def from_owner(message: agent_pb2.Owner) -> Owner:
    if not 0 < message.pid < 1 << 31:
        raise _refused("pid", "a process id", message.pid)
    boot = message.boot_id8
    if len(boot) != 8 or not set(boot) <= set("0123456789abcdef"):
        raise _refused("boot_id8", "8 hexadecimal digits", boot)
    return Owner(message.pid, message.start_ticks, boot, message.pid_namespace)


def to_claimant(claimant: Claimant) -> agent_pb2.Claimant:
    return agent_pb2.Claimant(
        process=claimant.process,
        pid=claimant.pid,
        rank=claimant.rank,
        launch=to_launch(claimant.launch),
        claimed_at=claimant.claimed_at,
        ending=claimant.is_ending,
    )


def from_claimant(message: agent_pb2.Claimant) -> Claimant:
    if not 0 < message.pid < 1 << 31:
        raise _refused("pid", "a process id", message.pid)
    if not math.isfinite(message.claimed_at):
        raise _refused("claimed_at", "seconds since 1970", message.claimed_at)
    launch = needed(message, "launch", from_launch)
    return Claimant(
        name(message.process, "process"), message.pid, message.rank, launch, message.claimed_at, message.ending
    )


def to_bundle(bundle: Bundle) -> agent_pb2.Bundle:
    return agent_pb2.Bundle(certificate_pem=bundle.certificate_pem, key_pem=bundle.key_pem, ca_pem=bundle.ca_pem)


def from_bundle(message: agent_pb2.Bundle) -> Bundle:
    for field in ("certificate_pem", "key_pem", "ca_pem"):
        size = len(getattr(message, field))
        if not 0 < size <= _MAX_PEM_BYTES:
            raise _refused(field, f"1 to {_MAX_PEM_BYTES} bytes", f"{size} bytes")
    return Bundle(message.certificate_pem, message.key_pem, message.ca_pem)


def to_lease(lease: Lease) -> agent_pb2.AgentHelloResponse:
    return agent_pb2.AgentHelloResponse(
        ticket=lease.ticket, agent_pid=lease.agent_pid, node_id=lease.node_id, granule_bytes=lease.granule_bytes
    )


def from_lease(message: agent_pb2.AgentHelloResponse) -> Lease:
    if not 0 < len(message.ticket) <= _MAX_TICKET_BYTES:
        raise _refused("ticket", f"1 to {_MAX_TICKET_BYTES} bytes", f"{len(message.ticket)} bytes")
    if not 0 < message.agent_pid < 1 << 31:
        raise _refused("agent_pid", "a process id", message.agent_pid)
    granule_bytes = positive(message.granule_bytes, "granule_bytes")
    return Lease(message.ticket, message.agent_pid, name(message.node_id, "node_id"), granule_bytes)


_ON_BUSY = {"wait": agent_pb2.ON_BUSY_WAIT, "skip": agent_pb2.ON_BUSY_SKIP}


def to_on_busy(on_busy: str) -> agent_pb2.OnBusy:
    if on_busy not in _ON_BUSY:
        raise _refused("on_busy", " or ".join(_ON_BUSY), on_busy)
    return _ON_BUSY[on_busy]


def from_on_busy(value: int) -> str:
    for text, number in _ON_BUSY.items():
        if number == value:
            return text
    raise _refused("on_busy", "a known value", value)


_CHANGES = {
    ChangeKind.WAITING: agent_pb2.CHANGE_WAITING,
    ChangeKind.LAGGING: agent_pb2.CHANGE_LAGGING,
    ChangeKind.GOING_ON: agent_pb2.CHANGE_GOING_ON,
    ChangeKind.AT_RISK: agent_pb2.CHANGE_AT_RISK,
    ChangeKind.LOST: agent_pb2.CHANGE_LOST,
    ChangeKind.HEALED: agent_pb2.CHANGE_HEALED,
}


def to_progress(progress: WatchNews) -> agent_pb2.WatchResponse:
    if isinstance(progress, Overtaken):
        reason = shorten(progress.reason, _MAX_TEXT_BYTES)
        return agent_pb2.WatchResponse(overtaken_by=to_launch(progress.launch), reason=reason)
    if isinstance(progress, Change):
        return agent_pb2.WatchResponse(
            generation=to_generation(progress.generation),
            reason=shorten(progress.reason, _MAX_TEXT_BYTES),
            change=_CHANGES[progress.kind],
        )
    return agent_pb2.WatchResponse(
        generation=to_generation(progress.generation),
        level=agent_pb2.Level.Name(progress.level),
        reason=shorten(progress.reason, _MAX_TEXT_BYTES),
        flush_problem=shorten(progress.flush_problem, _MAX_TEXT_BYTES),
    )


def from_progress(message: agent_pb2.WatchResponse) -> WatchNews:
    if message.HasField("overtaken_by"):
        return Overtaken(from_launch(message.overtaken_by), printable(message.reason))
    generation = needed(message, "generation", from_generation)
    if message.change:
        for kind, number in _CHANGES.items():
            if number == message.change:
                return Change(kind, generation, printable(message.reason))
        raise _refused("change", "a known value", message.change)
    try:
        level = Level(message.level)
    except ValueError as error:
        raise _refused("level", "a known value", message.level) from error
    return GenerationProgress(generation, level, printable(message.reason), printable(message.flush_problem))


# --- between agents


def to_trainer(trainer: TrainerState) -> common_pb2.Trainer:
    return common_pb2.Trainer(rank=trainer.rank, lives=trainer.lives, how=trainer.how)


def from_trainers(messages: Sequence[common_pb2.Trainer]) -> tuple[TrainerState, ...]:
    known = _bounded(messages, "trainers", _MAX_TRAINERS)
    return tuple(TrainerState(one.rank, one.lives, _line(one.how, "how")) for one in known)


def to_hello(hello: Hello, receiver: str) -> peer_pb2.PeerHello:
    return peer_pb2.PeerHello(
        version=hello.version,
        job=hello.job,
        node_id=hello.node_id,
        address=hello.address,
        launch=maybe(hello.launch, to_launch),
        line=maybe(hello.line, to_line),
        receiver=receiver,
        trainers=[to_trainer(one) for one in hello.trainers],
    )


def from_hello(message: peer_pb2.PeerHello) -> tuple[Hello, str]:
    """Return the hello, and the node that is meant."""
    hello = Hello(
        message.version,
        name(message.job, "job"),
        name(message.node_id, "node_id"),
        _address(message.address),
        optional(message, "launch", from_launch),
        optional(message, "line", from_line),
        from_trainers(message.trainers),
    )
    return hello, name(message.receiver, "receiver")


def to_envelope(envelope: wire.Envelope, receiver: str) -> peer_pb2.TellRequest:
    request = peer_pb2.TellRequest(
        sender=envelope.sender,
        receiver=receiver,
        launch=to_launch(envelope.launch),
        line=maybe(envelope.line, to_line),
    )
    match envelope.body:
        case wire.Beat():
            request.beat.SetInParent()
        case wire.Report(shard, digest, holders):
            request.report.CopyFrom(peer_pb2.Report(shard=to_shard(shard), digest=digest, holders=holders))
        case wire.GiveUp(generation):
            request.give_up.CopyFrom(peer_pb2.GiveUp(generation=to_generation(generation)))
        case wire.Announce(record, voids, order, persisted, failure):
            announce = peer_pb2.Announce(
                record=maybe(record, to_record),
                voids=map(to_generation, voids),
                flush=maybe(order, to_order),
                persisted=maybe(persisted, to_generation),
                failure=maybe(failure, to_failure),
            )
            request.announce.CopyFrom(announce)
        case wire.Lost(shard):
            request.lost.CopyFrom(peer_pb2.Lost(shard=to_shard(shard)))
        case wire.WantBack(shard, digest):
            request.want.CopyFrom(peer_pb2.Want(shard=to_shard(shard), digest=digest))
        case wire.WantPersisted(generation, reason, urgent):
            text = shorten(reason, _MAX_TEXT_BYTES)
            wanted = peer_pb2.Persist(generation=to_generation(generation), reason=text, urgent=urgent)
            request.persist.CopyFrom(wanted)
        case wire.FlushFailure():
            request.flush_failed.CopyFrom(to_failure(envelope.body))
        case wire.Holds():
            request.holds.CopyFrom(_to_holds(envelope.body))
    return request


def from_envelope(message: peer_pb2.TellRequest) -> tuple[wire.Envelope, str]:
    """Return the envelope, and the node that is meant."""
    envelope = wire.Envelope(
        name(message.sender, "sender"),
        needed(message, "launch", from_launch),
        optional(message, "line", from_line),
        _body(message),
    )
    return envelope, name(message.receiver, "receiver")


def _body(message: peer_pb2.TellRequest) -> wire.Body:
    match message.WhichOneof("body"):
        case "beat":
            return wire.Beat()
        case "report":
            report = message.report
            holders = tuple(name(one, "holders") for one in _bounded(report.holders, "holders", _MAX_HOLDERS))
            return wire.Report(needed(report, "shard", from_shard), digest16(report.digest), holders)
        case "give_up":
            return wire.GiveUp(needed(message.give_up, "generation", from_generation))
        case "announce":
            announce = message.announce
            return wire.Announce(
                optional(announce, "record", from_record),
                _generations(announce.voids),
                optional(announce, "flush", from_order),
                optional(announce, "persisted", from_generation),
                optional(announce, "failure", from_failure),
            )
        case "lost":
            return wire.Lost(needed(message.lost, "shard", from_shard))
        case "want":
            return wire.WantBack(needed(message.want, "shard", from_shard), digest16(message.want.digest))
        case "persist":
            reason = _line(message.persist.reason, "reason")
            generation = needed(message.persist, "generation", from_generation)
            return wire.WantPersisted(generation, reason, message.persist.urgent)
        case "flush_failed":
            return from_failure(message.flush_failed)
        case "holds":
            return _from_holds(message.holds)
        case _:
            raise _refused("body", "one that this version knows", "none")


def to_answer(answer: wire.Answer) -> peer_pb2.TellResponse:
    return peer_pb2.TellResponse(
        launch=maybe(answer.launch, to_launch),
        line=maybe(answer.line, to_line),
        record=maybe(answer.record, to_record),
        voids=map(to_generation, answer.voids),
        refused=shorten(answer.refused, _MAX_TEXT_BYTES),
        flush=maybe(answer.flush, to_order),
        persisted=maybe(answer.persisted, to_generation),
        failure=maybe(answer.failure, to_failure),
        base=maybe(answer.base, to_generation),
        health=maybe(answer.health, _to_health),
        copies=map(_to_copy, answer.copies),
    )


def to_order(order: wire.FlushOrder) -> peer_pb2.FlushOrder:
    return peer_pb2.FlushOrder(
        generation=to_generation(order.generation),
        attempt=order.attempt,
        reason=shorten(order.reason, _MAX_TEXT_BYTES),
        down=order.down,
        urgent=order.urgent,
    )


def to_failure(failure: wire.FlushFailure) -> peer_pb2.FlushFailure:
    return peer_pb2.FlushFailure(
        generation=to_generation(failure.generation),
        attempt=failure.attempt,
        reason=shorten(failure.reason, _MAX_TEXT_BYTES),
    )


def from_failure(message: peer_pb2.FlushFailure) -> wire.FlushFailure:
    if not message.attempt:
        raise _refused("attempt", "a number above 0", message.attempt)
    generation = needed(message, "generation", from_generation)
    return wire.FlushFailure(generation, message.attempt, _line(message.reason, "reason"))


def from_order(message: peer_pb2.FlushOrder) -> wire.FlushOrder:
    if not message.attempt:
        raise _refused("attempt", "a number above 0", message.attempt)
    down = tuple(name(one, "down") for one in _bounded(message.down, "down", _MAX_MEMBERS))
    generation = needed(message, "generation", from_generation)
    return wire.FlushOrder(generation, message.attempt, _line(message.reason, "reason"), down, message.urgent)


def from_answer(message: peer_pb2.TellResponse) -> wire.Answer:
    return wire.Answer(
        optional(message, "launch", from_launch),
        optional(message, "line", from_line),
        optional(message, "record", from_record),
        _generations(message.voids),
        _line(message.refused, "refused"),
        optional(message, "flush", from_order),
        optional(message, "persisted", from_generation),
        optional(message, "failure", from_failure),
        optional(message, "base", from_generation),
        optional(message, "health", _from_health),
        tuple(map(_from_copy, _bounded(message.copies, "copies", _MAX_COPIES))),
    )


# --- healing


def _to_holds(holds: wire.Holds) -> peer_pb2.Holds:
    return peer_pb2.Holds(
        generation=to_generation(holds.generation),
        world=holds.world,
        committed=holds.committed,
        ranks=holds.ranks,
        sizes_bytes=holds.sizes_bytes,
        digests=holds.digests,
        refusals=[
            peer_pb2.Refusal(rank=one.rank, target=one.target, reason=shorten(one.reason, _MAX_TEXT_BYTES))
            for one in holds.refusals[:_MAX_COPIES]
        ],
    )


def _from_holds(message: peer_pb2.Holds) -> wire.Holds:
    world = _world(message.world) if message.world else 0
    ranks = tuple(_bounded(message.ranks, "ranks", _MAX_HELD))
    if any(a >= b for a, b in itertools.pairwise(ranks)) or (ranks and ranks[-1] >= world):
        raise _refused("ranks", f"ascending, below world {world}", shorten(str(ranks), 100))
    if len(message.sizes_bytes) != len(ranks):
        raise _refused("sizes_bytes", f"as many as ranks: {len(ranks)}", len(message.sizes_bytes))
    if len(message.digests) != len(ranks):
        raise _refused("digests", f"as many as ranks: {len(ranks)}", len(message.digests))
    return wire.Holds(
        needed(message, "generation", from_generation),
        world,
        message.committed,
        ranks,
        tuple(_integer(size, "sizes_bytes") for size in message.sizes_bytes),
        tuple(map(digest16, message.digests)),
        tuple(
            wire.Refusal(one.rank, name(one.target, "target"), _line(one.reason, "reason"))
            for one in _bounded(message.refusals, "refusals", _MAX_COPIES)
        ),
    )


def _to_copy(copy: wire.CopyOrder) -> peer_pb2.Copy:
    return peer_pb2.Copy(rank=copy.rank, source=copy.source, target=copy.target, digest=copy.digest)


def _from_copy(message: peer_pb2.Copy) -> wire.CopyOrder:
    digest = digest16(message.digest) if message.digest else b""
    return wire.CopyOrder(message.rank, name(message.source, "source"), name(message.target, "target"), digest)


def _to_health(health: wire.Health) -> peer_pb2.Health:
    survival = health.survival
    return peer_pb2.Health(
        generation=to_generation(health.generation),
        world=health.world,
        committed=health.committed,
        wanted=health.wanted,
        copies=health.copies,
        lost=health.lost,
        lost_count=health.lost_count,
        at_risk=health.at_risk,
        at_risk_count=health.at_risk_count,
        left_copies=health.left_copies,
        left_bytes=health.left_bytes,
        running=map(_to_copy, health.running),
        missing=health.missing,
        survival=peer_pb2.Survival(
            any_nodes=survival.any_nodes,
            live=survival.live,
            fatal=[peer_pb2.Fatal(nodes=one.nodes, rank=one.rank) for one in survival.fatal],
            fatal_count=survival.fatal_count,
            fatal_domains=survival.fatal_domains,
        ),
        reason=shorten(health.reason, _MAX_TEXT_BYTES),
    )


def _from_health(message: peer_pb2.Health) -> wire.Health:
    return wire.Health(
        generation=needed(message, "generation", from_generation),
        world=_world(message.world),
        committed=message.committed,
        wanted=message.wanted,
        copies=message.copies,
        lost=tuple(_bounded(message.lost, "lost", _MAX_SHOWN)),
        lost_count=message.lost_count,
        at_risk=tuple(_bounded(message.at_risk, "at_risk", _MAX_SHOWN)),
        at_risk_count=message.at_risk_count,
        left_copies=message.left_copies,
        left_bytes=message.left_bytes,
        running=tuple(map(_from_copy, _bounded(message.running, "running", _MAX_SHOWN))),
        missing=_names(message.missing, "missing"),
        survival=needed(message, "survival", _from_survival),
        reason=_line(message.reason, "reason"),
    )


def _from_survival(message: peer_pb2.Survival) -> wire.Survival:
    fatal = [wire.Fatal(_names(one.nodes, "nodes"), one.rank) for one in _bounded(message.fatal, "fatal", _MAX_SHOWN)]
    if not all(one.nodes for one in fatal):
        raise _refused("nodes", "at least one", "none")
    return wire.Survival(
        message.any_nodes,
        message.live,
        tuple(fatal),
        message.fatal_count,
        _names(message.fatal_domains, "fatal_domains"),
    )


def _names(values: Sequence[str], what: str) -> tuple[str, ...]:
    return tuple(name(one, what) for one in _bounded(values, what, _MAX_SHOWN))


def to_opening(opening: wire.PutOpen, receiver: str, lanes: int = 0) -> peer_pb2.PutOpen:
    return peer_pb2.PutOpen(
        lanes=lanes,
        sender=opening.sender,
        receiver=receiver,
        launch=to_launch(opening.launch),
        line=maybe(opening.line, to_line),
        shard=to_shard(opening.shard),
        tag=opening.tag,
        digest=opening.digest,
        size_bytes=opening.size_bytes,
        head_bytes=opening.head_bytes,
    )


def from_opening(message: peer_pb2.PutOpen) -> tuple[wire.PutOpen, str]:
    """Return the opening, and the node that is meant."""
    size_bytes = positive(message.size_bytes, "size_bytes")
    head_bytes = positive(message.head_bytes, "head_bytes")
    if head_bytes > size_bytes:
        raise _refused("head_bytes", f"at most size_bytes {size_bytes}", head_bytes)
    opening = wire.PutOpen(
        name(message.sender, "sender"),
        needed(message, "launch", from_launch),
        optional(message, "line", from_line),
        needed(message, "shard", from_shard),
        message.tag,
        digest16(message.digest),
        size_bytes,
        head_bytes,
    )
    return opening, name(message.receiver, "receiver")


def to_ready(ready: wire.PutReady, lanes: peer_pb2.Lanes | None = None) -> peer_pb2.PutReady:
    return peer_pb2.PutReady(next_head_offset=ready.next_head_offset, next_chunk=ready.next_chunk, lanes=lanes)


def from_ready(message: peer_pb2.PutReady) -> wire.PutReady:
    return wire.PutReady(
        _integer(message.next_head_offset, "next_head_offset"), _integer(message.next_chunk, "next_chunk")
    )


def to_refused(refused: wire.PutRefused) -> peer_pb2.PutRefused:
    return peer_pb2.PutRefused(
        reason=shorten(refused.reason, _MAX_TEXT_BYTES),
        retry=refused.retry,
        launch=maybe(refused.launch, to_launch),
        line=maybe(refused.line, to_line),
    )


def from_refused(message: peer_pb2.PutRefused) -> wire.PutRefused:
    return wire.PutRefused(
        _line(message.reason, "reason"),
        message.retry,
        optional(message, "launch", from_launch),
        optional(message, "line", from_line),
    )


def _generations(messages: Iterable[common_pb2.Generation]) -> tuple[Generation, ...]:
    return tuple(map(from_generation, _bounded(list(messages), "voids", _MAX_VOIDS)))
