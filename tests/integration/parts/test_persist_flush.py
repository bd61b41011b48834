"""A flushed step is read by a process that has never seen flashckpt."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

import flashckpt
from flashckpt.persist.catalog import damaged, list_steps
from flashckpt.persist.flush import flush
from flashckpt.persist.names import METADATA
from flashckpt.persist.storage import open_storage
from tests.unit.test_persist_flush import checkpointer, spec_of

__all__ = ["checkpointer"]  # the fixture

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

# Plain DCP in an interpreter in which nothing of flashckpt can be imported.
PLAIN = """
import sys, torch, warnings
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "flashckpt":
            raise ImportError("flashckpt is not installed here")
sys.meta_path.insert(0, Block())
sys.path[:] = [p for p in sys.path if not __import__("os").path.isdir(p + "/flashckpt")]
warnings.simplefilter("ignore")
import torch.distributed.checkpoint as dcp
"""


def plain(code, *arguments):
    """Runs in a directory without our sources, and returns what the code puts into the file it is given."""
    result = subprocess.run(
        [sys.executable, "-I", "-c", PLAIN + code, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=240,
        cwd="/",
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_a_flushed_step_is_a_stock_dcp_checkpoint(checkpointer, memory_dir, tmp_path):
    weight = torch.randn(7, 5)
    state = {
        "model": {"weight": weight, "tied": weight, "scalar": torch.tensor(2.5), "empty": torch.empty(0, 3)},
        "view": torch.arange(24.0).reshape(4, 6).t()[1:4],
        "list": [torch.ones(2), {"a": torch.zeros(1)}],
        "lr": 0.1,
        "names": ["a", "b"],
        "own": flashckpt.PerRank({"seed": 7, "noise": torch.arange(3)}),
    }
    handle = checkpointer.save(3, state, extra={"run": "x", "n": 2})
    told = flush(spec_of(memory_dir, tmp_path / "out", handle))
    assert told["files"] == 5  # two data files, the values, checksums, the index
    step = tmp_path / "out" / "step-3"
    assert os.readlink(tmp_path / "out" / "latest") == "step-3"
    assert (tmp_path / "out" / "latest" / METADATA).is_file()
    torch.save(state | {"own": None}, tmp_path / "expected.pt")
    plain(
        """
where, expected_at = sys.argv[1:]
expected = torch.load(expected_at, weights_only=False)
got = {
    "model": {k: torch.full_like(v, -1) for k, v in expected["model"].items()},
    "view": torch.zeros(3, 4),
    "list": [torch.zeros(2), {"a": torch.ones(1)}],
    "lr": None, "names": None,
    "__rank__": {"0": {"own": {"seed": None, "noise": torch.zeros(3, dtype=torch.int64)}}},
}
dcp.load(got, checkpoint_id=where, no_dist=True)
for key, value in expected["model"].items():
    assert torch.equal(got["model"][key], value), key
assert torch.equal(got["view"], expected["view"])
assert torch.equal(got["list"][0], expected["list"][0]) and torch.equal(got["list"][1]["a"], expected["list"][1]["a"])
assert got["lr"] == 0.1 and got["names"] == ["a", "b"]
assert got["__rank__"]["0"]["own"]["seed"] == 7
assert torch.equal(got["__rank__"]["0"]["own"]["noise"], torch.arange(3))
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
dcp_to_torch_save(where, expected_at)
""",
        step,
        tmp_path / "expected.pt",
    )
    # torch's own converter builds the nested dict from the paths in the index.
    nested = torch.load(tmp_path / "expected.pt", weights_only=True)
    assert torch.equal(nested["model"]["tied"], weight)
    assert torch.equal(nested["list"][1]["a"], torch.zeros(1))
    assert nested["__rank__"]["0"]["own"]["seed"] == 7
    meta = json.loads((step / "meta.json").read_text())
    assert (meta["job"], meta["step"], meta["world"]) == ("job", 3, 1)
    assert meta["extra"] == {"run": "x", "n": 2}
    assert {name: one["size_bytes"] for name, one in meta["files"].items()} == {
        name: (step / name).stat().st_size for name in os.listdir(step) if name != "meta.json"
    }
    (listed,) = list_steps(open_storage(str(tmp_path / "out")))
    assert (listed.step, listed.problem, listed.generation) == (3, "", handle.generation)
    assert damaged(open_storage(str(tmp_path / "out")), listed) == []
