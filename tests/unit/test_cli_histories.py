"""`flashckpt histories`: what the tree says of each launch, and what a choice abandons, here and in persist_dir."""

from __future__ import annotations

import json
import os
import shutil
import sys

import pytest
import torch

import flashckpt
from flashckpt.cli import entry, histories
from flashckpt.errors import AgentError, AmbiguousHistoryError, LiveJobError, NotFoundError
from flashckpt.load.histories import pick
from flashckpt.persist.catalog import list_steps, read_lines
from flashckpt.persist.flush import flush
from flashckpt.persist.storage import open_storage
from flashckpt.protocol.flush_spec import FlushSpec
from flashckpt.protocol.line import Ancestor, Line, begun, from_fence, name_of
from flashckpt.rpc.session import encode_session
from flashckpt.store.slots import SlotStore
from flashckpt.types import Generation, Launch, Member, PersistSettings, Record, Session, ShardId

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

JOB = "job"
A, B, C, D = (Launch(1_000_000_000_000 + number, number << 60) for number in (0xA, 0xB, 0xC, 0xD))
LIKE_A = Launch(A.epoch + 9, A.nonce + 1)
ESCAPE = "\x1b[31mred\x9b"


def at(launch, step, seq=1):
    return Generation(launch.epoch, launch.nonce, step, seq)


def seal(store, launch, step, *ranks, world=1):
    for rank in ranks or (0,):
        store.seal(store.claim(store.granule_bytes), ShardId(at(launch, step), rank, world))


def session(launch, *members):
    nodes = tuple(Member(node, f"10.0.0.{rank}:7000", "", (rank,)) for rank, node in enumerate(members))
    return Session(launch, len(nodes), nodes, replicas=1, strategy="ring", slots_per_rank=2)


@pytest.fixture
def store(memory_dir):
    with SlotStore.open(memory_dir, JOB) as opened:
        yield opened


@pytest.fixture
def run(memory_dir, monkeypatch, capsys):
    """The command as its users run it: (stdout, stderr)."""
    monkeypatch.setenv("FLASHCKPT_NODE_ID", "node-a")

    def run(*arguments, code=0, options=()):
        where = ["--memory-dir", memory_dir, "--job", JOB, *options]
        monkeypatch.setattr(sys, "argv", ["flashckpt", "histories", *where, *arguments])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            entry.run()
        told = capsys.readouterr()
        assert ended.value.code == code, told.out + told.err
        return told

    return run


@pytest.fixture
def launches(run):
    """What --json says of each launch: the tests' own by the first letter of their names, a random one by its name."""

    def launches(*options):
        found = json.loads(run("--json", options=options).out)
        assert found["schema"] == "flashckpt.histories/v1"
        assert set(found) == {"schema", "job", "launches", "problems"}
        return {one["name"].removesuffix("0" * 15): one for one in found["launches"]}

    return launches


def one_rollback(store):
    """A saves up to 30; B goes on from 10 and is abandoned above 15; C goes on from there."""
    seal(store, A, 10)
    seal(store, A, 30)
    b = begun(A).continued(B, at(A, 10))
    for step in (15, 20):
        seal(store, B, step)
    c = b.continued(C, at(B, 15))
    seal(store, C, 16)
    for line in (begun(A), b, c):
        store.write_line(line)


def two_histories(store):
    for launch, step in ((A, 10), (B, 2)):
        seal(store, launch, step)
        store.write_line(begun(launch))


def picked(store):
    """What a load of this node alone would take, and what it may not."""
    whole = [one.shard.generation for one in store.scan()]
    found = pick(store.read_lines(), whole)
    return {one.step: found.why_not(one) for one in whole}


# --- the tree


def test_nothing_there(store, run):
    told = run(code=3)
    assert told.out == ""
    assert json.loads(run("--json", code=3).out)["launches"] == []


