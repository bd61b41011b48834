"""Defines the names in persist_dir. Pure."""

from __future__ import annotations

import re

METADATA = ".metadata"  # DCP's index, and the commit marker: without it nothing is a checkpoint
META_JSON = "meta.json"
LATEST = "latest"
HISTORY = "history.json"  # the lines of the job
FENCE = "fence.json"  # written by earlier versions instead
IDENTITY = "flashckpt.json"  # names the job that the directory belongs to
IMPORTED = "flashckpt-import.json"  # in a step that a person imported

# DCP needs the same keys on all ranks: what belongs to one rank alone has the rank in its key.
_PER_RANK = "__rank__"

_STEP = re.compile(r"step-(0|[1-9][0-9]{0,18})")
# How other programs name the directory of a step.
_FOREIGN_STEP = re.compile(r"(?:step[-_]?|checkpoint-)([0-9]{1,19})(?:_ckpt)?")
_TEMPORARY = re.compile(r"step-(?:0|[1-9][0-9]{0,18})\.tmp-([0-9a-f]{16})")
_ASIDE = re.compile(r"(latest|history\.json|flashckpt\.json)\.tmp-[0-9a-f]{16}")
_DATA = re.compile(r"__([0-9]{1,9})_")
_SUFFIXED = re.compile(r"__.+-[0-9a-f]{16}\.(?:distcp|flash|json)")
_DELETING = re.compile(r".+\.deleting-[0-9a-f]{16}")


def step_name(step: int) -> str:
    return f"step-{step}"


def step_of(name: str, *, foreign: bool = False) -> int | None:
    """Return the step of a directory's name. `foreign` also accepts the spellings of other checkpointers."""
    match = _STEP.fullmatch(name) or (_FOREIGN_STEP.fullmatch(name) if foreign else None)
    return None if match is None else int(match[1])


def temporary_name(step: int, attempt: str) -> str:
    return f"{step_name(step)}.tmp-{attempt}"


def attempt_of(name: str) -> str | None:
    """Return the attempt that writes, or wrote, into this temporary directory; None for every other name."""
    match = _TEMPORARY.fullmatch(name)
    return None if match is None else match[1]


def aside_of(name: str) -> str | None:
    """Return the name that this small file is to be renamed to; None for every other name."""
    match = _ASIDE.fullmatch(name)
    return None if match is None else match[1]


def is_of_attempt(name: str) -> bool:
    """Name a file of an attempt, for storage without temporary directories."""
    return name == META_JSON or _SUFFIXED.fullmatch(name) is not None


def damaged_name(name: str, token: str) -> str:
    """Name a damaged file that was set aside."""
    return f"{name}.damaged-{token}"


def deleting_name(name: str, token: str) -> str:
    return f"{name}.deleting-{token}"


def is_deleting(name: str) -> bool:
    return _DELETING.fullmatch(name) is not None


def per_rank_key(rank: int, fqn: str) -> str:
    return f"{_PER_RANK}.{rank}.{fqn}"


def parse_per_rank_key(key: str) -> tuple[int, str] | None:
    """Return (rank, key) of a key that belongs to one rank; None for a key that all ranks share."""
    prefix, _, rest = key.partition(".")
    number, _, fqn = rest.partition(".")
    if prefix != _PER_RANK or not number.isascii() or not number.isdigit() or not fqn:
        return None
    return int(number), fqn


def data_name(rank: int, part: int, suffix: str = "") -> str:
    return f"__{rank}_{part}{suffix}.distcp"


def checksums_name(suffix: str = "") -> str:
    """Name the file with the checksum of every part of every data file."""
    return f"__checksums{suffix}.flash"


def rank_of_data(name: str) -> int | None:
    """Return the rank whose shard a data file was written from; DCP names its files in the same way."""
    match = _DATA.match(name)
    return None if match is None else int(match[1])


def values_name(rank: int, suffix: str = "") -> str:
    """Name the file with the rank's values in the typed, pickle-free encoding, for our own reader."""
    return f"__{rank}_values{suffix}.flash"
