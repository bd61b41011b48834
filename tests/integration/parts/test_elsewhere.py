"""Permanent steps on disk, flushed by a real agent's helper."""

from __future__ import annotations

import contextlib
import os

import pytest
from torch import nn

import flashckpt
from flashckpt import CheckpointConfig, CheckpointManager
from flashckpt.agent.start import stop_agent
from flashckpt.training.policy import power2_window
from tests.unit.test_elsewhere import to_disk

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def test_permanent_steps_stay_and_do_not_count(memory_dir, tmp_path):
    model = nn.Linear(4, 4)
    settings = {"agent": "auto", "persist_dir": str(tmp_path / "agents"), "persist_on_exit": False}
    config = CheckpointConfig(job="job", memory_dir=memory_dir, **settings)
    by_policy = {"keep_policy": power2_window(4, 8)}
    with contextlib.ExitStack() as stack:
        stack.callback(stop_agent, memory_dir, "job", 30.0, kill=True)
        manager = stack.enter_context(CheckpointManager(config, model=model, **by_policy))
        for number in range(1, 12):
            # What JSON can't hold must not take the mark with it.
            handle = manager.save(
                number, permanent=True if number == 2 else None, extra={"odd": b"bytes"}, compat={"x": {1}}
            )
            handle.wait("sealed", timeout=60)
            to_disk(memory_dir, tmp_path, handle, keep_latest_k=2)
        assert manager.load(path=str(tmp_path / "step-2")).extra == {"odd": b"bytes"}
        with pytest.raises(flashckpt.ConfigError, match="manager's own"):
            manager.save(12, extra={"flashckpt.permanent": True})
    kept = sorted(int(name.partition("-")[2]) for name in os.listdir(tmp_path) if name.startswith("step-"))
    assert kept == [2, 4, 5, 6, 8, 10, 11]
