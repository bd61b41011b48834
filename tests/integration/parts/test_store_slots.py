"""Slots of processes that end, of forks, of another boot, and on huge pages."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from flashckpt.errors import NoSpaceError
from flashckpt.protocol.line import from_fence
from flashckpt.store.slots import SlotStore
from flashckpt.types import Generation
from tests.unit.test_store_slots import K, inode_of, memory_dir, shard, store

__all__ = ["memory_dir", "store"]  # the fixtures

ROOT = Path(__file__).parents[3]


def run_python(code, *arguments):
    """Another process, which has exited when this returns."""
    result = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


USE_AND_EXIT = """
import sys
from flashckpt.store.slots import SlotStore
from flashckpt.types import Generation, ShardId
store = SlotStore.open(sys.argv[1], "job")
slots = [store.claim(int(size) << 16) for size in sys.argv[2].split(",")]
for slot in slots:
    slot.view[:] = b"Z" * slot.size_bytes
store.seal(slots[0], ShardId(Generation(1000, 77, 9, 1), 1, 2))
for slot in slots[2:]:
    store.abandon(slot)
import os
os._exit(0)  # the second one stays in writing/
"""


def test_slots_of_dead_writers(store, memory_dir):
    run_python(USE_AND_EXIT, memory_dir, "2,3,4,8")
    assert store.check() != [], "a dead writer's slot is in writing/"
    reclaimed = store.reclaim()
    assert (reclaimed.files, reclaimed.bytes, reclaimed.dropped_files) == (1, 3 * K, 0)
    assert store.check() == []
    files = {path.stat().st_size: path.stat().st_ino for path in (store.path / "pool").iterdir()}
    slot = store.claim(7 * K)
    assert inode_of(slot, store) == files[8 * K], "the closest one"
    store.abandon(slot)
    (sealed,) = store.scan()
    fd = store.open_shard(sealed)
    assert store.release(sealed)
    assert os.pread(fd, 65, 0) == bytes(64) + b"Z"
    expected = {*files.values(), os.fstat(fd).st_ino}
    os.close(fd)
    slots = [store.claim(size * K) for size in (2, 3, 4, 7)]
    assert store.status().pool.files == 0
    assert {inode_of(slot, store) for slot in slots} == expected
    for slot in slots:
        assert bytes(slot.view[:64]) == bytes(64)
        store.abandon(slot)


def test_other_boot(store, memory_dir):
    """Free and bad slots of another boot are dropped, and what was being written is taken back first."""
    run_python(USE_AND_EXIT, memory_dir, "2,3,4")
    boot = store.scan()[0].writer.boot_id8
    for folder in ("pool", "writing", "sealed"):
        for path in (store.path / folder).iterdir():
            path.rename(path.with_name(path.name.replace(boot, "00000000")))
    (sealed,) = store.scan()
    store.quarantine(sealed, "test")
    reclaimed = store.reclaim()
    assert reclaimed.files == 1
    assert (reclaimed.dropped_files, reclaimed.dropped_bytes) == (3, 9 * K)
    assert store.status().total_bytes == 0


def test_fork_has_nothing_of_its_parents(memory_dir):
    code = """
import os, sys
from flashckpt.errors import ConflictError
from flashckpt.store.slots import SlotStore
from flashckpt.types import Generation, ShardId
store = SlotStore.open(sys.argv[1], "job")
slot, sealed = store.claim(65536), store.seal(store.claim(65536), ShardId(Generation(1, 2, 3, 4), 0, 1))
store.prepare(65536, 1)
pid = os.fork()
if pid == 0:
    calls = [lambda: store.claim(65536), lambda: store.seal(slot, sealed.shard), lambda: store.abandon(slot),
             lambda: store.release(sealed), lambda: store.reclaim(), lambda: store.scan(),
             lambda: store.quarantine(sealed, "")]
    for call in calls:
        try:
            call()
        except ConflictError as error:
            assert "fork" in str(error)
        else:
            os._exit(3)
    store.close(remove_pool=True)
    with SlotStore.open(sys.argv[1], "job") as own:
        assert not own.release(sealed), "its parent lives"
        assert own.claim(65536).slot_id != slot.slot_id
        own.close(remove_pool=True)
    sys.exit(0)
