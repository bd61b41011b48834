"""Stores persist_dir at an fsspec URL. Object stores have no rename, so the marker is the commit.

Files of an attempt have its name. So a second attempt at a step, or a step that is written again after a rollback,
never changes files that a marker already points to. `latest` is a small object with the step's name.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
from typing import TYPE_CHECKING, Any

from flashckpt.errors import ConfigError
from flashckpt.failpoints import failpoint
from flashckpt.persist.names import LATEST, META_JSON, METADATA, damaged_name, step_name
from flashckpt.persist.storage import Entry, Stage

if TYPE_CHECKING:
    from types import TracebackType

_log = logging.getLogger(__name__)

_MAX_NAME_BYTES = 256


class RemoteStorage:
    """Stores steps below one prefix of an object store, or of any other fsspec filesystem."""

    def __init__(self, url: str) -> None:
        try:
            import fsspec  # type: ignore[import-untyped]
        except ImportError as error:
            raise ConfigError(
                f"persist_dir {url}: expected the package fsspec, found that it is not installed",
                hint="pip install fsspec, and what its protocol needs (s3fs, gcsfs, …)",
            ) from error
        self.root = url.rstrip("/")
        try:
            # A cached listing would hide what other nodes write.
            self._fs, self._base = fsspec.core.url_to_fs(self.root, use_listings_cache=False)
        except (ImportError, ValueError) as error:
            raise ConfigError(
                f"persist_dir {url}: expected a URL that fsspec can open, found: {error}",
                hint="install the package of its protocol (s3fs for s3://, gcsfs for gs://), or correct the URL",
            ) from error

    def stage(self, step: int, attempt: str) -> Stage:
        self._fs.makedirs(self._path(step_name(step)), exist_ok=True)
        return Stage(step_name(step), f"-{attempt}")

    def open_write(self, name: str) -> _Object:
        return _Object(self._fs, self._path(name))

    def read(self, name: str, offset: int = 0, length: int | None = None) -> bytes | None:
        end = None if length is None else offset + length
        if length == 0:
            return b""
        try:
            data: bytes = self._fs.cat_file(self._path(name), start=offset or None, end=end)
        except FileNotFoundError:
            return None
        return data

    def list(self, name: str = "") -> dict[str, Entry] | None:
        path = self._path(name)
        try:
            self._fs.invalidate_cache(path)
            found = self._fs.ls(path, detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return None
        return {
            one["name"].rstrip("/").rpartition("/")[2]: Entry(
                int(one.get("size") or 0), one["type"] == "directory", _modified(one)
            )
            for one in found
            if one["name"].rstrip("/") != path.rstrip("/")
        }

    def commit(self, stage: Stage, step: int, marker: bytes) -> None:
        before = self.list(stage.place) or {}
        failpoint("before_persist_rename")
        self.put(f"{stage.place}/{METADATA}", marker)
        failpoint("after_persist_rename")
        # Left by an older marker, or by an attempt that did not commit.
        for name in before:
            if stage.suffix not in name and name not in (METADATA, META_JSON):
                self._drop(f"{stage.place}/{name}")

    def put(self, name: str, content: bytes) -> None:
        self._fs.pipe_file(self._path(name), content)

    def point_latest(self, name: str) -> None:
        failpoint("before_latest")
        if self.latest() != name:
            self.put(LATEST, name.encode())

    def latest(self) -> str | None:
        data = self.read(LATEST, 0, _MAX_NAME_BYTES)
        return None if data is None else data.decode("utf-8", "replace").strip()

    def set_aside(self, name: str) -> str:
        aside = damaged_name(name, secrets.token_hex(4))
        self._fs.mv(self._path(name), self._path(aside), recursive=True)
        return aside

    def remove(self, name: str) -> None:
        try:
            inside = self.list(name)
            if inside is not None and METADATA in inside:
                self._fs.rm_file(self._path(f"{name}/{METADATA}"))
            failpoint("mid_delete")
            self._fs.rm(self._path(name), recursive=True)
        except FileNotFoundError:
            return

    def _drop(self, name: str) -> None:
        try:
            self._fs.rm_file(self._path(name))
        except OSError as error:
            _log.warning("%s/%s could not be removed: %s", self.root, name, error)

    def _path(self, name: str) -> str:
        return f"{self._base}/{name}" if name else str(self._base)


class _Object:
    """Uploads an object while it is written. The object appears when it is closed."""

    def __init__(self, fs: Any, path: str) -> None:
        self._fs, self._path = fs, path
        self._file = fs.open(path, "wb")

    def write(self, data: bytes | bytearray | memoryview, /) -> int:
        self._file.write(data)
        return memoryview(data).nbytes

    def close(self) -> None:
        if not self._file.closed:
            self._file.close()

    def __enter__(self) -> _Object:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
            return
        discard = getattr(self._file, "discard", None)
        if discard is not None:
            try:
                discard()
            except (OSError, NotImplementedError) as problem:
                _log.info("an upload could not be aborted: %s", problem)
        # IMPORTANT: not close(), which would complete the upload of half an object.
        with contextlib.suppress(AttributeError):
            self._file.closed = True
        with contextlib.suppress(OSError):  # for stores where the object appears before it is closed
            self._fs.rm_file(self._path)


def _modified(found: dict[str, Any]) -> float:
    for key in ("LastModified", "mtime", "created"):
        value = found.get(key)
        if value is not None:
            return float(value) if isinstance(value, (int, float)) else float(value.timestamp())
    return 0.0
