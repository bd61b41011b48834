"""Renames files without replacing, or swaps them.

`renameat2(RENAME_NOREPLACE)` and not link + unlink: between those two the file has two names and two links, so that a
crash leaves it in two states at once and every reader that requires a single link refuses it.
"""

from __future__ import annotations

import ctypes
import errno
import os

_RENAME_NOREPLACE, _RENAME_EXCHANGE = 1, 2
_AT_FDCWD = -100


def _load_renameat2() -> ctypes._NamedFuncPointer | None:
    try:
        function = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return None  # a C library older than the call
    function.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint)
    function.restype = ctypes.c_int
    return function


_renameat2 = _load_renameat2()


def rename_noreplace(source: str, target: str, *, source_fd: int, target_fd: int) -> None:
    """Rename like os.rename, but raise FileExistsError if the target exists."""
    if _renameat2 is not None:
        if _renameat2(source_fd, os.fsencode(source), target_fd, os.fsencode(target), _RENAME_NOREPLACE) == 0:
            return
        number = ctypes.get_errno()
        if number not in (errno.ENOSYS, errno.EINVAL):
            raise OSError(number, os.strerror(number), source, None, target)
    # Without the call: names contain a random slot id and their writer, so that only a mistake makes two alike, and a
    # mistake does not happen in the microsecond between the check and the rename.
    try:
        os.stat(target, dir_fd=target_fd, follow_symlinks=False)
    except FileNotFoundError:
        os.rename(source, target, src_dir_fd=source_fd, dst_dir_fd=target_fd)
    else:
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), target)


def rename_exchange(one: str, other: str) -> None:
    """Swap what two paths name, in one step. Raise OSError if the filesystem can't (EINVAL, ENOSYS)."""
    number = errno.ENOSYS
    if _renameat2 is not None:
        if _renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
            return
        number = ctypes.get_errno()
    raise OSError(number, os.strerror(number), one, None, other)
