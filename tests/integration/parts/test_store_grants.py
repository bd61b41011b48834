"""Slots that an agent hands to trainers. The trainers are processes of their own: who lives is what it is about."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest

from flashckpt.errors import (
    ClosedError,
    ConfigError,
    ConflictError,
    NoSpaceError,
    NotFoundError,
    UnsafeDirectoryError,
)
from flashckpt.store import grants, records, session
from flashckpt.store.names import parse_slot_name, slot_name
from flashckpt.store.owner import Owner
from flashckpt.store.slots import SlotFile, SlotStore
from flashckpt.types import Generation, Record, ShardId

ROOT = Path(__file__).parents[3]
K = 64 << 10

# Evaluates one expression a line. `store` is its own; every answer is a line.
TRAINER = """
import os, sys
from flashckpt.store.owner import Owner
from flashckpt.store.slots import SlotStore
from flashckpt.types import Generation, ShardId
store = SlotStore.open(sys.argv[1], "job", threads=1)
slots = {}
def attach(slot_id, size, fill=None):
    slot = slots[slot_id] = store.attach(slot_id, size)
    head = bytes(slot.view[:64])
    if fill is not None:
        slot.view[:] = bytes([fill]) * size
    return head == bytes(64)
def seal(slot_id, step, rank=0):
    return store.seal(slots.pop(slot_id), ShardId(Generation(1000, 77, step, 1), rank, 2)).name
def abandon(slot_id):
    store.abandon(slots.pop(slot_id))
def mapped():
    return sorted(store._supply._mappings)
def touch():
    # Reads the last byte of everything mapped: a file that was cut short under it is a SIGBUS.
    return [mapping.view()[-1] for mapping in store._supply._mappings.values()]
print(repr(Owner.current()), flush=True)
for line in sys.stdin:
    try:
        print(repr(eval(line)), flush=True)
    except Exception as error:
        print(repr(type(error).__name__), flush=True)