def test_one_launch(store, run, launches):
    seal(store, A, 10)
    store.write_line(begun(A))
    told = run()
    assert told.out.splitlines() == [
        "a000000000000000  2001-09-09 01:46:40 UTC  began with nothing  [current]",
        "     step 10: memory (node-a)",
    ]
    assert "other nodes may have more" in told.err
    assert launches() == {
        "a": {
            "name": name_of(A),
            "epoch": A.epoch,
            "state": "current",
            "up_to": None,
            "is_root": True,
            "parent": None,
            "from_step": None,
            "steps": [{"step": 10, "places": ["memory"], "nodes": ["node-a"]}],
        }
    }


def test_a_line_of_launches_stands_one_below_the_other(store, run, launches):
    one_rollback(store)
    assert [line.replace("  2001-09-09 01:46:40 UTC", "") for line in run().out.splitlines()] == [
        "a000000000000000  began with nothing  [continued up to step 10]",
        "│    step 10: memory (node-a)",
        "│    step 30: memory (node-a)",
        "b000000000000000  from step 10  [continued up to step 15]",
        "│    step 15: memory (node-a)",
        "│    step 20: memory (node-a)",
        "c000000000000000  from step 15  [current]",
        "     step 16: memory (node-a)",
    ]
    found = launches()
    assert [(one["parent"], one["from_step"], one["up_to"]) for one in found.values()] == [
        (None, None, 10),
        (name_of(A), 10, 15),
        (name_of(B), 15, None),
    ]


def test_what_was_left_behind_is_a_branch_of_its_own(store, run, launches):
    """As operations.md shows it."""
    seal(store, A, 100)
    seal(store, B, 150)
    seal(store, C, 120)
    b = begun(A).continued(B, at(A, 100))
    for line in (begun(A), b, b.continued(C, at(A, 100))):
        store.write_line(line)
    assert run().out.splitlines() == [
        "a000000000000000  2001-09-09 01:46:40 UTC  began with nothing  [continued up to step 100]",
        "│    step 100: memory (node-a)",
        "├─ b000000000000000  2001-09-09 01:46:40 UTC  from step 100  [abandoned]",
        "│       step 150: memory (node-a)",
        "└─ c000000000000000  2001-09-09 01:46:40 UTC  from step 100  [current]",
        "        step 120: memory (node-a)",
    ]
    assert [one["state"] for one in launches().values()] == ["continued", "abandoned", "current"]


def test_launches_whose_own_lines_are_gone_keep_their_places(store, launches):
    """The newest line alone is left, as in persist_dir."""
    for launch, step in ((A, 10), (B, 15), (C, 16), (D, 20)):
        seal(store, launch, step)
    line = begun(A).continued(B, at(A, 10)).continued(C, at(B, 15)).continued(D, at(B, 15))
    store.write_line(line)
    found = launches()
    assert {name: (one["is_root"], one["parent"], one["from_step"]) for name, one in found.items()} == {
        "a": (True, None, None),
        "b": (False, name_of(A), 10),
        "c": (False, None, None),  # abandoned: nothing tells any more what it went on from
        "d": (False, name_of(B), 15),
    }
    assert found["c"]["state"] == "abandoned"


def test_a_launch_that_saves_without_a_load_leaves_all_steps_standing(store, run, launches):
    seal(store, A, 10)
    store.write_line(begun(A))
    store.write_line(begun(B).including(begun(A), [at(A, 10)]))
    seal(store, B, 20)
    found = launches()
    assert (found["a"]["state"], found["a"]["up_to"], found["b"]["from_step"]) == ("continued", None, None)
    assert "[continued with all its steps]" in run().out
    assert "from all that was there  [current]" in run().out


def test_what_an_earlier_version_left_is_not_said_to_begin_with_nothing(store, run):
    seal(store, A, 10)
    store.write_line(from_fence(10, B.epoch, B.nonce))
    assert "what it continued is not known here" in run().out


def test_launches_of_which_nothing_is_left_are_counted(store, run, launches):
    """A job that was restarted again and again without a save."""
    seal(store, A, 10)
    line = begun(A)
    for number in range(1, 20):
        line = line.continued(Launch(A.epoch + number, number), at(A, 10))
    store.write_line(line)
    told = run()
    assert len(told.out.splitlines()) == 3
    assert "Not shown: 18 launches" in told.err
    assert len(json.loads(run("--json").out)["launches"]) == 20


