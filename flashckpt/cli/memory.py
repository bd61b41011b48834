"""Reads a node's memory directory: its jobs, and the generations of each. No torch.

Nothing here creates, reclaims, renames or deletes: a command that shows must never change what a trainer relies on.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flashckpt.cli.output import note, printable
from flashckpt.config import CheckpointConfig, resolve
from flashckpt.errors import ConfigError, FlashError, NotFoundError
from flashckpt.format.shard import read_identity
from flashckpt.rpc.session import decode_session
from flashckpt.save.retention import GenerationState, judge
from flashckpt.store.default_place import default_memory_dir, other_place
from flashckpt.store.names import job_directory_name, parse_sealed_name
from flashckpt.store.owner import is_dead
from flashckpt.store.slots import SlotStore
from flashckpt.types import Launch, Level, age_order

if TYPE_CHECKING:
    from collections.abc import Iterator

    from flashckpt.protocol.line import Line
    from flashckpt.save.retention import GenerationVerdict
    from flashckpt.store.slots import Sealed, StoreStatus
    from flashckpt.types import Generation, Record, Session

_DIRECTORY_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
PARTIAL = "partial"
LOST = "lost"
_ESCAPE = re.compile(rb"%([0-9A-F]{2})")


@dataclass(frozen=True, slots=True)
class ShardView:
    """Describes a sealed shard as the filesystem shows it."""

    sealed: Sealed
    size_bytes: int
    sealed_at: float  # seconds since 1970: the rename into sealed/

    @property
    def rank(self) -> int:
        return self.sealed.shard.rank


@dataclass(frozen=True, slots=True)
class GenerationView:
    """Describes one generation with its shards, by rank."""

    generation: Generation
    world: int
    shards: tuple[ShardView, ...]
    state: str  # complete, pending, partial, lost, dead
    reason: str
    record: Record | None  # the commit record, if this node knows one

    @property
    def level(self) -> Level:
        """Return the level of the whole generation, as far as this directory knows."""
        if self.state == LOST:
            return Level.NONE
        if self.record is not None and self.record.replicas > 0:
            return Level.REPLICATED
        return Level.SEALED if self.state == GenerationState.COMPLETE.value else Level.NONE

    @property
    def size_bytes(self) -> int:
        return sum(shard.size_bytes for shard in self.shards)

    @property
    def sealed_at(self) -> float:
        """Return when its last shard was sealed."""
        return max(shard.sealed_at for shard in self.shards)

    def age_seconds(self, now: float) -> float:
        return max(0.0, now - self.sealed_at)

    def as_json(self) -> dict[str, Any]:
        """Return what every listing shows of a generation."""
        return {
            "step": self.generation.step,
            "epoch": self.generation.epoch,
            "nonce": f"{self.generation.nonce:016x}",
            "seq": self.generation.seq,
            "state": self.state,
            "reason": self.reason,
            "level": level_name(self) or None,
            "committed_at": None if self.record is None else self.record.committed_at,
            "copies_elsewhere": None if self.record is None else self.record.replicas,
            "world": self.world,
            "ranks": [shard.rank for shard in self.shards],
            "size_bytes": self.size_bytes,
        }


@dataclass(frozen=True, slots=True)
class JobView:
    """Describes one job of this node at one moment."""

    job: str
    generations: tuple[GenerationView, ...]  # newest first
    line: Line | None
    session: Session | None  # of the last launch that an agent served
    status: StoreStatus


def memory_dir_of(memory_dir: str | None, job: str | None) -> str:
    """Return the directory that the trainers would use with these options and this environment."""
    name = named_job(job)
    if name is not None:
        return resolve(CheckpointConfig(job=name, memory_dir=memory_dir)).memory_dir
    given = memory_dir or os.environ.get("FLASHCKPT_MEMORY_DIR")
    if given:
        return resolve(CheckpointConfig(job="-", memory_dir=given)).memory_dir
    found = default_memory_dir(None)
    if other := other_place(found):
        note(f"{other} has jobs, too: look there with --memory-dir {other}")
    return found


def named_job(job: str | None) -> str | None:
    """Return what the option or the environment names; None if neither does."""
    if job is not None:
        return CheckpointConfig(job=job).job
    try:
        return resolve(CheckpointConfig()).job
    except ConfigError:
        return None


def find_jobs(memory_dir: str) -> list[str]:
    """Return all jobs that have a directory there. NotFoundError if there is no memory directory."""
    try:
        fd = os.open(memory_dir, _DIRECTORY_FLAGS)
    except OSError as error:
        raise NotFoundError(
            f"memory directory {memory_dir}: expected a directory, found: {error.strerror}",
            hint="nothing was saved on this node yet, or the trainers use another --memory-dir",
            path=memory_dir,
        ) from error
    try:
        jobs = []
        for name in sorted(os.listdir(fd)):
            job = _job_of(fd, name)
            if job is None:
                note(f"{printable(name)}: not a job's directory, or one without a shard to tell its name; left out")
            else:
                jobs.append(job)
        return jobs
    finally:
        os.close(fd)


@contextlib.contextmanager
def open_store(memory_dir: str, job: str) -> Iterator[SlotStore]:
    """Open the job's store if it exists, else raise NotFoundError. Creates nothing."""
    with SlotStore.open(memory_dir, job, create=False) as store:
        yield store


def selected_jobs(memory_dir: str, job: str | None) -> list[str]:
    """Return the named job, or all jobs if none is named; at least one."""
    name = named_job(job)
    jobs = [name] if name is not None else find_jobs(memory_dir)
    if not jobs:
        raise NotFoundError(
            f"memory directory {memory_dir}: expected a job, found none",
            hint="nothing was saved on this node yet, or the trainers use another --memory-dir",
        )
    return jobs


