"""How replication goes on reaches the training: two nodes, whose agents are stopped, and who are lost.

This file is also the script that the ranks run.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import pytest


def until(condition, what, timeout=60.0):
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def train(directory):
    import torch
    import torch.distributed as dist

    import flashckpt

    def tell(name):
        (directory / name).touch()

    def wait_for(name):
        until((directory / name).exists, name)

    dist.init_process_group("gloo")
    rank, events = dist.get_rank(), []
    config = flashckpt.CheckpointConfig(
        replicas=1,
        peer_timeout=3,
        save_timeout=30,
        slots_per_rank=4,
        overlap=False,
        enable_first_step_checkpoint=False,
    )
    manager = flashckpt.CheckpointManager(config, model=torch.nn.Linear(16, 16), on_event=events.append)

    def heard(kind):
        manager.metrics()
        return [(event.step, event.reason) for event in events if event.kind == kind]

    def save(step):
        handle = manager.save(step)
        assert handle.outcome == "ok", handle.reason
        return handle

    assert save(1).wait("replicated", 30) == "ok"
    if rank == 1:
        save(2)
        tell("saved")
        wait_for("resumed")
        wait_for("left out")
        assert save(4).wait("replicated", 30) == "ok"
        tell("done")
        time.sleep(600)
    wait_for("stopped")
    late = save(2)
    try:
        late.wait("replicated", 6)
    except flashckpt.DeadlineError as error:
        problem, message = error.problem, error.message
    metrics = manager.metrics()
    tell("late")
    wait_for("resumed")
    found = {
        "problem": problem,
        "message": message,
        "metrics": metrics.replication_problem,
        "later": late.wait("replicated", 30),
    }
    until(lambda: heard("going_on"), "replication goes on")
    given_up = save(3)
    tell("left out")
    found["newer"] = save(4).wait("replicated", 30)
    found["given_up"] = [given_up.wait("replicated", 30), given_up.reason]
    until(lambda: heard("failed"), "the step that is given up")
    found["replications"] = manager.metrics().replications
    wait_for("done")
    tell("kill")
    until(lambda: heard("at_risk")[-1:] and heard("at_risk")[-1][0] == 4, "copies below k")
    found["events"] = {kind: heard(kind) for kind in ("lagging", "going_on", "failed", "at_risk", "healed", "lost")}
    (directory / "found.json.new").write_text(json.dumps(found))
    os.rename(directory / "found.json.new", directory / "found.json")
    os._exit(0)  # the group's other rank is gone


if __name__ == "__main__":
    train(Path(sys.argv[1]))
    raise SystemExit


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_what_hinders_replication_is_heard_of(tmp_path):
    from flashckpt.testing import Cluster

    def wait_for(name):
        def is_there():
            assert launch.processes[0].returncode in (None, 0), launch.output
            return (tmp_path / name).exists()

        until(is_there, name, 90)

    with Cluster(2) as cluster:
        launch = cluster.start([sys.executable, __file__, str(tmp_path)])
        other = cluster[1]
        wait_for("saved")
        other.pause("agent")
        (tmp_path / "stopped").touch()
        wait_for("late")
        other.resume("agent")
        (tmp_path / "resumed").touch()
        wait_for("kill")
        other.kill()
        wait_for("found.json")
    found = json.loads((tmp_path / "found.json").read_text())
    assert f"{other.name} does not answer: " in found["problem"]
    assert found["message"].endswith(f"found sealed: {found['problem']}")
    assert found["metrics"] == found["problem"]
    assert (found["later"], found["newer"]) == ("ok", "ok")
    assert found["given_up"] == ["failed", "rank 1 went on to step 4 without it"]
    assert found["replications"] == {"done": 3, "failed": 1}
    events = found["events"]
    assert [(step, reason.startswith(other.name)) for step, reason in events["lagging"]] == [(2, True)]
    assert [step for step, _ in events["going_on"]] == [2]
    assert events["failed"] == [[3, "not replicated: rank 1 went on to step 4 without it"]]
    # Step 1 while the agent was stopped, for longer than peer_timeout; step 4 once the node is lost.
    assert [(step, "fewer than 2 copies" in reason) for step, reason in events["at_risk"]] == [(1, True), (4, True)]
    assert len(events["healed"]) == 1
    assert events["lost"] == []
