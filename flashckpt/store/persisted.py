"""Keeps the newest step that is known to lie in persist_dir, and the path of that directory.

An empty persist_dir is then known to be one that is not mounted, or that somebody emptied.
"""

from __future__ import annotations

import logging
import struct
from typing import TYPE_CHECKING

from flashckpt.errors import UnsafeDirectoryError
from flashckpt.store.names import AGENT_FILES_PREFIX, Draft
from flashckpt.store.small_files import frame, read_framed, write_aside
from flashckpt.types import Generation

if TYPE_CHECKING:
    from flashckpt.store.directory import Directory
    from flashckpt.store.owner import Owner

_log = logging.getLogger(__name__)
_NAME = f"{AGENT_FILES_PREFIX}persisted"
_MAGIC = b"FCPERSD1"
_FIELDS = struct.Struct("<QQQQ")


def read_persisted(directory: Directory) -> tuple[str, Generation] | None:
    """Return (persist_dir, generation); None if there is none, or none that can be trusted."""
    try:
        payload = read_framed(directory, _NAME, _MAGIC)
        if payload is None:
            raise ValueError("it is torn or another job's")
        return payload[_FIELDS.size :].decode(), Generation(*_FIELDS.unpack_from(payload))
    except FileNotFoundError:
        return None
    except (UnsafeDirectoryError, ValueError, struct.error) as error:
        _log.warning("%s/%s ignored: %s", directory.path, _NAME, error)
        return None


def write_persisted(directory: Directory, persist_dir: str, generation: Generation, writer: Owner) -> None:
    """Remember this generation in place of an earlier one."""
    payload = _FIELDS.pack(*generation) + persist_dir.encode()
    write_aside(directory, _NAME, frame(_MAGIC, payload, directory.job), Draft.SESSION, writer)


def forget_persisted(directory: Directory) -> bool:
    """Forget the generation. Return False if there was none."""
    return directory.remove(None, _NAME)
