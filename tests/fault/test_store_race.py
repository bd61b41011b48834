"""Several processes at one directory: nobody ever has the slot of another one that may still write."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from flashckpt.errors import ConflictError
from flashckpt.protocol.line import from_fence
from flashckpt.store.slots import SlotStore
from flashckpt.types import Generation, ShardId

ROOT = Path(__file__).parents[2]
K = 64 << 10


@pytest.fixture
def memory_dir():
    path = Path(tempfile.mkdtemp(prefix="flashckpt-test-", dir="/dev/shm"))
    yield path
    shutil.rmtree(path)


@contextlib.contextmanager
def process(code, *arguments):
    child = subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield child
    finally:
        child.kill()
        child.communicate()


# Each round two processes start at once and claim more slots than there are free, all left by the dead
# processes of the round before; both hold theirs until both have reported.
RACE = """
import json, os, sys
from flashckpt.store.slots import SlotStore

path, rounds = sys.argv[1], int(sys.argv[2])

def racer(go, report, hold):
    os.read(go, 1)
    store = SlotStore.open(path, "job")
    store.reclaim()
    slots = [store.claim(65536) for _ in range(4)]
    mine = os.getpid().to_bytes(4, "little") * 16384
    for slot in slots:
        slot.view[:] = mine
    inodes = [mapping.inode for mapping in store._supply._mappings.values()]
    os.write(report, json.dumps(inodes).encode() + b"\\n")
    os.read(hold, 1)
    # Nobody wrote into them since.
    os._exit(0 if all(slot.view == mine for slot in slots) else 1)

recycled = overlaps = damaged = 0
before = set()
for _ in range(rounds):
    go, start = os.pipe()
    hold, finish = os.pipe()
    racers = []
    for _ in range(2):
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            racer(go, write, hold)
        os.close(write)
        racers.append((pid, read))
    os.write(start, b"gg")
    claims = [set(json.loads(os.fdopen(read).readline())) for _, read in racers]
    os.write(finish, b"ff")
    damaged += sum(os.waitpid(pid, 0)[1] != 0 for pid, _ in racers)
    overlaps += len(claims[0] & claims[1]) + (8 - sum(map(len, claims)))
    recycled += len((claims[0] | claims[1]) & before)
    before = claims[0] | claims[1]
    for fd in (go, start, hold, finish):
        os.close(fd)
print(json.dumps({"recycled": recycled, "overlaps": overlaps, "damaged": damaged}))
"""


@pytest.mark.slow
def test_two_processes_race_for_the_slots_of_the_dead(memory_dir):
    rounds = 200
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", RACE, memory_dir, str(rounds)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    counts = json.loads(result.stdout)
    assert counts["overlaps"] == 0
    assert counts["damaged"] == 0
    assert counts["recycled"] > rounds, "they did race for the same slots"
    with SlotStore.open(memory_dir, "job") as store:
        store.reclaim()
        assert store.check() == []


HOLDER = """
import os, sys
from flashckpt.store.slots import SlotStore
from flashckpt.types import Generation, ShardId
store = SlotStore.open(sys.argv[1], "job")
slot = store.claim(65536)
slot.view[:] = b"H" * 65536
store.seal(store.claim(65536), ShardId(Generation(1, 2, 3, 4), 0, 1))
store.prepare(65536, 1)
print("ready", flush=True)
sys.stdin.readline()
slot.view[:] = b"W" * 65536
print("wrote", flush=True)
sys.stdin.readline()
"""


def test_slots_of_a_paused_writer_are_left_alone(memory_dir):
    with process(HOLDER, memory_dir) as holder, SlotStore.open(memory_dir, "job") as store:
        assert holder.stdout.readline() == "ready\n"
        theirs = {path.stat().st_ino for path in store.path.glob("*/s*")}
        (sealed,) = store.scan()
        for pause in (False, True):
            if pause:
                holder.send_signal(signal.SIGSTOP)
                os.waitid(os.P_PID, holder.pid, os.WSTOPPED | os.WNOWAIT)
            assert store.reclaim().files == 0
            assert not store.release(sealed)
            slots = [store.claim(K) for _ in range(3)]
            mine = {mapping.inode for mapping in store._supply._mappings.values()}
            assert not mine & theirs
            for slot in slots:
                slot.view[:] = b"M" * K
            if pause:
                # It wakes up in the middle of our write and goes on with its own.
                holder.send_signal(signal.SIGCONT)
                holder.stdin.write("\n")
                holder.stdin.flush()
                assert holder.stdout.readline() == "wrote\n"
            assert all(slot.view == b"M" * K for slot in slots)
            for slot in slots:
                store.abandon(slot)
        holder.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, holder.pid, os.WSTOPPED | os.WNOWAIT)
        assert store.reclaim().files == 0
        holder.kill()
        os.waitid(os.P_PID, holder.pid, os.WEXITED | os.WNOWAIT)
        assert store.reclaim().files == 1
        assert store.release(sealed)
        slots = [store.claim(K) for _ in range(6)]
        mine = {mapping.inode for mapping in store._supply._mappings.values()}
        assert theirs <= mine, "now all of its slots are used again"
        for slot in slots:
            store.abandon(slot)
        assert store.check() == []


SAME_SHARD = """
import os, sys
from flashckpt.errors import ConflictError
from flashckpt.store.slots import SlotStore
from flashckpt.types import Generation, ShardId
store = SlotStore.open(sys.argv[1], "job")
for round in range(100):
    slot = store.claim(65536)
    print("ready", flush=True)
    sys.stdin.readline()
    try:
        store.seal(slot, ShardId(Generation(1, 2, round, 1), 0, 1), tag=os.getpid() % 1000)
        print("sealed", flush=True)
    except ConflictError:
        store.abandon(slot)
        print("refused", flush=True)
    sys.stdin.readline()
