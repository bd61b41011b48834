"""Ranks that do not go in step: other keys, lagging, out of memory, stopped and woken again."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from pathlib import Path

import pytest

from flashckpt.store.names import parse_slot_name


def steps(job, word="saved"):
    return [[(int(step), outcome) for step, outcome, *_ in said] for said in job.said(word)]


def test_common_tensors_are_stored_once_a_node(nursery, memory_dir):
    job = nursery.run(2, task="stages", memory_dir=memory_dir)
    assert job.codes == [0, 0], job.outputs
    assert [said[0] for said in job.said("loaded")] == [["5", "True"]] * 2
    shared = job.said("sizes")[0][0]
    assert max(map(int, shared)) < 2 * 64 * 1024


def test_stages_with_keys_of_their_own(nursery, memory_dir):
    """Plain tensors differ between ranks from the start: seen at the first save, each rank stores its own."""
    job = nursery.run(2, task="stages", memory_dir=memory_dir, own_keys=True)
    assert job.codes == [0, 0], job.outputs
    assert steps(job) == [[(step, "ok") for step in range(1, 6)]] * 2
    assert [said[0] for said in job.said("loaded")] == [["5", "True"]] * 2
    assert all("keys differ between ranks" in out for out in job.outputs)


def test_ranks_that_part_later_lose_a_generation_and_never_the_last(nursery, memory_dir):
    job = nursery.run(2, task="stages", memory_dir=memory_dir, part_at=3)
    assert job.codes == [0, 0], job.outputs
    states = dict(job.said("generation")[0])
    # A second one goes where the quick rank recycled the first before the other had looked at it.
    assert states.pop("4") in ("complete", "disagrees")
    assert states == {"1": "complete", "2": "complete", "3": "disagrees", "5": "complete"}
    assert all("no longer agree" in out for out in job.outputs)
    assert [said[0] for said in job.said("loaded")] == [["5", "True"]] * 2


@pytest.mark.parametrize("kind", ["order", "extra key", "tie"])
def test_nothing_is_left_to_a_rank_that_does_not_store_it(kind, nursery, memory_dir):
    job = nursery.run(2, task="order_of_keys", memory_dir=memory_dir, kind=kind)
    assert job.codes == [0, 0], job.outputs
    assert steps(job) == [[(step, "ok") for step in (1, 2, 3)]] * 2
    assert [said[0] for said in job.said("loaded")] == [["3", "True"]] * 2


@pytest.mark.parametrize("first", [False, True])
def test_a_rank_that_misses_a_save_is_in_step_again_at_the_next(first, nursery, memory_dir):
    job = nursery.run(2, task="one_rank_misses_a_save", memory_dir=memory_dir, first=first)
    assert job.codes == [0, 0], job.outputs
    outcomes = [dict(said) for said in steps(job)]
    at = 1 if first else 3
    assert outcomes[1].pop(at) == "refused"
    assert outcomes[0].pop(at) == ("failed" if first else "ok")
    assert set(outcomes[0].values()) == set(outcomes[1].values()) == {"ok"}
    assert all(float(words[2]) < 4 for said in job.said("saved") for words in said), "a save waited for its deadline"
    assert [said[0] for said in job.said("loaded")] == [["6", "6.0"]] * 2


def test_one_ranks_exception_in_load_is_everybodys(nursery, memory_dir):
    job = nursery.run(2, task="one_rank_cannot_load", memory_dir=memory_dir)
    assert job.codes == [0, 0], job.outputs
    assert [said[0] for said in job.said("raised")] == [["OtherRankError"], ["ValueError"]]
    assert [said[0] for said in job.said("loaded")] == [["1"]] * 2


def test_dcp_on_one_rank_does_not_replace_what_all_saved(nursery, memory_dir):
    job = nursery.run(2, task="only_part_of_the_world", memory_dir=memory_dir)
    assert job.codes == [0, 0], job.outputs
    assert job.said("raised") == [[["True"]], []]
    assert [said[0] for said in job.said("loaded")] == [["2", "2.0"]] * 2


def test_per_rank_state_comes_back_per_rank_through_dcp(nursery, memory_dir):
    job = nursery.run(2, task="per_rank_through_dcp", memory_dir=memory_dir)
    assert job.codes == [0, 0], job.outputs
    assert job.said("loaded") == [[["7.0"]], [["8.0"]]]


def test_what_could_never_be_loaded_is_not_saved(nursery, memory_dir):
    job = nursery.run(2, task="never_whole", memory_dir=memory_dir)
    assert job.codes == [0, 0], job.outputs
    assert job.said("refused") == [[["True"], ["True"]]] * 2


def test_memory_of_a_larger_world_is_given_back(nursery, memory_dir):
    """Four ranks leave eight slots; two ranks need four larger ones, and the rest goes."""
    assert nursery.run(4, memory_dir=memory_dir, first=1, steps=3, scale=50).codes == [0] * 4
    job = nursery.run(2, memory_dir=memory_dir, first=1, steps=9, scale=50)
    assert job.codes == [0, 0], job.outputs
    assert sorted(path.name for path in Path(memory_dir, "work", "pool").iterdir()) == []
    assert len(list(Path(memory_dir, "work", "sealed").iterdir())) == 4


@pytest.mark.parametrize(
    ("what", "named"),
    [
        ("job", "'job0' on ranks [0], 'job1' on ranks [1]"),
        ("memory_dir", "one memory directory"),
        ("interval", "ranks disagree on interval: '10' on ranks [0], '11' on ranks [1]"),
        ("persist_dir", "persist_dir0' on ranks [0], 'None' on ranks [1]"),
    ],
)
def test_ranks_that_do_not_belong_together_are_refused_at_the_start(what, named, nursery, memory_dir):
    job = nursery.run(2, task="strangers", memory_dir=memory_dir, what=what)
    assert job.codes == [0, 0], job.outputs
    assert all(named in " ".join(said[0]) for said in job.said("refused")), job.outputs


def test_a_load_that_a_rank_does_not_come_to_ends_at_its_deadline(nursery, memory_dir):
    job = nursery.run(2, task="absent", memory_dir=memory_dir)
    assert job.codes == [0, 0], job.outputs
    message = " ".join(job.said("gave")[0][0])
    assert "load(): rank 1 has not called load()" in message
    assert "call it on every rank" in message


def test_so_does_a_start(nursery, memory_dir):
    job = nursery.run(2, task="absent", memory_dir=memory_dir, from_start=True)
    assert job.codes == [0, 0], job.outputs
    assert "rank 1 has not called Checkpointer()" in " ".join(job.said("gave")[0][0])


def test_a_rank_that_runs_ahead_waits_and_loses_nothing(nursery, memory_dir):
    job = nursery.run(2, task="busy", memory_dir=memory_dir, on_busy="wait", late=1.5)
    assert job.codes == [0, 0], job.outputs
    assert steps(job) == [[(step, "ok") for step in range(1, 6)]] * 2
    waited = {int(step): float(claim) for step, _, claim, *_ in job.said("saved")[0]}
    assert max(waited.values()) > 0.5
    assert [said[0] for said in job.said("loaded")] == [["5", "5.0"]] * 2


def test_or_it_skips_and_says_whom_it_missed(nursery, memory_dir):
    job = nursery.run(2, task="busy", memory_dir=memory_dir, on_busy="skip", late=1.5)
    assert job.codes == [0, 0], job.outputs
    skipped = [words for words in job.said("saved")[0] if words[1] == "skipped"]
    assert skipped
    assert all("FC-MEM-002" in words[3] and "ranks [1]" in " ".join(words) for words in skipped)
    loaded = {said[0][0] for said in job.said("loaded")}
    assert len(loaded) == 1
    assert int(loaded.pop()) >= 2


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a tmpfs needs root")
def test_one_rank_out_of_room_does_not_hold_up_the_others(nursery):
    path = tempfile.mkdtemp(prefix="flashckpt-test-")
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32m", "none", path], check=True)
    try:
        job = nursery.run(2, task="one_rank_is_out_of_room", memory_dir=f"{path}/memory")
    finally:
        subprocess.run(["umount", "-l", path], check=True)
        shutil.rmtree(path)
    assert job.codes == [0, 0], job.outputs
    outcomes = steps(job)
    assert [o for s, o in outcomes[1] if s in (3, 4)] == ["failed", "failed"]
    assert [o for s, o in outcomes[1] if s not in (3, 4)] == ["ok"] * 5
    assert {o for _, o in outcomes[0]} == {"ok"}
    assert all(float(words[2]) < 5 for said in job.said("saved") for words in said), "a save waited for its deadline"
    assert [said[0] for said in job.said("loaded")] == [["7", "7.0"]] * 2


def test_a_stopped_trainer_that_wakes_up_changes_nothing(nursery, memory_dir, tmp_path):
    """Stopped with a slot half written; a new launch takes over; the old one wakes up and is refused."""
    assert nursery.run(1, memory_dir=memory_dir, first=1, steps=2).codes == [0]
    zombie = {}
    spec = {"FLASHCKPT_TESTING": "1", "FLASHCKPT_FAILPOINTS": "mid_copy=stop"}

    def run_zombie():
        from tests.fault.conftest import Nursery

        own = Nursery()
        zombie["job"] = own.run(1, task="frozen", memory_dir=memory_dir, ready="", environment=spec, timeout=120)
        own.close()

    thread = threading.Thread(target=run_zombie)
    thread.start()
    writing = Path(memory_dir, "work", "writing")
    pid = _wait_for(lambda: next((parse_slot_name(path.name).writer.pid for path in writing.iterdir()), None))
    _wait_for(lambda: Path(f"/proc/{pid}/stat").read_text().rsplit(")")[-1].split()[0] == "T" or None)
    held = next(writing.iterdir()).stat().st_ino
    again = nursery.run(1, memory_dir=memory_dir, first=1, steps=8)
    assert again.codes == [0], again.outputs
    assert again.said("resumed") == [[["2"]]]
    sealed = {path.stat().st_ino for path in Path(memory_dir, "work", "sealed").iterdir()}
    assert held not in sealed, "the slot of a live writer was recycled"
    os.kill(pid, signal.SIGCONT)
    thread.join(timeout=60)
    assert not thread.is_alive()
    woke = zombie["job"].said("woke")[0][0]
    assert woke[0] == "failed"
    assert "[FC-JOB-001]" in woke
    last = nursery.run(1, memory_dir=memory_dir, first=1, steps=9)
    assert (last.codes, last.said("resumed")) == ([0], [[["8"]]]), (woke, last.outputs)


def _wait_for(condition, timeout=60):
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        found = condition()
        if found is not None:
            return found
        time.sleep(0.02)
    raise TimeoutError("the condition did not come true")
