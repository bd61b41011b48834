"""SIGKILL at every arrow of a slot's life; the next process finds all that was promised, and nothing leaked."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from flashckpt.store import slots
from flashckpt.store.slots import SlotStore
from flashckpt.types import Generation

ROOT = Path(__file__).parents[2]
SIZE = 20 << 20  # two steps of allocation

# Prints what it may promise after each step: what was printed has happened.
LIFE = """
import sys
from flashckpt.store.slots import SlotStore
from flashckpt.protocol.line import from_fence
from flashckpt.types import Generation, ShardId

SIZE = 20 << 20
def say(*words):
    print(*words, flush=True)
def shard(step):
    return ShardId(Generation(1000, 77, step, step), 0, 1)
def save(store, step, size=SIZE):
    slot = store.claim(size)
    slot.view[:] = bytes([step]) * size
    sealed = store.seal(slot, shard(step))
    say("sealed", step)
    return sealed

store = SlotStore.open(sys.argv[1], "job")
store.reclaim()                                  # mid_reclaim: a dead writer left a slot
say("line?")
store.write_line(from_fence(step=5, epoch=50, nonce=9))
say("line")
first = save(store, 1)                           # a resized slot of the dead writer
second = save(store, 2)                          # a new file
third = save(store, 3, SIZE // 2)
store.abandon(store.claim(SIZE))
say("going", 1)
store.release(first)
say("released", 1)
fourth = save(store, 4)
say("going", 3)
store.quarantine(third, "test")
fifth = save(store, 5, SIZE * 2)
say("going", 2)
store.release(second)
save(store, 6)
say("end")
"""
LEAVE_ONE_IN_WRITING = """
import os, sys
from flashckpt.store.slots import SlotStore
slot = SlotStore.open(sys.argv[1], "job").claim(4 << 20)
slot.view[:] = b"old" * ((4 << 20) // 3) + b"o"
os._exit(0)
"""
PASSED_ONCE = ("_line", "_abandon", "_quarantine", "_reclaim")  # in this life
FAILPOINTS = re.findall(r"`([a-z_]+)`", slots.__doc__.partition("Failpoints")[2])


@pytest.fixture
def memory_dir():
    path = Path(tempfile.mkdtemp(prefix="flashckpt-test-", dir="/dev/shm"))
    yield path
    shutil.rmtree(path)


def run(code, memory_dir, **environment):
    return subprocess.run(
        [sys.executable, "-c", code, str(memory_dir)],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def check_promises(output, store):
    """What the dead process said: sealed shards that it had not begun to give up are there, and whole."""
    said = [line.split() for line in output.splitlines()]
    sealed = {int(words[1]) for words in said if words[0] == "sealed"}
    going = {int(words[1]) for words in said if words[0] == "going"}
    found = {one.shard.generation.step: one for one in store.scan()}
    assert sealed - going <= set(found)
    # Beyond what was promised: a shard whose process died before it could say so, or one that was going.
    assert len(set(found) - sealed) <= 1
    for step, one in found.items():
        assert one.shard.generation == Generation(1000, 77, step, step)
        fd = store.open_shard(one)
        try:
            assert os.pread(fd, one.size_bytes + 1, 0) == bytes([step]) * one.size_bytes
        finally:
            os.close(fd)
    if ["line"] in said:
        assert store.read_line().head.epoch == 50
    elif ["line?"] not in said:
        assert store.read_line() is None
    line = store.read_line()
    assert store.highest_epoch() == (1000 if found else 0 if line is None else line.head.epoch)
    return found


def check_slots_are_reusable(store):
    free = {path.stat().st_ino for path in (store.path / "pool").iterdir()}
    claimed = [store.claim(store.granule_bytes) for _ in free]
    assert {path.stat().st_ino for path in (store.path / "writing").iterdir()} == free
    for slot in claimed:
        assert not any(slot.view[:64])
        store.abandon(slot)
    assert store.check() == []


def test_the_life_itself(memory_dir):
    """Without faults it ends, and passes every failpoint; else the test below would prove nothing."""
    assert run(LEAVE_ONE_IN_WRITING, memory_dir).returncode == 0
    log = memory_dir / "log"
    every = ";".join(f"{name}=sleep(0)" for name in FAILPOINTS)
    result = run(LIFE, memory_dir, FLASHCKPT_TESTING="1", FLASHCKPT_FAILPOINTS=every, FLASHCKPT_FAILPOINTS_LOG=str(log))
    assert result.returncode == 0, result.stderr
    fired = {line.split()[0] for line in log.read_text().splitlines()}
    assert fired == set(FAILPOINTS)
    with SlotStore.open(memory_dir, "job") as store:
        assert set(check_promises(result.stdout, store)) == {4, 5, 6}


@pytest.mark.parametrize(
    ("failpoint", "occurrence"),
    [(name, n) for name in FAILPOINTS for n in (1, 2) if n == 1 or not name.endswith(PASSED_ONCE)],
)
def test_killed(memory_dir, failpoint, occurrence):
    assert run(LEAVE_ONE_IN_WRITING, memory_dir).returncode == 0
    log = memory_dir / "log"
    result = run(
        LIFE,
        memory_dir,
        FLASHCKPT_TESTING="1",
        FLASHCKPT_FAILPOINTS=f"{failpoint}=kill@{occurrence}",
        FLASHCKPT_FAILPOINTS_LOG=str(log),
    )
    assert result.returncode == -signal.SIGKILL, result.stderr
    assert log.read_text().split()[0] == failpoint
    log.unlink()
    with SlotStore.open(memory_dir, "job") as store:
        store.reclaim()
        assert store.check() == []
        assert store.status().writing.files == 0
        found = check_promises(result.stdout, store)
        assert {path.name for path in store.path.iterdir()} - {"pool", "writing", "sealed", "quarantine"} <= {
            "line-50-0000000000000009"
        }
        for one in found.values():
            assert store.release(one), "its writer is dead"
        check_slots_are_reusable(store)


# Runs the life, ends with its error, and looks at the store the error left.
LIVE_ON = f"""
import sys
scope = {{}}
try:
    exec({LIFE!r}, scope)
except OSError as error:
    caught = error
store = scope["store"]
problems = store.check()
for slot in list(store._writing.values()):  # what the caller was writing is still his to abandon
    store.abandon(slot)
problems += store.check()
if problems:
    sys.exit(repr(problems))
print(type(caught).__name__, flush=True)
"""


@pytest.mark.parametrize("failpoint", FAILPOINTS)
def test_error_instead(memory_dir, failpoint):
    """The same places fail with an error: the process lives on, and has nothing lying about."""
    assert run(LEAVE_ONE_IN_WRITING, memory_dir).returncode == 0
    log = memory_dir / "log"
    result = run(
        LIVE_ON,
        memory_dir,
        FLASHCKPT_TESTING="1",
        FLASHCKPT_FAILPOINTS=f"{failpoint}=error(ENOSPC)*1",
        FLASHCKPT_FAILPOINTS_LOG=str(log),
    )
    assert result.returncode == 0, result.stderr
    assert log.read_text().split()[0] == failpoint
    *promises, kind = result.stdout.splitlines()
    if failpoint in ("before_allocate", "mid_allocate", "after_allocate", "after_map", "after_claim", "mid_line"):
        assert kind == "NoSpaceError"
    with SlotStore.open(memory_dir, "job") as store:
        store.reclaim()
        assert store.check() == []
        check_promises("\n".join(promises), store)
        check_slots_are_reusable(store)
