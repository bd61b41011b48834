"""What `ls` and `status` say of a node of several: from its directory alone, and with its agent's word."""

from __future__ import annotations

import dataclasses
import json
import time

import pytest
from click.testing import CliRunner

from flashckpt.agent.lock import AgentLock, Holder
from flashckpt.agent.process import Options
from flashckpt.agent.start import SeenAgent
from flashckpt.agent.status import describe
from flashckpt.cli import ls, status
from flashckpt.cli.memory import view
from flashckpt.protocol.core import AgentCore
from flashckpt.protocol.events import Pushed, PushEnd, Started, Tick, Told
from flashckpt.protocol.line import from_fence
from flashckpt.protocol.wire import Envelope, Holds
from flashckpt.rpc.session import encode_session
from flashckpt.store.directory import open_directory
from flashckpt.store.owner import Owner
from flashckpt.store.slots import SlotStore
from flashckpt.types import Generation, Held, Launch, Member, Record, Session, ShardId

JOB = "run1"
LAUNCH = Launch(epoch=100, nonce=7)
SESSION = Session(
    launch=LAUNCH,
    world=3,
    members=(
        Member("node-a", "10.0.0.1:7000", "rack1", (0, 1)),
        Member("node-b", "10.0.0.2:7000", "rack2", (2,)),
    ),
    replicas=1,
    strategy="ring",
    slots_per_rank=2,
)


def generation(step, launch=LAUNCH):
    return Generation(launch.epoch, launch.nonce, step, step)


def shard(step, rank, launch=LAUNCH):
    return ShardId(generation(step, launch), rank, 3)


def seal(store, *shards):
    for one in shards:
        store.seal(store.claim(store.granule_bytes), one)


@pytest.fixture
def store(memory_dir):
    with SlotStore.open(memory_dir, JOB) as opened:
        yield opened


def run(command, memory_dir, *arguments, code=0):
    result = CliRunner().invoke(command, ["--memory-dir", memory_dir, "--job", JOB, *arguments])
    assert result.exit_code == code, (result.output, result.exception)
    return result


def test_a_committed_generation_is_complete_though_not_all_shards_are_here(store, memory_dir):
    store.write_session(encode_session(SESSION))
    seal(store, shard(10, 0), shard(10, 1), shard(20, 0), shard(20, 1))
    store.write_record(Record(generation(10), 3, 1, committed_at=1.5))
    newest, committed = view(store, JOB).generations
    assert (committed.state, committed.level.name) == ("complete", "REPLICATED")
    assert committed.reason == "committed: every rank sealed; copies on other nodes: 1"
    assert newest.level.name == "NONE"
    lines = run(ls.command, memory_dir).stdout.splitlines()
    assert lines[0].split() == ["job", "step", "ranks", "state", "level", "size", "age", "reason"]
    assert lines[1].split()[:4] == [JOB, "20", "2/3", "pending"]
    assert lines[2].split()[:5] == [JOB, "10", "2/3", "complete", "replicated"]
    found = json.loads(run(ls.command, memory_dir, "--json").stdout)["jobs"][0]["generations"]
    assert [one["level"] for one in found] == [None, "replicated"]
    assert [one["copies_elsewhere"] for one in found] == [None, 1]
    assert [one["committed_at"] for one in found] == [None, 1.5]


def test_without_copies_a_commit_is_no_more_than_sealed(store):
    seal(store, *(shard(10, rank) for rank in range(3)))
    store.write_record(Record(generation(10), 3, 0, committed_at=1.5))
    (found,) = view(store, JOB).generations
    assert (found.state, found.level.name) == ("complete", "SEALED")


def test_what_others_may_have_is_partial_not_dead(store):
    old = Launch(epoch=50, nonce=3)
    seal(store, shard(10, 0, old))
    seal(store, shard(20, 0), shard(20, 1))
    (newest, oldest) = view(store, JOB).generations
    assert oldest.state == "dead", "without a session there is one node, and nobody has the rest"
    store.write_session(encode_session(SESSION))
    (newest, oldest) = view(store, JOB).generations
    assert (oldest.state, oldest.reason) == ("partial", "no shard of ranks [1, 2] here; other nodes may have them")
    assert newest.state == "pending"
    store.mark_void(generation(10, old))
    assert view(store, JOB).generations[1].state == "dead"


