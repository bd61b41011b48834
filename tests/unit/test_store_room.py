"""How much memory there is: figures from trees of v1 and v2 files, decisions, and real allocation."""

from __future__ import annotations

import dataclasses
import errno
import os
import re
import tempfile

import pytest

from flashckpt.errors import NoSpaceError
from flashckpt.store import room as room_module
from flashckpt.store.mounts import find_mount
from flashckpt.store.room import (
    STEP_BYTES,
    CgroupRoom,
    Room,
    RoomReader,
    allocate,
    check_room,
    format_bytes,
    read_cgroup,
    read_meminfo,
)

M = 1 << 20
G = 1 << 30
UNLIMITED_V1 = "9223372036854771712"
ROOMY = Room("tmpfs", "/dev/shm", 64 * G, 60 * G, 1000, None, 100 * G, 90 * G)


@pytest.fixture
def tree(tmp_path):
    """Writes files of a fake /proc and of the cgroup trees its mountinfo names."""

    def write(files):
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(str(text).replace("TREE", str(tmp_path)))
        return tmp_path / "proc"

    return write


V1_MOUNT = "30 25 0:32 / TREE/cg/memory rw,relatime - cgroup cgroup rw,memory\n"
V2_MOUNT = "31 25 0:38 / TREE/cg2 rw,relatime - cgroup2 cgroup2 rw\n"


def v1(directory, limit, usage, inactive=0):
    return {
        f"{directory}/memory.limit_in_bytes": limit,
        f"{directory}/memory.usage_in_bytes": usage,
        f"{directory}/memory.stat": f"inactive_file 1\ntotal_inactive_file {inactive}\n",
    }


def v2(directory, limit, usage, inactive=0, high="max"):
    return {
        f"{directory}/memory.max": limit,
        f"{directory}/memory.high": high,
        f"{directory}/memory.current": usage,
        f"{directory}/memory.stat": f"anon 5\ninactive_file {inactive}\n",
    }


def test_v1_takes_the_tightest_ancestor(tree, tmp_path):
    proc = tree(
        {
            "proc/self/mountinfo": V2_MOUNT + V1_MOUNT,
            "proc/self/cgroup": "4:memory:/kube/pod/box\n1:cpu:/\n0::/\n",
            **v1("cg/memory", UNLIMITED_V1, 50 * G),
            **v1("cg/memory/kube", UNLIMITED_V1, 40 * G),
            **v1("cg/memory/kube/pod", 2 * G, 1900 * M, 100 * M),
            **v1("cg/memory/kube/pod/box", 1 * G, 100 * M),
        }
    )
    found = read_cgroup(proc)
    assert found == CgroupRoom(str(tmp_path / "cg/memory/kube/pod"), 2 * G, 1800 * M)
    assert found.free_bytes == 248 * M


def test_v2_takes_the_tightest_ancestor_and_minds_memory_high(tree, tmp_path):
    proc = tree(
        {
            "proc/self/mountinfo": V2_MOUNT,
            "proc/self/cgroup": "0::/job/rank\n",
            **v2("cg2/job", "max", 3 * G),
            **v2("cg2/job/rank", 8 * G, 1 * G, 256 * M, high=2 * G),
        }
    )
    assert read_cgroup(proc) == CgroupRoom(str(tmp_path / "cg2/job/rank"), 2 * G, 768 * M)


def test_container_whose_mount_shows_a_part_of_the_tree(tree, tmp_path):
    proc = tree(
        {
            "proc/self/mountinfo": "30 25 0:32 /docker/abc TREE/cg/memory rw - cgroup cgroup rw,memory\n",
            "proc/self/cgroup": "4:memory:/docker/abc/inner\n",
            **v1("cg/memory", 1 * G, 10 * M),
            **v1("cg/memory/inner", 2 * G, 5 * M),
        }
    )
    assert read_cgroup(proc) == CgroupRoom(str(tmp_path / "cg/memory"), 1 * G, 10 * M)
    tree({"proc/self/cgroup": "4:memory:/docker/abc\n"})
    assert read_cgroup(proc) == CgroupRoom(str(tmp_path / "cg/memory"), 1 * G, 10 * M)


@pytest.mark.parametrize("membership", ["0::/../../other\n", "0::/not/there\n", "0::/\n"])
def test_cgroup_path_that_leads_nowhere_means_the_visible_root(tree, tmp_path, membership):
    proc = tree(
        {
            "proc/self/mountinfo": V2_MOUNT.replace("TREE/cg2", r"TREE/c\040g"),
            "proc/self/cgroup": membership,
            **v2("c g", 4 * G, 1 * G),
        }
    )
    assert read_cgroup(proc) == CgroupRoom(str(tmp_path / "c g"), 4 * G, 1 * G)


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"proc/self/mountinfo": V1_MOUNT},
        {"proc/self/mountinfo": "", "proc/self/cgroup": "4:memory:/\n"},
        {"proc/self/mountinfo": V1_MOUNT, "proc/self/cgroup": "4:memory:/\n"},
        {"proc/self/mountinfo": V1_MOUNT, "proc/self/cgroup": "garbage\n\n::\n"},
        {"proc/self/mountinfo": V1_MOUNT, "proc/self/cgroup": "4:memory:/\n", **v1("cg/memory", UNLIMITED_V1, 5)},
        {"proc/self/mountinfo": V2_MOUNT, "proc/self/cgroup": "0::/\n", **v2("cg2", "max", 5)},
        {"proc/self/mountinfo": V2_MOUNT, "proc/self/cgroup": "0::/\n", **v2("cg2", "nonsense", 5)},
    ],
)
def test_no_limit_known(tree, files):
    assert read_cgroup(tree({"proc/x": "", **files})) is None


