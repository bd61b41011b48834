"""All memory is gone: what lies on disk comes back, also on another number of ranks and in another sharding."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import flashckpt
from flashckpt.agent.start import stop_agent
from tests.integration.persist_worker import full

WORKER = Path(__file__).with_name("persist_worker.py")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_sharded_tensors_come_back_in_other_worlds(memory_dir, tmp_path, torchrun):
    out = tmp_path / "out"
    try:
        code, output = torchrun(2, WORKER, "save", memory_dir, out, FLASHCKPT_AGENT="auto")
        assert code == 0, output
        got = {key: torch.zeros(13, 10) for key in ("rows", "columns", "copies", "plain")}
        dcp.load(got, checkpoint_id=out / "latest", no_dist=True)
        assert all(torch.equal(got[key], full(key)) for key in got)
        for world in (1, 3):
            stop_agent(memory_dir, "run1", 60.0, kill=True)
            for name in os.listdir(memory_dir):
                shutil.rmtree(os.path.join(memory_dir, name))
            code, output = torchrun(world, WORKER, "load2", memory_dir, out, FLASHCKPT_AGENT="auto")
            assert code == 0, output
    finally:
        with contextlib.suppress(flashckpt.FlashError):
            stop_agent(memory_dir, "run1", 30.0, kill=True)
