"""Writes the user's own files beside the checkpoints, each completely or not at all."""

from __future__ import annotations

from flashckpt.errors import ConfigError, ExistsError, NotFoundError
from flashckpt.persist.names import FENCE, HISTORY, IDENTITY, IMPORTED, LATEST, META_JSON, METADATA, step_name, step_of
from flashckpt.persist.storage import open_storage
from flashckpt.persist.tenancy import look_around

_OURS = (FENCE, HISTORY, IDENTITY, IMPORTED, LATEST, META_JSON, METADATA)


def persisted_steps(persist_dir: str | None, job: str) -> set[int]:
    """Returns the complete steps of this job in persist_dir."""
    if persist_dir is None:
        return set()
    return {one.step for one in look_around(open_storage(persist_dir), job).ours if not one.problem}


def write_file(
    persist_dir: str | None, name: str, contents: str | bytes, *, step: int | None = None, overwrite: bool = False
) -> str:
    """Writes `name` into persist_dir, or into the directory of a persisted `step`. Durable when this returns.

    Returns its path or URL. Raises ExistsError if it exists, unless `overwrite`.
    """
    if persist_dir is None:
        raise ConfigError("write_file: expected persist_dir in the config, found none")
    if not isinstance(name, str) or not name or "/" in name or "\0" in name or name in (".", ".."):
        raise ConfigError(f"write_file: expected the name of a file, without a directory, found {name!r}")
    if name in _OURS or name.endswith((".distcp", ".flash")) or step_of(name, foreign=True) is not None:
        raise ConfigError(f"write_file: {name!r} is a name that checkpoints use", hint="choose another name")
    storage = open_storage(persist_dir)
    place = "" if step is None else f"{step_name(step)}/"
    there = storage.list(place.rstrip("/"))
    if step is not None and there is None:
        raise NotFoundError(f"{persist_dir}: expected the directory of step {step}, found none", step=step)
    if name in (there or {}) and not overwrite:
        raise ExistsError(f"{persist_dir}/{place}{name}: exists already", hint="pass overwrite=True to replace it")
    storage.put(f"{place}{name}", contents.encode() if isinstance(contents, str) else contents)
    return f"{persist_dir.rstrip('/')}/{place}{name}"
