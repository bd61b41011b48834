"""Other users in the place where the memory directory lies: nothing of theirs is used, nothing is followed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from flashckpt.errors import ConfigError, UnsafeDirectoryError
from flashckpt.store.slots import SlotStore
from flashckpt.types import Generation, ShardId

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root: acts as two users"),
]
NOBODY = 65534
K = 64 << 10
SHARD = ShardId(Generation(1, 2, 3, 4), 0, 1)


@pytest.fixture
def shared():
    """A directory on tmpfs that everybody may change, without a sticky bit: worse than /dev/shm."""
    path = Path(tempfile.mkdtemp(prefix="flashckpt-test-", dir="/dev/shm"))
    path.chmod(0o777)
    yield path
    shutil.rmtree(path)


def as_nobody(code, *arguments):
    """Runs Python code as another user."""
    prelude = f"import os, sys\nfrom pathlib import Path\nos.setgroups([])\nos.setgid({NOBODY})\nos.setuid({NOBODY})\n"
    prelude += "os.umask(0)\nshared = Path(sys.argv[1])\n"
    subprocess.run([sys.executable, "-I", "-c", prelude + code, *map(str, arguments)], check=True, cwd="/")


def test_other_users_directory(shared):
    as_nobody("(shared / 'm').mkdir(0o700)", shared)
    with pytest.raises(UnsafeDirectoryError, match="owned by uid 65534") as caught:
        SlotStore.open(shared / "m", "job")
    assert "set memory_dir to a directory of your own, e.g. /dev/shm/flashckpt-0, or remove it" in caught.value.hint
    assert list((shared / "m").iterdir()) == []


def test_other_users_job_directory(shared):
    (shared / "m").mkdir(0o700)
    (shared / "m" / "job").mkdir(0o700)
    os.chown(shared / "m" / "job", NOBODY, NOBODY)
    with pytest.raises(UnsafeDirectoryError, match="m/job: expected owner uid 0, found owned by uid 65534"):
        SlotStore.open(shared / "m", "job")


@pytest.mark.parametrize("mode", [0o777, 0o750, 0o701, 0o1777])
@pytest.mark.parametrize("which", [".", "job", "job/sealed"])
def test_directories_open_to_others(shared, which, mode):
    SlotStore.open(shared / "m", "job").close()
    (shared / "m" / which).chmod(mode)
    with pytest.raises(UnsafeDirectoryError, match=f"mode {mode:04o}"):
        SlotStore.open(shared / "m", "job")


@pytest.mark.parametrize("which", ["", "job", "job/pool", "job/sealed"])
def test_symlinked_directories(shared, which):
    """Even to a directory that is ours in every way."""
    elsewhere = shared / "elsewhere"
    with SlotStore.open(elsewhere, "job") as store:
        store.seal(store.claim(K), SHARD)
    link = shared / "m" / which
    target = elsewhere / which
    link.parent.mkdir(0o700, parents=True, exist_ok=True)
    for folder in link.parents:
        if folder.is_relative_to(shared / "m"):
            folder.chmod(0o700)
    if which:
        link.symlink_to(target)
    else:
        as_nobody("(shared / 'm').symlink_to(shared / 'elsewhere')", shared)
    with pytest.raises(UnsafeDirectoryError, match="found a symbolic link"):
        SlotStore.open(shared / "m", "job")


def test_other_things_than_directories(shared):
    (shared / "m").write_text("x")
    with pytest.raises(UnsafeDirectoryError, match="expected a directory, found a regular file of uid 0"):
        SlotStore.open(shared / "m", "job")


def test_disk_is_refused_and_nothing_is_left_there(tmp_path):
    if os.stat(tmp_path).st_dev == os.stat("/dev/shm").st_dev:
        pytest.skip("temporary files lie on the same tmpfs here")
    with pytest.raises(UnsafeDirectoryError, match="expected a filesystem in memory"):
        SlotStore.open(tmp_path / "m", "job")
    assert not (tmp_path / "m").exists()
    (tmp_path / "m").mkdir(0o700)
    with pytest.raises(UnsafeDirectoryError, match="expected a filesystem in memory"):
        SlotStore.open(tmp_path / "m", "job")
    assert list((tmp_path / "m").iterdir()) == []


@pytest.mark.parametrize("path", ["relative", "", "/", "/dev/shm/../x", "/dev/shm/a\0b"])
def test_paths_that_make_no_sense(path):
    with pytest.raises(ConfigError, match="expected an absolute path"):
        SlotStore.open(path, "job")


def test_missing_parent(shared):
    with pytest.raises(ConfigError, match=r"expected its parent .* No such file"):
        SlotStore.open(shared / "a" / "b", "job")


def test_shm_itself_is_not_ours():
    with pytest.raises(UnsafeDirectoryError, match="mode 1777"):
        SlotStore.open("/dev/shm", "job")


def plant(store, kind, victim):
    """Puts something else under the name of a free slot of ours."""
    store.abandon(store.claim(K))
    (slot,) = (store.path / "pool").iterdir()
    if kind == "hard link":
        os.link(slot, victim)
        return
    slot.unlink()
    if kind == "symlink":
        victim.write_bytes(b"precious")
        slot.symlink_to(victim)
    elif kind == "fifo":
        os.mkfifo(slot, 0o600)
    elif kind == "directory":
        slot.mkdir(0o700)
    elif kind == "other owner":
        slot.write_bytes(b"")
        os.chown(slot, NOBODY, NOBODY)
    elif kind == "open mode":
        slot.write_bytes(b"")
        slot.chmod(0o666)


@pytest.mark.parametrize("kind", ["symlink", "hard link", "fifo", "directory", "other owner", "open mode"])
def test_planted_slot_is_refused(shared, kind):
    victim = shared / "victim"
    with SlotStore.open(shared / "m", "job") as store:
        plant(store, kind, victim)
        before = victim.read_bytes() if victim.exists() else None
        with pytest.raises(UnsafeDirectoryError):
            store.claim(K)
        assert (victim.read_bytes() if victim.exists() else None) == before
        assert len(list((store.path / "pool").iterdir())) == 1, "left where it was, to be looked at"
        assert any("pool/" in problem for problem in store.check())


@pytest.mark.parametrize("kind", ["symlink", "hard link"])
def test_planted_shard_is_refused(shared, kind):
    victim = shared / "victim"
    with SlotStore.open(shared / "m", "job") as store:
        sealed = store.seal(store.claim(K), SHARD)
        path = store.path / "sealed" / sealed.name
        if kind == "symlink":
            path.rename(victim)
            path.symlink_to(victim)
        else:
            os.link(path, victim)
        victim.write_bytes(b"\x55" * K)
        for call in (store.open_shard, store.release):
            with pytest.raises(UnsafeDirectoryError):
                call(sealed)
        assert victim.read_bytes() == b"\x55" * K


def test_directory_swapped_after_start(shared):
    """The neighbour moves our directory away and puts his own in its place."""
    shared_parent = shared / "parent"
    shared_parent.mkdir()
    shared_parent.chmod(0o777)
    with SlotStore.open(shared_parent / "m", "job") as store:
        sealed = store.seal(store.claim(K), SHARD)
        slot = store.claim(K)
        as_nobody(
            "os.rename(shared / 'm', shared / 'old')\n"
            "for name in ('pool', 'writing', 'sealed', 'quarantine'):\n"
            "    (shared / 'm/job' / name).mkdir(0o777, parents=True)\n",
            shared_parent,
        )
        for call in (lambda: store.claim(K), lambda: store.seal(slot, SHARD)):
            with pytest.raises(UnsafeDirectoryError, match="another directory lies there now"):
                call()
        fd = store.open_shard(sealed)
        os.close(fd)
        assert store.scan() == (sealed,), "through the held descriptor"
    theirs = [path for path in (shared_parent / "m").rglob("*") if not path.is_dir()]
    assert theirs == []


def test_directory_swapped_for_a_link(shared):
    with SlotStore.open(shared / "m", "job") as store:
        as_nobody("os.rename(shared / 'm', shared / 'old'); (shared / 'm').symlink_to(shared / 'old')", shared)
        with pytest.raises(UnsafeDirectoryError, match="another directory lies there now"):
            store.claim(K)


def test_directory_opened_up_after_start(shared):
    with SlotStore.open(shared / "m", "job") as store:
        store.path.chmod(0o777)
        with pytest.raises(UnsafeDirectoryError, match="mode 0777"):
            store.claim(K)
        store.path.chmod(0o700)
        store.abandon(store.claim(K))


def test_other_user_can_neither_look_nor_touch(shared):
    with SlotStore.open(shared / "m", "job") as store:
        sealed = store.seal(store.claim(K), SHARD)
        as_nobody(
            "import stat\n"
            "try:\n    (shared / 'm/job/sealed' / sys.argv[2]).read_bytes()\n"
            "except PermissionError:\n    pass\nelse:\n    sys.exit(1)\n"
            "try:\n    os.listdir(shared / 'm')\n"
            "except PermissionError:\n    pass\nelse:\n    sys.exit(2)\n",
            shared,
            sealed.name,
        )
