"""One agent and two trainers against a plain dictionary: grants, seals, releases and deaths in any order."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from flashckpt.errors import ConflictError, NoSpaceError
from flashckpt.store.names import parse_sealed_name, parse_slot_name
from flashckpt.store.owner import Owner
from flashckpt.store.slots import SlotStore
from flashckpt.types import Generation, ShardId

K = 64 << 10
BUDGET = 30
FORK = multiprocessing.get_context("fork")


def serve(memory_dir, pipe):
    """A trainer's process: does what it is told, and answers with a value or the name of an error."""
    store = SlotStore.open(memory_dir, "job", threads=1)
    slots = {}

    def attach(slot_id, size, fill):
        slot = slots[slot_id] = store.attach(slot_id, size)
        clean = not any(slot.view[:64])
        slot.view[:] = bytes([fill]) * size
        return clean

    def seal(slot_id, shard):
        store.seal(slots[slot_id], shard)
        del slots[slot_id]

    def abandon(slot_id):
        store.abandon(slots.pop(slot_id))

    def touch():
        # The last byte of everything mapped, in use or not: cut short under it, this would be a SIGBUS.
        for mapping in list(store._supply._mappings.values()):
            with mapping.view() as view:
                view[-1]
        return sorted(store._supply._mappings)

    def owner():
        return Owner.current()

    commands = {"attach": attach, "seal": seal, "abandon": abandon, "touch": touch, "owner": owner}
    while True:
        name, *arguments = pipe.recv()
        try:
            pipe.send(commands[name](*arguments))
        except Exception as error:
            pipe.send(error)


class Trainer:
    def __init__(self, memory_dir):
        self.pipe, theirs = FORK.Pipe()
        self.process = FORK.Process(target=serve, args=(memory_dir, theirs), daemon=True)
        self.process.start()
        theirs.close()
        self.owner = self.ask("owner")

    def ask(self, *command):
        self.pipe.send(command)
        answer = self.pipe.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def kill(self):
        self.process.kill()
        self.process.join()
        self.pipe.close()


@dataclass
class Modelled:
    state: str  # granted, writing (attached), sealed, pool
    writer: Owner
    size: int  # in granules
    fill: int | None = None
    shard: ShardId | None = None


# What is drawn must not depend on what the store did: ids are random, and which free slot it takes is its own affair.
WHICH = st.integers(0, 31)


def pick(slot_ids, which):
    return slot_ids[which % len(slot_ids)] if slot_ids else None


class GrantsMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.memory_dir = Path(tempfile.mkdtemp(prefix="flashckpt-test-", dir="/dev/shm"))
        self.agent = SlotStore.open(self.memory_dir, "job", budget_bytes=BUDGET * K, threads=1)
        self.me = Owner.current()
        self.trainers = [Trainer(self.memory_dir) for _ in range(2)]
        self.model: dict[int, Modelled] = {}
        self.files = {}  # replicas that the agent is writing
        self.fills = 0

    def teardown(self):
        for trainer in self.trainers:
            trainer.kill()
        self.agent.close()
        shutil.rmtree(self.memory_dir)

    def having(self, state, writer=None):
        return sorted(
            slot_id
            for slot_id, one in self.model.items()
            if one.state == state and (writer is None or one.writer == writer)
        )

    def living(self, state):
        """Of writers that can go on with it."""
        return [slot_id for slot_id in self.having(state) if self.model[slot_id].writer in self.alive()]

    def alive(self):
        return [self.me, *(trainer.owner for trainer in self.trainers)]

    def pool(self):
        return {parse_slot_name(path.name).slot_id for path in (self.agent.path / "pool").iterdir()}

    def next_fill(self):
        self.fills = self.fills % 255 + 1
        return self.fills

    def forget_what_was_given_up(self, may_go):
        for slot_id in set(self.having("pool")) - self.pool():
            assert self.model[slot_id].writer in may_go or self.model[slot_id].writer not in self.alive()
            del self.model[slot_id]

    def free_for(self, owner):
        """Granules that are gone or can be given up for a new slot of `owner`."""
        kept = sum(
            one.size
            for one in self.model.values()
            if one.state != "pool" or (one.writer in self.alive() and one.writer not in (owner, self.me))
        )
        return BUDGET - kept

    @rule(who=st.integers(0, 1), size=st.integers(1, 9))
    def grant(self, who, size):
        owner = self.trainers[who].owner
        before = {slot_id: self.model[slot_id] for slot_id in self.having("pool")}
        exact = [slot_id for slot_id, one in before.items() if one.writer == owner and one.size == size]
        try:
            slot_id = self.agent.grant(size * K, owner)
        except NoSpaceError:
            assert not exact
            assert self.free_for(owner) < size
            self.forget_what_was_given_up([owner, self.me])
            return
        if exact:
            assert slot_id in exact, "a rename would have done"
        elif slot_id in before:
            assert before[slot_id].writer == self.me or before[slot_id].writer not in self.alive()
        self.model[slot_id] = Modelled("granted", owner, size)
        self.forget_what_was_given_up([owner, self.me])

    @rule(which=WHICH)
    def attach(self, which):
        slot_id = pick(self.living("granted"), which)
        if slot_id is None:
            return
        one = self.model[slot_id]
        one.fill = self.next_fill()
        (trainer,) = (trainer for trainer in self.trainers if trainer.owner == one.writer)
        assert trainer.ask("attach", slot_id, one.size * K, one.fill), "its preamble was not erased"
        one.state = "writing"

    def written(self, which):
        slot_id = pick(self.living("writing"), which)
        writer = None if slot_id is None else self.model[slot_id].writer
        return slot_id, next((trainer for trainer in self.trainers if trainer.owner == writer), None)

    @rule(which=WHICH, step=st.integers(0, 5), rank=st.integers(0, 1))
    def seal(self, which, step, rank):
        slot_id, trainer = self.written(which)
        if slot_id is None:
            return
        shard = ShardId(Generation(1, 2, step, 1), rank, 2)
        exists = any(one.shard == shard and one.state == "sealed" for one in self.model.values())
        try:
            if trainer is None:
                self.agent.seal(self.files[slot_id], shard)
                del self.files[slot_id]
            else:
                trainer.ask("seal", slot_id, shard)
        except ConflictError:
            assert exists
            return
        assert not exists
        self.model[slot_id].state = "sealed"
        self.model[slot_id].shard = shard

    @rule(which=WHICH)
    def abandon(self, which):
        slot_id, trainer = self.written(which)
        if slot_id is None:
            return
        if trainer is None:
            self.agent.abandon(self.files.pop(slot_id))
        else:
            trainer.ask("abandon", slot_id)
        self.model[slot_id].state = "pool"

    @rule(size=st.integers(1, 9))
    def claim_file(self, size):
        before = {slot_id: self.model[slot_id] for slot_id in self.having("pool")}
        try:
            slot = self.agent.claim_file(size * K)
        except NoSpaceError:
            assert self.free_for(self.me) < size
            self.forget_what_was_given_up([self.me])
            return
        if slot.slot_id in before:
            assert before[slot.slot_id].writer == self.me or before[slot.slot_id].writer not in self.alive()
        fill = self.next_fill()
        slot.write_at(0, bytes([fill]) * (size * K))
        self.files[slot.slot_id] = slot
        self.model[slot.slot_id] = Modelled("writing", self.me, size, fill)
        self.forget_what_was_given_up([self.me])

    @rule(which=WHICH, of_others=st.booleans())
    def release(self, which, of_others):
        slot_id = pick(self.having("sealed"), which)
        if slot_id is None:
            return
        one = self.model[slot_id]
        (sealed,) = (found for found in self.agent.scan() if found.slot_id == slot_id)
        live_trainers = [trainer.owner for trainer in self.trainers]
        assert self.agent.release(sealed, of_others=of_others) == (of_others or one.writer not in live_trainers)
        if of_others or one.writer not in live_trainers:
            one.state = "pool"

    @rule(which=WHICH)
    def withdraw(self, which):
        slot_id = pick(self.having("granted"), which)
        if slot_id is None:
            return
        assert self.agent.withdraw(slot_id, self.model[slot_id].writer)
        self.model[slot_id].state = "pool"

    @rule(who=st.integers(0, 1))
    def die(self, who):
        self.trainers[who].kill()
        self.trainers[who] = Trainer(self.memory_dir)

    @rule()
    def reclaim(self):
        left = [
            one for one in self.model.values() if one.state in ("granted", "writing") and one.writer not in self.alive()
        ]
        reclaimed = self.agent.reclaim()
        assert (reclaimed.files, reclaimed.bytes) == (len(left), sum(one.size for one in left) * K)
        for one in left:
            one.state = "pool"

    @rule()
    def restart_of_the_agents_store(self):
        """What it knows is only what lies there; its own half-written replicas return to the pool."""
        self.agent.close()
        for slot_id in self.files:
            self.model[slot_id].state = "pool"
        self.files = {}
        self.agent = SlotStore.open(self.memory_dir, "job", budget_bytes=BUDGET * K, threads=1)

    @invariant()
    def files_are_as_modelled(self):
        found = {}
        for folder in ("pool", "writing", "sealed"):
            for path in (self.agent.path / folder).iterdir():
                parsed = parse_slot_name(path.name) or parse_sealed_name(path.name)
                found[parsed.slot_id] = (folder, parsed.writer, path.stat().st_size // K)
                if folder == "sealed":
                    one = self.model[parsed.slot_id]
                    assert parsed.shard == one.shard
                    assert path.read_bytes() == bytes([one.fill]) * (one.size * K)
        expected = {
            slot_id: ("writing" if one.state == "granted" else one.state, one.writer, one.size)
            for slot_id, one in self.model.items()
        }
        assert found == expected
        assert sum(one.size for one in self.model.values()) <= BUDGET

    @invariant()
    def nobody_is_cut_short(self):
        for trainer in self.trainers:
            mapped = trainer.ask("touch")
            attached = set(self.having("writing", trainer.owner)) | set(self.having("sealed", trainer.owner))
            assert attached <= set(mapped)

    @invariant()
    def the_agent_maps_nothing(self):
        assert str(self.memory_dir) not in Path("/proc/self/maps").read_text()


# Not shrunk: every step asks real processes, and a failure is a list of a few dozen steps as it is.
GrantsMachine.TestCase.settings = settings(
    max_examples=25, stateful_step_count=60, phases=[Phase.explicit, Phase.generate]
)
TestGrants = GrantsMachine.TestCase


def test_a_trainer_is_another_process():
    path = Path(tempfile.mkdtemp(prefix="flashckpt-test-", dir="/dev/shm"))
    trainer = Trainer(path)
    assert trainer.owner.pid == trainer.process.pid != os.getpid()
    trainer.kill()
    shutil.rmtree(path)
