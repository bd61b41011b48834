"""Keeps keys and certificates of one job on this node: files of mode 0600 in a folder of mode 0700, in memory only."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from flashckpt.store.directory import Private
from flashckpt.store.names import Draft, check_plain_name
from flashckpt.store.small_files import frame, read_framed, write_aside

if TYPE_CHECKING:
    from flashckpt.store.directory import Directory
    from flashckpt.store.owner import Owner

_log = logging.getLogger(__name__)
_MAGIC = b"FCSECRT1"


def write_secret(directory: Directory, name: str, content: bytes, writer: Owner) -> None:
    check_plain_name(name)
    directory.make_private(Private.TLS)
    write_aside(directory, name, frame(_MAGIC, content, directory.job), Draft.SECRET, writer, place=Private.TLS)


def read_secret(directory: Directory, name: str) -> bytes | None:
    """Return the secret; None if there is none, or a torn one.

    Raise UnsafeDirectoryError if others could read or have replaced it: a key that may be known must not be used
    silently.
    """
    check_plain_name(name)
    try:
        content = read_framed(directory, name, _MAGIC, place=Private.TLS)
    except FileNotFoundError:
        return None
    if content is None:
        _log.warning("%s/%s/%s is torn or foreign; ignored", directory.path, Private.TLS, name)
    return content


def remove_secret(directory: Directory, name: str) -> bool:
    """Remove a secret. Return False if there was none."""
    return directory.remove(Private.TLS, check_plain_name(name))