def test_a_thousand_launches_are_no_deeper_than_one(store, run):
    older = tuple(Ancestor(Launch(A.epoch + number, 1), number) for number in range(1500))
    line = Line(Launch(A.epoch + 1500, 1), older[0].launch, older)
    store.write_line(line)
    seal(store, line.head, 2000)
    lines = run().out.splitlines()
    assert len(lines) == 1502
    assert max(map(len, lines)) < 120


def test_old_steps_of_a_launch_are_counted(store, run, launches):
    for step in range(12):
        seal(store, A, step)
    store.write_line(begun(A))
    lines = run().out.splitlines()
    assert lines[1].strip() == "4 older steps"
    assert len(lines) == 10
    assert len(launches()["a"]["steps"]) == 12


# --- nodes


def test_a_committed_step_names_the_nodes_of_its_launch(store, run, launches):
    store.write_past_session(A, encode_session(session(A, "node-a", "node-b")))
    store.write_session(encode_session(session(B, *(f"node-{letter}" for letter in "abcdef"))))
    seal(store, A, 10, world=2)
    seal(store, A, 20, world=2)
    seal(store, B, 11, 0, world=6)
    seal(store, C, 5)
    store.write_record(Record(at(A, 10), 2, 1, committed_at=1.5))
    store.write_record(Record(at(B, 11), 6, 1, committed_at=1.5))
    store.write_line(begun(A))
    store.write_line(begun(A).continued(B, at(A, 10)))
    found = launches()
    assert [(one["step"], one["places"], one["nodes"]) for one in found["a"]["steps"]] == [
        (10, ["memory"], ["node-a", "node-b"]),
        (20, ["partly in memory"], ["node-a"]),
    ]
    assert found["b"]["steps"][0]["nodes"] == [f"node-{letter}" for letter in "abcdef"]
    assert found["c"]["steps"][0]["nodes"] == ["node-a"]
    text = run().out
    assert "step 10: memory (node-a, node-b)\n" in text
    assert "step 20: partly in memory (node-a)\n" in text
    assert "step 11: memory (node-a, node-b, node-c, node-d and 2 more)\n" in text


def test_a_node_whose_name_is_not_known_is_this_node(store, launches):
    store.write_session(encode_session(session(A, "tom", "dick")))
    seal(store, A, 10, world=2)
    assert launches()["a"]["steps"][0]["nodes"] == ["this node"]


def test_a_session_that_nobody_understands_is_passed_over(store, launches):
    store.write_session(b"{}")
    seal(store, A, 10)
    assert launches()["a"]["steps"][0]["nodes"] == ["node-a"]


# --- two histories


def test_two_histories_are_both_shown_as_such(store, run, launches):
    two_histories(store)
    assert [one["state"] for one in launches().values()] == ["one of several histories"] * 2
    assert run().out.count("[one of several histories: choose one before a load]") == 2


def test_what_two_histories_share_is_continued_by_both(store, launches):
    seal(store, A, 10)
    seal(store, B, 11)
    seal(store, C, 12)
    for line in (begun(A), begun(A).continued(B, at(A, 10)), begun(A).continued(C, at(A, 7))):
        store.write_line(line)
    found = launches()
    assert (found["a"]["state"], found["a"]["up_to"]) == ("continued", 10)
    assert found["b"]["state"] == found["c"]["state"] == "one of several histories"


