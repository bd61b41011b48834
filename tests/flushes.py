"""What tests of the persistent tier share: a trainer with an agent, a small state, and looks at what became of it."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

import flashckpt
from flashckpt.agent.start import look, stop_agent
from flashckpt.persist.catalog import damaged, list_steps
from flashckpt.persist.storage import open_storage

JOB = "run1"
# The flusher is nice: beside a few busy processes, its start alone takes two minutes.
WAIT = 400.0
COUNT = 100_000  # numbers in a state: 400 kB


@contextlib.contextmanager
def checkpointers(memory_dir, persist_dir):
    """make(**config): Checkpointers of one node with an agent; all of it is gone when the block ends."""
    opened = []

    def make(**config):
        settings = {
            "job": JOB,
            "memory_dir": memory_dir,
            "node_id": "a",
            "agent": "auto",
            "agent_linger": 60.0,
            "persist_dir": str(persist_dir),
            "persist_on_exit": False,
        }
        checkpointer = flashckpt.Checkpointer(flashckpt.CheckpointConfig(**{**settings, **config}))
        opened.append(checkpointer)
        return checkpointer

    try:
        yield make
    finally:
        for checkpointer in opened:
            checkpointer.close()
        with contextlib.suppress(flashckpt.FlashError):
            stop_agent(memory_dir, JOB, 30.0, kill=True)


def flush_with_a_late_node(cluster, late, persist_dir, log):
    """Two nodes or more flush step 3 together, in their first attempt. One of them begins only when another has
    shown what it has, however long that takes."""
    cluster[late].set_environment(
        FLASHCKPT_TESTING="1", FLASHCKPT_AGENT_FAILPOINTS="before_flush=stop", FLASHCKPT_FAILPOINTS_LOG=str(log)
    )
    storage = open_storage(persist_dir)
    config = {"persist_dir": persist_dir, "persist_on_exit": False, "replicas": 1}
    trainers = cluster.trainers(config=config)
    trainers.wait_started()
    number = trainers.send("save", step=3, level="persisted", timeout=WAIT)
    name, pid = wait_until(lambda: log.exists() and log.read_text(), "the late node").split()
    assert name == "before_flush"

    def shown():
        places = [place for place in storage.list() or {} if place.startswith("step-3")]
        return [name for place in places for name in storage.list(place) or {} if name.startswith("__flash_layout")]

    wait_until(shown, "what the others have")
    os.kill(int(pid), signal.SIGCONT)
    levels = trainers.wait_for("level", number=number, timeout=WAIT + 10)
    assert {one["level"] for one in levels.values()} == {"persisted"}, levels
    # The failpoint stops every flusher of the node, and only one was let go: there was no second attempt.
    assert log.read_text().split() == [name, pid]
    assert storage.latest() == "step-3"
    assert sorted(storage.list()) == ["flashckpt.json", "latest", "step-3"]
    (step,) = list_steps(storage)
    assert not step.problem
    assert damaged(storage, step) == []


def state(step):
    return {"weights": torch.full((COUNT,), float(step)), "step": step}


def plain_load(path):
    got = {"weights": torch.zeros(COUNT), "step": None}
    dcp.load(got, checkpoint_id=path, no_dist=True)
    return got


def assert_holds(path, step):
    """Plain DCP finds what was saved at that step, bit for bit."""
    got = plain_load(path)
    assert got["step"] == step
    assert torch.equal(got["weights"], state(step)["weights"])


def persist_status(memory_dir):
    seen = look(memory_dir, JOB, timeout=10.0)
    assert seen is not None
    assert seen.status is not None, seen.problem
    return seen.status["persist"]


def flushers(memory_dir):
    """Processes of this node's flusher that are not dead."""
    seen = look(memory_dir, JOB, timeout=10.0)
    assert seen is not None
    assert seen.status is not None, seen.problem
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if int(fields[1]) == seen.status["pid"] and fields[0] != "Z" and b"flashckpt.persist" in words:
            found.append(int(pid))
    return found


def wait_until(condition, what, timeout=WAIT):
    deadline = time.monotonic() + timeout
    while not (found := condition()):
        assert time.monotonic() < deadline, what
        time.sleep(0.05)
    return found