def test_a_fence_kills_what_was_committed(store):
    seal(store, *(shard(10, rank) for rank in range(3)))
    store.write_record(Record(generation(10), 3, 1, committed_at=1.5))
    store.write_line(from_fence(step=5, epoch=200, nonce=1))
    (found,) = view(store, JOB).generations
    assert (found.state, found.level.name) == ("dead", "NONE")
    assert found.as_json()["level"] is None


def test_a_session_that_nobody_understands_is_left_out(store, memory_dir):
    store.write_session(b"{}")
    seal(store, shard(10, 0))
    assert view(store, JOB).session is None
    assert "session" in run(status.command, memory_dir).stderr


def test_status_from_the_directory_alone(store, memory_dir):
    store.write_session(encode_session(SESSION))
    seal(store, shard(10, 0), shard(10, 1))
    store.write_record(Record(generation(10), 3, 1, committed_at=1.5))
    found = json.loads(run(status.command, memory_dir, "--json").stdout)
    assert found["schema"] == "flashckpt.status/v1"
    (job,) = found["jobs"]
    assert (job["agent"], job["backlog"], job["trainers"]) == (None, None, None), "None is not empty: nobody knows"
    assert job["launch"] == {"epoch": 100, "nonce": f"{7:016x}"}
    assert [(one["node"], one["state"]) for one in job["peers"]] == [("node-a", "unknown"), ("node-b", "unknown")]
    assert job["generations"][0]["level"] == "replicated"
    assert job["generations"][0]["shards"][0]["holders"] is None
    assert job["memory"]["sealed"]["files"] == 2
    text = run(status.command, memory_dir).stdout
    assert "no agent runs" in text
    assert "launch epoch 100" in text


def test_nothing_there(memory_dir):
    result = CliRunner().invoke(status.command, ["--memory-dir", memory_dir, "--job", JOB])
    assert result.exception.code == "FC-LOAD-001"
    SlotStore.open(memory_dir, JOB).close()
    run(status.command, memory_dir, code=3)


def seen_by(core, store, now):
    """What the real agent would answer."""
    options = Options(job=JOB, memory_dir=str(store.path.parent), node_id=core.node_id)
    said = describe(
        core,
        now,
        options=options,
        store=store.status(),
        uptime=5.0,
        leases=[{"rank": 0, "pid": 1}],
        address="10.0.0.1:7000",
        scrubbed=(1, 0),
        draining=False,
        flushed_bytes=0,
    )
    holder = Holder(Owner.current(), "9.9", JOB, time.time() - 300)
    return SeenAgent(holder, json.loads(json.dumps(said)), "", "/log")


def test_status_with_the_agents_word(store, capsys):
    store.write_session(encode_session(SESSION))
    seal(store, shard(10, 0), shard(10, 1), shard(10, 2))
    held = tuple(Held(shard(10, rank), bytes([rank]) * 16, store.granule_bytes, 0) for rank in range(3))
    core = AgentCore("node-a")
    core.handle(Started(held, (), (), SESSION), 0.0)
    core.handle(Pushed(shard(10, 0), "node-b", PushEnd.ACKED, digest=bytes(16)), 1.0)
    core.handle(Pushed(shard(10, 1), "node-b", PushEnd.FAILED, reason="\x1b[31mconnection reset"), 2.0)
    shown = status.overview_of(view(store, JOB), seen_by(core, store, 60.0), time.time())
    (found,) = shown["generations"]
    assert [(one["rank"], one["own"], one["holders"]) for one in found["shards"]] == [
        (0, True, ["node-b"]),
        (1, True, []),
        (2, False, []),
    ]
    assert found["waiting_for_ranks"] == [1, 2]
    assert [(one["rank"], one["to"]) for one in shown["backlog"]] == [(1, "node-b")]
    (peer,) = shown["peers"]
    assert (peer["node"], peer["state"]) == ("node-b", "down")
    assert "status" not in shown["agent"]
    json.dumps(shown)
    status._print(shown)
    text = capsys.readouterr().out
    assert "run1 on node-a: agent pid" in text
    assert "trainers: 1" in text
    assert "0 on node-b; keeps 1 for others" in text
    assert "copies to make: 1" in text
    assert "down for" in text
    assert "replicas: 1 of 1" in text
    assert "\x1b" not in text


