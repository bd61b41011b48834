"""A CheckpointManager with an agent and a persist_dir: real processes, one node."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import flashckpt
from flashckpt.agent.start import stop_agent
from tests.flushes import WAIT

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
    pytest.mark.timeout(1500),
]


@pytest.fixture
def job(memory_dir, tmp_path):
    """job(): a model, its optimizer and their manager; agent and manager are gone when the test ends."""
    opened = []

    def make(**settings):
        torch.manual_seed(0)
        model = nn.Linear(64, 64)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        config = flashckpt.CheckpointConfig(
            **{
                "job": "run1",
                "memory_dir": memory_dir,
                "node_id": "a",
                "agent": "auto",
                "agent_linger": 60.0,
                "interval": 1,
                "persist_dir": str(tmp_path / "out"),
                "persist_on_exit": False,
                **settings,
            }
        )
        manager = flashckpt.CheckpointManager(config, model=model, optimizer=optimizer)
        opened.append(manager)
        return model, optimizer, manager

    yield make
    for manager in opened:
        manager.close()
    with contextlib.suppress(flashckpt.FlashError):
        stop_agent(memory_dir, "run1", 30.0, kill=True)


def step(model, optimizer):
    model(torch.ones(2, 64)).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_a_step_that_is_asked_for_is_a_stock_checkpoint(job, tmp_path):
    model, optimizer, manager = job()
    step(model, optimizer)
    manager.save(1)
    step(model, optimizer)
    handle = manager.save(2, persist=True, extra={"wandb": "abc"}, compat={"width": 64})
    wanted = model.weight.detach().clone()
    assert manager.wait("persisted", WAIT) == "ok"
    assert handle.level is flashckpt.Level.PERSISTED
    assert "persisted" in manager.metrics().newest_step
    got = {
        "model": {"weight": torch.zeros(64, 64)},
        "optimizer": {"state": {"weight": {"exp_avg": torch.zeros(64, 64)}}},
    }
    dcp.load(got, checkpoint_id=tmp_path / "out" / "latest", no_dist=True)
    assert torch.equal(got["model"]["weight"], wanted)
    assert torch.equal(got["optimizer"]["state"]["weight"]["exp_avg"], optimizer.state[model.weight]["exp_avg"])
    meta = json.loads((tmp_path / "out" / "step-2" / "meta.json").read_text())
    assert meta["extra"]["wandb"] == "abc"
    assert meta["extra"]["flashckpt"]["compat"] == {"width": 64}
    assert flashckpt.peek(str(tmp_path / "out")) == 2
    assert 2 in manager.all_steps()
    where = manager.write_file("notes.txt", "x", step=2)
    assert Path(where).read_text() == "x"


def test_waiting_for_the_disk_right_after_an_overlapped_save(job, tmp_path):
    model, optimizer, manager = job(enable_first_step_checkpoint=False)
    step(model, optimizer)
    assert manager.save(1).wait("persisted", WAIT) == "ok"
    assert (tmp_path / "out" / "step-1" / ".metadata").exists()


def test_a_signal_brings_the_last_step_to_the_disk(job, tmp_path):
    model, optimizer, manager = job(interval=1000)
    manager.install_signal_handlers([signal.SIGUSR1], deadline=WAIT)
    step(model, optimizer)
    manager.save(1)
    os.kill(os.getpid(), signal.SIGUSR1)
    step(model, optimizer)
    handle = manager.save(2)
    assert manager.stop_requested
    assert handle.level is flashckpt.Level.PERSISTED
    assert flashckpt.latest_checkpoint(str(tmp_path / "out")).endswith("step-2")


_SETUP = """
import torch
torch.manual_seed(0)
steps = {steps}
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 7)
class Loader:
    n = 0
    def state_dict(self): return {{"n": self.n}}
    def load_state_dict(self, state): self.n = state["n"]
loader = Loader()
def train_one_step():
    loader.n += 1
    model(torch.full((2, 8), float(loader.n))).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()
"""
_END = "print('from', resumed and resumed.step, 'weights', model[2].weight.sum().item().hex(), 'n', loader.n)"


@pytest.mark.slow
def test_the_quickstart_of_the_guide_resumes_bit_exact(run_python, memory_dir, tmp_path):
    guide = (Path(__file__).parents[2] / "docs" / "manager.md").read_text()
    snippet = guide.partition("```python\n")[2].partition("```")[0]
    assert '"/data/run1"' in snippet  # as in the contract; nothing else is changed
    said = {}
    try:
        for name, runs in (("whole", (23,)), ("parts", (13, 23))):
            code = snippet.replace("/data/run1", str(tmp_path / name)).replace("run1", name)
            for steps in runs:
                result = run_python(
                    _SETUP.format(steps=steps) + code + _END,
                    FLASHCKPT_AGENT="auto",
                    FLASHCKPT_MEMORY_DIR=memory_dir,
                    FLASHCKPT_NODE_ID="a",
                )
                assert result.returncode == 0, result.stderr
                said[name] = result.stdout
    finally:
        for name in ("whole", "parts"):
            with contextlib.suppress(flashckpt.FlashError):
                stop_agent(memory_dir, name, 60.0, kill=True)
    assert "from 13" in said["parts"]
    assert "n 23" in said["whole"]
    assert said["parts"].partition("weights")[2] == said["whole"].partition("weights")[2]
