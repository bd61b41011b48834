"""The agent's lock in one process: one holder, named; a note that nobody can have written is no obstacle."""

from __future__ import annotations

import json
import os

import pytest

from flashckpt import ConflictError, UnsafeDirectoryError, __version__
from flashckpt.agent.lock import LOCK_NAME, AgentLock
from flashckpt.errors import InternalError
from flashckpt.store.directory import open_directory
from flashckpt.store.owner import Owner

JOB = "run 1"


@pytest.fixture
def directory(memory_dir):
    opened = open_directory(memory_dir, JOB)
    yield opened
    opened.close()


def note(directory):
    return directory.path / LOCK_NAME


def test_nobody_holds_it_at_first(directory):
    assert AgentLock(directory).holder() is None
    assert not note(directory).exists(), "a look must not make the file"


def test_the_holder_says_who_it_is(directory):
    with AgentLock(directory) as lock:
        assert lock.is_in_force()
        holder = AgentLock(directory).holder()
        assert holder.owner == Owner.current()
        assert (holder.pid, holder.version, holder.job) == (os.getpid(), __version__, JOB)
        assert json.loads(note(directory).read_text())["pid"] == os.getpid()
        assert note(directory).stat().st_mode & 0o777 == 0o600
    assert AgentLock(directory).holder() is None
    lock.release()


def test_a_second_lock_in_one_process_is_refused(directory):
    with AgentLock(directory) as lock:
        with pytest.raises(ConflictError, match=f"pid {os.getpid()}"):
            AgentLock(directory).acquire()
        with pytest.raises(ConflictError, match="already"):
            lock.acquire()
        assert lock.is_in_force()


def test_a_pid_that_was_reused_is_not_the_holder(directory):
    with AgentLock(directory):
        fields = json.loads(note(directory).read_text())
    note(directory).write_text(json.dumps({**fields, "start_ticks": fields["start_ticks"] + 1}) + "\n")
    assert AgentLock(directory).holder() is None


def test_a_note_of_another_boot_is_no_obstacle(directory):
    with AgentLock(directory):
        text = note(directory).read_text()
    note(directory).write_text(json.dumps({**json.loads(text), "boot_id": "00000000"}) + "\n")
    assert AgentLock(directory).holder() is None
    with AgentLock(directory):
        pass


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\0" * 4096,
        b"{}\n",
        b"[]\n",
        b"null\n",
        b'{"pid": 1',
        b"[" * 5000 + b"\n",
        b"\xff\xfe\n",
    ],
)
def test_what_no_agent_wrote_is_no_obstacle(directory, content):
    note(directory).write_bytes(content)
    note(directory).chmod(0o600)
    assert AgentLock(directory).holder() is None
    with AgentLock(directory):
        assert AgentLock(directory).holder().pid == os.getpid()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("pid", "0"),
        ("pid", "-1"),
        ("pid", str(1 << 40)),
        ("pid", "1e999"),
        ("start_ticks", '"x"'),
        ("pid_namespace", "null"),
        ("started_at", "NaN"),
        ("started_at", "1e300"),
    ],
)
def test_a_note_that_no_agent_can_have_written(directory, field, value):
    with AgentLock(directory):
        fields = {name: json.dumps(one) for name, one in json.loads(note(directory).read_text()).items()}
        text = ", ".join(f'"{name}": {one}' for name, one in {**fields, field: value}.items())
        note(directory).write_text(f"{{{text}}}\n")
        # This process lives and has the lock, but what is written there can't be it.
        assert AgentLock(directory).holder() is None


def test_a_removed_or_replaced_file_is_noticed(directory):
    with AgentLock(directory) as lock:
        note(directory).unlink()
        assert not lock.is_in_force()
        with AgentLock(directory) as second:
            assert second.is_in_force()
            assert not lock.is_in_force()


def test_a_link_in_its_place_is_refused(directory, tmp_path):
    target = tmp_path / "target"
    target.write_text("precious")
    note(directory).symlink_to(target)
    for call in (AgentLock(directory).acquire, AgentLock(directory).holder):
        with pytest.raises(UnsafeDirectoryError):
            call()
    assert target.read_text() == "precious"


def test_asking_before_it_was_taken_is_a_bug(directory):
    with pytest.raises(InternalError):
        AgentLock(directory).is_in_force()
