"""Agents and their flushers against a real S3-compatible server: there is no rename, the marker is the commit."""

from __future__ import annotations

import os
import shutil
import signal
import uuid
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp

import flashckpt
from flashckpt.agent.process import Options
from flashckpt.agent.start import ensure_agent, stop_agent
from flashckpt.persist.catalog import damaged, list_steps
from flashckpt.persist.names import METADATA
from flashckpt.persist.storage import open_storage
from flashckpt.testing import Cluster
from tests.flushes import (
    COUNT,
    JOB,
    WAIT,
    checkpointers,
    flush_with_a_late_node,
    flushers,
    persist_status,
    state,
    wait_until,
)
from tests.s3_server import write_credentials

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(2000),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
    # Of the S3 libraries' own, not of ours.
    pytest.mark.filterwarnings("ignore::DeprecationWarning:botocore"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]


@pytest.fixture
def home(s3_endpoint, tmp_path, monkeypatch):
    """With credentials and endpoint in the files that the library reads."""
    path = tmp_path / "home"
    write_credentials(path, s3_endpoint)
    for name in [one for one in os.environ if one.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(path))
    return path


@pytest.fixture
def url(home):
    import s3fs

    bucket = f"bucket-{uuid.uuid4().hex[:12]}"
    s3fs.S3FileSystem(skip_instance_cache=True).mkdir(bucket)
    return f"s3://{bucket}/deep/out"


def stock_load(url, name):
    """Through torch's own reader for fsspec."""
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

    got = {"weights": torch.zeros(COUNT), "step": None}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(got, storage_reader=FsspecReader(f"{url}/{name}"), no_dist=True)
    return got


def assert_good(storage, url, *, latest, steps):
    """Every step that has a marker is whole, to the last byte and for torch's own reader; `latest` names this one."""
    assert storage.latest() == f"step-{latest}"
    found = list_steps(storage)
    assert [one.step for one in found if not one.problem] == steps
    for one in found:
        if one.problem:  # what died before its marker
            assert "no .metadata" in one.problem, one
            continue
        assert damaged(storage, one) == []
        got = stock_load(url, one.name)
        assert got["step"] == one.step
        assert torch.equal(got["weights"], state(one.step)["weights"])


def test_flush_retention_and_load_when_all_memory_is_gone(url, memory_dir):
    storage = open_storage(url)
    with checkpointers(memory_dir, url) as make:
        checkpointer = make(keep_latest_k=2, keep_every=4)
        for step in range(1, 7):
            assert checkpointer.save(step, state(step)).wait("persisted", timeout=WAIT) == "ok"
        assert_good(storage, url, latest=6, steps=[4, 5, 6])
        # Nothing is left of steps that retention removed.
        assert sorted(storage.list()) == ["flashckpt.json", "latest", "step-4", "step-5", "step-6"]
        checkpointer.close()
        stop_agent(memory_dir, JOB, 60.0, kill=True)
        for name in os.listdir(memory_dir):
            shutil.rmtree(os.path.join(memory_dir, name))
        again = make()
        live = {"weights": torch.zeros(COUNT), "step": None}
        result = again.load(live)
        assert (result.step, result.source) == (6, "persist")
        assert torch.equal(live["weights"], state(6)["weights"])
        # What it leaves behind is remembered there too, and it goes on from there.
        older = again.load(live, step=4)
        assert (older.step, older.source) == (4, "persist")
        assert "history.json" in storage.list()


