"""What names look like, and which are refused. Round trips are in the property tests."""

from __future__ import annotations

import pytest

from flashckpt.errors import ConfigError
from flashckpt.store.names import (
    damaged_line_name,
    job_directory_name,
    line_name,
    parse_damaged_line_name,
    parse_draft_name,
    parse_line_name,
    parse_sealed_name,
    parse_slot_name,
    parse_void_name,
    sealed_name,
    slot_name,
)
from flashckpt.store.owner import Owner
from flashckpt.types import Generation, Launch, ShardId

OWNER = Owner(4321, 99887, "81c33f2d", 4026531836)
SHARD = ShardId(Generation(1753, 0xABC, 1200, 3), 5, 8)
SLOT_NAME = "s000000000000002a.w4321-99887-81c33f2d-4026531836"
SEALED_NAME = "e1753-0000000000000abc-1200-3.r5-8.t0000002b." + SLOT_NAME


def test_exact_names():
    """Processes of two versions may meet in one directory: a changed form is a changed format."""
    assert slot_name(42, OWNER) == SLOT_NAME
    assert sealed_name(SHARD, 43, 42, OWNER) == SEALED_NAME
    assert line_name(Launch(epoch=7, nonce=8)) == "line-7-0000000000000008"
    assert damaged_line_name("line-7-0000000000000008") == "damaged-line-7-0000000000000008"


@pytest.mark.parametrize(
    "name",
    [
        "",
        "x",
        SLOT_NAME + "x",
        SLOT_NAME + "\n",
        SLOT_NAME.replace("w4321", "w04321"),
        SLOT_NAME.replace("w4321", "w0"),
        SLOT_NAME.replace("w4321", "w-1"),
        SLOT_NAME.replace("w4321", "w99999999999"),
        SLOT_NAME.replace("w4321", "w\u0664321"),
        SLOT_NAME.replace("2a", "2A"),
        SLOT_NAME.replace("99887", "99999999999999999999"),
        SEALED_NAME,
    ],
)
def test_foreign_slot_names(name):
    assert parse_slot_name(name) is None


@pytest.mark.parametrize(
    "name",
    [
        SLOT_NAME,
        SEALED_NAME[1:],
        SEALED_NAME.replace("e1753", "e99999999999999999999"),
        SEALED_NAME.replace("r5", "r4294967296"),
        SEALED_NAME.replace("r5", "r05"),
        SEALED_NAME.replace("t0000002b", "t2b"),
        SEALED_NAME + ".tmp",
        "../" + SEALED_NAME,
    ],
)
def test_foreign_sealed_names(name):
    assert parse_sealed_name(name) is None


@pytest.mark.parametrize(
    "name",
    [
        "line",
        "line-7-8",
        "line-07-0000000000000008",
        "line-7-000000000000000A",
        "line-7-0000000000000008-1",
        "line-7-0000000000000008\n",
        "line-99999999999999999999-0000000000000008",
        "fence-7-0000000000000008-1",
        "damaged-line-7-8",
        "damaged-damaged-line-7-0000000000000008",
    ],
)
def test_foreign_line_names(name):
    assert parse_line_name(name) is None
    assert parse_damaged_line_name(name) is None
    assert parse_draft_name(name) is None
    assert parse_void_name(name) is None


def test_a_damaged_line_is_no_line():
    name = line_name(Launch(epoch=7, nonce=8))
    assert parse_line_name(name) == Launch(7, 8)
    assert parse_damaged_line_name(name) is None
    assert parse_damaged_line_name(damaged_line_name(name)) == name
    assert parse_line_name(damaged_line_name(name)) is None


@pytest.mark.parametrize(
    ("shard", "field"),
    [
        (ShardId(Generation(1, 2, -1, 4), 0, 1), "step"),
        (ShardId(Generation(1, 2, 3, 1 << 64), 0, 1), "seq"),
        (ShardId(Generation(1, 2, 3, 4), 1 << 32, 1), "rank"),
    ],
)
def test_numbers_that_no_name_can_hold(shard, field):
    with pytest.raises(ConfigError, match=field):
        sealed_name(shard, 0, 0, OWNER)


@pytest.mark.parametrize(
    ("job", "name"),
    [
        ("run1", "run1"),
        ("a/b c", "a%2Fb%20c"),
        ("..", "%2E."),
        (".hidden", "%2Ehidden"),
        ("-rf", "%2Drf"),
        ("a~b%", "a%7Eb%25"),
        ("é", "%C3%A9"),
        ("nul\0", "nul%00"),
    ],
)
def test_job_directory_names(job, name):
    assert job_directory_name(job) == name


@pytest.mark.parametrize("job", ["", "x" * 257, "é" * 129])
def test_jobs_without_a_directory_name(job):
    with pytest.raises(ConfigError, match="1 to 256 bytes"):
        job_directory_name(job)


def test_long_jobs_that_differ_at_the_end():
    names = {job_directory_name("/" * 255 + end) for end in "ab"}
    assert len(names) == 2
    assert all(len(name) <= 255 for name in names)
