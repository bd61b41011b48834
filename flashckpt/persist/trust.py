"""Whose files are read: a checkpoint that somebody else could have written is not loaded unseen."""

from __future__ import annotations

import logging
import os
import stat

from flashckpt.errors import UnsafeDirectoryError
from flashckpt.persist.names import METADATA
from flashckpt.persist.storage import is_url

_log = logging.getLogger(__name__)

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def check_owner(root: str, name: str) -> None:
    """UnsafeDirectoryError where the step belongs to neither this user nor root; a warning where others may write.

    An object store has no owners: who may write there is its own business.
    """
    if is_url(root):
        return
    for path in (os.path.join(root, name), os.path.join(root, name, METADATA)):
        found = os.stat(path)
        if found.st_uid not in (os.geteuid(), 0):
            raise UnsafeDirectoryError(
                f"{path}: expected owner uid {os.geteuid()} or root, found uid {found.st_uid}",
                hint="look at what it is; if you trust it, chown it",
                path=path,
            )
        if found.st_mode & _OTHERS_WRITE:
            mode = stat.S_IMODE(found.st_mode)
            _log.warning("%s: mode %04o lets others write: whoever can, decides what is loaded", path, mode)
