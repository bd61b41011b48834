"""Finds what is in a job's persist_dir, for the commands. No torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flashckpt.errors import CorruptShardError, FlashError
from flashckpt.rpc.session import decode_session

if TYPE_CHECKING:
    from flashckpt.persist.catalog import Persisted
    from flashckpt.store.slots import SlotStore


def persist_dir_of(store: SlotStore) -> str | None:
    """Return where the job's last launch flushed to; None if it did not, or if that is not known."""
    data = store.read_session()
    if data is None:
        return None
    try:
        session = decode_session(data)
    except CorruptShardError:
        return None
    return session.persist.directory if session.persist is not None else None


def persisted_steps(persist_dir: str) -> tuple[list[Persisted], str]:
    """List the steps, newest first, and why they could not be listed."""
    from flashckpt.persist.catalog import list_steps
    from flashckpt.persist.storage import open_storage

    try:
        return list_steps(open_storage(persist_dir))[::-1], ""
    except FlashError as error:
        return [], error.message
    except OSError as error:
        return [], str(error)


def as_json(one: Persisted) -> dict[str, Any]:
    return {
        "step": one.step,
        "name": one.name,
        "usable": not one.problem,
        "problem": one.problem,
        "foreign": one.meta is None,
        "world": one.meta.world if one.meta is not None else None,
        "size_bytes": one.meta.size_bytes if one.meta is not None else None,
        "persisted_at": one.meta.persisted_at if one.meta is not None else None,
        "epoch": one.generation.epoch,
    }