@pytest.mark.parametrize("name", ["b", "B000", "0xb0", "b000000000000000"])
def test_the_chosen_one_is_loaded_and_the_other_abandoned(store, run, launches, name):
    two_histories(store)
    with pytest.raises(AmbiguousHistoryError):
        picked(store)
    told = run("choose", name)
    assert f"continues with history {name_of(B)}" in told.err
    assert picked(store) == {2: "", 10: f"abandoned: the job went on without launch {name_of(A)}"}
    found = launches()
    assert found["a"]["state"] == "abandoned"
    assert (found["b"]["state"], found["b"]["up_to"]) == ("continued", None)
    # And back again: a choice takes nothing away.
    run("choose", name_of(A))
    assert picked(store) == {10: "", 2: f"abandoned: the job went on without launch {name_of(B)}"}


def test_the_abandoned_one_makes_way_for_the_only_other(store, run, launches):
    two_histories(store)
    run("abandon", "b")
    assert picked(store) == {10: "", 2: f"abandoned: the job went on without launch {name_of(B)}"}
    assert launches()["b"]["state"] == "abandoned"


@pytest.mark.parametrize(("doomed", "kept"), [("d", {10, 15, 16}), ("c", {1})])
def test_what_a_history_went_on_from_is_no_other_history(store, run, doomed, kept):
    """Abandon the stray one, and the rollback stands; abandon the other, and no part of its past is left to take."""
    one_rollback(store)
    seal(store, D, 1)
    store.write_line(begun(D))
    run("abandon", doomed)
    assert {step for step, why in picked(store).items() if not why} == kept


def test_of_three_one_is_chosen_not_abandoned(store, run):
    two_histories(store)
    seal(store, C, 3)
    store.write_line(begun(C))
    before = store.read_lines()
    told = run("abandon", "b", code=3)
    assert "expected one other history to go on with, found a000000000000000, c000000000000000" in told.err
    assert "flashckpt histories choose NAME" in told.err
    assert store.read_lines() == before
    run("choose", "c")
    assert {step for step, why in picked(store).items() if not why} == {3}


@pytest.mark.parametrize("verb", ["choose", "abandon"])
def test_the_only_history_is_neither_chosen_nor_abandoned(store, run, verb):
    """It would say nothing to the nodes that have the other one."""
    one_rollback(store)
    before = store.read_lines()
    told = run(verb, "c", code=3)
    assert "FC-LOAD-001" in told.err
    assert "load(history=…)" in told.err
    assert store.read_lines() == before


def test_a_person_goes_back_to_what_was_abandoned(store, run):
    seal(store, A, 100)
    seal(store, B, 150)
    b = begun(A).continued(B, at(A, 100))
    for line in (begun(A), b, b.continued(C, at(A, 100))):
        store.write_line(line)
    assert picked(store)[150] != ""
    run("choose", "b")
    assert picked(store) == {100: "", 150: ""}


@pytest.mark.parametrize(
    ("name", "found"), [("f", "found none among"), ("a0000", "found 2 among"), ("", "found none among"), ("..", "none")]
)
@pytest.mark.parametrize("verb", ["choose", "abandon"])
def test_a_name_that_fits_none_or_two(store, run, verb, name, found):
    two_histories(store)
    seal(store, LIKE_A, 3)
    store.write_line(begun(LIKE_A))
    before = store.read_lines()
    told = run(verb, name, code=entry.exit_code(NotFoundError("")))
    assert "error FC-LOAD-001" in told.err
    assert found in told.err
    assert store.read_lines() == before


def test_no_name_and_no_command(store, run):
    run("choose", code=2)
    run("forget", "a", code=2)


# --- damage, and what strangers put there


def test_a_damaged_line_is_named_and_hides_no_step(store, run, launches):
    one_rollback(store)
    (path,) = store.path.glob("line-*c000000000000000")
    path.write_bytes(path.read_bytes()[:-3])
    found = json.loads(run("--json").out)
    assert found["problems"] == [f"{path} is damaged and ignored"]
    assert f"{path} is damaged and ignored" in run().err
    assert {step["step"] for one in found["launches"] for step in one["steps"]} == {10, 15, 16, 20, 30}
    assert launches()["c"]["is_root"] is False