def test_what_is_kept_is_shown_with_the_losses_it_would_survive(store, capsys):
    """Node-b is gone: what it held has one copy left."""
    store.write_session(encode_session(SESSION))
    seal(store, shard(10, 0), shard(10, 1), shard(10, 2))
    record = Record(generation(10), 3, 1, committed_at=1.5)
    held = tuple(Held(shard(10, rank), bytes([rank]) * 16, store.granule_bytes, 0) for rank in range(3))
    core = AgentCore("node-a")
    core.handle(Started(held, (), (record,), SESSION), 0.0)
    core.handle(Tick(), 1.0)
    shown = status.overview_of(view(store, JOB), seen_by(core, store, 1.0), time.time())
    assert shown["kept"]["health"] is None, "node-b may still speak"
    core.handle(
        Told(Envelope("node-b", SESSION.launch, None, Holds(generation(10), 3, True, (2,), (1,), (bytes([2]) * 16,)))),
        2.0,
    )
    core.handle(Tick(), 2.0)
    shown = status.overview_of(view(store, JOB), seen_by(core, store, 2.5), time.time())
    assert shown["kept"]["health"]["survives"]["words"] == "nothing may be lost: node-a holds the only copy of shard 0"
    assert shown["kept"]["health"]["healing"]["copies"] == 2
    status._print(shown)
    text = capsys.readouterr().out
    assert "kept: step 10: replicated, copies of each shard: at least 1, wanted 2 (node-a said so" in text
    assert "survives the loss of: nothing may be lost" in text
    assert "at risk: shard 0, 1; lost: no shard" in text
    assert "being made: 0 from node-a to node-b, 1 from node-a to node-b" in text
    for now in (4.0, 6.0, 8.0, 10.0, 12.0, 14.0):
        core.handle(Tick(), now)
    shown = status.overview_of(view(store, JOB), seen_by(core, store, 14.0), time.time())
    assert shown["kept"]["health"]["missing_nodes"] == ["node-b"]
    status._print(shown)
    assert "not heard of: node-b" in capsys.readouterr().out


def test_records_of_what_is_not_here_are_shown_by_the_agent_alone(store):
    core = AgentCore("node-a")
    core.handle(Started((), (), (Record(generation(10), 3, 1, 1.5),), SESSION), 0.0)
    shown = status.overview_of(view(store, JOB), seen_by(core, store, 1.0), time.time())
    assert shown["generations"] == []
    assert [one["step"] for one in shown["records_only"]] == [10]


def test_an_agent_that_does_not_answer_is_named(store, memory_dir):
    """This very process holds the lock, and serves nothing."""
    directory = open_directory(memory_dir, JOB)
    try:
        with AgentLock(directory):
            (job,) = json.loads(run(status.command, memory_dir, "--json", "--timeout", "0.1").stdout)["jobs"]
            assert (job["agent"]["answers"], job["peers"]) == (False, None)
            assert job["agent"]["problem"]
            assert "does not answer" in run(status.command, memory_dir, "--timeout", "0.1").stdout
    finally:
        directory.close()


def test_holders_are_plain_values(store):
    """What is shown has to survive JSON as it is."""
    seen = dataclasses.replace(seen_by(AgentCore("node-a"), store, 0.0), status=None, problem="hung")
    shown = status.overview_of(view(store, JOB), seen, time.time())
    assert json.loads(json.dumps(shown)) == shown
