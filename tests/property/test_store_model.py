"""SlotStore against a plain dictionary: random lives of many slots, crashes included."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from flashckpt.errors import ConflictError, NoSpaceError
from flashckpt.store.names import parse_sealed_name, parse_slot_name
from flashckpt.store.owner import Owner
from flashckpt.store.slots import SlotStore
from flashckpt.types import Generation, ShardId

ROOT = Path(__file__).parents[2]
K = 64 << 10
BUDGET = 24
ME = "me"
DEAD = "dead"


@cache
def dead_owner() -> Owner:
    """A process that really was, and has exited."""
    code = "from flashckpt.store.owner import Owner\nprint(repr(Owner.current()))"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return eval(result.stdout)


@dataclass
class Modelled:
    state: str
    writer: str
    size: int  # in granules
    fill: int
    shard: ShardId | None = None


# What is drawn must not depend on what the store did: ids are random, and which free slot it takes is its own affair.
WHICH = st.integers(0, 31)


def pick(slot_ids, which):
    return slot_ids[which % len(slot_ids)] if slot_ids else None


class StoreMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.memory_dir = Path(tempfile.mkdtemp(prefix="flashckpt-test-", dir="/dev/shm"))
        self.model: dict[int, Modelled] = {}
        self.slots = {}
        self.fills = 0
        self.store = self.open()

    def open(self):
        return SlotStore.open(self.memory_dir, "job", budget_bytes=BUDGET * K, threads=1)

    def teardown(self):
        self.store.close()
        shutil.rmtree(self.memory_dir)

    def having(self, state):
        return sorted(slot_id for slot_id, one in self.model.items() if one.state == state)

    def total(self):
        return sum(one.size for one in self.model.values())

    @rule(size=st.integers(1, 10))
    def claim(self, size):
        pool = self.having("pool")
        others = self.total() - sum(self.model[slot_id].size for slot_id in pool)
        try:
            slot = self.store.claim(size * K)
        except NoSpaceError:
            assert others + size > BUDGET, "refused although giving up free slots would have made room"
            # What was given up on the way is gone; one free slot at most is left.
            for slot_id in set(pool) - self.on_disk("pool"):
                del self.model[slot_id]
            return
        assert others + size <= BUDGET
        taken = self.model.pop(slot.slot_id, None)
        exact = [
            i for i in pool if self.model_or(taken, slot, i).writer == ME and self.model_or(taken, slot, i).size == size
        ]
        assert slot.slot_id in exact or not exact
        if pool:
            assert taken is not None, "a new file although a slot was free"
            assert taken.state == "pool"
        for slot_id in set(pool) - self.on_disk("pool") - {slot.slot_id}:
            assert self.model.pop(slot_id).state == "pool"
        self.fills = self.fills % 255 + 1
        assert not any(slot.view[:64])
        slot.view[:] = bytes([self.fills]) * (size * K)
        self.slots[slot.slot_id] = slot
        self.model[slot.slot_id] = Modelled("writing", ME, size, self.fills)

    def model_or(self, taken, slot, slot_id):
        return taken if slot_id == slot.slot_id else self.model[slot_id]

    @rule(which=WHICH, step=st.integers(0, 5), rank=st.integers(0, 1), tag=st.integers(0, 3))
    def seal(self, which, step, rank, tag):
        slot_id = pick(sorted(self.slots), which)
        if slot_id is None:
            return
        shard = ShardId(Generation(1, 2, step, 1), rank, 2)
        exists = any(one.shard == shard and one.state == "sealed" for one in self.model.values())
        try:
            sealed = self.store.seal(self.slots[slot_id], shard, tag)
        except ConflictError:
            assert exists
            return
        assert not exists
        assert sealed in self.store.scan()
        del self.slots[slot_id]
        self.model[slot_id].state = "sealed"
        self.model[slot_id].shard = shard

    @rule(which=WHICH)
    def abandon(self, which):
        slot_id = pick(sorted(self.slots), which)
        if slot_id is None:
            return
        self.store.abandon(self.slots.pop(slot_id))
        self.model[slot_id].state = "pool"

    @rule(which=WHICH)
    def release(self, which):
        slot_id = pick(self.having("sealed"), which)
        if slot_id is None:
            return
        (sealed,) = (one for one in self.store.scan() if one.slot_id == slot_id)
        assert self.store.release(sealed)
        assert not self.store.release(sealed)
        self.model[slot_id].state = "pool"

    @rule(which=WHICH)
    def quarantine(self, which):
        slot_id = pick(self.having("sealed"), which)
        if slot_id is None:
            return
        (sealed,) = (one for one in self.store.scan() if one.slot_id == slot_id)
        self.store.quarantine(sealed, "test")
        self.model[slot_id].state = "quarantine"
        for gone in set(self.having("quarantine")) - self.on_disk("quarantine"):
            assert gone != slot_id
            assert len(self.having("quarantine")) > 2
            del self.model[gone]
        assert len(self.having("quarantine")) <= 2

    @rule()
    def reclaim(self):
        left = [self.model[slot_id] for slot_id in self.having("writing") if self.model[slot_id].writer == DEAD]
        reclaimed = self.store.reclaim()
        assert (reclaimed.files, reclaimed.bytes) == (len(left), sum(one.size for one in left) * K)
        assert reclaimed.dropped_files == 0
        for one in left:
            one.state = "pool"

    @rule()
    def crash(self):
        """The process dies where it stands and another one takes over: our name in each file is a dead one's."""
        me, dead = Owner.current(), dead_owner()
        old = f"w{me.pid}-{me.start_ticks}-"
        new = f"w{dead.pid}-{dead.start_ticks}-"
        for path in self.store.path.glob("*/*"):
            path.rename(path.with_name(path.name.replace(old, new)))
        for one in self.model.values():
            one.writer = DEAD
        self.slots.clear()
        self.store.close()
        self.store = self.open()

    @rule()
    def reopen(self):
        self.store.close()
        for slot_id in self.slots:
            self.model[slot_id].state = "pool"
        self.slots.clear()
        self.store = self.open()

    def on_disk(self, state):
        parse = parse_slot_name if state in ("pool", "writing") else parse_sealed_name
        return {parse(path.name).slot_id for path in (self.store.path / state).iterdir()}

    @invariant()
    def files_are_as_modelled(self):
        for state in ("pool", "writing", "sealed", "quarantine"):
            assert self.on_disk(state) == set(self.having(state))
        for path in self.store.path.glob("*/*"):
            parsed = parse_slot_name(path.name) or parse_sealed_name(path.name)
            one = self.model[parsed.slot_id]
            assert path.stat().st_size == one.size * K
            assert (parsed.writer == Owner.current()) == (one.writer == ME)

    @invariant()
    def shards_are_whole(self):
        found = {one.slot_id: one for one in self.store.scan()}
        assert set(found) == set(self.having("sealed"))
        for slot_id, sealed in found.items():
            one = self.model[slot_id]
            assert sealed.shard == one.shard
            fd = self.store.open_shard(sealed)
            try:
                assert os.pread(fd, one.size * K + 1, 0) == bytes([one.fill]) * (one.size * K)
            finally:
                os.close(fd)

    @invariant()
    def check_finds_only_what_the_dead_left(self):
        left = [one for one in self.model.values() if one.state == "writing" and one.writer == DEAD]
        problems = self.store.check()
        assert len(problems) == len(left)
        assert all("its writer is dead" in problem for problem in problems)
        assert self.store.status().total_bytes == self.total() * K <= BUDGET * K


TestStore = pytest.mark.slow(StoreMachine.TestCase)
TestStore.settings = settings(max_examples=50, stateful_step_count=60, deadline=None)
