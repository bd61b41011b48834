"""Managers whose process group is replaced, and forks of ranks that have one: real ranks, with and without an agent."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import time
from pathlib import Path

import pytest
import torch

import flashckpt
from flashckpt.agent.start import look, stop_agent
from tests.conftest import torchrun

WORKER = Path(__file__).parent / "group_worker.py"


@pytest.fixture
def agent(memory_dir):
    yield
    with contextlib.suppress(flashckpt.FlashError):
        stop_agent(memory_dir, "run1", 10.0, kill=True)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["auto", "off"])
def test_a_replaced_group_and_a_fork_end_in_typed_errors(memory_dir, tmp_path, agent, mode):
    code, output = torchrun(2, WORKER, timeout=120, MEMORY=memory_dir, AGENT=mode, STORE=str(tmp_path / "store"))
    assert code == 0, output
    assert "DONE 0" in output
    assert "DONE 1" in output
    assert "Traceback" not in output


def test_what_is_dropped_gives_its_lease_back(memory_dir, agent):
    """A hundred times, beside one that lives: descriptors, threads and leases stay as many as they were."""
    config = flashckpt.CheckpointConfig(job="run1", memory_dir=memory_dir, node_id="a", agent="auto", replicas=0)
    with flashckpt.Checkpointer(config):

        def holdings():
            return len(os.listdir("/proc/self/fd")), threading.active_count(), leases()

        def leases():
            return len(look(memory_dir, "run1").status["trainers"])

        def use(step):
            checkpointer = flashckpt.Checkpointer(config)
            checkpointer.load({"x": torch.zeros(100)})
            assert checkpointer.save(step, {"x": torch.ones(100)}).outcome == "ok"

        use(1)
        gc.disable()
        try:
            wait_until(lambda: leases() == 1)
            # The lease is given back before the connection's descriptors are closed: counted too early, they would be
            # missed for ever.
            before = [min(counts) for counts in zip(*every(0.05, 40, holdings), strict=True)]
            for step in range(2, 102):
                use(step)
                wait_until(lambda: leases() <= 3)
            # What earlier tests of this process have left may end meanwhile.
            wait_until(lambda: all(now <= then for now, then in zip(holdings(), before, strict=True)))
            assert leases() == 1
        finally:
            gc.enable()


def every(seconds, times, count):
    for _ in range(times):
        time.sleep(seconds)
        yield count()


def wait_until(condition):
    deadline = time.monotonic() + 20.0
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
