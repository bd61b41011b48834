"""Where the persistent tier's bytes rest: one small surface, two kinds (a local path, an fsspec URL)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from types import TracebackType

_URL = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]*://")


@dataclass(frozen=True, slots=True)
class Stage:
    """Where one attempt writes the files of one step before they are a checkpoint."""

    place: str  # the name of the directory
    suffix: str  # to be part of every file's name; "" where the directory is the attempt's own


@dataclass(frozen=True, slots=True)
class Entry:
    size_bytes: int
    is_directory: bool
    modified_at: float  # seconds since 1970; 0 where it is not known


class Writer(Protocol):
    """One file that is being written. `close()` returns once its bytes are durable; leaving the block by an error
    abandons it."""

    def write(self, data: bytes | bytearray | memoryview, /) -> int: ...

    def close(self) -> None: ...

    def __enter__(self) -> Writer: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Storage(Protocol):
    """One persist_dir. Names are relative to it, with `/` between their parts. Absence is None, never an error."""

    root: str

    def stage(self, step: int, attempt: str) -> Stage:
        """Makes room for an attempt at a step; the same again for every node that asks."""

    def open_write(self, name: str) -> Writer:
        """A new file. Readers see it whole or not at all only once the stage it lies in was committed."""

    def read(self, name: str, offset: int = 0, length: int | None = None) -> bytes | None:
        """The bytes from `offset` on; fewer than `length` only where the file ends."""

    def list(self, name: str = "") -> dict[str, Entry] | None:
        """What lies in a directory, by name. None: there is no such directory."""

    def commit(self, stage: Stage, step: int, marker: bytes) -> None:
        """Makes the stage the checkpoint of its step, in place of an older one: in one moment, and durably."""

    def put(self, name: str, content: bytes) -> None:
        """A small file, whole or not at all, over what was there; durable."""

    def point_latest(self, name: str) -> None:
        """`latest` names this step from now on. It is durable already."""

    def latest(self) -> str | None:
        """The name that `latest` points to; it may be gone."""

    def set_aside(self, name: str) -> str:
        """Give what lies there, a file or a directory, another name, and return that."""

    def remove(self, name: str) -> None:
        """A directory or file. From the first moment on it is no checkpoint any more; then its bytes go."""


def is_url(persist_dir: str) -> bool:
    return _URL.match(persist_dir) is not None


def open_storage(persist_dir: str) -> Storage:
    """Creates nothing yet. ConfigError where no kind of storage has such names."""
    if is_url(persist_dir):
        from flashckpt.persist.remote import RemoteStorage

        return RemoteStorage(persist_dir)
    from flashckpt.persist.local import LocalStorage

    return LocalStorage(persist_dir)
