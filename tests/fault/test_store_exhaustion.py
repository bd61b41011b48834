"""No space, no inodes, read-only, gone: each is an outcome with a reason, and shards stay whole."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from flashckpt.errors import NoSpaceError, UnsafeDirectoryError
from flashckpt.protocol.line import from_fence
from flashckpt.store.slots import SlotStore
from flashckpt.types import Generation, ShardId

pytestmark = [pytest.mark.root, pytest.mark.skipif(os.geteuid() != 0, reason="needs root: mounts")]
ROOT = Path(__file__).parents[2]
K = 64 << 10
M = 1 << 20


def shard(step):
    return ShardId(Generation(1, 2, step, 4), 0, 1)


@contextlib.contextmanager
def tmpfs(path, options):
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", path], check=True)
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", path], check=False, capture_output=True)


@pytest.fixture
def small(tmp_path):
    with tmpfs(tmp_path, "size=8m") as path:
        yield path


def seal_pattern(store, step, size):
    slot = store.claim(size)
    slot.view[:] = bytes([step]) * size
    return store.seal(slot, shard(step))


def is_whole(store, sealed, step):
    fd = store.open_shard(sealed)
    try:
        return os.pread(fd, sealed.size_bytes + 1, 0) == bytes([step]) * sealed.size_bytes
    finally:
        os.close(fd)


def free_bytes(path):
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize


def test_full(small):
    with SlotStore.open(small / "m", "job") as store:
        sealed = seal_pattern(store, 1, 4 * M)
        before = free_bytes(small)
        with pytest.raises(NoSpaceError, match=r"tmpfs .* has 4 MiB free of 8 MiB") as caught:
            store.claim(5 * M)
        assert f"remount,size=… {small}" in caught.value.hint
        assert free_bytes(small) == before
        assert store.status().writing.files == 0
        assert is_whole(store, sealed, 1)
        store.abandon(store.claim(4 * M))
        assert store.check() == []


def test_full_after_the_look(small):
    """Another user of the mount fills it between the headroom check and the allocation."""
    with SlotStore.open(small / "m", "job") as store:
        sealed = seal_pattern(store, 1, 2 * M)
        real = store._room
        filler = os.open(small / "filler", os.O_RDWR | os.O_CREAT)

        def room_then_full():
            room = real()
            if os.fstat(filler).st_size == 0:
                os.posix_fallocate(filler, 0, free_bytes(small) - K)
            return room

        store._supply._room = room_then_full
        with pytest.raises(NoSpaceError, match="No space left on device"):
            store.claim(2 * M)
        assert free_bytes(small) == K, "what the failed call took is given back"
        os.ftruncate(filler, 0)
        os.close(filler)
        assert is_whole(store, sealed, 1)
        assert store.check() == []
        store._supply._room = real
        store.abandon(store.claim(2 * M))


def test_hole_in_a_slot_of_a_full_mount(small):
    """Somebody punched it; touched through a mapping it would be a SIGBUS."""
    with SlotStore.open(small / "m", "job") as store:
        store.abandon(store.claim(2 * M))
        (path,) = (store.path / "pool").iterdir()
        os.truncate(path, K)
        os.truncate(path, 2 * M)
        filler = os.open(small / "filler", os.O_RDWR | os.O_CREAT)
        os.posix_fallocate(filler, 0, free_bytes(small))
        with pytest.raises(NoSpaceError, match="No space left on device"):
            store.claim(2 * M)
        os.ftruncate(filler, 0)
        os.close(filler)
        slot = store.claim(2 * M)
        slot.view[:] = b"x" * (2 * M)
        store.abandon(slot)
        assert store.check() == []


def test_free_slots_are_given_up_first(small):
    with SlotStore.open(small / "m", "job") as store:
        sealed = seal_pattern(store, 1, 2 * M)
        slots = [store.claim(M) for _ in range(5)]
        for slot in slots:
            store.abandon(slot)
        slot = store.claim(6 * M - K)
        slot.view[:] = b"\2" * slot.size_bytes
        assert is_whole(store, sealed, 1)
        assert store.status().pool.files == 0
        store.abandon(slot)
        assert store.check() == []


def test_line_on_a_full_mount(small):
    with SlotStore.open(small / "m", "job") as store:
        filler = os.open(small / "filler", os.O_RDWR | os.O_CREAT)
        os.posix_fallocate(filler, 0, free_bytes(small))
        with pytest.raises(NoSpaceError):
            store.write_line(from_fence(step=1, epoch=2, nonce=3))
        assert store.read_line() is None
        assert store.check() == []
        store.mark_void(Generation(1, 2, 3, 4))
        assert store.voids() == {Generation(1, 2, 3, 4)}
        os.close(filler)


def test_out_of_inodes(tmp_path):
    with tmpfs(tmp_path, "size=8m,nr_inodes=8"), SlotStore.open(tmp_path / "m", "job") as store:
        sealed = seal_pattern(store, 1, K)
        with pytest.raises(NoSpaceError, match="0 free inodes"):
            store.claim(K)
        with pytest.raises(NoSpaceError, match="0 free inodes"):
            store.write_line(from_fence(step=1, epoch=2, nonce=3))
        store.mark_void(Generation(1, 2, 3, 4))  # can't, and does not make a failed save worse
        assert store.voids() == frozenset()
        assert is_whole(store, sealed, 1)
        assert store.release(sealed)
        store.abandon(store.claim(2 * K))
        assert store.check() == []


def test_out_of_inodes_for_the_directory(tmp_path):
    with (
        tmpfs(tmp_path, "size=8m,nr_inodes=3"),
        pytest.raises(NoSpaceError, match="expected to create it, found: No space left"),
    ):
        SlotStore.open(tmp_path / "m", "job")


def test_read_only(small):
    with SlotStore.open(small / "m", "job") as store:
        sealed = seal_pattern(store, 1, K)
        # A mount with files open for writing can't be remounted; a bind of it can.
    subprocess.run(["mount", "--bind", small, small], check=True)
    try:
        with SlotStore.open(small / "m", "job") as store:
            subprocess.run(["mount", "-o", "remount,ro,bind", small], check=True)
            calls = [
                lambda: store.claim(K),
                lambda: store.release(sealed),
                lambda: store.quarantine(sealed, "x"),
                lambda: store.write_line(from_fence(step=1, epoch=2, nonce=3)),
            ]
            for call in calls:
                with pytest.raises(UnsafeDirectoryError, match="expected a writable mount, found a read-only one"):
                    call()
            (sealed,) = store.scan()
            assert is_whole(store, sealed, 1)
        with pytest.raises(UnsafeDirectoryError, match="read-only"):
            SlotStore.open(small / "m", "job")
        with pytest.raises(UnsafeDirectoryError, match="read-only"):
            SlotStore.open(small / "m2", "job")
        with SlotStore.open(small / "m", "job", create=False) as store:
            assert len(store.scan()) == 1
        subprocess.run(["mount", "-o", "remount,rw,bind", small], check=True)
        with SlotStore.open(small / "m", "job") as store:
            store.abandon(store.claim(K))
            assert store.check() == []
    finally:
        subprocess.run(["umount", "-l", small], check=True)


def test_read_only_while_a_slot_is_written(small):
    """The kernel refuses: a mapped slot keeps its filesystem writable."""
    with SlotStore.open(small / "m", "job") as store:
        slot = store.claim(K)
        result = subprocess.run(["mount", "-o", "remount,ro", small], check=False, capture_output=True)
        assert result.returncode != 0
        store.seal(slot, shard(1))


def test_lazily_unmounted(tmp_path):
    with tmpfs(tmp_path, "size=8m"), SlotStore.open(tmp_path / "m", "job") as store:
        sealed = seal_pattern(store, 1, K)
        slot = store.claim(K)
        subprocess.run(["umount", "-l", tmp_path], check=True)
        for call in (lambda: store.claim(K), lambda: store.seal(slot, shard(2))):
            with pytest.raises(UnsafeDirectoryError, match="its filesystem was unmounted while in use"):
                call()
        slot.view[0] = 1
        assert is_whole(store, sealed, 1), "what is held stays readable"
        store.abandon(slot)


def test_other_mount_on_top(tmp_path):
    with tmpfs(tmp_path, "size=8m"), SlotStore.open(tmp_path / "m", "job") as store, tmpfs(tmp_path, "size=8m"):
        with pytest.raises(UnsafeDirectoryError, match="it was moved away while in use"):
            store.claim(K)
        SlotStore.open(tmp_path / "m", "job").close()
        with pytest.raises(UnsafeDirectoryError, match="another directory lies there now"):
            store.claim(K)


@pytest.mark.parametrize("which", ["m", "m/job", "m/job/pool"])
def test_deleted(small, which):
    with SlotStore.open(small / "m", "job") as store:
        sealed = seal_pattern(store, 1, K)
        slot = store.claim(K)
        shutil.rmtree(small / which)
        for call in (lambda: store.claim(K), lambda: store.seal(slot, shard(2))):
            with pytest.raises(UnsafeDirectoryError, match="it was deleted while in use"):
                call()
        slot.view[0] = 1
        if which == "m/job/pool":
            assert is_whole(store, sealed, 1)
    with SlotStore.open(small / "m", "job") as store:
        assert store.reclaim().files == 0
        store.abandon(store.claim(K))


def test_slot_removed_while_it_is_written(small):
    with SlotStore.open(small / "m", "job") as store:
        slot = store.claim(K)
        (path,) = (store.path / "writing").iterdir()
        path.unlink()
        with pytest.raises(UnsafeDirectoryError, match="it was removed or renamed"):
            store.seal(slot, shard(1))
        store.abandon(slot)
        assert store.check() == []
        store.abandon(store.claim(K))


def test_no_descriptors_left(small):
    code = """
import os, resource, sys
from flashckpt.store.slots import SlotStore
store = SlotStore.open(sys.argv[1], "job")
store.abandon(store.claim(65536))
resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) - 1, 4096))
held = []
for _ in range(3):
    try:
        held.append(store.claim(65536))
    except OSError as error:
        assert error.errno == 24, error
    else:
        sys.exit(1)
resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 4096))
assert store.check() == [], store.check()
store.abandon(store.claim(65536))
print("ok")
"""
    result = subprocess.run(
        [sys.executable, "-c", code, str(small / "m")], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.stdout == "ok\n", result.stderr