"""


class Trainer:
    def __init__(self, memory_dir):
        self.process = subprocess.Popen(
            [sys.executable, "-c", TRAINER, str(memory_dir)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.owner = eval(self.process.stdout.readline())

    def ask(self, expression):
        self.process.stdin.write(expression + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        assert answer, f"the trainer died of {expression}: {self.process.wait()}"
        return eval(answer)

    def kill(self):
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()


@contextmanager
def trainer_of(memory_dir):
    trainer = Trainer(memory_dir)
    try:
        yield trainer
    finally:
        trainer.kill()


def shard(step, rank=0):
    return ShardId(Generation(1000, 77, step, 1), rank, 2)


def writers(store, state):
    """slot id → writer, of the files there."""
    parsed = (parse_slot_name(path.name) for path in (store.path / state).iterdir())
    return {one.slot_id: one.writer for one in parsed}


def file_of(store, state, slot_id):
    (path,) = (path for path in (store.path / state).iterdir() if f"s{slot_id:016x}." in path.name)
    return path


def is_mapped_here(store):
    return str(store.path) in Path("/proc/self/maps").read_text()


@pytest.fixture
def memory_dir():
    path = Path(tempfile.mkdtemp(prefix="flashckpt-test-", dir="/dev/shm"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def agent(memory_dir):
    with SlotStore.open(memory_dir, "job") as store:
        yield store
        store.reclaim()
        assert store.check() == []


@pytest.fixture
def trainer(memory_dir, agent):
    with trainer_of(memory_dir) as trainer:
        yield trainer


def test_a_saves_life(agent, trainer):
    slot_id = agent.grant(3 * K, trainer.owner)
    assert writers(agent, "writing") == {slot_id: trainer.owner}
    found = file_of(agent, "writing", slot_id).stat()
    assert (found.st_size, found.st_blocks * 512) == (3 * K, 3 * K)
    assert not is_mapped_here(agent)
    assert trainer.ask(f"attach({slot_id}, {3 * K}, 7)") is True
    name = trainer.ask(f"seal({slot_id}, 1)")
    (sealed,) = agent.scan()
    assert (sealed.name, sealed.writer) == (name, trainer.owner)
    assert not agent.release(sealed), "its writer lives"
    assert agent.release(sealed, of_others=True)
    assert not agent.release(sealed, of_others=True)
    assert writers(agent, "pool") == {slot_id: trainer.owner}
    assert file_of(agent, "pool", slot_id).read_bytes() == bytes(64) + b"\7" * (3 * K - 64)
    assert trainer.ask("mapped()") == [slot_id]
    assert agent.grant(3 * K, trainer.owner) == slot_id, "a rename: the trainer has it mapped"
    assert trainer.ask(f"attach({slot_id}, {3 * K})") is True
    trainer.ask(f"abandon({slot_id})")
    assert writers(agent, "pool") == {slot_id: trainer.owner}
    assert not is_mapped_here(agent)


def test_attach_erases_the_preamble_of_an_abandoned_slot(agent, trainer):
    slot_id = agent.grant(K, trainer.owner)
    trainer.ask(f"attach({slot_id}, {K}, 5)")
    trainer.ask(f"abandon({slot_id})")
    assert file_of(agent, "pool", slot_id).read_bytes() == b"\5" * K
    assert agent.grant(K, trainer.owner) == slot_id
    assert trainer.ask(f"attach({slot_id}, {K})") is True


def test_slot_of_a_live_trainer_goes_to_nobody_else_and_is_never_resized(agent, trainer, memory_dir):
    slot_id = agent.grant(8 * K, trainer.owner)
    trainer.ask(f"attach({slot_id}, {8 * K}, 1)")
    trainer.ask(f"abandon({slot_id})")
    with trainer_of(memory_dir) as other:
        theirs = agent.grant(8 * K, other.owner)
        assert theirs != slot_id
    replica = agent.claim_file(8 * K)
    assert replica.slot_id != slot_id
    agent.abandon(replica)
    # Another size for the trainer itself: the old one is unlinked, and not cut short under the mapping.
    smaller = agent.grant(K, trainer.owner)
    assert smaller != slot_id
    assert slot_id not in writers(agent, "pool")
    assert trainer.ask("touch()") == [1]
    assert trainer.ask("mapped()") == [slot_id]
    trainer.ask(f"attach({smaller}, {K})")
    assert trainer.ask("mapped()") == [smaller], "attaching lets go of what was unlinked"


def test_free_slots_of_other_sizes_do_not_pile_up(agent, trainer):
    for size in range(1, 8):
        slot_id = agent.grant(size * K, trainer.owner)
        trainer.ask(f"attach({slot_id}, {size * K}, {size})")
        trainer.ask(f"abandon({slot_id})")
        assert list(writers(agent, "pool")) == [slot_id]
        assert trainer.ask("touch()") == [size]


def test_slot_of_a_dead_trainer_is_resized_and_granted(agent, trainer, memory_dir):
    with trainer_of(memory_dir) as first:
        granted = [agent.grant(size * K, first.owner) for size in (2, 9)]
        for slot_id, size in zip(granted, (2, 9), strict=True):
            first.ask(f"attach({slot_id}, {size * K}, 255)")
        first.ask(f"abandon({granted[1]})")
    assert agent.check() == [f"writing/{slot_name(granted[0], first.owner)}: its writer is dead"]
    reclaimed = agent.reclaim()
    assert (reclaimed.files, reclaimed.bytes) == (1, 2 * K)
    assert agent.grant(8 * K, trainer.owner) == granted[1], "the closest"
    assert file_of(agent, "writing", granted[1]).read_bytes() == bytes(64) + b"\xff" * (8 * K - 64)
    assert agent.grant(20 * K, trainer.owner) == granted[0]
    for slot_id, size in zip(granted, (20, 8), strict=True):
        assert trainer.ask(f"attach({slot_id}, {size * K}, 3)") is True
        trainer.ask(f"abandon({slot_id})")


def test_sealed_shard_of_a_dead_trainer(agent, trainer, memory_dir):
    with trainer_of(memory_dir) as first:
        slot_id = agent.grant(K, first.owner)
        first.ask(f"attach({slot_id}, {K}, 4)")
        first.ask(f"seal({slot_id}, 1)")
    assert agent.reclaim().files == 0
    (sealed,) = agent.scan()
    assert agent.release(sealed)
    assert agent.grant(K, trainer.owner) == slot_id


def test_grant_of_a_trainer_that_is_dead_already_is_reclaimed(agent, memory_dir):
    with trainer_of(memory_dir) as first:
        pass
    slot_id = agent.grant(K, first.owner)
    assert agent.reclaim().files == 1
    assert writers(agent, "pool") == {slot_id: first.owner}


def test_replica_slots_become_grants_and_back(agent, trainer):
    replica = agent.claim_file(3 * K)
    replica.write_at(0, b"\xee" * (3 * K))
    agent.release(agent.seal(replica, shard(1)))
    assert agent.grant(K, trainer.owner) == replica.slot_id
    assert trainer.ask(f"attach({replica.slot_id}, {K}, 1)") is True
    trainer.ask(f"seal({replica.slot_id}, 2)")
    (sealed,) = agent.scan()
    assert agent.release(sealed, of_others=True)
    again = agent.claim_file(K)
    assert again.slot_id != replica.slot_id, "the trainer lives, and has it mapped"
    agent.abandon(again)


def test_budget_gives_up_free_slots_first(memory_dir, trainer):
    with SlotStore.open(memory_dir, "job", budget_bytes=10 * K) as agent:
        kept = agent.claim_file(2 * K)
        granted = [agent.grant(2 * K, trainer.owner) for _ in range(3)]
        for slot_id in granted:
            trainer.ask(f"attach({slot_id}, {2 * K}, 6)")
            trainer.ask(f"abandon({slot_id})")
        agent.abandon(kept)
        large = agent.grant(10 * K, trainer.owner)
        assert agent.status().total_bytes == 10 * K
        assert trainer.ask("touch()") == [6, 6, 6]
        with pytest.raises(NoSpaceError, match="budget"):
            agent.grant(K, trainer.owner)
        assert list(writers(agent, "writing")) == [large]
        assert agent.withdraw(large, trainer.owner)
        assert not agent.withdraw(large, trainer.owner)
        trainer.ask("store.forget_unlinked()")
        assert trainer.ask("mapped()") == []


def test_slots_of_other_live_trainers_are_not_given_up(memory_dir, trainer):
    with SlotStore.open(memory_dir, "job", budget_bytes=10 * K) as agent:
        agent.prepare_for(4 * K, 2, trainer.owner)
        with trainer_of(memory_dir) as other, pytest.raises(NoSpaceError):
            agent.grant(4 * K, other.owner)
        with pytest.raises(NoSpaceError):
            agent.claim_file(4 * K)
        assert agent.status().pool.files == 2
        assert agent.check() == []


def test_what_lies_ready_is_mapped_before_it_is_granted(agent, trainer):
    agent.prepare_for(2 * K, 2, trainer.owner)
    assert trainer.ask(f"store.map_free({3 * K})") == 0
    assert trainer.ask(f"store.map_free({2 * K})") == 2
    assert trainer.ask(f"store.map_free({2 * K})") == 0  # they are mapped already
    ready = trainer.ask("mapped()")
    assert len(ready) == 2
    slot_id = agent.grant(2 * K, trainer.owner)
    assert slot_id in ready
    assert trainer.ask(f"attach({slot_id}, {2 * K}, 7)")
    assert trainer.ask("mapped()") == ready


def test_prepare_for(agent, trainer):
    agent.prepare_for(2 * K, 3, trainer.owner)
    ready = writers(agent, "pool")
    assert set(ready.values()) == {trainer.owner}
    assert len(ready) == 3
    agent.prepare_for(2 * K, 2, trainer.owner)
    assert writers(agent, "pool") == ready
    assert {agent.grant(2 * K, trainer.owner) for _ in range(3)} == set(ready)


@pytest.mark.parametrize("size", [0, -K, K + 1])
def test_sizes_that_are_refused(agent, size):
    with pytest.raises(ConfigError, match="multiple of 65536"):
        agent.grant(size, Owner.current())


def test_free_slot_with_a_hole_is_not_granted(agent, trainer):
    slot_id = agent.grant(2 * K, trainer.owner)
    assert agent.withdraw(slot_id, trainer.owner)
    path = file_of(agent, "pool", slot_id)
    os.truncate(path, 0)
    os.truncate(path, 2 * K)
    other = agent.grant(2 * K, trainer.owner)
    assert other != slot_id
    assert file_of(agent, "writing", other).stat().st_blocks * 512 == 2 * K


# --- attaching


def test_attach_what_was_not_granted(agent):
    with pytest.raises(NotFoundError, match=r"expected slot 0000000000000005 as it was granted, found none"):
        agent.attach(5, K)


@pytest.mark.parametrize("damage", ["shorter", "longer", "hole"])
def test_attach_what_is_not_as_it_was_granted(agent, trainer, damage):
    slot_id = agent.grant(2 * K, trainer.owner)
    path = file_of(agent, "writing", slot_id)
    if damage == "hole":
        os.truncate(path, 0)
        os.truncate(path, 2 * K)
    else:
        os.truncate(path, K if damage == "shorter" else 3 * K)
    assert trainer.ask(f"attach({slot_id}, {2 * K})") == "UnsafeDirectoryError"
    assert writers(agent, "writing") == {}
    assert trainer.ask("mapped()") == []


def test_attach_of_a_link_is_refused(agent, memory_dir):
    slot_id = agent.grant(K, Owner.current())
    path = file_of(agent, "writing", slot_id)
    path.rename(memory_dir / "away")
    path.symlink_to(memory_dir / "away")
    with pytest.raises(UnsafeDirectoryError):
        agent.attach(slot_id, K)
    next((agent.path / "pool").iterdir()).unlink()


def test_attach_twice(agent):
    slot_id = agent.grant(K, Owner.current())
    slot = agent.attach(slot_id, K)
    with pytest.raises(ConflictError, match="being written already"):
        agent.attach(slot_id, K)
    slot.view[:5] = b"still"
    agent.abandon(slot)


def test_slot_that_was_taken_back_is_not_sealed(agent, trainer):
    slot_id = agent.grant(K, trainer.owner)
    trainer.ask(f"attach({slot_id}, {K})")
    assert agent.withdraw(slot_id, trainer.owner)
    assert trainer.ask(f"seal({slot_id}, 1)") == "UnsafeDirectoryError"
    assert agent.scan() == ()


# --- claim_file


def test_file_slot(agent):
    slot = agent.claim_file(3 * K + 5)
    found = file_of(agent, "writing", slot.slot_id).stat()
    assert found.st_size == 3 * K + 5 <= found.st_blocks * 512
    slot.write_at(3 * K, b"tail!")
    slot.write_at(0, bytearray(b"head"))
    slot.write_at(3 * K + 5, b"")
    for offset, data in ((-1, b"x"), (3 * K + 5, b"x"), (3 * K, b"longer"), (1 << 62, b"x")):
        with pytest.raises(ConfigError, match="expected bytes within 0 to 196613"):
            slot.write_at(offset, data)
    sealed = agent.seal(slot, shard(1), tag=4)
    with pytest.raises(ClosedError):
        slot.write_at(0, b"late")
    fd = agent.open_shard(sealed)
    content = os.pread(fd, 4 * K, 0)
    os.close(fd)
    assert (content[:4], content[3 * K :]) == (b"head", b"tail!")
    with pytest.raises(ConflictError, match="sealed or abandoned before"):
        agent.abandon(slot)
    assert not is_mapped_here(agent)
    assert agent.release(sealed)
    again = agent.claim_file(3 * K + 5)
    assert again.slot_id == slot.slot_id
    again.close()
    again.close()
    with pytest.raises(ClosedError, match="closed"):
        again.write_at(0, b"x")
    agent.abandon(again)


def test_file_slot_erases_the_preamble(agent):
    first = agent.claim_file(K)
    first.write_at(0, b"P" * K)
    agent.abandon(first)
    again = agent.claim_file(K)
    assert again.slot_id == first.slot_id
    assert file_of(agent, "writing", again.slot_id).read_bytes() == bytes(64) + b"P" * (K - 64)
    agent.abandon(again)


def test_mapped_slot_becomes_a_file_slot_only_when_nobody_has_a_buffer(agent):
    slot = agent.claim(2 * K)
    part = slot.view[K:]
    agent.abandon(slot)
    other = agent.claim_file(2 * K)
    assert other.slot_id != slot.slot_id
    part.release()
    agent.abandon(other)
    both = [agent.claim_file(2 * K) for _ in range(2)]
    assert slot.slot_id in {one.slot_id for one in both}
    assert not is_mapped_here(agent)
    for one in both:
        agent.abandon(one)


@pytest.mark.parametrize("offset", [0, 1, 4095, 4096, 5000, 3 * 4096 - 5])
@pytest.mark.parametrize("length", [0, 1, 5, 4096, 4097, 4 * 4096 + 5])
def test_writing_through_a_window_of_pages(memory_dir, offset, length):
    """As on a filesystem without write(): the same bytes arrive, and none beside them."""
    path = memory_dir / "file"
    path.write_bytes(b"." * (8 * 4096))
    fd = os.open(path, os.O_RDWR)
    slot = SlotFile(1, 8 * 4096, fd, page_bytes=4096)
    data = os.urandom(length)
    slot.write_at(offset, data)
    slot.close()
    assert path.read_bytes() == b"." * offset + data + b"." * (8 * 4096 - offset - length)


@pytest.fixture
def hugetlbfs(tmp_path):
    """24 MiB of hugetlbfs, where the machine has set huge pages aside."""
    free = int(Path("/proc/meminfo").read_text().partition("HugePages_Free:")[2].split()[0])
    if free < 12:
        pytest.skip("needs 12 free huge pages: sysctl vm.nr_hugepages=16")
    subprocess.run(["mount", "-t", "hugetlbfs", "-o", "size=24M", "none", tmp_path], check=True)
    yield tmp_path
    subprocess.run(["umount", "-l", tmp_path], check=True)


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: mounts")
def test_what_an_agent_does_on_hugetlbfs(hugetlbfs):
    with SlotStore.open(hugetlbfs / "m", "job") as store:
        with pytest.raises(ConfigError, match="multiple of 2097152"):
            store.claim_file(3 << 20)
        slot = store.claim_file(4 << 20)
        slot.write_at((2 << 20) - 3, b"across")
        sealed = store.seal(slot, shard(1))
        fd = store.open_shard(sealed)
        assert os.pread(fd, 6, (2 << 20) - 3) == b"across"
        os.close(fd)
        assert store.release(sealed)
        slot_id = store.grant(4 << 20, Owner.current())
        store.abandon(store.attach(slot_id, 4 << 20))
        store.write_session(b"session")
        store.write_record(Record(Generation(1, 2, 3, 4), 1, 0, 5.0))
        store.write_secret("key.pem", b"key")
        assert (store.read_session(), len(store.read_records()), store.read_secret("key.pem")) == (
            b"session",
            1,
            b"key",
        )
        assert store.check() == []


@pytest.mark.parametrize("size", [0, -1])
def test_file_slots_that_are_refused(agent, size):
    with pytest.raises(ConfigError, match="positive"):
        agent.claim_file(size)


def test_closing_the_store_closes_its_file_slots(memory_dir):
    store = SlotStore.open(memory_dir, "job")
    before = len(os.listdir("/proc/self/fd"))
    slots = [store.claim_file(K) for _ in range(3)]
    assert len(os.listdir("/proc/self/fd")) == before + 3
    store.close()
    for slot in slots:
        with pytest.raises(ClosedError):
            slot.write_at(0, b"x")
    assert not list((memory_dir / "job" / "writing").iterdir())
    assert len(list((memory_dir / "job" / "pool").iterdir())) == 3


def test_a_fork_only_closes_its_own_descriptors(memory_dir, agent):
    slot = agent.claim_file(K)
    pid = os.fork()
    if pid == 0:
        agent.close()
        os._exit(0 if slot._fd == -1 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    slot.write_at(0, b"the parent goes on")
    agent.abandon(slot)


# --- killed

# An agent's life; its trainer is the process that asked for it, which lives on.
AGENT = """
import sys
from flashckpt.store.owner import Owner
from flashckpt.store.slots import SlotStore
from flashckpt.types import Generation, Record, ShardId
def say(*words):
    print(*words, flush=True)
