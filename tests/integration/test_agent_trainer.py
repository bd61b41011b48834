"""A trainer and its node's agent: real processes, one node."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import threading
import time

import pytest
import torch
from click.testing import CliRunner

import flashckpt
from flashckpt.agent.process import Options
from flashckpt.agent.start import ensure_agent, look, stop_agent
from flashckpt.checkpointer import internals_of
from flashckpt.cli.entry import group
from tests.conftest import count_objects

JOB = "run1"
WAIT = 30.0


@pytest.fixture
def make(memory_dir):
    """Checkpointers with an agent; both are gone when the test ends."""
    opened = []

    def make(**config):
        settings = {"job": JOB, "memory_dir": memory_dir, "node_id": "a", "agent": "auto", "agent_linger": 60.0}
        checkpointer = flashckpt.Checkpointer(flashckpt.CheckpointConfig(**{**settings, **config}))
        opened.append(checkpointer)
        return checkpointer

    yield make
    for checkpointer in opened:
        checkpointer.close()
    with contextlib.suppress(flashckpt.FlashError):
        stop_agent(memory_dir, JOB, 10.0, kill=True)


def status(memory_dir):
    seen = look(memory_dir, JOB)
    return seen.status if seen is not None else None


def wait_until(condition, what):
    deadline = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def state(step):
    return {"weights": torch.full((1000,), float(step)), "step": step}


def test_saves_back_to_back_are_all_kept_in_turn(make, memory_dir):
    """News of a sealed shard must not be overtaken by the request for the next slot."""
    checkpointer = make()
    handles = [checkpointer.save(step, state(step)) for step in range(1, 41)]
    assert {handle.outcome for handle in handles} == {"ok"}
    wait_until(
        lambda: [g["step"] for g in status(memory_dir)["generations"] if g["shards"]] == [40],
        "only the newest generation stays",
    )
    live = state(0)
    assert checkpointer.load(live).step == 40
    assert torch.equal(live["weights"], state(40)["weights"])


def test_keep_memory_keeps_the_newest_ones_and_an_older_one_can_be_loaded(make, memory_dir):
    checkpointer = make(keep_memory=3)
    for step in (10, 20, 30, 40, 50):
        assert checkpointer.save(step, state(step)).outcome == "ok"
    wait_until(
        lambda: [g["step"] for g in status(memory_dir)["generations"] if g["shards"]] == [50, 40, 30],
        "the newest three stay",
    )
    live = state(0)
    assert make(keep_memory=3).load(live, step=30).step == 30
    assert torch.equal(live["weights"], state(30)["weights"])
    # What lay above it was left behind by that load.
    wait_until(
        lambda: [g["step"] for g in status(memory_dir)["generations"] if g["shards"]] == [30], "the others are dead"
    )


def test_a_load_takes_the_agent_over_before_it_looks(make):
    """Else the older launch could commit a newer step meanwhile, and free what is being read."""
    old, new = make(), make()
    old.save(1, state(1))
    taken_over = []
    recover = internals_of(new).slots.put_line

    def late(line, base):
        # The load has read step 1 by now; a save of the older launch must change nothing any more.
        handle = old.save(2, state(2))
        taken_over.append((handle.outcome, handle.reason))
        return recover(line, base)

    internals_of(new).slots.put_line = late
    live = state(0)
    assert new.load(live).step == 1
    assert taken_over[0][0] == "failed"
    assert "FC-JOB-001" in taken_over[0][1]
    assert make().load(live).step == 1


def test_the_doctor_looks_at_a_running_node(make, memory_dir, tmp_path):
    checkpointer = make(persist_dir=str(tmp_path), persist_on_exit=False)
    checkpointer.save(1, state(1))

    def doctor():
        arguments = ["doctor", "--job", JOB, "--memory-dir", str(memory_dir), "--size", "64k", "--json"]
        found = CliRunner().invoke(group, arguments, catch_exceptions=False)
        return {one["check"]: one for one in json.loads(found.stdout)["findings"]}

    found = doctor()
    assert (found["agent.runs"]["state"], found["agent.version"]["state"]) == ("ok", "ok")
    assert str(status(memory_dir)["pid"]) in found["agent.runs"]["found"]
    assert found["persist.directory"]["found"].startswith(str(tmp_path))  # the agent was told
    assert "of it are allocated" in found["memory.room"]["found"]
    pid = status(memory_dir)["pid"]
    os.kill(pid, signal.SIGSTOP)
    try:
        found = doctor()
        assert found["agent.runs"]["state"] == "fail"
        assert "does not answer" in found["agent.runs"]["found"]
    finally:
        os.kill(pid, signal.SIGCONT)


def test_two_checkpointers_of_one_process_do_not_get_each_others_slots(make, memory_dir):
    one, other = make(slots_per_rank=3), make(slots_per_rank=3)
    one.save(1, state(1))
    slot = internals_of(one).slots.acquire(_shard(one, 2), 1 << 16)
    try:
        other_slots = internals_of(other).slots
        other_slots.enter(internals_of(one).slots.launch)
        second = other_slots.acquire(_shard(one, 3), 1 << 16)
        assert second.slot_id != slot.slot_id
        internals_of(other).store.abandon(second)
    finally:
        internals_of(one).store.abandon(slot)


def _shard(checkpointer, step):
    launch = internals_of(checkpointer).slots.launch
    return flashckpt.types.ShardId(flashckpt.Generation(launch.epoch, launch.nonce, step, 1), 0, 1)


def test_a_killed_agent_is_replaced_and_nothing_is_lost(make, memory_dir):
    checkpointer = make()
    checkpointer.save(1, state(1))
    pid = status(memory_dir)["pid"]
    os.kill(pid, signal.SIGKILL)
    handle = checkpointer.save(2, state(2))
    assert handle.outcome == "ok"
    wait_until(lambda: (status(memory_dir) or {}).get("pid") not in (None, pid), "another agent")
    assert checkpointer.save(3, state(3)).outcome == "ok"
    live = state(0)
    assert make().load(live).step == 3


def test_an_agent_under_another_node_name_starts(make, memory_dir):
    """A pod's host name changes at each restart; its memory need not."""
    checkpointer = make()
    checkpointer.save(1, state(1))
    checkpointer.close()
    stop_agent(memory_dir, JOB, 10.0)
    ensure_agent(Options(job=JOB, memory_dir=memory_dir, node_id="b", linger=60.0))
    assert make(node_id="b").load(state(0)).step == 1


