"""persist_dir and histories: a step that was promised is replaced by nothing but the history that it belongs to."""

from __future__ import annotations

import os
import shutil

import pytest
import torch

import flashckpt
from flashckpt.errors import AmbiguousHistoryError, PersistError
from flashckpt.persist.catalog import list_steps
from flashckpt.persist.flush import flush
from flashckpt.persist.storage import open_storage
from flashckpt.protocol.flush_spec import FlushSpec
from flashckpt.types import PersistSettings

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out"


@pytest.fixture
def nodes(memory_dir):
    """The memory directories of two machines that don't hear of each other."""
    found = [os.path.join(memory_dir, name) for name in ("one", "other")]
    for path in found:
        os.mkdir(path, 0o700)
    return found


def state(step, who):
    return {"a": torch.full((500,), float(step)), "who": who}


def opened(memory_dir, out):
    # Without an agent nothing is written to persist_dir but by these tests.
    config = flashckpt.CheckpointConfig(
        job="job", memory_dir=memory_dir, persist_dir=str(out), persist_on_exit=False, keep_memory=3
    )
    return flashckpt.Checkpointer(config)


def to_disk(memory_dir, out, handle, **settings):
    return flush(
        FlushSpec(
            job="job",
            memory_dir=memory_dir,
            node_id="node",
            generation=handle.generation,
            world=1,
            writers=(("node", (0,)),),
            coordinates=True,
            attempt=f"{handle.step:016x}",
            reason="test",
            settings=PersistSettings(str(out), **settings),
        )
    )


def on_disk(out):
    return {one.step: one.generation for one in list_steps(open_storage(str(out)))}


def load(memory_dir, out, **how):
    """The step, and who saved it."""
    found = {"a": torch.zeros(500), "who": ""}
    with opened(memory_dir, out) as checkpointer:
        result = checkpointer.load(found, **how)
    return None if result is None else (result.step, found["who"])


def test_a_step_of_another_history_is_not_replaced(nodes, out):
    here, there = nodes
    with opened(here, out) as one, opened(there, out) as other:
        mine, theirs = one.save(5, state(5, "one")), other.save(5, state(5, "other"))
        to_disk(here, out, mine)
        with pytest.raises(PersistError, match="another history"):
            to_disk(there, out, theirs)
        to_disk(there, out, other.save(6, state(6, "other")), keep_latest_k=2)
        to_disk(there, out, other.save(7, state(7, "other")), keep_latest_k=2)
        to_disk(there, out, other.save(8, state(8, "other")), keep_latest_k=2)
    assert on_disk(out)[5] == mine.generation
    for path in nodes:
        shutil.rmtree(path)
        os.mkdir(path, 0o700)
    with pytest.raises(AmbiguousHistoryError) as caught:
        load(here, out)
    one, other = caught.value.histories
    assert load(here, out, history=one) == (5, "one")
    # It was chosen: the other one's steps may be replaced now.
    with opened(here, out) as again:
        again.load({"a": torch.zeros(500), "who": ""})
        newer = again.save(7, state(7, "again"))
        to_disk(here, out, newer)
    assert on_disk(out)[7] == newer.generation


def test_a_flush_that_was_overtaken_replaces_nothing(nodes, out):
    here, there = nodes
    with opened(here, out) as old:
        to_disk(here, out, old.save(10, state(10, "old")))
        late = old.save(20, state(20, "old"))
        # It stands still here. The job goes on from disk on another machine.
        with opened(there, out) as new:
            new.load({"a": torch.zeros(500), "who": ""})
            kept = new.save(20, state(20, "new"))
            to_disk(there, out, kept)
        with pytest.raises(PersistError, match="abandoned"):
            to_disk(here, out, late)
    assert on_disk(out)[20] == kept.generation
    shutil.rmtree(there)
    os.mkdir(there, 0o700)
    assert load(there, out) == (20, "new")


def test_a_rollback_before_anything_was_on_disk_is_known_there(nodes, out):
    here, there = nodes
    with opened(here, out) as old:
        old.save(10, state(10, "old"))
        late = old.save(20, state(20, "old"))
    shutil.copytree(here, there, dirs_exist_ok=True)  # a machine that was away during the rollback
    with opened(here, out) as new:
        new.load({"a": torch.zeros(500), "who": ""}, 10)
        to_disk(here, out, new.save(15, state(15, "new")))
    with pytest.raises(PersistError, match="abandoned"):
        to_disk(there, out, late)
    for path in nodes:
        shutil.rmtree(path)
        os.mkdir(path, 0o700)
    assert load(there, out) == (15, "new")
