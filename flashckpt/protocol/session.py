"""A session ↔ the bytes that an agent keeps of it, so that its successor goes on without the trainers. Pure."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from flashckpt.errors import CorruptShardError
from flashckpt.types import Generation, Launch, Member, PersistSettings, Session

_VERSION = 1


def encode_session(session: Session, base: Generation | None = None) -> bytes:
    """`base`: what the launch has loaded."""
    return json.dumps(
        {
            "version": _VERSION,
            "epoch": session.launch.epoch,
            "nonce": session.launch.nonce,
            "world": session.world,
            "members": [[one.node_id, one.address, one.domain, list(one.ranks)] for one in session.members],
            "replicas": session.replicas,
            "strategy": session.strategy,
            "slots_per_rank": session.slots_per_rank,
            "keep_memory": session.keep_memory,
            "persist": None if session.persist is None else asdict(session.persist),
            "base": None if base is None else list(base),
        }
    ).encode()


def decode_session(data: bytes) -> Session:
    """CorruptShardError where the bytes are of another version, or no session at all."""
    try:
        found = json.loads(data)
        if found["version"] != _VERSION:
            raise CorruptShardError(f"session: expected version {_VERSION}, found {found['version']!r}")
        return Session(
            launch=Launch(_natural(found["epoch"]), _natural(found["nonce"])),
            world=_natural(found["world"]),
            members=tuple(_member(one) for one in found["members"]),
            replicas=_natural(found["replicas"]),
            strategy=str(found["strategy"]),
            slots_per_rank=_natural(found["slots_per_rank"]),
            persist=_persist(found.get("persist")),
            keep_memory=_natural(found.get("keep_memory", 1)),
        )
    except (ValueError, KeyError, TypeError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptShardError(f"session: expected what encode_session() writes, found: {error!r}") from error


def _persist(found: Any) -> PersistSettings | None:
    if found is None:
        return None
    return PersistSettings(**found | {"keep_steps": tuple(map(_natural, found["keep_steps"]))})


def decode_base(data: bytes) -> Generation | None:
    """Of what decode_session() has understood; None also where an earlier version wrote it."""
    found = json.loads(data).get("base")
    try:
        return None if found is None else Generation(*map(_natural, found))
    except (ValueError, TypeError) as error:
        raise CorruptShardError(f"session: expected a generation as base, found {found!r}") from error


def _member(found: Any) -> Member:
    node_id, address, domain, ranks = found
    return Member(str(node_id), str(address), str(domain), tuple(_natural(rank) for rank in ranks))


def _natural(found: Any) -> int:
    if not isinstance(found, int) or isinstance(found, bool) or not 0 <= found < 1 << 64:
        raise ValueError(f"expected a number from 0 on, found {found!r}")
    return found
