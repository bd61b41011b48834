"""Keeps what the agent needs to continue after a restart without the trainers, as bytes that only the agent
understands.

One file, replaced as a whole; only the agent writes it, and there is one agent per directory. Beside it are the
sessions of earlier launches of which shards are left, a file `past-<launch>` each: they tell which nodes should have a
missing shard.

Failpoints: `before_session` · `after_session`.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from flashckpt.errors import UnsafeDirectoryError
from flashckpt.failpoints import failpoint
from flashckpt.store.names import SESSION_NAME, Draft, parse_past_name, past_name
from flashckpt.store.small_files import frame, read_framed, write_aside

if TYPE_CHECKING:
    from flashckpt.store.directory import Directory
    from flashckpt.store.owner import Owner
    from flashckpt.types import Launch

_log = logging.getLogger(__name__)
KEPT_PAST = 4
_MAGIC = b"FCSESSN1"


def read_session(directory: Directory) -> bytes | None:
    """Return the session; None if there is none, or none that can be trusted."""
    return _read(directory, SESSION_NAME)


def read_past(directory: Directory) -> tuple[tuple[Launch, bytes], ...]:
    """Return the sessions of earlier launches, newest last; one that can't be trusted is left out."""
    found = ((launch, _read(directory, past_name(launch))) for launch in _launches(directory))
    return tuple((launch, payload) for launch, payload in found if payload is not None)


def write_past(directory: Directory, launch: Launch, payload: bytes, writer: Owner) -> None:
    """Keep the session of an earlier launch, and the newest few in all."""
    write_aside(directory, past_name(launch), frame(_MAGIC, payload, directory.job), Draft.SESSION, writer)
    for old in _launches(directory)[:-KEPT_PAST]:
        remove_past(directory, old)


def remove_past(directory: Directory, launch: Launch) -> bool:
    return directory.remove(None, past_name(launch))


def write_session(directory: Directory, payload: bytes, writer: Owner) -> None:
    failpoint("before_session")
    write_aside(directory, SESSION_NAME, frame(_MAGIC, payload, directory.job), Draft.SESSION, writer)
    failpoint("after_session")


def _read(directory: Directory, name: str) -> bytes | None:
    try:
        payload = read_framed(directory, name, _MAGIC)
    except FileNotFoundError:
        return None
    except UnsafeDirectoryError as error:
        _log.warning("session ignored: %s", error)
        return None
    if payload is None:
        _log.warning("session %s/%s is torn or foreign; ignored", directory.path, name)
    return payload


def _launches(directory: Directory) -> list[Launch]:
    """Return the launches with a session here, oldest first."""
    found = [launch for name in directory.names(None) if (launch := parse_past_name(name)) is not None]
    return sorted(found, key=lambda launch: (launch.epoch, launch.nonce))
