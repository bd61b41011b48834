"""The files of lines: the newest head is in force, others stay while they are needed, nothing bad is believed."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest

from flashckpt.protocol.line import Ancestor, Line, begun, encode
from flashckpt.store.names import line_name
from flashckpt.store.slots import SlotStore
from flashckpt.store.small_files import frame, unframe
from flashckpt.types import Generation, Launch, ShardId

MAGIC = b"FCLINE01"
A, B, C, D = (Launch(10 * number, number) for number in range(1, 5))
STRANGER = Launch(15, 99)


@pytest.fixture
def memory_dir():
    path = Path(tempfile.mkdtemp(prefix="flashckpt-test-", dir="/dev/shm"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def store(memory_dir):
    with SlotStore.open(memory_dir, "job") as store:
        yield store


def at(launch, step):
    return Generation(launch.epoch, launch.nonce, step, 1)


def seal(store, launch, step=1):
    return store.seal(store.claim(64 << 10), ShardId(at(launch, step), 0, 1))


def files(store):
    return sorted(path.name for path in store.path.glob("*line*"))


def put_file(store, line, name=None):
    """As a process that was paused before it looked: nothing is removed, nothing compared."""
    path = store.path / (name or line_name(line.head))
    path.write_bytes(frame(MAGIC, encode(line), "job"))
    path.chmod(0o600)
    return path


def test_nothing_is_there_at_first(store):
    assert store.read_line() is None
    assert store.read_lines() == ()
    assert store.damaged_lines() == ()
    assert files(store) == []


def test_what_was_written_is_read(store):
    line = begun(A).continued(B, at(A, 7), [STRANGER])
    assert store.write_line(line) == line == store.read_line()
    assert store.read_lines() == (line,)
    assert files(store) == [line_name(B)]
    assert store.check() == []
    assert store.highest_epoch() == B.epoch


def test_the_newest_head_is_in_force_whatever_the_order_of_writing(store):
    """It knows of no other here, so all of them stay: the oldest first."""
    for head in (C, A, D, B):
        in_force = store.write_line(begun(head))
    assert in_force == begun(D) == store.read_line()
    assert store.read_lines() == (begun(A), begun(B), begun(C), begun(D))


def test_a_line_that_nothing_is_left_of_goes_with_the_one_that_knows_of_it(store):
    store.write_line(begun(STRANGER))
    store.write_line(begun(A))
    line = begun(A).continued(B, at(A, 7))
    assert store.write_line(line) == line
    assert store.read_lines() == (begun(STRANGER), line), "nobody has given up the stranger's history"
    later = line.continued(C, at(B, 9), [STRANGER])
    assert store.write_line(later) == later
    assert files(store) == [line_name(C)]
    assert store.check() == []


def test_a_line_stays_while_shards_of_its_launch_are_left(store):
    store.write_line(begun(A))
    sealed = seal(store, A)
    line = begun(A).continued(B, at(A, 7))
    store.write_line(line)
    assert store.read_lines() == (begun(A), line)
    store.release(sealed)
    assert store.write_line(line) == line, "once more"
    assert store.read_lines() == (line,)


def test_a_line_that_comes_too_late_is_not_in_force(store):
    line = begun(A).continued(B, at(A, 7))
    store.write_line(line)
    assert store.write_line(begun(A)) == line == store.read_line()
    assert files(store) == [line_name(B)], "the newer one knows of it, and nothing is left of its launch"


def test_older_line_of_a_process_that_was_paused_changes_nothing(store):
    """It had read the old state, and renames its file when the newer one is there already."""
    new = begun(A).continued(B, at(A, 7))
    store.write_line(new)
    put_file(store, begun(A))
    assert store.read_line() == new
    assert store.read_lines() == (begun(A), new)
    assert store.write_line(new) == new
    assert files(store) == [line_name(B)]


def test_what_two_nodes_say_of_one_launch_is_joined(store):
    first = Line(C, C, (Ancestor(A, 10), Ancestor(B, 3)))
    second = Line(C, A, (Ancestor(A, 12), Ancestor(STRANGER, 1)))
    joined = Line(C, A, (Ancestor(A, 12), Ancestor(STRANGER, 1), Ancestor(B, 3)))
    assert store.write_line(first) == first
    assert store.write_line(second) == joined == store.read_line()
    before = (store.path / line_name(C)).stat()
    assert store.write_line(first) == store.write_line(joined) == joined
    after = (store.path / line_name(C)).stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns), "nothing new: not written again"
    assert files(store) == [line_name(C)]


def test_every_damaged_file_is_refused():
    content = frame(MAGIC, encode(begun(A).continued(B, at(A, 7))), "job")
    assert unframe(MAGIC, content, "job", paged=False) is not None
    assert unframe(MAGIC, content, "job2", paged=False) is None
    assert unframe(MAGIC, content + b"\0", "job", paged=False) is None
    for length in range(len(content)):
        assert unframe(MAGIC, content[:length], "job", paged=False) is None
    for bit in range(8 * len(content)):
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        assert unframe(MAGIC, bytes(damaged), "job", paged=False) is None


def damage_torn(path, other):
    path.write_bytes(path.read_bytes()[:20])


def damage_empty(path, other):
    path.write_bytes(b"")


def damage_foreign(path, other):
    path.write_bytes(other.read_bytes())


def damage_link(path, other):
    path.unlink()
    path.symlink_to(other)


def damage_renamed(path, other):
    """A good file, of this job, under another launch's name."""
    path.write_bytes(frame(MAGIC, encode(begun(C)), "job"))


def damage_payload(path, other):
    """The frame is right, what is in it is no line."""
    path.write_bytes(frame(MAGIC, encode(begun(B))[:-1], "job"))


DAMAGES = [damage_torn, damage_empty, damage_foreign, damage_link, damage_renamed, damage_payload]


@pytest.fixture
def theirs(memory_dir):
    with SlotStore.open(memory_dir, "other job") as other:
        other.write_line(begun(B))
        (path,) = other.path.glob("line-*")
        yield path


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_bad_file_is_ignored_with_a_warning_and_written_anew(store, theirs, caplog, damage):
    line = begun(B)
    store.write_line(line)
    damage(store.path / line_name(B), theirs)
    assert store.read_line() is None
    assert store.read_lines() == ()
    assert "ignored" in caplog.text
    assert store.damaged_lines() == (line_name(B),)
    assert store.write_line(line) == line == store.read_line()
    assert store.damaged_lines() == ()
    assert theirs.is_file()
    assert store.check() == []


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_bad_file_of_another_launch_is_set_aside_by_the_next_write(store, theirs, caplog, damage):
    store.write_line(begun(A))
    store.write_line(begun(B))
    damage(store.path / line_name(B), theirs)
    assert store.read_line() == begun(A), "of those that can be believed, the newest"
    assert store.damaged_lines() == (line_name(B),)
    later = begun(C)
    assert store.write_line(later) == later == store.read_line()
    assert store.damaged_lines() == ()
    assert store.read_lines() == (begun(A), begun(C))
    assert files(store) == [f"damaged-{line_name(B)}", line_name(A), line_name(C)]
    assert "was set aside" in caplog.text
    assert theirs.is_file()


def test_what_was_set_aside_is_no_stranger(store, theirs):
    store.write_line(begun(B))
    damage_torn(store.path / line_name(B), theirs)
    store.write_line(begun(C))
    assert f"damaged-{line_name(B)}" in files(store)
    assert store.check() == []
    assert store.status().foreign_names == 0
