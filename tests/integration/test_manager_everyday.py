"""All that docs/manager.md tells a user, at once: two nodes, FSDP2, from a Hugging Face model to a second launch."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

WORKER = Path(__file__).parent / "everyday_worker.py"
LAST = 31  # step of the first launch's end

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


def publish(directory):
    """A model of the worker's shape under other names, in bfloat16."""
    directory.mkdir()
    generator = torch.Generator().manual_seed(3)
    tensors = {}
    for number in range(4):
        tensors[f"model.layers.{number}.mlp.weight"] = torch.randn(16, 16, generator=generator).bfloat16()
        tensors[f"model.layers.{number}.mlp.bias"] = torch.randn(16, generator=generator).bfloat16()
    save_file(tensors, directory / "model.safetensors")
    ours = {name.replace("model.layers", "layers").replace(".mlp", ""): value for name, value in tensors.items()}
    return {name: value.float().sum().item() for name, value in ours.items()}


def test_the_guide_from_end_to_end(tmp_path):
    from flashckpt.testing import Cluster

    published = publish(tmp_path / "hf")
    out, disk = tmp_path / "out", tmp_path / "disk"
    out.mkdir()

    def launch(which):
        started = cluster.torchrun(WORKER, str(out), str(disk), str(tmp_path / "hf"), which)
        assert started.wait(600) == [0, 0], started.output
        return [json.loads((out / f"{which}{rank}.json").read_text()) for rank in range(2)]

    with Cluster(2) as cluster:
        ranks = launch("first")
        for one in ranks:
            # A fresh start from the published model, converted and renamed.
            assert (one["peeked"], one["resumed"], one["initial"]) == (None, None, 0)
            assert one["weights"] == pytest.approx(published, rel=1e-4)
            assert (one["pending"], one["moments"]) == ([], 0)
            # Saves that reached every level, counted, with the age of the newest at each.
            assert one["persisted"] == "ok"
            assert set(one["age"]) == set(one["newest"]) == {"staged", "sealed", "replicated", "persisted"}
            assert one["newest"]["replicated"] == one["newest"]["persisted"] == LAST
            assert all(0 <= age < 300 for age in one["age"].values())
            assert one["saves"] == {"ok": len(one["steps"]), "skipped": 0, "failed": 0}
            assert one["bytes"] > 0 < one["held"]
            assert {"saved", "staged", "sealed", "replicated", "persisted"} <= one["events"].keys()
            assert one["latest"] == LAST
            assert not one["is_pending"]
        # Ranks of different speed, with clocks of their own, saved the same steps.
        assert ranks[0]["steps"] == ranks[1]["steps"]
        assert {1, 7, LAST} < set(ranks[0]["steps"]) <= {1, 7, *range(2, 32, 2), LAST}
        kept = sorted(name for name in os.listdir(disk) if name.startswith("step-"))
        assert "step-7" in kept  # permanent
        assert (disk / "notes-first.txt").read_text() == "hello"

        again = launch("second")
        for rank, one in enumerate(again):
            assert one["resumed"] == [LAST, "memory", {"tokens": -1}]
            assert one["initial"] is None
            assert (one["pending"], one["loader"]) == (["dataloader"], [rank, 30])  # made after the load
            assert one["ema"] == [30.0] * 3
            assert one["moments"] == 4
            assert one["lrs"] == pytest.approx([1e-3 * 0.1**6, 1e-2 * 0.1**6])
            assert one["weights"] != pytest.approx(ranks[rank]["weights"])
        assert cluster.check(timeout=60) == []
