"""A live job is not taken over by accident: real trainers and agents on several nodes."""

from __future__ import annotations

import os
import signal
import time

import pytest

from flashckpt.testing import Cluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

REFUSED_WITHIN = 10.0  # seconds on a busy machine; the grace period is 3


def launch(cluster, persist_dir):
    return cluster.trainers(nodes=2, config={"save_timeout": 20.0, "persist_dir": str(persist_dir)})


def refused(trainers, do, **arguments):
    """The error that each rank reports to a command."""
    number = trainers.send(do, **arguments)
    return trainers.wait_for("error", number=number, timeout=60)


def wait_until(condition):
    deadline = time.monotonic() + 10.0
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.fixture(scope="module")
def cluster():
    with Cluster(3) as cluster:
        yield cluster
        assert cluster.check(timeout=30) == []


@pytest.fixture(scope="module")
def persist_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("persist")


def snapshot(directory):
    """Every file below it, with the time of its last change."""
    return sorted((str(path), path.lstat().st_mtime_ns) for path in [directory, *directory.rglob("*")])


@pytest.fixture(scope="module")
def training(cluster, persist_dir):
    training = launch(cluster, persist_dir)
    training.wait_started()
    assert {one["step"] for one in training.load().values()} == {None}
    return training


@pytest.fixture(scope="module")
def other(cluster, training, persist_dir):
    other = launch(cluster, persist_dir)
    other.wait_started()
    return other


def pids(trainers):
    return {event["pid"] for rank in range(trainers.world) for event in trainers.events(rank)[:1]}


def test_a_load_beside_a_live_job_is_refused_on_all_ranks_alike(training, other):
    training.save(1, "replicated")
    began = time.monotonic()
    errors = refused(other, "load", step=None, arguments={})
    assert time.monotonic() - began < REFUSED_WITHIN
    assert {one["code"] for one in errors.values()} == {"FC-JOB-002"}
    messages = {one["message"] for one in errors.values()}
    assert len(messages) == 1
    message = messages.pop()
    assert all(f"process {pid} on node" in message for pid in pids(training))
    assert "rank 0" in message
    assert "rank 1" in message
    assert "UTC" in message
    for way in ("read_only=True", "take_over=True", "another job name"):
        assert way in message
    assert {one["outcome"] for one in training.save(2, "replicated").values()} == {"ok"}


def test_a_save_without_a_load_beside_a_live_job_is_refused(training, other):
    errors = refused(other, "save", step=9, level="sealed", timeout=20)
    assert {one["code"] for one in errors.values()} == {"FC-JOB-002"}
    assert {one["outcome"] for one in training.save(3, "replicated").values()} == {"ok"}


def test_a_live_job_whose_agents_have_just_died_is_refused_too(cluster, training, other):
    for node in cluster.nodes[:2]:
        os.kill(node.agent_pid(), signal.SIGKILL)
    errors = refused(other, "load", step=None, arguments={})
    assert {one["code"] for one in errors.values()} == {"FC-JOB-002"}
    assert {one["outcome"] for one in training.save(3, "replicated").values()} == {"ok"}


def test_a_read_only_load_beside_a_live_job_changes_nothing(training, other):
    for _ in range(2):
        loaded = other.load(read_only=True)
        assert {(one["step"], one["matches"]) for one in loaded.values()} == {(3, True)}
    assert {one["outcome"] for one in training.save(4, "replicated").values()} == {"ok"}


def test_a_launch_on_one_of_its_nodes_is_refused(cluster, training, other):
    alone = cluster.trainers(nodes=[cluster.nodes[1]], config={"replicas": 0})
    alone.wait_started()
    (error,) = refused(alone, "load", step=None, arguments={}).values()
    assert error["code"] == "FC-JOB-002"
    assert {one["outcome"] for one in training.save(5, "replicated").values()} == {"ok"}
    alone.kill()


def test_an_evaluation_on_another_machine_writes_nothing(cluster, training, persist_dir):
    training.save(6, "persisted", timeout=240)
    before = snapshot(persist_dir)
    config = {"replicas": 0, "load_only": True, "persist_dir": str(persist_dir)}
    evaluation = cluster.trainers(nodes=[cluster.nodes[2]], nproc_per_node=1, config=config)
    evaluation.wait_started()
    (loaded,) = evaluation.load(strict=False).values()
    assert (loaded["step"], loaded["source"]) == (6, "persist")
    assert snapshot(persist_dir) == before
    evaluation.kill()
    assert {one["outcome"] for one in training.save(7, "replicated").values()} == {"ok"}


def test_take_over_takes_it_and_only_by_name(cluster, training, other, persist_dir):
    loaded = other.load(take_over=True)
    assert {(one["step"], one["matches"]) for one in loaded.values()} == {(7, True)}
    # The training hears it at once, not only at its next save.
    wait_until(lambda: all("has taken over" in one["text"] for one in training.status().values()))
    assert "begun by rank 0, process" in training.status()[0]["text"]
    assert {one["outcome"] for one in other.save(80, "replicated").values()} == {"ok"}
    number = training.send("save", step=80, level="sealed", timeout=20.0)
    failed = training.wait_for("saved", number=number)
    assert {one["outcome"] for one in failed.values()} == {"failed"}
    assert all("has taken over" in one["reason"] for one in failed.values())
    # What was overtaken does not take the job back by loading again.
    errors = refused(training, "load", step=None, arguments={})
    assert {one["code"] for one in errors.values()} == {"FC-JOB-002"}
    assert {one["outcome"] for one in other.save(90, "replicated").values()} == {"ok"}
    # Its owners are dead, and those that were overtaken before do not count: a restart is as quick as ever.
    other.kill()
    again = launch(cluster, persist_dir)
    again.wait_started()
    assert {(one["step"], one["matches"]) for one in again.load().values()} == {(90, True)}
    assert max(one["seconds"] for one in again.load().values()) < 3.0
