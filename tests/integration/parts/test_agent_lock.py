"""The agent's lock between processes: killed holders, stopped ones, and those that left no note."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from flashckpt import ConflictError, __version__
from flashckpt.agent.lock import AgentLock
from tests.unit.test_agent_lock import JOB, directory, note

__all__ = ["directory"]  # the fixture

ROOT = Path(__file__).resolve().parents[3]
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


def test_another_process_is_refused_and_told_who_holds_it(directory, other):
    with pytest.raises(ConflictError) as refused:
        AgentLock(directory).acquire()
    assert refused.value.pid == other.pid
    for part in (f"pid {other.pid}", f"version {__version__}", "started 20", repr(JOB), str(note(directory))):
        assert part in refused.value.message
    assert AgentLock(directory).holder().pid == other.pid


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


def test_locked_by_one_who_left_no_note(directory, other):
    note(directory).write_bytes(b"")
    with pytest.raises(ConflictError, match="left no note") as refused:
        AgentLock(directory).acquire()
    assert refused.value.pid is None
