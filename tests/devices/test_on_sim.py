"""Runs the tests of this directory that need an accelerator, in a process with the simulated one (tests/simdev).

Registering it can't be undone, and the other tests are to see what machines without an accelerator see.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT, environment

HERE = Path(__file__).parent


@pytest.mark.parametrize("cases", ["copies.py", "states.py"])
@pytest.mark.slow
def test_on_the_simulated_accelerator(cases):
    command = [sys.executable, "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider", str(HERE / cases)]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-5000:]


LATE = """
import torch
from flashckpt import CheckpointConfig, Checkpointer
from flashckpt.devices import has_accelerator
from tests import simdev

assert not has_accelerator()
with Checkpointer(CheckpointConfig(job="job", memory_dir={memory_dir!r})) as checkpointer:
    checkpointer.save(1, {{"a": torch.arange(10)}}, overlap=True).wait("sealed", timeout=60)
    simdev.load()
    assert has_accelerator()
    handle = checkpointer.save(2, {{"a": torch.arange(10).to("sim:1")}}, overlap=True)
    handle.wait("sealed", timeout=60)
    assert handle.outcome == "ok", handle.reason
    fresh = {{"a": torch.zeros(10, dtype=torch.int64)}}
    assert checkpointer.load(fresh).step == 2
    assert torch.equal(fresh["a"], torch.arange(10))
"""


@pytest.mark.slow
def test_a_backend_that_is_registered_late_is_seen(memory_dir):
    code = LATE.format(memory_dir=memory_dir)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
