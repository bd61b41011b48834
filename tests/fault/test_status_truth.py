"""What `status`, `ls` and agent.log say when more nodes are lost than copies were made: the truth, or that they do not
know."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest

from flashckpt.testing import Cluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
PEER_TIMEOUT = 2.0
CONFIG = {"replicas": 1, "peer_timeout": PEER_TIMEOUT, "save_timeout": 30, "start_timeout": 60}


def ask(node, command):
    done = node.python("-m", "flashckpt.cli", command, "--job", node.job, "--memory-dir", node.memory_dir, "--json")
    (job,) = json.loads(done.stdout)["jobs"]
    return job


def text(node, command):
    return node.python("-m", "flashckpt.cli", command, "--job", node.job, "--memory-dir", node.memory_dir).stdout


def warnings(node):
    found = "".join(path.read_text() for path in sorted(Path(node.memory_dir).glob("*/agent.log*"), reverse=True))
    return [line for line in found.splitlines() if re.search(r"WARNING", line)], found


def test_two_of_three_nodes_lost_with_their_memory():
    with Cluster(3) as cluster:
        trainers = cluster.trainers(config=CONFIG, mebibytes=0.1)
        trainers.wait_started()
        trainers.load()
        for step in (1, 2, 3):
            assert {one["outcome"] for one in trainers.save(step, "replicated").values()} == {"ok"}
        last = cluster[2]
        deadline = time.monotonic() + 20
        while (said := ask(last, "status"))["kept"]["verdict"]["safety"] != "safe":
            assert time.monotonic() < deadline, said["kept"]
            time.sleep(0.2)
        assert said["kept"]["verdict"]["words"].startswith("any 1 node")
        assert "committed" not in warnings(last)[1], "saves are no news"

        trainers.kill()
        for node in cluster.nodes[:2]:
            node.kill()
            node.wipe()
        lost_at = time.monotonic()
        seen = []
        while True:
            asked_at = time.monotonic() - lost_at
            job = ask(last, "status")
            verdict = job["kept"]["verdict"]
            seen.append((asked_at, verdict["safety"], verdict["source"]))
            for peer in job["peers"]:
                assert peer["state"] != "up" or "refused" not in peer["problem"], peer
            if verdict["safety"] == "lost":
                break
            # Not known for a while; never that all is well, and never in the name of who does not speak.
            assert asked_at < 5 or verdict["safety"] == "unknown", seen
            assert asked_at < 60, seen
        assert verdict["source"] == last.name
        (ranks,) = {tuple(job["kept"]["health"]["lost"]["ranks"])}
        assert len(ranks) == 1, "two of the three shards, or their copies, lie here"
        said = text(last, "status")
        assert "any 1 node" not in said
        assert f"no live node has shard {ranks[0]}" in said

        def states(command):
            return {one["step"]: (one["state"], one["level"]) for one in ask(last, command)["generations"]}

        deadline = time.monotonic() + 10
        while states("ls")[3] != ("lost", None):
            assert time.monotonic() < deadline, states("ls")
            time.sleep(0.2)
        assert states("status")[3] == ("lost", None)

        # A launch on what is left and two blank nodes finds nothing that is whole.
        again = cluster.trainers(config=CONFIG, mebibytes=0.1)
        again.wait_started()
        number = again.send("load", step=None, arguments={})
        errors = again.wait_for("error", number=number)
        assert {one["code"] for one in errors.values()} == {"FC-LOAD-002"}
        again.stop()
        for command in ("ls", "status"):
            assert states(command)[3] == ("lost", None), command
            assert re.search(r"\blost\b", text(last, command))
        lines, whole = warnings(last)
        for node in cluster.nodes[:2]:
            assert sum(f"node {node.name} is lost" in line for line in lines) == 1, whole
        assert sum("no node that answers has shard" in line for line in lines) == 1, whole


def test_a_lost_node_and_its_healing_are_a_line_each():
    with Cluster(3) as cluster:
        trainers = cluster.trainers(config=CONFIG, mebibytes=0.1)
        trainers.wait_started()
        trainers.load()
        trainers.save(1, "replicated")
        first = cluster[0]
        cluster[1].kill()
        cluster[1].wipe()
        deadline = time.monotonic() + 60
        while not any("healed" in line for line in warnings(first)[0]):
            assert time.monotonic() < deadline, warnings(first)[1]
            time.sleep(0.2)
        lines, whole = warnings(first)
        assert sum("node node1 is lost" in line for line in lines) == 1, whole
        assert sum("fewer than 2 copies" in line for line in lines) == 1, whole
        assert sum("healed: every shard has 2 copies" in line for line in lines) == 1, whole
        assert ask(first, "status")["kept"]["verdict"]["safety"] == "safe"
