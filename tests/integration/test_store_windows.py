"""What an agent sends of other processes' shards: mapped once a slot, and given back with its memory."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from flashckpt.agent.shard_files import ShardFiles
from flashckpt.store.slots import SlotStore
from flashckpt.store.windows import open_window
from flashckpt.types import ChunkRange, Generation, ShardId
from tests.integration.rpc_world import JOB
from tests.integration.test_rpc_replica import write_shard

ROOT = Path(__file__).parents[2]
SIZE = 3 << 20

WRITER = """
import sys
from flashckpt.store.slots import SlotStore
from flashckpt.types import Generation, ShardId
with SlotStore.open(sys.argv[1], "job") as store:
    slot = store.claim(int(sys.argv[3]))
    slot.view[:] = bytes([int(sys.argv[2])]) * len(slot.view)
    store.seal(slot, ShardId(Generation(1000, 77, int(sys.argv[2]), 1), 0, 2))
"""


@pytest.fixture
def store(memory_dir):
    with SlotStore.open(memory_dir, "job") as store:
        yield store


def written(store, memory_dir, step, size=SIZE):
    """Another process's shard of `step`; its writer has exited."""
    subprocess.run([sys.executable, "-c", WRITER, memory_dir, str(step), str(size)], cwd=ROOT, check=True)
    (found,) = (one for one in store.scan() if one.shard.generation.step == step)
    return found


def look(store, sealed):
    fd = store.open_shard(sealed)
    try:
        return store.window(sealed, fd)
    finally:
        os.close(fd)


def content(window, start=0, length=SIZE):
    with window.view_of(start, length) as view:
        return bytes(view)


@pytest.fixture
def reading(memory_dir):
    """A store, a shard in it as another process would have left it, and an agent's reader of it."""
    with SlotStore.open(memory_dir, JOB) as writer:
        write_shard(writer)
    with SlotStore.open(memory_dir, JOB) as store:
        files = ShardFiles(store, JOB)
        (sealed,) = store.scan()
        assert files.adopt(sealed) is not None
        reader = files.open(sealed.shard)
        yield store, sealed, reader
        reader.close()


def mapped_slots():
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if "flashckpt-test-" in line]


def test_a_window_stays_for_the_next_generation_in_its_slot(store, memory_dir):
    first = written(store, memory_dir, 1)
    window = look(store, first)
    assert content(window, 5, SIZE - 9) == b"\1" * (SIZE - 9)
    assert store.release(first)
    second = written(store, memory_dir, 2)
    assert second.slot_id == first.slot_id
    assert look(store, second) is window
    assert content(window) == b"\2" * SIZE
    assert len(mapped_slots()) == 1


def test_a_slot_that_got_another_size_gets_another_window(store, memory_dir):
    first = written(store, memory_dir, 1)
    window = look(store, first)
    store.release(first)
    second = written(store, memory_dir, 2, SIZE * 2)
    assert second.slot_id == first.slot_id
    other = look(store, second)
    assert content(other, SIZE, SIZE) == b"\2" * SIZE
    assert window.view_of(0, 1) is None
    assert len(mapped_slots()) == 1


def test_memory_that_is_given_up_is_free_at_once(memory_dir):
    """Whoever gives a slot up wants to use its memory: a window would keep it."""
    with SlotStore.open(memory_dir, "job", budget_bytes=SIZE * 2) as store:
        both = [written(store, memory_dir, step) for step in (1, 2)]
        for sealed in both:
            content(look(store, sealed))
        for sealed in both:
            store.release(sealed)
        assert len(mapped_slots()) == 2
        slot = store.claim(SIZE * 2)  # one of them gets that size, the other one has to go
        assert not [line for line in mapped_slots() if "(deleted)" in line]
        store.abandon(slot)


@pytest.mark.parametrize("way", ["trim", "reclaim"])
def test_a_removed_file_has_no_window(store, memory_dir, way):
    sealed = written(store, memory_dir, 1)
    content(look(store, sealed))
    if way == "trim":
        store.release(sealed)
        assert store.trim() == 1
    else:
        (store.path / "sealed" / sealed.name).unlink()
        store.reclaim()
    assert mapped_slots() == []


def test_what_is_being_sent_outlives_its_window(store, memory_dir):
    sealed = written(store, memory_dir, 1)
    window = look(store, sealed)
    view = window.view_of(0, SIZE)
    store.release(sealed)
    store.trim()
    assert view[SIZE - 1] == 1
    view.release()
    del window, view
    assert mapped_slots() == []


def test_a_reader_of_a_removed_shard_keeps_nothing_when_it_is_closed(reading):
    """Also where an error's traceback keeps the reader itself."""
    store, sealed, reader = reading
    view = reader.view_of(ChunkRange(0, 1))
    (store.path / "sealed" / sealed.name).unlink()
    store.forget_unlinked()
    assert len(mapped_slots()) == 1, "it is being sent"
    view.release()
    reader.close()
    assert mapped_slots() == []
    assert reader.view_of(ChunkRange(0, 1)) is None, "its descriptor may be another file's now"


def test_a_file_that_went_before_its_window_was_opened(store, memory_dir):
    """Nobody would close a window that came after the look for removed files."""
    sealed = written(store, memory_dir, 1)
    fd = store.open_shard(sealed)
    store.release(sealed)
    store.trim()
    window = store.window(sealed, fd)
    os.close(fd)
    assert content(window, 100, 1) == b"\1"
    del window
    assert mapped_slots() == []


def test_a_file_with_holes_has_no_window(store, memory_dir):
    """To read one would take memory."""
    sealed = written(store, memory_dir, 1)
    os.truncate(store.path / "sealed" / sealed.name, SIZE + (1 << 20))
    assert look(store, sealed) is None


def test_what_is_not_sent_is_not_mapped(reading):
    """The scrubber reads every shard, again and again."""
    _, _, reader = reading
    assert reader.read_chunk(0)
    assert mapped_slots() == []


def test_a_file_that_is_cut_short_is_an_error_of_the_kernel(store, memory_dir):
    sealed = written(store, memory_dir, 1)
    window = look(store, sealed)
    os.truncate(store.path / "sealed" / sealed.name, 1 << 20)
    ours, theirs = socket.socketpair()
    with ours, theirs, window.view_of(2 << 20, 1 << 20) as view, pytest.raises(OSError, match="Bad address") as caught:
        ours.send(view)
    assert caught.value.errno == errno.EFAULT


def test_nothing_beyond_the_end(store, memory_dir):
    window = look(store, written(store, memory_dir, 1))
    assert window.view_of(SIZE - 1, 2) is None
    assert window.view_of(SIZE, 1) is None
    assert window.view_of(-1, 1) is None
    assert content(window, SIZE, 0) == b""


def test_what_this_process_mapped_to_write_needs_no_other_mapping(store):
    slot = store.claim(SIZE)
    slot.view[:3] = b"abc"
    sealed = store.seal(slot, ShardId(Generation(1000, 77, 1, 1), 0, 2))
    assert content(look(store, sealed), 0, 3) == b"abc"
    assert len(mapped_slots()) == 1


def test_what_has_no_bytes_has_no_window(tmp_path):
    (tmp_path / "empty").touch()
    fd = os.open(tmp_path / "empty", os.O_RDONLY)
    before = len(os.listdir("/proc/self/fd"))
    assert open_window(fd) is None
    assert len(os.listdir("/proc/self/fd")) == before
    os.close(fd)
