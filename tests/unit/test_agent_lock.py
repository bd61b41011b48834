"""The agent's lock: one holder, named; a dead one's note is no obstacle, a stopped one still holds."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from flashckpt import ConflictError, UnsafeDirectoryError, __version__
from flashckpt.agent.lock import LOCK_NAME, AgentLock
from flashckpt.errors import InternalError
from flashckpt.store.directory import open_directory
from flashckpt.store.owner import Owner

ROOT = Path(__file__).resolve().parents[2]
JOB = "run 1"

HOLD = """
import sys
from flashckpt.agent.lock import AgentLock
from flashckpt.store.directory import open_directory
lock = AgentLock(open_directory(sys.argv[1], sys.argv[2]))
lock.acquire()
print("held", flush=True)
sys.stdin.read()
lock.release()
"""


@pytest.fixture
def directory(memory_dir):
    opened = open_directory(memory_dir, JOB)
    yield opened
    opened.close()


@pytest.fixture
def other(memory_dir):
    """Another process that holds the lock."""
    child = subprocess.Popen(
        [sys.executable, "-c", HOLD, memory_dir, JOB], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert child.stdout.readline() == b"held\n"
    yield child
    child.kill()
    child.stdin.close()
    child.stdout.close()
    child.wait()


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


def test_another_process_is_refused_and_told_who_holds_it(directory, other):
    with pytest.raises(ConflictError) as refused:
        AgentLock(directory).acquire()
    assert refused.value.pid == other.pid
    for part in (f"pid {other.pid}", f"version {__version__}", "started 20", repr(JOB), str(note(directory))):
        assert part in refused.value.message
    assert AgentLock(directory).holder().pid == other.pid


def test_a_second_lock_in_one_process_is_refused(directory):
    with AgentLock(directory) as lock:
        with pytest.raises(ConflictError, match=f"pid {os.getpid()}"):
            AgentLock(directory).acquire()
        with pytest.raises(ConflictError, match="already"):
            lock.acquire()
        assert lock.is_in_force()


def test_a_stopped_holder_still_holds(directory, other):
    other.send_signal(signal.SIGSTOP)
    os.waitpid(other.pid, os.WUNTRACED)
    assert AgentLock(directory).holder().pid == other.pid
    with pytest.raises(ConflictError, match=f"pid {other.pid}"):
        AgentLock(directory).acquire()


def test_a_killed_holder_leaves_a_note_that_is_no_obstacle(directory, other):
    other.kill()
    os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)  # still a zombie, with its pid
    assert json.loads(note(directory).read_text())["pid"] == other.pid
    assert AgentLock(directory).holder() is None
    with AgentLock(directory):
        assert AgentLock(directory).holder().pid == os.getpid()


def test_a_released_lock_goes_to_the_next(directory, other):
    other.stdin.close()
    other.wait()
    with AgentLock(directory) as lock:
        assert lock.is_in_force()
        assert AgentLock(directory).holder().pid == os.getpid()
    assert AgentLock(directory).holder() is None


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


def test_in_another_pid_namespace_only_the_lock_knows(directory, other):
    """Its pid can't be looked up from here: while it is locked it counts as alive, afterwards not."""
    foreign = json.dumps({**json.loads(note(directory).read_text()), "pid": 1, "pid_namespace": 7}) + "\n"
    note(directory).write_text(foreign)
    assert AgentLock(directory).holder().owner.pid_namespace == 7
    with pytest.raises(ConflictError, match="pid 1,"):
        AgentLock(directory).acquire()
    other.kill()
    other.wait()
    assert note(directory).read_text() == foreign
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


def test_locked_by_one_who_left_no_note(directory, other):
    note(directory).write_bytes(b"")
    with pytest.raises(ConflictError, match="left no note") as refused:
        AgentLock(directory).acquire()
    assert refused.value.pid is None


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
