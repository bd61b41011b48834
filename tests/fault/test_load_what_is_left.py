"""One shard is lost: the error says what is whole and which argument takes it, and that argument does."""

from __future__ import annotations

import json
import sys

import pytest

from flashckpt.testing import Cluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SCRIPT = """
import json, sys
import torch
import torch.distributed as dist
import flashckpt
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

dist.init_process_group("gloo")
rank = dist.get_rank()
mesh = init_device_mesh("cpu", (dist.get_world_size(),))


def state(value):
    return {
        "model": {"w": torch.full((64,), value), "b": torch.full((8,), value)},
        "lr": value,
        "rng": flashckpt.PerRank({"state": torch.full((4,), value + rank)}),
        "fsdp": {"w": distribute_tensor(torch.full((64,), value), mesh, [Shard(0)])},
    }


def load(arguments):
    live = state(-1.0)
    try:
        result = checkpointer.load(live, **arguments)
    except flashckpt.FlashError as error:
        return {"code": error.code, "message": error.message}
    if result is None:
        return {"step": None}
    return {
        "step": result.step,
        "missing": result.missing,
        "model": live["model"]["w"].tolist() + live["model"]["b"].tolist(),
        "fsdp": live["fsdp"]["w"].to_local().tolist(),
        "lr": live["lr"],
        "rng": live["rng"].value["state"].tolist(),
        "extra": result.extra,
    }


def save(step):
    handle = checkpointer.save(step, state(float(step)), extra={"seen": step})
    handle.wait("sealed", 30)
    return {"outcome": handle.outcome, "reason": handle.reason}


config = flashckpt.CheckpointConfig(replicas=0, peer_timeout=2.0, save_timeout=30, start_timeout=60)
with flashckpt.Checkpointer(config) as checkpointer:
    for act, argument in json.loads(sys.argv[1]):
        print(json.dumps(save(argument) if act == "save" else load(argument)), flush=True)
        dist.barrier()
dist.destroy_process_group()
"""


def run(cluster, script, *acts):
    """What each rank says of each act."""
    launch = cluster.start([sys.executable, str(script), json.dumps(acts)])
    assert set(launch.wait(120)) == {0}, launch.output
    said = [
        [json.loads(line) for line in process.output.splitlines() if line.startswith("{")]
        for process in launch.processes
    ]
    return list(zip(*said, strict=True))


def test_what_survives_of_a_replicated_model_is_loaded_by_the_argument_that_the_error_names(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    with Cluster(2) as cluster:
        (_, saved) = run(cluster, script, ("load", {}), ("save", 10))
        assert [one["outcome"] for one in saved] == ["ok"] * 2
        cluster[0].kill()
        cluster[0].wipe()
        prefixes = ["lr", "model"]
        newest, asked, accident, sharded, chosen, left, saved, again = run(
            cluster,
            script,
            ("load", {}),
            ("load", {"step": 10}),
            ("load", {"strict": False}),
            ("load", {"step": 10, "keys": ["fsdp"]}),
            ("load", {"step": 10, "keys": prefixes, "read_only": True}),
            ("load", {"step": 10, "strict": False}),
            ("save", 11),
            ("load", {}),
        )
    for code, errors in (("FC-LOAD-002", newest), ("FC-LOAD-001", asked)):
        for one in errors:
            assert one["code"] == code, one
            assert "complete: 'lr', 'model'; incomplete: 'fsdp.w'" in one["message"]
            assert "PerRank parts of ranks [0] are missing: 'rng'" in one["message"]
            assert f"load(step=10, keys={prefixes})" in one["message"]
            assert "load(step=10, strict=False)" in one["message"]
    assert {one["code"] for one in accident} == {"FC-LOAD-002"}, "never without naming the step"
    assert {one["code"] for one in sharded} <= {"FC-STR-002", "FC-RANK-001"}, sharded
    for rank, found in enumerate(chosen):
        assert (found["step"], found["lr"], set(found["model"])) == (10, 10.0, {10.0}), found
        assert found["rng"] == [-1.0 + rank] * 4, "not asked for"
        assert found["extra"] == {"seen": 10}
    for rank, found in enumerate(left):
        assert (found["step"], found["lr"], set(found["model"])) == (10, 10.0, {10.0}), found
        assert set(found["fsdp"]) == {-1.0}, "never a part of a tensor"
        assert found["rng"] == [10.0 + rank if rank else -1.0] * 4
        assert found["missing"] == ["fsdp.w"] if rank else ["fsdp.w", "rng.state"]
    assert [one["outcome"] for one in saved] == ["ok"] * 2
    for rank, found in enumerate(again):
        assert (found["step"], set(found["fsdp"]), found["rng"]) == (11, {11.0}, [11.0 + rank] * 4), found
