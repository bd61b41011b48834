"""Converts between file names of the memory directory and types. Pure.

A name has everything that a decision needs (which slot, who wrote it last, which shard), so that a scan opens no file
and a rename changes state and ownership in one step. Only the exact form that the writing functions produce is parsed:
two names never mean the same thing.
"""

from __future__ import annotations

import enum
import hashlib
import re
from dataclasses import dataclass

from flashckpt.errors import ConfigError
from flashckpt.store.owner import Owner
from flashckpt.types import Generation, Launch, ShardId

MAX_JOB_BYTES = 256
SESSION_NAME = "session"
LOSSES_NAME = "losses"
AGENT_FILES_PREFIX = "agent."  # socket, lock and log of the agent
_MAX_COMPONENT_BYTES = 255
_DIGEST_BYTES = 20
_U32 = (1 << 32) - 1
_U64 = (1 << 64) - 1


class Draft(enum.StrEnum):
    """What a file that is written aside will become."""

    LINE = "line"
    SESSION = "session"
    RECORD = "record"
    SECRET = "secret"
    LOSSES = "losses"


_NUMBER = "(0|[1-9][0-9]{0,19})"
_WRITER = rf"w{_NUMBER}-{_NUMBER}-([0-9a-f]{{8}})-{_NUMBER}"
_SLOT = re.compile(rf"s([0-9a-f]{{16}})\.{_WRITER}")
_SEALED = re.compile(
    rf"e{_NUMBER}-([0-9a-f]{{16}})-{_NUMBER}-{_NUMBER}\.r{_NUMBER}-{_NUMBER}"
    rf"\.t([0-9a-f]{{8}})\.s([0-9a-f]{{16}})\.{_WRITER}"
)
_PAST = re.compile(rf"past-{_NUMBER}-([0-9a-f]{{16}})")
_FETCHED = re.compile(rf"f([0-9a-f]{{16}})\.{_WRITER}")
_LINE = re.compile(rf"line-{_NUMBER}-([0-9a-f]{{16}})")
_RECORD = re.compile(rf"record-{_NUMBER}-([0-9a-f]{{16}})-{_NUMBER}-{_NUMBER}")
_PLAIN = re.compile(r"[a-z][a-z0-9_-]{0,40}(\.[a-z0-9_-]{1,20}){0,2}")
_DRAFT = re.compile(rf"({'|'.join(Draft)})-draft-[0-9a-f]{{16}}\.{_WRITER}")
_VOID = re.compile(rf"void-{_NUMBER}-([0-9a-f]{{16}})-{_NUMBER}-{_NUMBER}\.{_WRITER}")


@dataclass(frozen=True, slots=True)
class SlotName:
    """A file in `pool/` (its last writer) or `writing/` (its writer)."""

    slot_id: int
    writer: Owner


@dataclass(frozen=True, slots=True)
class SealedName:
    """A file in `sealed/` or `quarantine/`."""

    shard: ShardId
    tag: int
    slot_id: int
    writer: Owner


@dataclass(frozen=True, slots=True)
class VoidName:
    """A mark in the job's directory."""

    generation: Generation
    writer: Owner


@dataclass(frozen=True, slots=True)
class DraftName:
    """A small file that is not in force yet."""

    kind: Draft
    writer: Owner


def slot_name(slot_id: int, writer: Owner) -> str:
    return f"s{_within(slot_id, _U64, 'slot_id'):016x}.{_writer_text(writer)}"


def parse_slot_name(name: str) -> SlotName | None:
    match = _SLOT.fullmatch(name)
    if match is None:
        return None
    writer = _writer(match.groups()[1:])
    return None if writer is None else SlotName(int(match[1], 16), writer)


def fetched_name(file_id: int, writer: Owner) -> str:
    return f"f{_within(file_id, _U64, 'file_id'):016x}.{_writer_text(writer)}"


def parse_fetched_name(name: str) -> Owner | None:
    """Return the agent that fetched the file."""
    match = _FETCHED.fullmatch(name)
    return None if match is None else _writer(match.groups()[1:])


def sealed_prefix(shard: ShardId) -> str:
    """Return the beginning of all names of one shard, which no name of another shard has."""
    rank, world = _within(shard.rank, _U32, "rank"), _within(shard.world, _U32, "world")
    return f"e{_generation_text(shard.generation)}.r{rank}-{world}.t"


def sealed_name(shard: ShardId, tag: int, slot_id: int, writer: Owner) -> str:
    return f"{sealed_prefix(shard)}{_within(tag, _U32, 'tag'):08x}.{slot_name(slot_id, writer)}"


def parse_sealed_name(name: str) -> SealedName | None:
    match = _SEALED.fullmatch(name)
    if match is None:
        return None
    epoch, nonce, step, seq, rank, world, tag, slot_id, *owner = match.groups()
    generation = _generation(epoch, nonce, step, seq)
    writer = _writer(tuple(owner))
    if writer is None or generation is None or max(int(rank), int(world)) > _U32:
        return None
    shard = ShardId(generation, int(rank), int(world))
    return SealedName(shard, int(tag, 16), int(slot_id, 16), writer)


def line_name(head: Launch) -> str:
    return f"line-{_launch_text(head)}"


def parse_line_name(name: str) -> Launch | None:
    """Return the head of the line."""
    return _launch(_LINE.fullmatch(name))


