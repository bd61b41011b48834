"""The life of a slot in one process, on real tmpfs files."""

from __future__ import annotations

import dataclasses
import logging
import os
import shutil
import tempfile
from pathlib import Path

import pytest

from flashckpt.errors import ClosedError, ConfigError, ConflictError, NoSpaceError, NotFoundError
from flashckpt.protocol.line import from_fence
from flashckpt.store.directory import Directory, SlotState
from flashckpt.store.names import sealed_name, slot_name
from flashckpt.store.owner import Owner
from flashckpt.store.slots import SlotStore
from flashckpt.types import Generation, Record, ShardId

K = 64 << 10


def shard(step, rank=0, seq=1):
    return ShardId(Generation(1000, 77, step, seq), rank, 2)


def inodes(store, state):
    folder = store.path / state
    return {name.stat().st_ino for name in folder.iterdir()}


def inode_of(slot, store):
    (path,) = (store.path / "writing").glob(f"s{slot.slot_id:016x}.*")
    return path.stat().st_ino


@pytest.fixture
def memory_dir():
    path = Path(tempfile.mkdtemp(prefix="flashckpt-test-", dir="/dev/shm"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def store(memory_dir):
    with SlotStore.open(memory_dir, "job") as store:
        yield store
        assert store.check() == []


def test_claim_seal_scan_read_release_reuse(store):
    slot = store.claim(3 * K)
    assert (slot.size_bytes, len(slot.view), slot.view.readonly) == (3 * K, 3 * K, False)
    slot.view[:] = b"\xab" * (3 * K)
    inode = inode_of(slot, store)
    view = slot.view
    sealed = store.seal(slot, shard(1), tag=0xDEADBEEF)
    with pytest.raises(ValueError, match="released"):
        view[0]
    assert store.scan() == (sealed,)
    (found,) = store.scan()
    assert (found.shard, found.tag, found.slot_id, found.size_bytes) == (shard(1), 0xDEADBEEF, slot.slot_id, 3 * K)
    fd = store.open_shard(sealed)
    try:
        assert os.pread(fd, 4 * K, 0) == b"\xab" * (3 * K)
        assert os.fstat(fd).st_ino == inode
        assert store.release(sealed)
        assert os.pread(fd, 65, 0) == bytes(64) + b"\xab", "who has it open sees that it is no shard any more"
    finally:
        os.close(fd)
    assert not store.release(sealed)
    assert store.scan() == ()
    with pytest.raises(NotFoundError):
        store.open_shard(sealed)
    with pytest.raises(NotFoundError):
        _ = sealed.size_bytes
    again = store.claim(3 * K)
    assert inode_of(again, store) == inode
    assert bytes(again.view[:65]) == bytes(64) + b"\xab", "only the preamble is erased"
    store.abandon(again)


def test_claim_erases_the_preamble_of_an_abandoned_slot(store):
    slot = store.claim(K)
    slot.view[:64] = b"P" * 64
    store.abandon(slot)
    slot = store.claim(K)
    assert bytes(slot.view[:64]) == bytes(64)
    store.abandon(slot)


def test_slots_at_once_are_different(store):
    slots = [store.claim(K) for _ in range(5)]
    assert len({inode_of(slot, store) for slot in slots}) == 5
    for number, slot in enumerate(slots):
        slot.view[:] = bytes([number]) * K
    assert [slot.view[K - 1] for slot in slots] == list(range(5))
    for slot in slots:
        store.abandon(slot)
    assert store.status().pool.files == 5


@pytest.mark.parametrize(("first", "second"), [(2 * K, 7 * K), (7 * K, 2 * K), (K, 40 << 20)])
def test_growth_and_shrink_keep_the_file(store, first, second):
    slot = store.claim(first)
    slot.view[:] = b"\x11" * first
    inode = inode_of(slot, store)
    store.abandon(slot)
    slot = store.claim(second)
    assert inode_of(slot, store) == inode
    (file,) = (store.path / "writing").iterdir()
    assert (file.stat().st_size, file.stat().st_blocks * 512) == (second, second)
    slot.view[second - 1] = 5
    store.abandon(slot)


def test_own_slot_of_that_size_first_then_the_closest(store):
    slots = {size: store.claim(size * K) for size in (2, 5, 9)}
    files = {size: inode_of(slot, store) for size, slot in slots.items()}
    for slot in slots.values():
        store.abandon(slot)
    exact, close, third = store.claim(5 * K), store.claim(8 * K), store.claim(5 * K)
    assert [inode_of(slot, store) for slot in (exact, close, third)] == [files[5], files[9], files[2]]
    for slot in (exact, close, third):
        store.abandon(slot)


def test_slot_with_a_buffer_still_in_use_is_not_resized(store):
    slot = store.claim(4 * K)
    part = slot.view[K : 2 * K]
    store.abandon(slot)
    other = store.claim(K)
    assert other.slot_id != slot.slot_id
    part[0] = 1  # a file cut short under it would be a SIGBUS here
    same = store.claim(4 * K)
    assert same.slot_id == slot.slot_id
    store.abandon(other)
    store.abandon(same)
    part.release()
    assert store.claim(2 * K).slot_id in (slot.slot_id, other.slot_id)


def test_hole_is_filled_before_the_slot_is_mapped(store, memory_dir):
    store.abandon(store.claim(4 * K))
    (file,) = (store.path / "pool").iterdir()
    with file.open("r+b") as opened:
        opened.truncate(0)
        opened.truncate(4 * K)
    assert file.stat().st_blocks == 0
    slot = store.claim(4 * K)
    (file,) = (store.path / "writing").iterdir()
    assert file.stat().st_blocks * 512 == 4 * K
    store.abandon(slot)


def test_prepare_makes_claims_cheap(store):
    store.prepare(4 * K, 3)
    before = inodes(store, "pool")
    assert len(before) == 3
    store.prepare(4 * K, 2)
    assert inodes(store, "pool") == before
    slots = [store.claim(4 * K) for _ in range(3)]
    assert {inode_of(slot, store) for slot in slots} == before
    for slot in slots:
        store.abandon(slot)


def test_prepare_that_does_not_fit_leaves_what_it_got(memory_dir):
    with SlotStore.open(memory_dir, "job", budget_bytes=10 * K) as store:
        with pytest.raises(NoSpaceError):
            store.prepare(4 * K, 3)
        assert store.status().pool.files == 2
        assert store.check() == []


@pytest.mark.parametrize("size", [0, -K, 1, K + 1])
def test_sizes_that_are_no_multiple_of_the_granule(store, size):
    with pytest.raises(ConfigError, match="multiple of 65536"):
        store.claim(size)


def test_budget(memory_dir):
    with SlotStore.open(memory_dir, "job", budget_bytes=10 * K) as store:
        sealed = store.seal(store.claim(6 * K), shard(1))
        with pytest.raises(NoSpaceError, match=r"budget 640 KiB with 384 KiB in slots") as caught:
            store.claim(5 * K)
        assert caught.value.need_bytes == 5 * K
        assert store.scan() == (sealed,)
        assert store.status().writing.files == 0
        store.check_budget(10 * K)
        with pytest.raises(NoSpaceError, match="of which 384 KiB are there"):
            store.check_budget(11 * K)
        kept = store.claim(4 * K)
        store.abandon(kept)
        assert store.release(sealed)
        slot = store.claim(10 * K)  # the other free slot is given up for it
        assert store.status().total_bytes == 10 * K
        assert store.check() == []
        store.abandon(slot)


def test_failed_growth_returns_the_slot_as_it_was(memory_dir):
    with SlotStore.open(memory_dir, "job", budget_bytes=4 * K) as store:
        store.abandon(store.claim(2 * K))
        before = inodes(store, "pool")
        with pytest.raises(NoSpaceError):
            store.claim(5 * K)
        assert inodes(store, "pool") == before
        assert store.status().pool.size_bytes == 2 * K
        store.abandon(store.claim(2 * K))
        assert inodes(store, "pool") == before


def test_second_file_of_one_shard_is_refused(store):
    first = store.seal(store.claim(K), shard(1), tag=1)
    slot = store.claim(K)
    with pytest.raises(ConflictError, match="expected none yet"):
        store.seal(slot, shard(1), tag=2)
    slot.view[0] = 1  # still ours
    second = store.seal(slot, shard(1, rank=1), tag=2)
    assert set(store.scan()) == {first, second}


def test_slot_is_used_once(store):
    slot = store.claim(K)
    store.seal(slot, shard(1))
    for call in (lambda: store.seal(slot, shard(2)), lambda: store.abandon(slot)):
        with pytest.raises(ConflictError, match="sealed or abandoned before"):
            call()


def test_two_stores_of_one_process(store, memory_dir):
    """The second takes and resizes what the first has mapped; the first notices."""
    store.abandon(store.claim(8 * K))
    with SlotStore.open(memory_dir, "job") as second:
        slot = second.claim(2 * K)
        second.abandon(slot)
        again = store.claim(2 * K)
        assert again.slot_id == slot.slot_id
        again.view[2 * K - 1] = 1
        sealed = store.seal(again, shard(1))
        assert second.release(sealed)


def test_close_keeps_or_removes_the_pool(memory_dir):
    store = SlotStore.open(memory_dir, "job")
    store.prepare(K, 2)
    store.claim(K)
    store.seal(store.claim(K), shard(1))
    store.close()
    store.close()
    with pytest.raises(ClosedError):
        store.claim(K)
    with SlotStore.open(memory_dir, "job") as again:
        assert (again.status().pool.files, again.status().writing.files) == (1, 0)
        assert again.claim(K).view[0] == 0
        assert len(again.scan()) == 1
        again.close(remove_pool=True)
    with SlotStore.open(memory_dir, "job") as again:
        assert (again.status().pool.files, again.status().sealed.files) == (0, 1)


def test_create_false(memory_dir):
    with pytest.raises(NotFoundError, match="expected a directory"):
        SlotStore.open(memory_dir, "job", create=False)
    SlotStore.open(memory_dir, "job").close()
    with SlotStore.open(memory_dir, "job", create=False) as store:
        assert store.scan() == ()


@pytest.mark.parametrize("settings", [{"budget_bytes": 0}, {"threads": 0}])
def test_bad_settings(memory_dir, settings):
    with pytest.raises(ConfigError, match=next(iter(settings))):
        SlotStore.open(memory_dir, "job", **settings)


def test_quarantine_keeps_two(store, caplog):
    sealed = [store.seal(store.claim(K), shard(step)) for step in range(4)]
    for one in sealed:
        with caplog.at_level(logging.WARNING):
            store.quarantine(one, "crc32c 0x1 expected 0x2")
    assert "crc32c 0x1 expected 0x2" in caplog.text
    assert store.scan() == ()
    names = {path.name for path in (store.path / "quarantine").iterdir()}
    assert names == {one.name for one in sealed[2:]}
    assert store.status().quarantined_files == 2
    store.quarantine(sealed[0], "gone already")
    assert not store.release(sealed[3])
    slots = [store.claim(K) for _ in range(4)]
    assert not {slot.slot_id for slot in slots} & {one.slot_id for one in sealed}, "never recycled"
    for slot in slots:
        store.abandon(slot)


def test_mapping_of_an_unlinked_shard_is_let_go(store):
    """What others drop must not go on using memory through our mapping."""

    def mapped():
        return Path("/proc/self/maps").read_text().count(str(store.path))

    sealed = [store.seal(store.claim(K), shard(step)) for step in range(5)]
    assert mapped() == 5
    for one in sealed:
        store.quarantine(one, "test")
    store.reclaim()
    assert mapped() == 2


def test_foreign_names_are_ignored_and_said_once(store, caplog):
    for state in SlotState:
        (store.path / state / "notes.txt").write_text("x")
    store.scan(), store.scan()
    assert caplog.text.count("notes.txt") == 1
    slot = store.claim(K)
    store.abandon(slot)
    assert store.status().foreign_names == 4
    assert len([problem for problem in store.check() if "not a name of flashckpt" in problem]) == 4
    for state in SlotState:
        (store.path / state / "notes.txt").unlink()


def test_check_is_not_misled_by_a_slot_that_another_process_seals_meanwhile(store, monkeypatch):
    sealed = store.seal(store.claim(K), shard(1), tag=1)
    other = dataclasses.replace(Owner.current(), pid_namespace=1)  # nobody can say that it is dead
    target = store.path / "sealed" / sealed_name(shard(1), 1, sealed.slot_id, other)
    path = store.path / "writing" / slot_name(sealed.slot_id, other)
    (store.path / "sealed" / sealed.name).rename(path)
    names = Directory.names

    def names_after_a_rename(self, place):
        if place is SlotState.SEALED and path.exists():
            path.rename(target)
        return names(self, place)

    monkeypatch.setattr(Directory, "names", names_after_a_rename)
    assert store.check() == []
    assert target.exists()
    target.unlink()


def test_check_sees_what_is_wrong(memory_dir):
    with SlotStore.open(memory_dir, "job") as store:
        sealed = store.seal(store.claim(K), shard(1), tag=1)
        slot = store.claim(K)
        pooled = store.claim(K)
        store.abandon(pooled)
        assert store.check() == []
        path = store.path / "sealed" / sealed.name
        path.chmod(0o644)
        assert "mode 0644" in "\n".join(store.check())
        path.chmod(0o600)
        twin = path.with_name(sealed.name.replace("t00000001", "t00000002"))
        os.link(path, twin)
        problems = "\n".join(store.check())
        assert "two files of one shard" in problems
        assert "2 links" in problems
        assert f"slot {sealed.slot_id:016x} is in" in problems
        twin.unlink()
        (written,) = (store.path / "writing").iterdir()
        stray = written.with_name(written.name.replace(f"{slot.slot_id:016x}", "0" * 16))
        stray.write_bytes(b"")
        stray.chmod(0o600)
        assert "leaked" in "\n".join(store.check())
        stray.unlink()
        written.unlink()
        assert "its file has gone" in "\n".join(store.check())


def test_highest_epoch(store):
    assert store.highest_epoch() == 0
    store.seal(store.claim(K), shard(1))
    assert store.highest_epoch() == 1000
    store.write_line(from_fence(step=0, epoch=2000, nonce=1))
    assert store.highest_epoch() == 2000


def test_what_this_process_sealed_can_be_read_where_it_is_mapped(store, memory_dir):
    slot = store.claim(K)
    slot.view[100:103] = b"abc"
    sealed = store.seal(slot, shard(1), 0)
    fd = store.open_shard(sealed)
    try:
        with store.mapped_shard(sealed, fd) as view:
            assert view.readonly
            assert bytes(view[100:103]) == b"abc"
            assert len(view) == K
        with SlotStore.open(memory_dir, "job") as other:  # the same process, but it has not mapped it
            assert other.mapped_shard(sealed, fd) is None
    finally:
        os.close(fd)


def test_a_record_is_a_sign_of_its_launch_too(store):
    """An agent that was restarted on a node without shards must not let an older launch in."""
    for epoch in (3000, 2500):
        store.write_record(Record(Generation(epoch, 1, 5, 1), 2, 1, 5.0))
    assert store.highest_epoch() == 3000
    store.seal(store.claim(K), shard(1))
    assert store.highest_epoch() == 3000


def test_a_closed_store_answers_nothing(memory_dir):
    store = SlotStore.open(memory_dir, "job")
    store.close()
    for ask in (lambda: store.directory_id, store.highest_epoch, store.scan, store.read_records, store.status):
        with pytest.raises(ClosedError, match=r"slot store .*: used after close\(\)"):
            ask()
