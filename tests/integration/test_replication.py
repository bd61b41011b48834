"""A sharded model that trains on several nodes under torchrun: what it saves is on other nodes, byte for byte.

This file is also the script that the ranks run.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time

import pytest

STEPS = 8
PAUSED_AT = 4  # where the test may interfere


def train(directory):
    """FSDP2 over all ranks; every step is saved and waited for."""
    import torch
    import torch.distributed as dist
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.fsdp import fully_shard

    import flashckpt

    dist.init_process_group("gloo")
    torch.manual_seed(1)
    model = torch.nn.Sequential(*(torch.nn.Linear(130, 130) for _ in range(4)))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    config = flashckpt.CheckpointConfig(replicas=1, save_timeout=30, peer_timeout=5)
    with flashckpt.Checkpointer(config) as checkpointer:
        for step in range(1, STEPS + 1):
            model(torch.randn(8, 130)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            states = get_state_dict(model, optimizer)
            handle = checkpointer.save(step, {"model": states[0], "optimizer": states[1], "step": step})
            outcome = handle.wait("replicated", timeout=60)
            # A file a rank: lines of ranks that share an output can run into each other.
            with open(f"{directory}/saved{dist.get_rank()}", "a") as saved:
                saved.write(f"{step} {outcome} {handle.level.name} {handle.reason}\n")
            if step == PAUSED_AT:
                open(f"{directory}/rank{dist.get_rank()}", "w").close()
                while not os.path.exists(f"{directory}/go"):
                    time.sleep(0.01)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    train(sys.argv[1])
    raise SystemExit


def _kinds():
    from flashckpt.testing import Cluster

    reason = Cluster.available("netns")
    return [
        pytest.param("loopback", [2, 1], id="loopback"),
        pytest.param(
            "netns", [1, 1], id="netns", marks=[pytest.mark.root, pytest.mark.skipif(bool(reason), reason=reason)]
        ),
    ]


def _doctor(node):
    found = node.python("-m", "flashckpt.cli", "doctor", "--job", node.job, "--memory-dir", node.memory_dir, "--json")
    return {one["check"]: (one["state"], one["found"]) for one in json.loads(found.stdout)["findings"]}


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize(("kind", "ranks"), _kinds())
def test_a_sharded_model_is_replicated_while_agents_die(kind, ranks, tmp_path):
    from flashckpt.testing import Cluster

    with Cluster(2, kind, ranks_per_node=ranks) as cluster:
        launch = cluster.torchrun(__file__, str(tmp_path))
        _wait(lambda: all((tmp_path / f"rank{rank}").exists() for rank in range(sum(ranks))), launch)
        assert cluster.check(timeout=30) == []
        assert _doctor(cluster[0])["network.peers"] == ("ok", "all 1 other nodes answer")
        victims = [node.agent_pid() for node in cluster.nodes]
        os.kill(victims[1], signal.SIGKILL)
        (tmp_path / "go").touch()
        assert launch.wait(120) == [0, 0], launch.output
        for rank in range(sum(ranks)):
            lines = (tmp_path / f"saved{rank}").read_text().splitlines()
            assert [line.split()[:3] for line in lines] == [
                [str(step), "ok", "REPLICATED"] for step in range(1, STEPS + 1)
            ]
        assert cluster[0].agent_pid() == victims[0]
        assert cluster[1].agent_pid() not in (None, victims[1])
        assert cluster.check(timeout=30) == []


def _wait(condition, launch, timeout=120.0):
    deadline = time.monotonic() + timeout
    while not condition():
        ended = [process.returncode for process in launch.processes if process.returncode is not None]
        if ended or time.monotonic() > deadline:
            raise AssertionError(f"exit codes {ended}\n{launch.output}")
        time.sleep(0.05)