def test_no_name_reaches_the_terminal_as_it_is(store, run, tmp_path):
    store.write_session(encode_session(session(A, "node-a", ESCAPE)))
    seal(store, A, 10, world=2)
    store.write_record(Record(at(A, 10), 2, 1, committed_at=1.5))
    persist_dir = tmp_path / ESCAPE
    persist_dir.mkdir()
    (persist_dir / "history.json").write_text(json.dumps({"schema": ESCAPE}))
    for told in (
        run(options=("--persist-dir", str(persist_dir))),
        run("--json", options=("--persist-dir", str(persist_dir))),
        run("choose", ESCAPE, code=3),
        run("abandon", ESCAPE, code=3),
    ):
        assert not {"\x1b", "\x9b"} & set(told.out + told.err)
        assert "1b[31mred" in told.out + told.err


def test_beside_live_trainers_a_choice_is_refused(store, run, monkeypatch):
    """The real agent's word is tested in tests/integration/test_histories.py."""
    two_histories(store)
    before = store.read_lines()

    class Agent:
        status = {"trainers": [{"rank": 3, "pid": 4711}]}  # noqa: RUF012
        problem = ""

    monkeypatch.setattr("flashckpt.agent.start.look", lambda *_: Agent)
    told = run("choose", "a", code=1)
    assert LiveJobError.code in told.err
    assert "rank 3 (pid 4711)" in told.err
    monkeypatch.setattr(Agent, "status", None)
    assert AgentError.code in run("abandon", "a", code=1).err
    assert store.read_lines() == before
    run()


# --- persist_dir


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out"


@pytest.fixture
def other_dir(memory_dir):
    """The memory of a machine that does not hear of the first."""
    path = f"{memory_dir}-other"
    os.mkdir(path, 0o700)
    yield path
    shutil.rmtree(path)


def state(step):
    return {"a": torch.full((500,), float(step))}


def opened(memory_dir, out):
    # Without an agent nothing is written to persist_dir but by these tests.
    config = flashckpt.CheckpointConfig(
        job=JOB, memory_dir=memory_dir, persist_dir=str(out), persist_on_exit=False, keep_memory=3
    )
    return flashckpt.Checkpointer(config)


def launch(memory_dir, out, *steps, load=None, job=JOB):
    """One launch that saves these steps in memory and on disk."""
    with opened(memory_dir, out) as checkpointer:
        if load is not None:
            assert checkpointer.load(state(0), load).step == load
        for step in steps:
            generation = checkpointer.save(step, state(step)).generation
            flush(
                FlushSpec(
                    job=job,
                    memory_dir=memory_dir,
                    node_id="node",
                    generation=generation,
                    world=1,
                    writers=(("node", (0,)),),
                    coordinates=True,
                    attempt=f"{step:016x}",
                    reason="test",
                    settings=PersistSettings(str(out)),
                )
            )


def names(run, out):
    """(what the tree calls a launch, its steps) of those that have steps."""
    found = json.loads(run("--json", options=("--persist-dir", str(out))).out)["launches"]
    return {tuple(step["step"] for step in one["steps"]): one["name"] for one in found if one["steps"]}


def loaded(memory_dir, out, **how):
    with opened(memory_dir, out) as checkpointer:
        return checkpointer.load(state(0), **how).step


def wiped(*memory_dirs):
    for path in memory_dirs:
        shutil.rmtree(path)
        os.mkdir(path, 0o700)


def test_steps_on_disk_stand_in_the_same_tree(memory_dir, out, run):
    launch(memory_dir, out, 10, 20, 30)
    launch(memory_dir, out, 15, load=10)
    launch(memory_dir, out, 16, load=15)
    found = json.loads(run("--json", options=("--persist-dir", str(out))).out)["launches"]
    assert [(one["state"], one["up_to"]) for one in found] == [("continued", 10), ("continued", 15), ("current", None)]
    assert [[step["step"] for step in one["steps"]] for one in found] == [[10, 20, 30], [15], [16]]
    assert found[2]["steps"] == [{"step": 16, "places": ["memory", "disk"], "nodes": ["node-a"]}]
    assert [one["parent"] for one in found] == [None, found[0]["name"], found[1]["name"]]
    # And from the disk alone: the same tree.
    wiped(memory_dir)
    SlotStore.open(memory_dir, JOB).close()
    again = json.loads(run("--json", options=("--persist-dir", str(out))).out)["launches"]
    assert again[0]["steps"][2] == {"step": 30, "places": ["disk"], "nodes": []}
    for one in (*found, *again):
        one["steps"] = [step["step"] for step in one["steps"]]
    assert again == found


