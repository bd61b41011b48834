"""What the agent has to know to go on after a restart without the trainers, as bytes that only it understands.

One file, replaced as a whole; only the agent writes it, and there is one agent a directory.

Failpoints: `before_session` · `after_session`.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from flashckpt.errors import UnsafeDirectoryError
from flashckpt.failpoints import failpoint
from flashckpt.store.names import SESSION_NAME, Draft
from flashckpt.store.small_files import frame, read_framed, write_aside

if TYPE_CHECKING:
    from flashckpt.store.directory import Directory
    from flashckpt.store.owner import Owner

_log = logging.getLogger(__name__)
_MAGIC = b"FCSESSN1"


def read_session(directory: Directory) -> bytes | None:
    """None where there is none, or none that can be believed."""
    try:
        payload = read_framed(directory, SESSION_NAME, _MAGIC)
    except FileNotFoundError:
        return None
    except UnsafeDirectoryError as error:
        _log.warning("session ignored: %s", error)
        return None
    if payload is None:
        _log.warning("session %s/%s is torn or foreign; ignored", directory.path, SESSION_NAME)
    return payload


def write_session(directory: Directory, payload: bytes, writer: Owner) -> None:
    failpoint("before_session")
    write_aside(directory, SESSION_NAME, frame(_MAGIC, payload, directory.job), Draft.SESSION, writer)
    failpoint("after_session")