store = SlotStore.open(sys.argv[1], "job")
to = eval(sys.argv[2])
for round in (1, 2):
    store.write_session(b"session %d" % round)
    say("session", round)
    for size in (3, 5):
        say("granted", store.grant(size << 16, to), size << 16)
    store.write_record(Record(Generation(1, 2, round, round), 2, 1, 5.0))
    say("record", round)
own = store.grant(4 << 16, Owner.current())
slot = store.attach(own, 4 << 16)
store.abandon(store.attach(store.grant(4 << 16, Owner.current()), 4 << 16))
store.abandon(slot)
say("end")
"""
FAILPOINTS = [
    name
    for module in (grants, session, records)
    for name in re.findall(r"`([a-z_]+)`", module.__doc__.partition("Failpoints")[2])
]


def run_agent(memory_dir, **environment):
    log = memory_dir / "log"
    result = subprocess.run(
        [sys.executable, "-c", AGENT, str(memory_dir), repr(Owner.current())],
        cwd=ROOT,
        env={**os.environ, "FLASHCKPT_TESTING": "1", "FLASHCKPT_FAILPOINTS_LOG": str(log), **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    fired = [line.split()[0] for line in log.read_text().splitlines()]
    log.unlink()
    return result, fired


def test_the_agents_life_passes_every_failpoint(memory_dir):
    assert set(FAILPOINTS) == {
        *("before_grant", "after_grant", "after_attach", "before_session", "after_session"),
        *("before_record", "mid_record", "after_record"),
    }
    result, fired = run_agent(memory_dir, FLASHCKPT_FAILPOINTS=";".join(f"{name}=sleep(0)" for name in FAILPOINTS))
    assert result.returncode == 0, result.stderr
    assert set(fired) == set(FAILPOINTS)


@pytest.mark.parametrize(("name", "occurrence"), [(name, n) for name in FAILPOINTS for n in (1, 2)])
def test_agent_is_killed(memory_dir, name, occurrence):
    result, fired = run_agent(memory_dir, FLASHCKPT_FAILPOINTS=f"{name}=kill@{occurrence}")
    assert (result.returncode, fired) == (-signal.SIGKILL, [name]), result.stderr
    said = [line.split() for line in result.stdout.splitlines()]
    promised = {word: [int(words[1]) for words in said if words[0] == word] for word in ("session", "record")}
    with SlotStore.open(memory_dir, "job") as next_agent:
        me = Owner.current()
        next_agent.reclaim()
        assert set(writers(next_agent, "writing").values()) <= {me}
        # What was promised is there; beyond it at most what the dead one was about to say.
        granted = {int(words[1]): int(words[2]) for words in said if words[0] == "granted"}
        in_writing = writers(next_agent, "writing")
        assert set(granted) <= set(in_writing)
        assert len(set(in_writing) - set(granted)) <= 1
        for slot_id, size in granted.items():
            next_agent.abandon(next_agent.attach(slot_id, size))
        for slot_id in set(in_writing) - set(granted):  # the agent died before it could answer
            assert next_agent.withdraw(slot_id, me)
        last = max(promised["session"], default=0)
        possible = [b"session %d" % last if last else None]
        if name.endswith("session"):
            possible.append(b"session %d" % (last + 1))
        assert next_agent.read_session() in possible
        steps = [record.generation.step for record in next_agent.read_records()]
        assert set(promised["record"]) <= set(steps)
        assert set(steps) <= {1, 2}
        assert next_agent.check() == []
        for _ in range(next_agent.status().pool.files):
            slot = next_agent.claim(next_agent.granule_bytes)
            assert not any(slot.view[:64])
        assert next_agent.status().pool.files == 0


@pytest.mark.parametrize("name", FAILPOINTS)
def test_agent_gets_an_error(memory_dir, name):
    """The process lives on, and has nothing lying about."""
    result, fired = run_agent(memory_dir, FLASHCKPT_FAILPOINTS=f"{name}=error(ENOSPC)*1")
    assert result.returncode == 1
    assert fired == [name]
    assert "Error" in result.stderr
    with SlotStore.open(memory_dir, "job") as store:
        store.reclaim()
        assert all(record == Record(record.generation, 2, 1, 5.0) for record in store.read_records())
        for slot_id, writer in writers(store, "writing").items():
            assert store.withdraw(slot_id, writer)
        assert store.check() == []


def test_error_after_a_grant_takes_it_back(memory_dir):
    result, _ = run_agent(memory_dir, FLASHCKPT_FAILPOINTS="after_grant=error(EIO)*1")
    assert "granted" not in result.stdout
    with SlotStore.open(memory_dir, "job") as store:
        assert writers(store, "writing") == {}
        assert set(writers(store, "pool").values()) == {Owner.current()}