def test_a_damaged_history_and_a_damaged_step_are_named(memory_dir, out, run):
    launch(memory_dir, out, 10, 20)
    launch(memory_dir, out, 15, load=10)
    (out / "history.json").write_text('{"schema": 1')
    (out / "step-20" / ".metadata").unlink()
    found = json.loads(run("--json", options=("--persist-dir", str(out))).out)
    (problem,) = found["problems"]
    assert "history.json: expected the job's lines" in problem
    places = {step["step"]: step["places"] for one in found["launches"] for step in one["steps"]}
    assert {step: where[-1] for step, where in places.items()} == {10: "disk", 15: "disk", 20: "damaged on disk"}


def test_a_persist_dir_that_is_not_there_or_not_ours(memory_dir, out, run, store):
    seal(store, A, 10)
    store.write_line(begun(A))
    assert run(options=("--persist-dir", str(out))).out.count("step") == 1
    out.write_text("a file")
    assert str(out) in run(options=("--persist-dir", str(out))).err


def test_lines_of_another_job_are_not_ours(memory_dir, out, run, other_dir):
    launch(memory_dir, out, 10)
    (out / "flashckpt.json").write_text(
        json.dumps({"schema": "flashckpt.persist-dir/v1", "job": "stranger", "created": 1.0})
    )
    (out / "history.json").write_text(json.dumps({"schema": "flashckpt.history/v1", "lines": 7}))
    found = json.loads(run("--json", options=("--persist-dir", str(out))).out)
    assert "belongs to job 'stranger'" in found["problems"][0]
    before = (out / "history.json").read_bytes()
    with SlotStore.open(memory_dir, JOB) as store:
        two_histories(store)
    run("choose", "a0000", options=("--persist-dir", str(out)))
    assert (out / "history.json").read_bytes() == before


@pytest.mark.parametrize(("verb", "named", "kept"), [("choose", (5,), 5), ("abandon", (5,), 7)])
def test_a_choice_lies_in_persist_dir_too(memory_dir, other_dir, out, run, verb, named, kept):
    launch(memory_dir, out, 5)
    launch(other_dir, out, 6, 7)
    for path in (memory_dir, other_dir):
        with pytest.raises(AmbiguousHistoryError):
            loaded(path, out)
    name = names(run, out)[named]
    run(verb, name[:6], options=("--persist-dir", str(out)))
    whole = [one.generation for one in list_steps(open_storage(str(out)))]
    found = pick(read_lines(open_storage(str(out))), whole)
    abandoned = {one.step for one in whole if found.why_not(one).startswith("abandoned")}
    assert abandoned == ({6, 7} if kept == 5 else {5})
    # A machine that was not asked hears of it there, and so does one that has lost its memory.
    assert loaded(other_dir, out, read_only=True) == kept
    assert loaded(memory_dir, out, read_only=True) == kept
    wiped(memory_dir)
    assert loaded(memory_dir, out) == kept


def test_a_choice_that_persist_dir_does_not_take_says_so(memory_dir, other_dir, out, run, monkeypatch):
    launch(memory_dir, out, 5)
    launch(other_dir, out, 6, 7)
    name = names(run, out)[5,]

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("flashckpt.persist.local.LocalStorage.put", full)
        told = run("choose", name, code=1, options=("--persist-dir", str(out)))
    assert "FC-DISK-001" in told.err
    assert "it counts for loads in which this node takes part" in told.err
    assert loaded(memory_dir, out, read_only=True) == 5


def test_the_module_needs_no_torch():
    assert "torch" not in vars(histories)
