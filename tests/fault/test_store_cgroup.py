"""A real memory cgroup: a claim beyond it is refused, and nobody in it is killed."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from flashckpt.store.mounts import read_mounts
from flashckpt.store.slots import SlotStore
from flashckpt.types import Generation, ShardId

pytestmark = [pytest.mark.root, pytest.mark.skipif(os.geteuid() != 0, reason="needs root: makes a cgroup")]
ROOT = Path(__file__).parents[2]
LIMIT = 256 << 20


class Cgroup:
    def __init__(self, path, is_v2):
        self.path = path
        self.is_v2 = is_v2

    def limit(self, count):
        name = "memory.max" if self.is_v2 else "memory.limit_in_bytes"
        (self.path / name).write_text(str(count))

    def kills(self):
        name = "memory.events" if self.is_v2 else "memory.oom_control"
        values = dict(line.split() for line in (self.path / name).read_text().splitlines())
        return int(values["oom_kill"])


def root_of_memory_cgroups():
    mounts = read_mounts()
    for mount in mounts:
        if mount.fs_type == "cgroup" and "memory" in mount.options:
            return Path(mount.mount_point), False
    for mount in mounts:
        if mount.fs_type == "cgroup2":
            control = Path(mount.mount_point) / "cgroup.subtree_control"
            with contextlib.suppress(OSError):
                control.write_text("+memory")
            if "memory" in control.read_text().split():
                return Path(mount.mount_point), True
    pytest.skip("no memory cgroup can be made here")


@pytest.fixture
def memory_dir():
    path = Path(tempfile.mkdtemp(prefix="flashckpt-test-", dir="/dev/shm"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def cgroup(memory_dir):
    root, is_v2 = root_of_memory_cgroups()
    path = root / memory_dir.name
    try:
        path.mkdir()
    except OSError as error:
        pytest.skip(f"no memory cgroup can be made here: {error}")
    group = Cgroup(path, is_v2)
    try:
        group.limit(LIMIT)
        yield group
    finally:
        # Its tmpfs pages first: they are charged to it.
        shutil.rmtree(memory_dir, ignore_errors=True)
        path.rmdir()


def start(cgroup, code, *arguments):
    """A process that is in the cgroup before it imports anything."""
    prelude = f"import os, sys\nopen({str(cgroup.path / 'cgroup.procs')!r}, 'w').write(str(os.getpid()))\n"
    return subprocess.Popen(
        [sys.executable, "-c", prelude + code, *map(str, arguments)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process, text=""):
    output, errors = process.communicate(text, timeout=120)
    assert process.returncode == 0, f"exit code {process.returncode}: {errors}"
    return output


CLAIM_TOO_MUCH = """
from flashckpt.errors import NoSpaceError
from flashckpt.store.slots import SlotStore
from flashckpt.types import Generation, ShardId
store = SlotStore.open(sys.argv[1], "job")
slot = store.claim(32 << 20)
slot.view[:] = b"S" * slot.size_bytes
store.seal(slot, ShardId(Generation(1, 2, 3, 4), 0, 1))
store.prepare(16 << 20, 1)
try:
    store.claim(512 << 20)
except NoSpaceError as error:
    print(error)
assert store.status().writing.files == 0 and store.check() == []
slot = store.claim(64 << 20)      # what does fit still works
slot.view[:] = b"T" * slot.size_bytes
store.abandon(slot)
"""


def test_claim_beyond_the_limit(cgroup, memory_dir):
    output = finish(start(cgroup, CLAIM_TOO_MUCH, memory_dir))
    assert "needs 496 MiB" in output, "beyond the 16 MiB of the free slot that was to grow"
    assert f"cgroup {cgroup.path} limit 256 MiB" in output
    assert cgroup.kills() == 0
    with SlotStore.open(memory_dir, "job") as store:
        (sealed,) = store.scan()
        assert sealed.shard == ShardId(Generation(1, 2, 3, 4), 0, 1)
        fd = store.open_shard(sealed)
        assert os.pread(fd, 33 << 20, 0) == b"S" * (32 << 20)
        os.close(fd)


FILL = """
from flashckpt.errors import NoSpaceError
from flashckpt.store.slots import SlotStore
store = SlotStore.open(sys.argv[1], "job")
print("ready", flush=True)
sys.stdin.readline()
slots = []
try:
    while True:
        slots.append(store.claim(24 << 20))
        slots[-1].view[:] = b"F" * (24 << 20)
except NoSpaceError as error:
    assert "cgroup" in str(error), error
print(len(slots), flush=True)
sys.stdin.readline()
"""
TRAINER = """
print("ready", flush=True)
sys.stdin.readline()
memory = []
for _ in range(48):               # grows as a trainer would, one MiB after the other
    memory.append(bytearray(os.urandom(1) * (1 << 20)))
print(len(memory), flush=True)
sys.stdin.readline()
"""


def test_three_that_grow_at_once(cgroup, memory_dir):
    """Two stores take all they can get while a third process grows: it is never killed for it."""
    children = [start(cgroup, FILL, memory_dir), start(cgroup, FILL, memory_dir), start(cgroup, TRAINER)]
    try:
        for child in children:
            assert child.stdout.readline() == "ready\n"
        for child in children:
            child.stdin.write("\n")
            child.stdin.flush()
        counts = [int(child.stdout.readline()) for child in children]
        assert counts[2] == 48
        assert counts[0] + counts[1] >= 2
        for child in children:
            finish(child, "\n")
    finally:
        for child in children:
            child.kill()
            child.communicate()
    assert cgroup.kills() == 0


def test_a_blind_allocation_would_have_been_killed(cgroup, memory_dir):
    """Else the tests above would prove nothing on this kernel."""
    code = "fd = os.open(sys.argv[1] + '/blind', os.O_RDWR | os.O_CREAT)\nos.posix_fallocate(fd, 0, 512 << 20)\n"
    process = start(cgroup, code, memory_dir)
    process.communicate(timeout=120)
    assert process.returncode == -9
    assert cgroup.kills() == 1