assert os.waitpid(pid, 0)[1] == 0
assert store.check() == [], store.check()
assert store.status().pool.files == 1 and store.scan() == (sealed,)
slot.view[0] = 1
store.abandon(slot)
assert store.release(sealed)
assert store.status().pool.files == 3
print("ok")
"""
    assert run_python(code, memory_dir).strip() == "ok"


def test_directory_id(store, memory_dir):
    with SlotStore.open(memory_dir, "job") as same, SlotStore.open(memory_dir, "job2") as other:
        assert same.directory_id == store.directory_id != other.directory_id
    code = (
        "import sys\nfrom flashckpt.store.slots import SlotStore\n"
        "print(SlotStore.open(sys.argv[1], 'job').directory_id)"
    )
    assert run_python(code, memory_dir).strip() == store.directory_id


def test_voids(store, memory_dir):
    generation = shard(4, seq=9).generation
    assert store.voids() == frozenset()
    store.mark_void(generation)
    store.mark_void(generation)
    with SlotStore.open(memory_dir, "job") as other:
        assert other.voids() == {generation}
    sealed = store.seal(store.claim(K), shard(4, seq=9))
    store.mark_void(generation._replace(step=5, seq=10))
    assert store.voids() == {generation, generation._replace(step=5, seq=10)}, "its shard is still there"
    store.release(sealed)
    store.mark_void(generation._replace(step=6, seq=11))
    assert store.voids() == {generation._replace(step=6, seq=11)}
    assert store.reclaim().dropped_files == 0
    run_python(
        "import sys\nfrom flashckpt.store.slots import SlotStore\nfrom flashckpt.types import Generation\n"
        "SlotStore.open(sys.argv[1], 'job').mark_void(Generation(1, 2, 3, 4))",
        memory_dir,
    )
    assert Generation(1, 2, 3, 4) in store.voids()
    assert store.reclaim().dropped_files == 1
    assert store.voids() == {generation._replace(step=6, seq=11)}


def test_store_imports_neither_torch_nor_numpy():
    code = "import sys, flashckpt.store.slots\nprint([name for name in ('torch', 'numpy') if name in sys.modules])"
    assert run_python(code).strip() == "[]"


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: mounts")
@pytest.mark.parametrize("policy", ["always", "within_size", "advise", "never"])
def test_huge_pages(tmp_path, policy):
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size=64m,huge={policy}", "none", tmp_path], check=False, capture_output=True
    ).returncode:
        pytest.skip(f"this kernel refuses huge={policy}")
    try:
        with SlotStore.open(tmp_path / "m", "job") as store:
            huge = policy != "never"
            assert store.granule_bytes == (2 << 20 if huge else K)
            assert store.status().huge_page_bytes == (2 << 20 if huge else 0)
            slot = store.claim(8 << 20)
            slot.view[:] = b"\x01" * (8 << 20)
            smaps = Path("/proc/self/smaps").read_text()
            (entry,) = (one for one in smaps.split("\n7") if str(store.path) in one.splitlines()[0])
            mapped_huge = int(entry.split("ShmemPmdMapped:")[1].split()[0])
            # With "advise" only faults get huge pages, not fallocate: the kernel may merge pages later.
            assert mapped_huge == (8 << 10 if policy in ("always", "within_size") else 0)
            store.abandon(slot)
    finally:
        subprocess.run(["umount", "-l", tmp_path], check=True)


def test_what_another_process_sealed_is_read_through_its_file(store, memory_dir):
    run_python(
        "import sys; from flashckpt.store.slots import SlotStore; from flashckpt.types import *;"
        "store = SlotStore.open(sys.argv[1], 'job');"
        f"store.seal(store.claim({K}), ShardId(Generation(1000, 77, 1, 1), 0, 2), 0)",
        memory_dir,
    )
    (sealed,) = store.scan()
    fd = store.open_shard(sealed)
    try:
        assert store.mapped_shard(sealed, fd) is None
    finally:
        os.close(fd)


@pytest.fixture
def hugetlbfs(tmp_path):
    """24 MiB of hugetlbfs, where the machine has set huge pages aside."""
    free = int(Path("/proc/meminfo").read_text().partition("HugePages_Free:")[2].split()[0])
    if free < 12:
        pytest.skip("needs 12 free huge pages: sysctl vm.nr_hugepages=16")
    subprocess.run(["mount", "-t", "hugetlbfs", "-o", "size=24M", "none", tmp_path], check=True)
    yield tmp_path
    subprocess.run(["umount", "-l", tmp_path], check=True)


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: mounts")
def test_hugetlbfs(hugetlbfs):
    """It knows no write(), and files are whole pages."""
    with SlotStore.open(hugetlbfs / "m", "job") as store:
        assert store.granule_bytes == 2 << 20
        slot = store.claim(8 << 20)
        slot.view[:] = b"x" * (8 << 20)
        sealed = store.seal(slot, shard(1))
        with pytest.raises(NoSpaceError, match=r"hugetlbfs .* has 16 MiB free of 24 MiB"):
            store.claim(18 << 20)
        line = from_fence(step=1, epoch=2, nonce=3)
        assert store.write_line(line) == line == store.read_line()
        assert store.check() == []
    with SlotStore.open(hugetlbfs / "m", "job") as store:
        fd = store.open_shard(sealed := store.scan()[0])
        assert os.pread(fd, 9 << 20, 0) == b"x" * (8 << 20)
        assert store.release(sealed)
        assert os.pread(fd, 65, 0) == bytes(64) + b"x"
        os.close(fd)
        store.abandon(store.claim(4 << 20))
        assert store.check() == []
