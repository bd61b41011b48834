"""Says what to do about an error of the storage below persist_dir. Pure."""

from __future__ import annotations

import errno

_BY_ERRNO = {
    errno.ENOSPC: "free space in persist_dir, or keep fewer steps (keep_latest_k)",
    errno.EDQUOT: "raise the quota of this user in persist_dir, or keep fewer steps (keep_latest_k)",
    errno.EACCES: "let the user that runs the agent write to persist_dir (chown, chmod), or name another one",
    errno.EPERM: "let the user that runs the agent write to persist_dir (chown, chmod), or name another one",
    errno.EROFS: "remount the file system of persist_dir for writing: dmesg may say why it became read-only",
    errno.ENOTDIR: "a part of the path of persist_dir is a file: remove it, or name another persist_dir",
    errno.EEXIST: "a part of the path of persist_dir is a file: remove it, or name another persist_dir",
    errno.EISDIR: "a directory lies where a file belongs: remove or rename it",
    errno.ENOENT: "persist_dir was removed or unmounted while it was written to: mount it again on this node",
    errno.ESTALE: "mount persist_dir again on this node: its server has forgotten what was open",
    errno.ENODEV: "mount persist_dir again on this node: its device is gone",
    errno.ENXIO: "mount persist_dir again on this node: its device is gone",
    errno.EIO: "look at the disk below persist_dir, or its server: dmesg may say what is wrong",
    errno.ETIMEDOUT: "the server of persist_dir does not answer: look at it, and at the network",
    errno.EHOSTUNREACH: "the server of persist_dir does not answer: look at it, and at the network",
    errno.ECONNREFUSED: "the server of persist_dir does not answer: look at it, and at the network",
    errno.EMFILE: "raise the limit of open files (ulimit -n) of the agent, or lower persist_concurrency",
    errno.ENFILE: "this machine has no file descriptors left: raise fs.file-max",
    errno.ENAMETOOLONG: "name a shorter persist_dir",
    errno.ELOOP: "a link in the path of persist_dir leads in a circle: correct it",
}


def hint_of(error: BaseException) -> str:
    """Return what to do about it; "" if that is not known."""
    if not isinstance(error, OSError):
        return ""
    return _BY_ERRNO.get(error.errno or 0, "look at persist_dir on this node")