def selected_job(memory_dir: str, job: str | None) -> str:
    """Return the named job, or the only one if none is named."""
    jobs = selected_jobs(memory_dir, job)
    if len(jobs) > 1:
        raise ConfigError(
            f"memory directory {memory_dir}: expected one job, found {len(jobs)}: {', '.join(map(repr, jobs))}",
            hint="name one with --job",
        )
    return jobs[0]


def view(store: SlotStore, job: str) -> JobView:
    """Read what is there now. Files that disappear meanwhile are left out."""
    line = store.read_line()
    session = _session(store)
    shards = [shard for sealed in store.scan() if (shard := _stat(store, sealed)) is not None]
    tags = {shard.sealed.shard: shard.sealed.tag for shard in shards}
    voids = store.voids()
    records = {record.generation: record for record in store.read_records()}
    losses = {one.generation: one.reason for one in store.read_losses()}
    nodes = 1 if session is None else len(session.members)
    generations = []
    for generation, verdict in judge(tags, _live_launch(shards), line, voids).items():
        members = sorted((s for s in shards if s.sealed.shard.generation == generation), key=lambda s: s.rank)
        world = max(shard.sealed.shard.world for shard in members)
        dead = generation in voids or (line is not None and line.kills(generation))
        record = None if dead else records.get(generation)
        state, reason = verdict.state.value, verdict.reason
        if verdict.state is GenerationState.DISAGREES:
            state = GenerationState.DEAD.value
        elif not dead and len(members) < world:
            state, reason = _of_several_nodes(verdict, record, nodes)
            if record is not None and generation in losses:
                state, reason = LOST, losses[generation]
        generations.append(GenerationView(generation, world, tuple(members), state, reason, record))
    generations.sort(key=lambda one: age_order(one.generation), reverse=True)
    return JobView(job, tuple(generations), line, session, store.status())


def pick(job: JobView, step: int | None) -> GenerationView:
    """Return the generation of that step, else the newest: complete ones first. NotFoundError if there is none."""
    of_step = [one for one in job.generations if step is None or one.generation.step == step]
    if not of_step:
        steps = sorted({one.generation.step for one in job.generations})
        raise NotFoundError(
            f"job {job.job!r}: expected {'a saved step' if step is None else f'step {step}'}, "
            f"found steps {steps or 'none'}",
            hint="`flashckpt ls` lists what is there",
        )
    return next((one for one in of_step if one.state == GenerationState.COMPLETE.value), of_step[0])


def level_name(found: GenerationView) -> str:
    """Name the level for people; "" if the generation has not reached any."""
    return "" if found.level is Level.NONE else found.level.name.lower()


def now() -> float:
    return time.time()


def _of_several_nodes(verdict: GenerationVerdict, record: Record | None, nodes: int) -> tuple[str, str]:
    """Return state and reason of a generation if some of its shards are not on this node."""
    if record is not None:
        return GenerationState.COMPLETE.value, f"committed: every rank sealed; copies on other nodes: {record.replicas}"
    if nodes > 1 and verdict.state is GenerationState.DEAD:
        return PARTIAL, f"{verdict.reason} here; other nodes may have them"
    return verdict.state.value, verdict.reason


def _session(store: SlotStore) -> Session | None:
    kept = store.read_session()
    try:
        return None if kept is None else decode_session(kept)
    except FlashError as error:
        note(f"{store.path}: left out: {error.message}")
        return None


def _live_launch(shards: list[ShardView]) -> Launch | None:
    """Return the newest launch if a writer of it still runs: only then may an incomplete generation be completed."""
    if not shards:
        return None
    newest = max((s.sealed.shard.generation for s in shards), key=lambda g: (g.epoch, g.nonce))
    writers = {s.sealed.writer for s in shards if s.sealed.shard.generation[:2] == (newest.epoch, newest.nonce)}
    alive = any(not is_dead(writer) for writer in writers)
    return Launch(newest.epoch, newest.nonce) if alive else None


def _stat(store: SlotStore, sealed: Sealed) -> ShardView | None:
    try:
        fd = store.open_shard(sealed)
    except NotFoundError:
        return None  # released while it was read
    except FlashError as error:
        note(f"{sealed.shard}: left out: {error.message}")
        return None
    try:
        found = os.fstat(fd)
    finally:
        os.close(fd)
    # Renaming sets ctime; writing through a mapping does not reliably set mtime.
    return ShardView(sealed, found.st_size, found.st_ctime)


def _job_of(base_fd: int, name: str) -> str | None:
    """Return the job of a directory, from its name, or if that was cut short from a shard in it."""
    raw = _ESCAPE.sub(lambda match: bytes([int(match[1], 16)]), os.fsencode(name))
    for candidate in (raw.decode("utf-8", "replace"), _job_in_shards(base_fd, name)):
        with contextlib.suppress(ConfigError):
            if candidate and job_directory_name(candidate) == name:
                return candidate
    return None


def _job_in_shards(base_fd: int, name: str) -> str:
    try:
        sealed_fd = os.open(f"{name}/sealed", _DIRECTORY_FLAGS, dir_fd=base_fd)
    except OSError:
        return ""
    try:
        for file in filter(parse_sealed_name, os.listdir(sealed_fd)):
            with contextlib.suppress(OSError, FlashError):
                fd = os.open(file, _FILE_FLAGS, dir_fd=sealed_fd)
                try:
                    return read_identity(fd)[0]
                finally:
                    os.close(fd)
    finally:
        os.close(sealed_fd)
    return ""
