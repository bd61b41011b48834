"""Ordinary actions of users and operators destroy, hide or mix no history: real trainers and agents on many nodes."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

import pytest

from flashckpt.testing import Cluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

CONFIG = {"save_timeout": 20.0, "peer_timeout": 5.0}


@pytest.fixture
def cluster():
    with Cluster(4) as cluster:
        yield cluster
        assert cluster.check(timeout=30) == []


def launch(cluster, *nodes, **config):
    """Trainers on these nodes, which have a Checkpointer."""
    trainers = cluster.trainers(nodes=[cluster.nodes[i] for i in nodes], config={**CONFIG, **config})
    trainers.wait_started()
    return trainers


def session(cluster, nodes, *, loads=None, saves=(), level="replicated", config=None, killed=False, **arguments):
    """One launch from start to end: loads, which has to give step `loads`, and saves. Ranks that did not exist when the
    step was saved have nothing of their own to get back."""
    trainers = launch(cluster, *nodes, **(config or {}))
    loaded = trainers.load(**arguments)
    assert {one["step"] for one in loaded.values()} == {loads}, loaded
    assert loads is None or all(loaded[rank]["matches"] for rank in (0, 1) if rank in loaded), loaded
    for step in saves:
        assert {one["outcome"] for one in trainers.save(step, level, timeout=120).values()} == {"ok"}
    if killed:  # with the agents, so that they bring nothing to disk
        for node in trainers.launch.nodes:
            node.kill()
    else:
        assert set(trainers.stop()) == {0}
    return loaded[0]


def refused(cluster, nodes, config=None, **arguments):
    """The one error that load() raises on all ranks of a launch."""
    trainers = launch(cluster, *nodes, **(config or {}))
    step = arguments.pop("step", None)
    number = trainers.send("load", step=step, arguments=arguments)
    errors = trainers.wait_for("error", number=number, timeout=60)
    assert set(trainers.stop()) == {0}
    assert len({one["message"] for one in errors.values()}) == 1
    return errors[0]


def steps_on(cluster, node):
    """Steps that shards lie of on a node."""
    found = re.findall(r"e\d+-[0-9a-f]+-(\d+)-\d+\.r", "\n".join(map(str, sealed(cluster, node))))
    return {int(step) for step in found}


def sealed(cluster, node):
    return sorted(path.name for path in Path(cluster.nodes[node].memory_dir).rglob("sealed/*"))


def histories_in(message):
    return re.findall(r"history ([0-9a-f]{16}): newest", message)


def test_a_stray_launch_that_saves_nothing_changes_nothing(cluster):
    """Issue 1: afterwards all nodes together were refused ("fenced: step -1")."""
    session(cluster, [0, 1], saves=[100])
    session(cluster, [2], config={"replicas": 0})
    found = session(cluster, [0, 1, 2], loads=100, saves=[101])
    assert found["stepped_over"] == []
    # And it was the documented replacement of a lost node.
    session(cluster, [3], config={"replicas": 0})
    cluster.nodes[1].kill()
    cluster.nodes[1].replace()
    session(cluster, [0, 3, 2], loads=101)


def test_a_stray_launch_that_saves_is_another_history_and_both_survive(cluster):
    """Issue 1: all nodes together resumed from step 2 without a word, and step 100 was deleted."""
    session(cluster, [0, 1], saves=[100])
    # Without replicas, so that each of its nodes has one half.
    session(cluster, [2, 3], saves=[1, 2], level="sealed", config={"replicas": 0})
    before = [sealed(cluster, node) for node in range(4)]
    for _ in range(2):
        error = refused(cluster, [0, 1, 2, 3])
        assert error["code"] == "FC-LOAD-003"
        names = histories_in(error["message"])
        assert len(names) == 2, error
        assert "step 100" in error["message"]
        assert "step 2" in error["message"]
    # Whoever has only half of the other history is not concerned, and leaves it alone.
    session(cluster, [0, 1, 2], loads=100, saves=[101])
    assert steps_on(cluster, 2) >= {2}
    assert [sealed(cluster, 3)] == before[3:]
    assert refused(cluster, [0, 1, 2, 3])["code"] == "FC-LOAD-003"
    # A look at either is no choice.
    for name, step in zip(histories_in(refused(cluster, [0, 1, 2, 3])["message"]), (2, 101), strict=True):
        session(cluster, [0, 1, 2, 3], loads=step, history=name, read_only=True)
    # A person chooses; from then on the other one is abandoned.
    name = histories_in(refused(cluster, [0, 1, 2, 3])["message"])[0]
    session(cluster, [0, 1, 2, 3], loads=2, history=name, saves=[3])
    session(cluster, [0, 1, 2, 3], loads=3)


def histories(cluster, node, *arguments):
    """`flashckpt histories` on one node."""
    return cluster.nodes[node].run([sys.executable, "-m", "flashckpt.cli", "histories", *arguments])


def launches_on(cluster, node):
    """What the command on one node says of launches that it has steps of, by the newest of those steps."""
    found = json.loads(histories(cluster, node, "--json").stdout)["launches"]
    return {one["steps"][-1]["step"]: one for one in found if one["steps"]}


def test_a_choice_on_one_node_counts_for_all(cluster):
    nodes = [0, 1, 2, 3]
    names = [cluster.nodes[node].name for node in nodes]
    session(cluster, [0, 1], saves=[100])
    session(cluster, [2, 3], saves=[1, 2], level="sealed", config={"replicas": 0})
    # Here only one is known: a choice would say nothing to the nodes that have the other one.
    name = launches_on(cluster, 0)[100]["name"]
    result = histories(cluster, 0, "choose", name)
    assert (result.returncode, "FC-LOAD-001" in result.stderr) == (3, True), result.stderr
    # Node 2 learns of the other one, and keeps its half of the first.
    session(cluster, [0, 1, 2], loads=100, saves=[101])
    error = refused(cluster, nodes)
    assert error["code"] == "FC-LOAD-003"
    found = launches_on(cluster, 2)
    assert {found[step]["name"] for step in (2, 101)} == set(histories_in(error["message"]))
    assert [found[step]["state"] for step in (2, 101)] == ["one of several histories"] * 2
    assert [found[step]["steps"][-1]["nodes"] for step in (2, 101)] == [names[2:], names[:3]]
    before = [sealed(cluster, node) for node in nodes]
    result = histories(cluster, 2, "choose", found[2]["name"][:8])
    assert result.returncode == 0, result.stderr
    assert found[2]["name"] in result.stderr
    assert [sealed(cluster, node) for node in nodes] == before
    session(cluster, nodes, loads=2, saves=[3])
    # Beside live trainers nobody chooses.
    trainers = launch(cluster, *nodes)
    assert {one["step"] for one in trainers.load().values()} == {3}
    for verb in ("choose", "abandon"):
        result = histories(cluster, 2, verb, found[101]["name"])
        assert (result.returncode, "FC-JOB-002" in result.stderr) == (1, True), result.stderr
    assert histories(cluster, 2).returncode == 0
    assert {one["outcome"] for one in trainers.save(4, "replicated").values()} == {"ok"}
    assert set(trainers.stop()) == {0}


def test_a_step_that_is_named_resolves_two_histories(cluster):
    session(cluster, [0, 1], saves=[100])
    session(cluster, [2, 3], saves=[1, 2])
    session(cluster, [0, 1, 2, 3], loads=100, step=100, saves=[101])
    session(cluster, [0, 1, 2, 3], loads=101)


def test_what_a_rollback_abandoned_never_comes_back(cluster):
    """Issue 2, in memory: a node that was away during the rollback brought it back."""
    session(cluster, [0, 1, 2], saves=[10], config={"replicas": 2})
    # Step 20 lies on all of them; node 2 is away when the job goes back to 10, which it still has.
    session(cluster, [0, 1, 2], loads=10, saves=[20], config={"replicas": 2, "keep_memory": 2})
    away = sealed(cluster, 2)
    session(cluster, [0, 1], loads=10, step=10, saves=[12], config={"replicas": 1, "keep_memory": 2})
    session(cluster, [0, 1], loads=12, saves=[15], config={"replicas": 1, "keep_memory": 2})
    session(cluster, [0, 1], loads=15, config={"replicas": 1, "keep_memory": 2})
    assert away == sealed(cluster, 2)
    found = session(cluster, [0, 1, 2], loads=15, config={"keep_memory": 2}, saves=[16])
    assert any("abandoned" in one for one in found["stepped_over"]), found
    assert 20 not in steps_on(cluster, 2)
    # It is named, and asked for it is refused with the way back to it.
    error = refused(cluster, [0, 1, 2], step=20)
    assert error["code"] == "FC-DIR-001" or "20" in error["message"]


def test_an_evaluation_that_fetches_from_other_nodes_leaves_the_training_alone(cluster):
    """Readers spoke in the name of their own launch, which holders then took for the one that owns the job."""
    training = launch(cluster, 0, 1, 2)
    training.load()
    assert {one["outcome"] for one in training.save(1, "replicated").values()} == {"ok"}
    # Each rank runs on another node than in the training, and one node lacks what its rank reads.
    found = session(cluster, [1, 2, 0], loads=1, read_only=True)
    assert found["source"] == "peer" or found["source"] == "memory"
    assert {one["outcome"] for one in training.save(2, "replicated", timeout=30).values()} == {"ok"}
    assert set(training.stop()) == {0}


def lose_all_memory(cluster):
    for node in cluster.nodes:
        node.kill()
        node.replace()


def steps_in(persist_dir):
    return sorted(path.name for path in persist_dir.glob("step-*"))


def test_what_a_rollback_abandoned_never_comes_back_from_disk(cluster, tmp_path):
    """Issue 2, on disk: steps 10, 20, 30; back to 10, 15 is persisted; restarted at 25; all memory is lost. The load
    took step 20, which was abandoned."""
    config = {"persist_dir": str(tmp_path / "persist"), "keep_memory": 4}
    persist_dir = tmp_path / "persist"
    session(cluster, [0, 1], saves=[10, 20, 30], level="persisted", config=config)
    session(cluster, [0, 1], loads=10, step=10, saves=[15], level="persisted", config=config)
    session(cluster, [0, 1], loads=15, saves=[25], config=config, killed=True)
    session(cluster, [0, 1], loads=25, config=config, killed=True)
    lose_all_memory(cluster)
    found = session(cluster, [0, 1], loads=15, config=config)
    assert found["source"] == "persist"
    assert {"step-10", "step-15", "step-20", "step-30"} <= set(steps_in(persist_dir))
    history = json.loads((persist_dir / "history.json").read_text())
    (line,) = history["lines"]
    assert [step for _, _, step in line["listed"] if step >= 0] == [10, 15]
    # A person may go back to it.
    lose_all_memory(cluster)
    error = refused(cluster, [0, 1], config=config, step=30)
    name = re.search(r"history='([0-9a-f]{16})'", error["message"])
    assert name is not None, error
    session(cluster, [0, 1], loads=30, step=30, history=name[1], config=config)


def test_a_damaged_history_on_disk_hides_no_step(cluster, tmp_path):
    """Issue 4: every intact step counted as unusable, and the hint's allow_fresh replaced them."""
    persist_dir = tmp_path / "persist"
    config = {"persist_dir": str(persist_dir)}
    session(cluster, [0, 1], saves=[1, 2], level="persisted", config=config)
    session(cluster, [0, 1], loads=2, config=config)
    path = persist_dir / "history.json"
    good = path.read_bytes()
    path.write_bytes(good[: len(good) // 2])
    lose_all_memory(cluster)
    session(cluster, [0, 1], loads=1, step=1, config=config, read_only=True)
    session(cluster, [0, 1], loads=2, config=config, saves=[3], level="persisted")
    # It was set aside and written anew.
    assert json.loads(path.read_bytes())["schema"] == "flashckpt.history/v1"
    assert len(list(persist_dir.glob("history.json.damaged-*"))) == 1
    lose_all_memory(cluster)
    session(cluster, [0, 1], loads=3, config=config)
    shutil.rmtree(persist_dir)


def test_a_damaged_line_in_memory_hides_no_step(cluster):
    session(cluster, [0, 1], saves=[1, 2])
    session(cluster, [0, 1], loads=2, saves=[3])
    for node in (0, 1):
        cluster.nodes[node].kill()  # agents read it when they start
        for path in Path(cluster.nodes[node].memory_dir).rglob("line-*"):
            path.write_bytes(path.read_bytes()[:-3])
    session(cluster, [0, 1], loads=3, step=3, read_only=True)
    session(cluster, [0, 1], loads=3, saves=[4])
    for node in (0, 1):
        assert list(Path(cluster.nodes[node].memory_dir).rglob("damaged-line-*"))
        assert list(Path(cluster.nodes[node].memory_dir).rglob("*/line-*"))
