"""Maps a slot's file into this process.

The mapping outlives claim and seal: faulting pages in again costs many times the copy into them.
"""

from __future__ import annotations

import contextlib
import mmap
import os

_MADV_POPULATE_READ = 22  # Linux 5.14; Python has no name for it


class Mapping:
    """Owns a descriptor and the shared mapping of its complete file."""

    __slots__ = ("_descriptors", "_map", "inode", "size_bytes")

    def __init__(self, fd: int, size_bytes: int, *, huge_pages: bool, writable: bool = True) -> None:
        """Map the file, which must have its memory already: touching a page that can't be allocated is a SIGBUS."""
        self._descriptors = [fd]
        self.size_bytes = size_bytes
        self.inode = os.fstat(fd).st_ino
        access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        self._map = mmap.mmap(fd, size_bytes, mmap.MAP_SHARED, access)
        # Weights do not belong into core dumps. Advice that a kernel does not know changes nothing.
        with contextlib.suppress(OSError):
            self._map.madvise(mmap.MADV_DONTDUMP)
        if huge_pages:
            with contextlib.suppress(OSError):
                self._map.madvise(mmap.MADV_HUGEPAGE)

    def view(self) -> memoryview:
        """Return a view of the mapping. Raise ValueError if it was closed."""
        return memoryview(self._map)

    def populate(self, offset: int, length: int) -> None:
        """Map these pages for reading at once, if the kernel can: complete pages, and none beyond the end."""
        with contextlib.suppress(OSError, ValueError):
            self._map.madvise(_MADV_POPULATE_READ, offset, min(length, self.size_bytes - offset))

    def fits(self, found: os.stat_result, size_bytes: int) -> bool:
        """Return True if this is the mapping of that file at that size."""
        return self.inode == found.st_ino and self.size_bytes == size_bytes == found.st_size

    def is_unlinked(self) -> bool:
        """Return True if the file was removed. Any thread may ask.

        A thread that has the slot may close the mapping meanwhile, and the number may then be another file's: the
        answer may only be used to call close(), which then does nothing.
        """
        try:
            return os.fstat(self._descriptors[0]).st_nlink == 0
        except (IndexError, OSError):
            return False

    def close(self) -> bool:
        """Close the mapping. Return False, and change nothing, if a buffer over it is still in use."""
        try:
            self._map.close()
        except BufferError:
            return False
        self._close_descriptor()
        return True

    def forget(self) -> None:
        """Close the mapping; one that is still in use is closed with its last buffer."""
        if not self.close():
            self._close_descriptor()

    def _close_descriptor(self) -> None:
        # Taken out in one step: of two threads, or two calls, one closes it. A lock would be held for ever in the child
        # of a fork that came at the wrong moment.
        with contextlib.suppress(IndexError):
            os.close(self._descriptors.pop())
