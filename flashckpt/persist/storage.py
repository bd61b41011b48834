"""Defines the storage of the persistent tier: one interface, two kinds (a local path, an fsspec URL)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from types import TracebackType

_URL = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]*://")


@dataclass(frozen=True, slots=True)
class Stage:
    """Names the place where one attempt writes the files of one step before they are a checkpoint."""

    place: str  # the name of the directory
    suffix: str  # part of every file's name; "" if the attempt has a directory of its own


@dataclass(frozen=True, slots=True)
class Entry:
    size_bytes: int
    is_directory: bool
    modified_at: float  # seconds since 1970; 0 if not known


class Writer(Protocol):
    """Writes one file. `close()` returns once its bytes are durable. An error in the block abandons the file."""

    def write(self, data: bytes | bytearray | memoryview, /) -> int: ...

    def close(self) -> None: ...

    def __enter__(self) -> Writer: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Storage(Protocol):
    """Accesses one persist_dir. Names are relative to it, with `/` between their parts. Absence is None, never an
    error.
    """

    root: str

    def stage(self, step: int, attempt: str) -> Stage:
        """Make the place for an attempt at a step. Every node that asks gets the same place."""

    def open_write(self, name: str) -> Writer:
        """Open a new file. Readers can rely on it only once its stage is committed."""

    def read(self, name: str, offset: int = 0, length: int | None = None) -> bytes | None:
        """Return the bytes from `offset` on; fewer than `length` only at the end of the file."""

    def list(self, name: str = "") -> dict[str, Entry] | None:
        """List a directory, by name. None: there is no such directory."""

    def commit(self, stage: Stage, step: int, marker: bytes) -> None:
        """Make the stage the checkpoint of its step, in place of an older one: atomically and durably."""

    def put(self, name: str, content: bytes) -> None:
        """Replace a small file, atomically and durably."""

    def point_latest(self, name: str) -> None:
        """Let `latest` name this step, which is durable already."""

    def latest(self) -> str | None:
        """Return the name that `latest` points to. It may not exist any more."""

    def set_aside(self, name: str) -> str:
        """Give a file or a directory another name, and return that name."""

    def remove(self, name: str) -> None:
        """Delete a directory or file. First it stops being a checkpoint, then its bytes are removed."""


def is_url(persist_dir: str) -> bool:
    return _URL.match(persist_dir) is not None


def open_storage(persist_dir: str) -> Storage:
    """Choose the kind of storage. Creates nothing yet. ConfigError if no kind of storage has such names."""
    if is_url(persist_dir):
        from flashckpt.persist.remote import RemoteStorage

        return RemoteStorage(persist_dir)
    from flashckpt.persist.local import LocalStorage

    return LocalStorage(persist_dir)