def damaged_line_name(name: str) -> str:
    """Return the name of a line's file that was set aside because it can't be trusted."""
    return f"damaged-{name}"


def parse_damaged_line_name(name: str) -> str | None:
    """Return the name that the file had before."""
    was = name.removeprefix("damaged-")
    return was if was != name and parse_line_name(was) is not None else None


def record_name(generation: Generation) -> str:
    return f"record-{_generation_text(generation)}"


def parse_record_name(name: str) -> Generation | None:
    match = _RECORD.fullmatch(name)
    return None if match is None else _generation(*match.groups())


def past_name(launch: Launch) -> str:
    return f"past-{_launch_text(launch)}"


def parse_past_name(name: str) -> Launch | None:
    """Return the earlier launch whose session it is."""
    return _launch(_PAST.fullmatch(name))


def draft_name(kind: Draft, writer: Owner, random64: int) -> str:
    return f"{kind}-draft-{_within(random64, _U64, 'random64'):016x}.{_writer_text(writer)}"


def parse_draft_name(name: str) -> DraftName | None:
    match = _DRAFT.fullmatch(name)
    if match is None:
        return None
    writer = _writer(match.groups()[1:])
    return None if writer is None else DraftName(Draft(match[1]), writer)


def is_plain_name(name: str) -> bool:
    """Return True for a name that a part of flashckpt has chosen; such a name never comes from outside."""
    return _PLAIN.fullmatch(name) is not None and "-draft-" not in name


def check_plain_name(name: str) -> str:
    if not is_plain_name(name):
        raise ConfigError(
            f"file name: expected {_PLAIN.pattern} and no draft's, found {name!r}", field="name", value=name
        )
    return name


def void_name(generation: Generation, writer: Owner) -> str:
    return f"void-{_generation_text(generation)}.{_writer_text(writer)}"


def parse_void_name(name: str) -> VoidName | None:
    match = _VOID.fullmatch(name)
    if match is None:
        return None
    epoch, nonce, step, seq, *owner = match.groups()
    generation, writer = _generation(epoch, nonce, step, seq), _writer(tuple(owner))
    return None if generation is None or writer is None else VoidName(generation, writer)


def job_directory_name(job: str) -> str:
    """Return one path component for any job name of 1 to 256 bytes; different jobs have different ones.

    Letters, digits, `_`, `-` and `.` stand for themselves, every other byte becomes `%XX`, so that the directory can be
    recognized in a listing. A name that gets too long ends in `~` and a digest; a plain name never contains a `~`. A
    leading dot would hide the directory, a leading dash looks like an option: both are escaped.
    """
    # surrogatepass, not surrogateescape: the latter maps different strings to the same bytes.
    raw = job.encode("utf-8", "surrogatepass")
    if not 1 <= len(raw) <= MAX_JOB_BYTES:
        raise ConfigError(
            f"job: expected a name of 1 to {MAX_JOB_BYTES} bytes, found {len(raw)}",
            hint="set job= to a short name",
        )
    units = [chr(byte) if _is_plain(byte, index) else f"%{byte:02X}" for index, byte in enumerate(raw)]
    name = "".join(units)
    if len(name) <= _MAX_COMPONENT_BYTES:
        return name
    digest = hashlib.blake2b(raw, digest_size=_DIGEST_BYTES).hexdigest()
    room = _MAX_COMPONENT_BYTES - 1 - len(digest)
    return f"{name[:room]}~{digest}"


def _is_plain(byte: int, index: int) -> bool:
    character = chr(byte)
    if not (byte < 128 and (character.isalnum() or character in "_-.")):
        return False
    return index > 0 or character not in ".-"


def _launch_text(launch: Launch) -> str:
    return f"{_within(launch.epoch, _U64, 'epoch')}-{_within(launch.nonce, _U64, 'nonce'):016x}"


def _launch(match: re.Match[str] | None) -> Launch | None:
    launch = None if match is None else Launch(int(match[1]), int(match[2], 16))
    return launch if launch is not None and launch.epoch <= _U64 else None


def _generation_text(generation: Generation) -> str:
    epoch, nonce, step, seq = (
        _within(value, _U64, name) for name, value in zip(generation._fields, generation, strict=True)
    )
    return f"{epoch}-{nonce:016x}-{step}-{seq}"


def _generation(epoch: str, nonce: str, step: str, seq: str) -> Generation | None:
    generation = Generation(int(epoch), int(nonce, 16), int(step), int(seq))
    return generation if max(generation) <= _U64 else None


def _writer_text(writer: Owner) -> str:
    return f"w{writer.pid}-{writer.start_ticks}-{writer.boot_id8}-{writer.pid_namespace}"


def _writer(groups: tuple[str, ...]) -> Owner | None:
    pid, start_ticks, boot_id8, pid_namespace = groups
    owner = Owner(int(pid), int(start_ticks), boot_id8, int(pid_namespace))
    # A pid of 0 or beyond the kernel's range would name something else than a process.
    in_range = 0 < owner.pid < 1 << 31 and owner.start_ticks <= _U64 and owner.pid_namespace <= _U64
    return owner if in_range else None


def _within(value: int, maximum: int, field: str) -> int:
    if not 0 <= value <= maximum:
        raise _out_of_range(value, field, f"0 to {maximum}")
    return value


def _out_of_range(value: int, field: str, expected: str) -> ConfigError:
    return ConfigError(f"{field}: expected {expected}, found {value}", field=field, value=value)
