"""Creates files in advance, so that what must be kept can be written when others have filled the tmpfs.

    reserve/spare ──take──▶ draft ──(written in place)──▶ exchanged with the file that it replaces ──▶ reserve/spare

A spare has its inode and its pages. It is taken by renaming, so that of two processes that want one the second looks
again. The file that is replaced becomes a spare, so that as many are left as before. Only a new name uses a spare up;
retiring an old file brings one back.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from typing import TYPE_CHECKING

from flashckpt.errors import FlashError, NotFoundError
from flashckpt.store.directory import Private
from flashckpt.store.room import check_room

if TYPE_CHECKING:
    from flashckpt.store.directory import Directory, Place
    from flashckpt.store.room import Room

# A session of a thousand nodes needs 100 KiB; credentials need 2 KiB, records and lines less than a page.
SPARE_BYTES = (256 << 10,) * 2 + (8 << 10,) * 8
_BLOCK_BYTES = 512  # unit of st_blocks


def fill_reserve(directory: Directory, room: Room) -> str:
    """Create the missing files. Return why that is not possible; "" = the reserve is complete.

    Only one process at a time may call it: the agent, or a trainer that has none.
    """
    if directory.mount.fs_type == "hugetlbfs":
        return ""  # its files consist of huge pages, set aside for us at boot
    directory.make_private(Private.RESERVE)
    spares = [*_spares(directory)]
    sizes = [size for size, _ in spares] + [0] * max(0, len(SPARE_BYTES) - len(spares))
    missing = [(have, wanted) for have, wanted in zip(sizes, SPARE_BYTES, strict=False) if have < wanted]
    if not missing:
        return ""
    new_files = max(0, len(SPARE_BYTES) - len(spares))
    shortage = check_room(sum(wanted - have for have, wanted in missing), room, new_files=new_files)
    if shortage is not None:
        return shortage
    for (have, wanted), (_, name) in zip(zip(sizes, SPARE_BYTES, strict=False), spares, strict=False):
        if have < wanted:
            _allocate(directory, directory.open_file(Private.RESERVE, name, write=True), wanted)
    for wanted in SPARE_BYTES[len(spares) :]:
        _allocate(directory, directory.create_file(Private.RESERVE, _new_name()), wanted)
    return ""


def take_spare(directory: Directory, place: Place, name: str, size_bytes: int) -> int | None:
    """Rename the smallest spare that holds `size_bytes`, and return its descriptor; None if there is none."""
    for have, spare in reversed(_spares(directory)):
        if have >= size_bytes and directory.move(Private.RESERVE, spare, place, name):
            return directory.open_file(place, name, write=True)
    return None


def give_up_spare(directory: Directory) -> bool:
    """Remove the smallest spare: its inode is free for something that can't be a plain file. Return False if there is
    none."""
    return any(directory.remove(Private.RESERVE, spare) for _, spare in reversed(_spares(directory)))


def retire(directory: Directory, place: Place, name: str) -> bool:
    """Remove a file, or keep it as a spare if one is missing. Return False if another process was quicker."""
    if len(_spares(directory)) >= len(SPARE_BYTES) or directory.mount.fs_type == "hugetlbfs":
        return directory.remove(place, name)
    with contextlib.suppress(NotFoundError):  # no reserve was created here
        if not directory.move(place, name, Private.RESERVE, spare := _new_name()):
            return False
        _clear(directory, spare)
        return True
    return directory.remove(place, name)


def replace_with_spare(directory: Directory, place: Place, draft: str, name: str) -> None:
    """Rename a draft that was a spare to `name`. The file that was there becomes a spare."""
    if directory.stat(place, name) is None:
        directory.replace(place, draft, name)
        return
    try:
        directory.exchange(place, draft, name)
    except OSError:  # a filesystem that can't swap
        directory.replace(place, draft, name)
        return
    retire(directory, place, draft)


def _spares(directory: Directory) -> list[tuple[int, str]]:
    """Return (bytes that it has, name) of the spares, largest first."""
    try:
        names = directory.names(Private.RESERVE)
    except NotFoundError:
        return []
    found = ((directory.stat(Private.RESERVE, name), name) for name in names)
    return sorted(((one.st_blocks * _BLOCK_BYTES, name) for one, name in found if one is not None), reverse=True)


def _allocate(directory: Directory, fd: int, size_bytes: int) -> None:
    try:
        os.posix_fallocate(fd, 0, size_bytes)
    finally:
        os.close(fd)


def _clear(directory: Directory, spare: str) -> None:
    """Overwrite the file in place: it may have been a key."""
    with contextlib.suppress(FlashError, OSError):
        fd = directory.open_file(Private.RESERVE, spare, write=True)
        try:
            os.pwrite(fd, bytes(os.fstat(fd).st_size), 0)
        finally:
            os.close(fd)


def _new_name() -> str:
    return f"spare-{secrets.randbits(64):016x}"