def test_a_fork_may_close_its_copy(make, memory_dir):
    checkpointer = make()
    checkpointer.save(1, state(1))
    pid = os.fork()
    if pid == 0:
        try:
            checkpointer.close()
            os._exit(0)
        finally:
            os._exit(1)
    wait_until(lambda: os.waitpid(pid, os.WNOHANG)[0] == pid, "the child ends")
    assert checkpointer.save(2, state(2)).outcome == "ok"
    assert len(status(memory_dir)["trainers"]) == 1


def test_leases_end_with_close(make, memory_dir):
    checkpointer = make()
    assert len(status(memory_dir)["trainers"]) == 1
    checkpointer.close()
    assert status(memory_dir)["trainers"] == []


def test_a_hung_agent_fails_a_save_within_its_deadline(make, memory_dir):
    checkpointer = make(save_timeout=2.0)
    checkpointer.save(1, state(1))
    pid = status(memory_dir)["pid"]
    os.kill(pid, signal.SIGSTOP)
    try:
        began = time.monotonic()
        handle = checkpointer.save(2, state(2))
        assert handle.outcome in ("failed", "skipped")
        assert "agent" in handle.reason
        assert time.monotonic() - began < 20.0
    finally:
        os.kill(pid, signal.SIGCONT)
    wait_until(lambda: checkpointer.save(3, state(3)).outcome == "ok", "saves work again")


def test_alone_nothing_is_replicated_and_that_is_said(make):
    checkpointer = make()
    handle = checkpointer.save(1, state(1))
    with pytest.raises(flashckpt.ConfigError, match="sealed at most"):
        handle.wait("replicated", timeout=1.0)


@contextlib.contextmanager
def no_descriptor_left():
    """As long as it lasts, whatever this process opens fails with EMFILE."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = [os.open(os.devnull, os.O_RDONLY)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 1, hard))
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        yield
    finally:
        for fd in taken:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_trainer_without_descriptors_brings_its_agent_back_when_it_has_some(make, memory_dir):
    checkpointer = make()
    assert checkpointer.save(1, state(1)).outcome == "ok"
    watcher = next(one for one in threading.enumerate() if one.name == "flashckpt-watch")
    pid = status(memory_dir)["pid"]
    os.kill(pid, signal.SIGKILL)
    with no_descriptor_left():
        time.sleep(1.0)
    wait_until(lambda: (found := status(memory_dir)) and found["trainers"], "another agent with our lease")
    assert watcher.is_alive()
    assert checkpointer.save(2, state(2)).outcome == "ok"
    began = time.monotonic()
    checkpointer.close()
    assert time.monotonic() - began < 10.0


def test_objects_of_a_trainer_do_not_grow_with_saves(make):
    checkpointer = make()
    for step in range(1, 30):
        checkpointer.save(step, state(step))
    before = count_objects()
    for step in range(30, 180):
        checkpointer.save(step, state(step))
    after = count_objects()
    assert {kind: more for kind, more in (after - before).items() if more > 50} == {}
