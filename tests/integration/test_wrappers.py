"""Real ranks with the optimizers and shardings that people use: loaded into fresh objects they go on bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest

WORKER = Path(__file__).parent / "wrapper_worker.py"

# Starting ranks is most of the time: a launch takes many kinds.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_fresh_objects_go_on_bit_for_bit(torchrun, memory_dir, tmp_path):
    kinds = ("accelerate", "ddp-sgd", "fsdp", "fsdp-rows", "tp", "flat", "flat-names", "flat-sgd")
    code, output = torchrun(2, WORKER, "resume", memory_dir, tmp_path, *kinds)
    assert code == 0, output


def test_state_that_is_divided_among_ranks_at_the_same_and_at_other_world_sizes(torchrun, memory_dir, tmp_path):
    code, output = torchrun(2, WORKER, "resume", memory_dir, tmp_path, "zero", "zero-sgd", "zero-buckets", "ddp-adamw")
    assert code == 0, output
    assert "keys differ between ranks" not in output
    code, output = torchrun(3, WORKER, "reload", memory_dir, tmp_path, "zero:zero", "ddp-adamw:zero")
    assert code == 0, output
    code, output = torchrun(1, WORKER, "reload", memory_dir, tmp_path, "zero:zero", "zero:ddp-adamw")
    assert code == 0, output
