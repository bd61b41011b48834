"""Converts a session to its protobuf message and back, for a call and for the file that an agent keeps of it.

A setting is converted by its name and checked with the limits given at its field in types.py. A new setting is a field
there and in agent.proto, and nothing here.
"""

from __future__ import annotations

import itertools
import math
import struct
from dataclasses import MISSING, fields
from typing import TYPE_CHECKING, Any, TypeVar

from google.protobuf.message import DecodeError

from flashckpt.errors import CorruptShardError, IncompatibleError
from flashckpt.rpc.checks import (
    MAX_NAME_BYTES,
    MAX_TEXT_BYTES,
    bounded,
    integer,
    maybe,
    name,
    needed,
    optional,
    refused,
    shorten,
    text,
)
from flashckpt.rpc.checks import world as checked_world
from flashckpt.rpc.ids import from_generation, from_launch, to_generation, to_launch
from flashckpt.types import Bounds, Member, PersistSettings, Session
from flashckpt.v1 import agent_pb2, common_pb2

if TYPE_CHECKING:
    from collections.abc import Callable

    from google.protobuf.message import Message

    from flashckpt.types import Generation

_MAX_MEMBERS = 1 << 16
_MAX_ITEMS = 1 << 16  # of a setting that is a list
_PARTS = {"launch", "world", "members", "persist"}  # fields of a session that are not settings
_HEAD = struct.Struct("<I")  # number of bytes of the session, which follow; the base comes after them

_T = TypeVar("_T", Session, PersistSettings)
_D = TypeVar("_D")


# --- a call


def to_session(session: Session) -> agent_pb2.Session:
    """Return the message of a session."""
    return agent_pb2.Session(
        launch=to_launch(session.launch),
        world=session.world,
        members=[
            agent_pb2.Member(node_id=m.node_id, address=m.address, domain=m.domain, ranks=m.ranks)
            for m in session.members
        ],
        persist=maybe(session.persist, lambda persist: agent_pb2.PersistSettings(**_settings_of(persist))),
        **_settings_of(session),
    )


def from_session(message: agent_pb2.Session) -> Session:
    """Return the session of a message, with every field checked."""
    launch = needed(message, "launch", from_launch)
    world = checked_world(message.world)
    members = tuple(map(_from_member, bounded(message.members, "members", _MAX_MEMBERS)))
    names = [member.node_id for member in members]
    if len(set(names)) != len(names) or not names:
        raise refused("members", "nodes with a name each", f"{len(names)} with {len(set(names))} names")
    # IMPORTANT: no gap and no rank twice: this decides who reports for which rank, and when all have reported.
    ranks = sorted(rank for member in members for rank in member.ranks)
    if len(ranks) != world or ranks != list(range(world)):
        raise refused("ranks of the members", f"each of 0 to {world - 1} once", shorten(str(ranks), 100))
    if [m.ranks[0] for m in members] != sorted(m.ranks[0] for m in members):
        raise refused("members", "the order of their lowest rank", [m.ranks[0] for m in members][:16])
    persist = optional(message, "persist", _from_persist)
    return Session(launch=launch, world=world, members=members, persist=persist, **_settings_in(message, Session))


def _from_member(message: agent_pb2.Member) -> Member:
    ranks = tuple(message.ranks)
    if not ranks or any(a >= b for a, b in itertools.pairwise(ranks)):
        raise refused("ranks of a member", "at least one, ascending", shorten(str(ranks), 100))
    return Member(
        name(message.node_id, "node_id"),
        text(message.address, "address", MAX_NAME_BYTES),
        text(message.domain, "domain", MAX_NAME_BYTES),
        ranks,
    )


def _from_persist(message: agent_pb2.PersistSettings) -> PersistSettings:
    return PersistSettings(**_settings_in(message, PersistSettings))


def _settings_of(value: Session | PersistSettings) -> dict[str, Any]:
    return {field.name: getattr(value, field.name) for field in fields(value) if field.name not in _PARTS}


def _settings_in(message: Message, cls: type[_T]) -> dict[str, Any]:
    """Return the settings that a message contains, each checked. The others keep their defaults."""
    found: dict[str, Any] = {}
    for field in fields(cls):
        if field.name in _PARTS:
            continue
        described = message.DESCRIPTOR.fields_by_name[field.name]
        if described.has_presence and not message.HasField(field.name):
            if field.default is MISSING:
                raise refused(field.name, "one", "none")
            continue
        value, bounds = getattr(message, field.name), field.metadata.get("bounds", Bounds())
        if isinstance(value, (bool, int, float, str)):
            found[field.name] = _checked(value, field.name, bounds)
        else:
            items = bounded(value, field.name, _MAX_ITEMS)
            found[field.name] = tuple(_checked(item, field.name, bounds) for item in items)
    return found


def _checked(value: Any, what: str, bounds: Bounds) -> Any:
    if isinstance(value, bool):
        return value
    if isinstance(value, str):
        if not value or "\0" in value:
            raise refused(what, "a text", value or "none")
        return text(value, what, MAX_TEXT_BYTES if bounds.most is None else int(bounds.most))
    least, most = bounds.least, math.inf if bounds.most is None else bounds.most
    if isinstance(value, float):
        # Without a limit too: no setting may be infinite or NaN.
        if not least <= value <= most or not math.isfinite(value) or (bounds.above and value == least):
            raise refused(what, f"{'more than' if bounds.above else 'at least'} {least:g}, at most {most:g}", value)
        return value
    if not least <= value <= most:
        raise refused(what, f"{least:g} to {most:g}", value)
    return integer(value, what)


# --- the file


def encode_session(session: Session, base: Generation | None = None) -> bytes:
    """Return the bytes that an agent keeps of a session. `base` is the generation that the launch loaded."""
    data = to_session(session).SerializeToString()
    return _HEAD.pack(len(data)) + data + (b"" if base is None else to_generation(base).SerializeToString())


def decode_session(data: bytes) -> Session:
    """Return the session. Raises CorruptShardError if the bytes are of another version, or are not a session."""
    return _decoded(lambda: from_session(agent_pb2.Session.FromString(_split(data)[0])))


def decode_base(data: bytes) -> Generation | None:
    """Return the generation that the launch loaded, from bytes that decode_session() accepts."""

    def decode() -> Generation | None:
        base = _split(data)[1]
        return from_generation(common_pb2.Generation.FromString(base)) if base else None

    return _decoded(decode)


def _split(data: bytes) -> tuple[bytes, bytes]:
    (size,) = _HEAD.unpack_from(data)
    end = _HEAD.size + size
    if len(data) < end:
        raise CorruptShardError(f"session: expected {end} bytes at least, found {len(data)}")
    return data[_HEAD.size : end], data[end:]


def _decoded(decode: Callable[[], _D]) -> _D:
    try:
        return decode()
    except (struct.error, DecodeError, IncompatibleError) as error:
        raise CorruptShardError(f"session: expected what encode_session() writes, found: {error}") from error
