"""Flushes that are killed or fail anywhere, again and again: what `latest` names is whole after every one of them."""

from __future__ import annotations

import os
import random
import re
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import flashckpt
from flashckpt import failpoints, persist
from flashckpt.persist.catalog import damaged, list_steps
from flashckpt.persist.flush import flush
from flashckpt.persist.storage import open_storage
from flashckpt.protocol.flush_spec import FlushSpec
from flashckpt.types import PersistSettings

POINTS = ["before_flush", "mid_flush", "before_persist_rename", "after_persist_rename", "before_latest", "mid_delete"]
ACTIONS = ["kill", "error(ENOSPC)", "error(EDQUOT)", "error(EIO)"]

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def test_no_failpoint_is_forgotten():
    sources = Path(persist.__file__).parent.glob("*.py")
    named = {name for source in sources for name in re.findall(r'failpoint\("(\w+)"\)', source.read_text())}
    assert named == set(POINTS)


def content(step, attempt):
    return torch.full((2000,), float(step)) + torch.arange(2000) * attempt


def flush_in_child(spec, armed, log):
    """True where it said that it went well."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.environ.update(FLASHCKPT_TESTING="1", FLASHCKPT_FAILPOINTS=armed, FLASHCKPT_FAILPOINTS_LOG=str(log))
            failpoints.arm()
            flush(spec)
            code = 0
        finally:
            os._exit(code)
    return os.waitpid(child, 0)[1] == 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.timeout(280)
def test_latest_is_whole_on_every_cycle(memory_dir, tmp_path, seed):
    chance = random.Random(seed)
    out, log = tmp_path / "out", tmp_path / "fired"
    storage = open_storage(str(out))
    saved = {}  # generation → what it holds
    promised = None  # the last one that a flush said to be there
    config = flashckpt.CheckpointConfig(job="job", memory_dir=memory_dir)
    fired = set()
    with flashckpt.Checkpointer(config) as checkpointer:
        step = 0
        for cycle in range(100):
            if chance.random() < 0.15 and step > 2:
                checkpointer.start_fresh()  # a rollback: steps are written once more
                step -= chance.choice([1, 2])
            step += 1
            handle = checkpointer.save(step, {"a": content(step, cycle), "cycle": cycle})
            assert handle.outcome == "ok"
            saved[handle.generation] = (step, cycle)
            armed = f"{chance.choice(POINTS)}={chance.choice(ACTIONS)}@{chance.choice([1, 1, 2])}"
            spec = FlushSpec(
                job="job",
                memory_dir=memory_dir,
                node_id="n",
                generation=handle.generation,
                world=1,
                writers=(("n", (0,)),),
                coordinates=True,
                attempt=f"{chance.getrandbits(64):016x}",
                reason="test",
                settings=PersistSettings(str(out), keep_latest_k=3, keep_every=7),
            )
            if flush_in_child(spec, armed if chance.random() < 0.7 else "", log):
                promised = handle.generation
            check(storage, out, saved, promised, f"cycle {cycle}, {armed}")
    if log.exists():
        fired = {line.split()[0] for line in log.read_text().splitlines()}
    assert len(fired) >= 4, fired


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize(
    ("point", "again"),
    # A step that is written once more has `latest` already: it is not moved.
    [(point, again) for point in POINTS for again in (False, True) if not (again and point == "before_latest")],
)
def test_every_failpoint(memory_dir, tmp_path, point, action, again):
    """Steps 1 to 3 lie there, two are kept. Then a flush of step 4, or of step 3 once more after a rollback, meets the
    fault: what lies there afterwards is whole, and the next flush leaves nothing of it."""
    out, log = tmp_path / "out", tmp_path / "fired"
    storage = open_storage(str(out))
    saved = {}

    def flushed(handle, armed=""):
        spec = FlushSpec(
            job="job",
            memory_dir=memory_dir,
            node_id="n",
            generation=handle.generation,
            world=1,
            writers=(("n", (0,)),),
            coordinates=True,
            attempt=f"{len(saved):08x}{len(armed):08x}",
            reason="test",
            settings=PersistSettings(str(out), keep_latest_k=2),
        )
        return flush_in_child(spec, armed, log)

    def save(step):
        handle = checkpointer.save(step, {"a": content(step, len(saved)), "cycle": len(saved)})
        saved[handle.generation] = (step, len(saved))
        return handle

    with flashckpt.Checkpointer(flashckpt.CheckpointConfig(job="job", memory_dir=memory_dir)) as checkpointer:
        for step in (1, 2, 3):
            promised = save(step)
            assert flushed(promised)
        if again:
            checkpointer.start_fresh()
        struck = save(3 if again else 4)
        ended_well = flushed(struck, f"{point}={action}")
        # A removal that fails is tried again later: the step is there all the same.
        assert ended_well == (point == "mid_delete" and action != "kill")
        assert log.read_text().split()[0] == point
        check(storage, out, saved, (struck if ended_well else promised).generation, point)
        assert flushed(struck)
        check(storage, out, saved, struck.generation, point)
        following = save(5)
        assert flushed(following)
        check(storage, out, saved, following.generation, point)
        assert storage.latest() == "step-5"
        assert not [name for name in os.listdir(out) if "tmp" in name or "deleting" in name]


def check(storage, out, saved, promised, where):
    steps = {one.name: one for one in list_steps(storage)}
    latest = storage.latest()
    if promised is not None:
        # What a flush said to be there is there, or something newer of the same history.
        assert latest is not None, where
        assert steps[latest].order >= (promised.epoch, promised.nonce, promised.step), where
    if latest is not None:
        assert not steps[latest].problem, (where, steps[latest])
    for one in steps.values():
        assert not one.problem, (where, one)
        assert damaged(storage, one) == [], where
        expected_step, cycle = saved[one.generation]
        got = {"a": torch.zeros(2000), "cycle": None}
        dcp.load(got, checkpoint_id=out / one.name, no_dist=True)
        assert got["cycle"] == cycle, where
        assert torch.equal(got["a"], content(expected_step, cycle)), where