"""


def test_one_shard_sealed_by_two(memory_dir):
    sealed = 0
    children = process(SAME_SHARD, memory_dir), process(SAME_SHARD, memory_dir)
    with children[0] as a, children[1] as b, SlotStore.open(memory_dir, "job") as store:
        for step in range(100):
            for child in (a, b):
                assert child.stdout.readline() == "ready\n"
            for child in (a, b):
                child.stdin.write("\n")
                child.stdin.flush()
            answers = sorted(child.stdout.readline().strip() for child in (a, b))
            present = [one for one in store.scan() if one.shard.generation.step == step]
            assert answers in (["refused", "sealed"], ["refused", "refused"])
            assert len(present) == answers.count("sealed")
            sealed += len(present)
            for child in (a, b):
                child.stdin.write("\n")
                child.stdin.flush()
    assert sealed > 0


def test_second_seal_of_one_shard_withdraws(memory_dir):
    """It had looked before the first came, and was paused right before its rename."""
    shard = ShardId(Generation(1, 2, 0, 1), 0, 1)
    arm = "import os\nos.environ.update(FLASHCKPT_TESTING='1', FLASHCKPT_FAILPOINTS='before_rename_sealed=stop*1')\n"
    with process(arm + SAME_SHARD, memory_dir) as late, SlotStore.open(memory_dir, "job") as store:
        assert late.stdout.readline() == "ready\n"
        late.stdin.write("\n")
        late.stdin.flush()
        os.waitid(os.P_PID, late.pid, os.WSTOPPED)
        sealed = store.seal(store.claim(K), shard)
        late.send_signal(signal.SIGCONT)
        assert late.stdout.readline() == "refused\n"
        assert store.scan() == (sealed,)
        assert store.status().writing.files == 0


def test_lines_written_by_many_end_in_the_newest(memory_dir):
    code = (
        "import random, sys\nfrom flashckpt.store.slots import SlotStore\n"
        "from flashckpt.protocol.line import from_fence\n"
        "store = SlotStore.open(sys.argv[1], 'job')\nepochs = list(range(1, 101))\n"
        "random.Random(sys.argv[2]).shuffle(epochs)\n"
        "print('ready', flush=True)\nsys.stdin.readline()\n"
        "for epoch in epochs:\n"
        "    assert store.write_line(from_fence(step=epoch, epoch=epoch, nonce=int(sys.argv[2]))).head.epoch >= epoch\n"
        "print('done', flush=True)\nsys.stdin.readline()\n"
    )
    with contextlib.ExitStack() as stack:
        children = [stack.enter_context(process(code, memory_dir, number)) for number in range(3)]
        store = stack.enter_context(SlotStore.open(memory_dir, "job"))
        for child in children:
            assert child.stdout.readline() == "ready\n"
        for child in children:
            child.stdin.write("\n")
            child.stdin.flush()
        # Meanwhile nobody ever sees it go back, or vanish.
        newest = -1
        while newest < 100:
            line = store.read_line()
            if line is not None:
                assert line.head.epoch >= newest
                newest = line.head.epoch
            else:
                assert newest == -1
        for child in children:
            assert child.stdout.readline() == "done\n"
        assert store.read_line() == from_fence(step=100, epoch=100, nonce=2)
        assert len(list(store.path.glob("line-*"))) == 1


def test_threads_of_one_process(memory_dir):
    """Four threads claim, fill, seal, verify and release with one store."""
    failures = []
    with SlotStore.open(memory_dir, "job") as store:

        def work(number):
            try:
                for round_number in range(200):
                    size = K * (1 + (number + round_number) % 3)
                    slot = store.claim(size)
                    slot.view[:] = bytes([number + 1]) * size
                    if round_number % 4 == 0:
                        store.abandon(slot)
                        continue
                    sealed = store.seal(slot, ShardId(Generation(1, 2, round_number, 1), number, 4))
                    fd = store.open_shard(sealed)
                    if os.pread(fd, size + 1, 0) != bytes([number + 1]) * size:
                        failures.append((number, round_number))
                    os.close(fd)
                    if not store.release(sealed):
                        failures.append("not released")
            except BaseException as error:
                failures.append(error)

        switch_interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-6)  # threads take turns within a call, not just between calls
        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        sys.setswitchinterval(switch_interval)
        assert failures == []
        assert store.check() == []
        assert store.status().pool.files <= 5, "who loses a race looks again instead of making a file"
        with pytest.raises(ConflictError):
            store.abandon(store.seal(store.claim(K), ShardId(Generation(9, 9, 9, 9), 0, 1)))
