"""Flushes one generation from sealed shards to persist_dir. Reads as the list of its stages.

The order is: data files, each durable → what every node wrote → meta.json → the launch's line → `.metadata` → rename →
`latest` → retention. Nobody sees a step before all of it is durable. If this process dies, the step before it is
untouched.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from typing import TYPE_CHECKING, Any

import torch

from flashckpt import __version__, native
from flashckpt.errors import CorruptShardError, DeadlineError, FlashError, NotFoundError
from flashckpt.failpoints import failpoint
from flashckpt.move.throttle import Throttle
from flashckpt.persist.catalog import look
from flashckpt.persist.exchange import Exchange
from flashckpt.persist.index import encode_index
from flashckpt.persist.lineage import check_lineage, keep_line
from flashckpt.persist.meta import PERMANENT, FileInfo, Meta, encode_meta, json_part
from flashckpt.persist.names import (
    HISTORY,
    META_JSON,
    METADATA,
    aside_of,
    attempt_of,
    checksums_name,
    is_deleting,
    is_of_attempt,
    step_name,
    step_of,
)
from flashckpt.persist.plan import plan
from flashckpt.persist.retain import KeepRules, Lying, removable
from flashckpt.persist.storage import is_url, open_storage
from flashckpt.persist.tenancy import enter, look_around
from flashckpt.persist.write import Shard, WrittenFiles, write_files
from flashckpt.store.slots import SlotStore
from flashckpt.types import ShardId

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from flashckpt.persist.lineage import Lineage
    from flashckpt.persist.plan import PersistPlan
    from flashckpt.persist.storage import Stage, Storage
    from flashckpt.protocol.flush_spec import FlushSpec

_log = logging.getLogger(__name__)

# How long to wait until all nodes show what they have. This may be less than the writing takes. Flushers are niced, so
# on busy nodes they may start minutes apart.
_MEET_SECONDS = 600.0
_HISTORY_SECONDS = 3600.0  # age at which an unrenamed history file is removed: its writer is a trainer, on any node


def flush(spec: FlushSpec, progress: Callable[[int], None] = lambda _: None) -> dict[str, Any]:
    """Flush this node's part and return what to report. If it raises, at most a temporary directory is left, which the
    next flush removes.
    """
    began = time.monotonic()
    storage = open_storage(spec.settings.directory)
    failpoint("before_flush")
    enter(storage, spec)
    if spec.coordinates:
        check_lineage(storage, spec)
        sweep(storage, spec.generation.step, spec.attempt)
    there = look(storage, step_name(spec.generation.step), spec.generation.step)
    if there.meta is not None and there.generation == spec.generation and not there.problem:
        # The previous agent died between the commit and its report.
        if spec.coordinates:
            _move_latest(storage, spec)
        return {"files": len(there.meta.files), "size_bytes": there.meta.size_bytes, "seconds": 0.0}
    stage = storage.stage(spec.generation.step, spec.attempt)
    nodes = [node for node, _ in spec.writers]
    deadline = time.monotonic() + spec.settings.timeout
    meeting = min(deadline, time.monotonic() + _MEET_SECONDS)
    together = Exchange(storage, stage, nodes, spec.node_id, meeting) if len(nodes) > 1 else None
    try:
        with _shards(spec) as shards:
            mine = [shard.contribution() for shard in shards]
            if together is not None:
                together.offer(mine)
                mine = together.offered()
            _check_ranks(spec, [one.rank for one in mine])
            todo = plan(mine)
            mbps = spec.settings.max_mbps
            written = write_files(
                storage,
                stage,
                todo,
                shards,
                throttle=Throttle(None if mbps is None else mbps * 1e6 / 8),
                concurrency=spec.settings.concurrency,
                progress=progress,
            )
            paths = _value_paths(todo, shards)
            saved_at = min((shard.header.saved_at for shard in shards), default=float("inf"))
            extra = shards[0].values.extra if shards else None
        if together is not None:
            together = Exchange(storage, stage, nodes, spec.node_id, deadline)
            together.report(written, paths, saved_at)
        if not spec.coordinates:
            return _told(written, began)
        if together is not None:
            written, paths, saved_at = _merge(together.reported())
            _check_seen(storage, stage, written)
            together.clean()
    except BaseException as error:
        if together is not None and not isinstance(error, NotFoundError):
            reason = error.message if isinstance(error, FlashError) else f"{type(error).__name__}: {error}"
            with contextlib.suppress(OSError, FlashError):
                together.fail(reason)
            # No other node sees this directory, or no node is left that would remove it.
            if isinstance(error, DeadlineError) and not spec.coordinates and not stage.suffix:
                _remove(storage, stage.place)
        raise
    _write_checksums(storage, stage, written)
    marker = encode_index(todo, written.placed, paths)
    written.files[METADATA] = FileInfo(len(marker), native.crc32c(marker))
    meta = Meta(
        job=spec.job,
        generation=spec.generation,
        world=spec.world,
        saved_at=saved_at,
        persisted_at=time.time(),
        reason=spec.reason,
        files=written.files,
        values=written.values,
        extra=json_part(extra),
        extra_keys=tuple(sorted(map(str, extra))) if isinstance(extra, dict) else (),
        versions={"flashckpt": __version__, "torch": str(torch.__version__)},
    )
    storage.put(f"{stage.place}/{META_JSON}", encode_meta(meta))
    # Checked again: this process may have been paused while it wrote, and a newer launch may have started.
    lineage = check_lineage(storage, spec)
    keep_line(storage, lineage)
    storage.commit(stage, spec.generation.step, marker)
    _move_latest(storage, spec)
    told = _told(written, began)
    retain(storage, spec, lineage)
    return told


def sweep(storage: Storage, step: int, attempt: str) -> None:
    """Remove what dead flushes and deletions left. There is one flush at a time: only the nodes of this attempt are
    writing, and they may have begun before this one.
    """
    for name, entry in (storage.list() or {}).items():
        left, aside = attempt_of(name), aside_of(name)
        # Without renames, a dead attempt leaves its files in a step without a marker.
        # IMPORTANT: skip this step, where quicker nodes have written; the commit removes what died there.
        is_other_step = is_url(storage.root) and step_of(name) not in (None, step)
        inside = (storage.list(name) or {}) if is_other_step else {}
        if inside and METADATA not in inside and all(map(is_of_attempt, inside)):
            _remove(storage, name)
        # A load may be writing one right now, and neither waits for the other.
        is_new_history = aside == HISTORY and time.time() - entry.modified_at < _HISTORY_SECONDS
        is_aside = aside is not None and not is_new_history
        if is_deleting(name) or is_aside or (left is not None and left != attempt):
            _log.info("removing %s/%s, which a flush that ended early left behind", storage.root, name)
            _remove(storage, name)


def retain(storage: Storage, spec: FlushSpec, lineage: Lineage) -> None:
    settings = spec.settings
    rules = KeepRules(settings.keep_latest_k, settings.keep_every, frozenset(settings.keep_steps))
    lying = [
        Lying(
            one.name,
            one.step,
            one.order,
            good=not one.problem,
            # A person put an imported step there; a step of another history waits until a person chooses.
            ours=not one.is_imported and lineage.is_known(one.generation),
            permanent=one.meta is not None and one.meta.extra.get(PERMANENT) is True,
        )
        for one in look_around(storage, spec.job).ours
    ]
    for name, reason in removable(lying, rules, storage.latest(), {step_name(spec.generation.step)}).items():
        _log.info("removing %s/%s: %s", storage.root, name, reason)
        _remove(storage, name)


def _remove(storage: Storage, name: str) -> None:
    """Remove a step or file. A failure here does not fail the flush; the next flush tries again."""
    try:
        storage.remove(name)
    except OSError as error:
        _log.warning("%s/%s could not be removed: %s; trying again later", storage.root, name, error)


@contextlib.contextmanager
def _shards(spec: FlushSpec) -> Iterator[list[Shard]]:
    """Open the shards that this node writes, and check their headers."""
    opened: list[Shard] = []
    with SlotStore.open(spec.memory_dir, spec.job, create=False) as store:
        try:
            for rank in spec.ranks:
                shard = ShardId(spec.generation, rank, spec.world)
                sealed = store.find(shard)
                if sealed is None:
                    raise NotFoundError(f"{shard}: expected it in {store.path}, found that it is gone")
                opened.append(Shard(store.open_shard(sealed), shard, spec.job))
            yield opened
        finally:
            for one in opened:
                one.close()


def _check_ranks(spec: FlushSpec, ranks: list[int]) -> None:
    if sorted(ranks) != list(range(spec.world)):
        raise CorruptShardError(f"{spec.generation}: expected shards of ranks 0 to {spec.world - 1}, found {ranks}")


def _value_paths(todo: PersistPlan, shards: list[Shard]) -> dict[str, tuple[str | int, ...]]:
    """Return the nested keys that are not simply the parts of the flat ones."""
    by_rank = {shard.rank: shard.values.paths for shard in shards}
    return {
        value.key: by_rank[value.rank][value.fqn] for value in todo.values if value.fqn in by_rank.get(value.rank, ())
    }


def _merge(
    reports: list[tuple[WrittenFiles, dict[str, tuple[str | int, ...]], float]],
) -> tuple[WrittenFiles, dict[str, tuple[str | int, ...]], float]:
    merged = WrittenFiles()
    paths: dict[str, tuple[str | int, ...]] = {}
    for written, value_paths, _ in reports:
        merged.files |= written.files
        merged.placed += written.placed
        merged.values |= written.values
        paths |= value_paths
    return merged, paths, min(saved_at for _, _, saved_at in reports)


def _check_seen(storage: Storage, stage: Stage, written: WrittenFiles) -> None:
    """Check that what other nodes report as written is in the directory too."""
    seen = storage.list(stage.place) or {}
    for name, info in written.files.items():
        size = seen[name].size_bytes if name in seen else None
        if size != info.size_bytes:
            raise NotFoundError(
                f"{storage.root}/{stage.place}/{name}: expected {info.size_bytes} bytes that another node wrote, "
                f"found {'no such file' if size is None else size}",
                hint="persist_dir has to be the same directory on every node",
            )


def _write_checksums(storage: Storage, stage: Stage, written: WrittenFiles) -> None:
    """Write the checksums of every part, so that a reader of a few parts need not read whole files to verify them."""
    parts: dict[str, list[list[int]]] = {}
    for one in written.placed:
        parts.setdefault(one.file, []).append([one.offset_bytes, one.length_bytes, one.crc32c])
    name, content = checksums_name(stage.suffix), json.dumps(parts).encode()
    storage.put(f"{stage.place}/{name}", content)
    written.files[name] = FileInfo(len(content), native.crc32c(content))


def _move_latest(storage: Storage, spec: FlushSpec) -> None:
    """Move `latest` to this step unless it names a newer one: a step flushed on request may be older."""
    name = step_name(spec.generation.step)
    good = [one for one in look_around(storage, spec.job).ours if not one.problem]
    mine = next((one for one in good if one.name == name), None)
    current = next((one for one in good if one.name == storage.latest()), None)
    if mine is not None and (current is None or current.order <= mine.order):
        storage.point_latest(name)


def _told(written: WrittenFiles, began: float) -> dict[str, Any]:
    size_bytes = sum(one.size_bytes for one in written.files.values())
    return {"files": len(written.files), "size_bytes": size_bytes, "seconds": time.monotonic() - began}