@pytest.mark.parametrize(
    "failpoint",
    ["before_flush", "mid_flush", "before_persist_rename", "after_persist_rename", "before_latest", "mid_delete"],
)
def test_killed_at(url, memory_dir, tmp_path, monkeypatch, failpoint):
    storage = open_storage(url)
    with checkpointers(memory_dir, url) as make:
        checkpointer = make(keep_latest_k=2)
        for step in (1, 2):
            assert checkpointer.save(step, state(step)).wait("persisted", timeout=WAIT) == "ok"
        log = tmp_path / "fired"
        # Before its end: the checkpointer starts the next agent as soon as it notices.
        monkeypatch.setenv("FLASHCKPT_TESTING", "1")
        monkeypatch.setenv("FLASHCKPT_AGENT_FAILPOINTS", f"{failpoint}=kill")
        monkeypatch.setenv("FLASHCKPT_FAILPOINTS_LOG", str(log))
        stop_agent(memory_dir, JOB, 60.0)
        ensure_agent(Options(job=JOB, memory_dir=memory_dir, node_id="a"), 60.0)
        checkpointer.save(3, state(3))
        checkpointer.flush()
        found = wait_until(lambda: (p := persist_status(memory_dir))["failures"] and p, "the failure")
        assert "SIGKILL" in found["problem"]
        assert log.read_text().split()[0] == failpoint
        # The marker is the commit: before it there is no step 3, from it on there is all of it.
        committed = failpoint in ("after_persist_rename", "before_latest", "mid_delete")
        marker = METADATA in (storage.list("step-3") or {})
        assert marker is committed
        # What is being removed has lost its marker first.
        steps = [step for step in (1, 2, 3) if (step != 3 or committed) and (step != 1 or failpoint != "mid_delete")]
        assert_good(storage, url, latest=3 if failpoint == "mid_delete" else 2, steps=steps)
        assert checkpointer.save(4, state(4)).outcome == "ok"
        monkeypatch.delenv("FLASHCKPT_AGENT_FAILPOINTS")
        stop_agent(memory_dir, JOB, 60.0, kill=True)
        ensure_agent(Options(job=JOB, memory_dir=memory_dir, node_id="a"), 60.0)
        assert checkpointer.save(5, state(5)).wait("persisted", timeout=WAIT) == "ok"
        assert_good(storage, url, latest=5, steps=[3, 5] if committed else [2, 5])
        # Nothing is left of what died, neither of steps nor within them.
        assert sorted(storage.list()) == ["flashckpt.json", "latest", "step-3" if committed else "step-2", "step-5"]


def test_killed_in_the_middle_of_an_upload_it_is_tried_again(url, memory_dir):
    """By SIGKILL, while bytes are on their way; nothing but the flusher is told to fail."""
    storage = open_storage(url)
    with checkpointers(memory_dir, url) as make:
        checkpointer = make(persist_max_mbps=0.4)  # 400 kB take 8 s
        handle = checkpointer.save(1, state(1))
        checkpointer.flush()
        (pid,) = wait_until(lambda: flushers(memory_dir), "the flusher")
        wait_until(lambda: persist_status(memory_dir)["flushed_bytes"] > 0, "its first bytes")
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: persist_status(memory_dir)["failures"], "the failure")
        assert storage.latest() is None
        assert list_steps(storage) == [] or all(one.problem for one in list_steps(storage))
        assert handle.wait("persisted", timeout=WAIT) == "ok"
        assert_good(storage, url, latest=1, steps=[1])


def test_nodes_write_one_step_together_and_load_it_after_all_were_lost(url, home):
    with Cluster(2, ranks_per_node=[2, 1]) as cluster:
        for node in cluster.nodes:
            node.set_environment(HOME=str(home))
        config = {"persist_dir": url, "persist_on_exit": False, "replicas": 1}
        trainers = cluster.trainers(launcher="torchrun", config=config)
        trainers.wait_started()
        levels = trainers.save(3, "persisted", timeout=WAIT)
        assert {one["level"] for one in levels.values()} == {"persisted"}, levels
        storage = open_storage(url)
        assert storage.latest() == "step-3"
        assert not [name for name in storage.list("step-3") if "__flash_" in name]
        (step,) = list_steps(storage)
        assert damaged(storage, step) == []
        for node in cluster.nodes:
            node.kill()
            node.wipe()
        again = cluster.trainers(launcher="torchrun", config=config)
        again.wait_started()
        loaded = again.load(timeout=120)
        assert {(one["step"], one["source"], one["matches"]) for one in loaded.values()} == {(3, "persist", True)}
        again.stop()


@pytest.mark.parametrize("late", [0, 1])
def test_a_node_is_late(url, home, late, tmp_path):
    """Also the one that cleans up and commits: what the other has begun to write is no leftover."""
    with Cluster(2) as cluster:
        for node in cluster.nodes:
            node.set_environment(HOME=str(home))
        flush_with_a_late_node(cluster, late, url, tmp_path / "fired")


def test_credentials_that_are_missing_are_an_outcome(url, memory_dir, home):
    (home / ".aws" / "credentials").unlink()
    with checkpointers(memory_dir, url) as make:
        checkpointer = make()
        checkpointer.save(1, state(1))
        checkpointer.flush()
        found = wait_until(lambda: (p := persist_status(memory_dir))["failures"] and p, "the failure")
        assert "redentials" in found["problem"], found
        assert checkpointer.save(2, state(2)).outcome == flashckpt.Outcome.OK