def test_meminfo(tree):
    proc = tree({"proc/meminfo": "MemTotal:  1000 kB\nMemFree: 1 kB\nMemAvailable:    400 kB\n"})
    assert read_meminfo(proc) == (1000 << 10, 400 << 10)
    assert read_meminfo(proc / "missing") == (None, None)


def test_this_machine():
    """The real files are read: something is known, and it is plausible."""
    fd = os.open("/dev/shm", os.O_RDONLY)
    try:
        room = RoomReader(fd, find_mount(fd))()
    finally:
        os.close(fd)
    assert room.fs_type == "tmpfs"
    assert room.mount_point == "/dev/shm"
    assert 0 < room.fs_free_bytes <= room.fs_total_bytes
    assert 0 < room.memory_available_bytes <= room.memory_total_bytes


@pytest.mark.parametrize(
    ("need", "changes", "new_files", "reason"),
    [
        (50 * G, {}, 1, None),
        (61 * G, {}, 0, "tmpfs can't hold it: needs 61 GiB, tmpfs /dev/shm has 60 GiB free of 64 GiB"),
        (61 * G, {"fs_free_bytes": None, "fs_total_bytes": None}, 0, None),
        (89 * G, {"fs_free_bytes": None}, 0, "the machine's memory can't hold it"),
        (1, {"fs_free_inodes": 0}, 1, "tmpfs inodes can't hold it: needs 1 B, .*0 free inodes"),
        (1, {"fs_free_inodes": 0}, 0, None),
        (6 * M, {"budget_bytes": 10 * M, "budget_used_bytes": 4 * M}, 0, None),
        (7 * M, {"budget_bytes": 10 * M, "budget_used_bytes": 4 * M}, 0, "budget 10 MiB with 4 MiB in slots"),
        (100 * M, {"cgroup": CgroupRoom("/x", 256 * M, 124 * M)}, 0, None),
        (101 * M, {"cgroup": CgroupRoom("/x", 256 * M, 124 * M)}, 0, "cgroup /x limit 256 MiB with 124 MiB in use"),
        (G, {"cgroup": CgroupRoom("/x", 100 * G, 97 * G)}, 0, None),
        (G + 1, {"cgroup": CgroupRoom("/x", 100 * G, 97 * G)}, 0, "2 GiB kept in reserve"),
        (0, {"cgroup": CgroupRoom("/x", 40 * M, 39 * M)}, 0, "the memory cgroup"),
    ],
)
def test_decisions(need, changes, new_files, reason):
    answer = check_room(need, dataclasses.replace(ROOMY, **changes), new_files=new_files)
    if reason is None:
        assert answer is None
    else:
        assert re.search(reason, answer)


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (3435973837, "3.2 GiB"), (64 * M, "64 MiB"), (1 << 50, "1024 TiB")],
)
def test_figures_for_people(count, text):
    assert format_bytes(count) == text


@pytest.fixture
def file():
    with tempfile.TemporaryFile(dir="/dev/shm", buffering=0) as opened:
        yield opened


def test_allocate_gives_real_memory_in_steps(file):
    looks = []

    def reader():
        looks.append(os.fstat(file.fileno()).st_size)
        return ROOMY

    allocate(file.fileno(), 0, 40 * M, reader)
    assert looks == [0, STEP_BYTES, 2 * STEP_BYTES]
    found = os.fstat(file.fileno())
    assert (found.st_size, found.st_blocks * 512) == (40 * M, 40 * M)


def test_steps_are_small_near_a_limit(file):
    sizes = []

    def reader():
        sizes.append(os.fstat(file.fileno()).st_size)
        return dataclasses.replace(ROOMY, cgroup=CgroupRoom("/x", 256 * M, 170 * M + sizes[-1]))

    allocate(file.fileno(), 0, 10 * M, reader)
    assert sizes == [0, 2 * M, 4 * M, 6 * M, 8 * M]


def test_refusal_midway_gives_back_what_was_added(file):
    """Others grow meanwhile: the third look finds too little."""
    allocate(file.fileno(), 0, 2 * M, lambda: ROOMY)
    looks = []

    def reader():
        looks.append(1)
        used = 100 * M if len(looks) < 3 else 250 * M
        return dataclasses.replace(ROOMY, cgroup=CgroupRoom("/x", 256 * M, used))

    with pytest.raises(NoSpaceError, match="cgroup /x limit 256 MiB with 250 MiB in use") as caught:
        allocate(file.fileno(), 2 * M, 50 * M, reader, path="there")
    assert len(looks) == 3
    assert caught.value.path == "there"
    assert "memory_dir=" in caught.value.hint
    found = os.fstat(file.fileno())
    assert (found.st_size, found.st_blocks * 512) == (2 * M, 2 * M)


def test_impossible_request_allocates_nothing(file, monkeypatch):
    def never(*arguments):
        raise AssertionError("allocated in spite of the refusal")

    monkeypatch.setattr(os, "posix_fallocate", never)
    with pytest.raises(NoSpaceError, match="needs 61 GiB"):
        allocate(file.fileno(), 0, 61 * G, lambda: ROOMY)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.ENOMEM])
def test_the_kernels_refusal_is_explained(file, monkeypatch, number):
    """The room was there a moment ago, and another process was quicker."""
    real = os.posix_fallocate

    def refuse_second(fd, offset, length):
        if offset:
            raise OSError(number, os.strerror(number))
        real(fd, offset, length)

    monkeypatch.setattr(room_module.os, "posix_fallocate", refuse_second)
    with pytest.raises(NoSpaceError, match=f"{os.strerror(number)}: needs 40 MiB, tmpfs"):
        allocate(file.fileno(), 0, 40 * M, lambda: ROOMY)
    assert os.fstat(file.fileno()).st_size == 0
