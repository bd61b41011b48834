"""Whatever fails below a save is an outcome: save() raises what the state is to blame for, and nothing unasked."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import signal
import tempfile
import threading
import time

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import flashckpt
from flashckpt import CheckpointConfig, Checkpointer, failpoints
from flashckpt.agent.start import look, stop_agent
from flashckpt.checkpointer import internals_of

STAGES = ["before_copy", "mid_copy", "after_copy", "before_header", "before_preamble", "before_seal", "after_seal"]
STORE = ["before_rename_sealed", "after_rename_sealed", "before_abandon", "after_abandon", "after_claim", "after_map"]
SLOTS = ["before_recycle", "before_release", "after_release", "mid_release", "after_invalidate", "after_take"]
ERRORS = ["EIO", "ENOSPC", "EMFILE", "ENOENT", "ENOMEM", "EACCES", "RuntimeError", "MemoryError", "ValueError"]
LIMIT = "descriptors"

one_failpoint = st.builds(
    "{}=error({})*{}".format, st.sampled_from(STAGES + STORE + SLOTS), st.sampled_from(ERRORS), st.integers(1, 3)
)
faults = st.lists(one_failpoint, min_size=1, max_size=3, unique_by=lambda one: one.split("=")[0]).map(";".join)


@contextlib.contextmanager
def few_descriptors():
    """Every further open() fails with EMFILE."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@contextlib.contextmanager
def armed(text):
    failpoints._armed.update(failpoints.parse(text))
    try:
        yield
    finally:
        failpoints._armed.clear()


def save_and_judge(checkpointer, step, overlap):
    """Save; check that it is an outcome with a reason, or, where that was asked for, a FlashError. Return `ok`."""
    allowed = flashckpt.FlashError if checkpointer.config.on_save_error == "raise" else ()
    try:
        handle = checkpointer.save(step, {"t": torch.full((50_000,), float(step)), "n": step}, overlap=overlap)
        outcome = handle.wait("sealed", timeout=30)
        internals_of(checkpointer).settle()
    except allowed:
        return False
    assert outcome == "ok" or handle.reason
    return outcome == "ok"


def check_saves_go_on(checkpointer, first):
    """At the latest the second save without a fault is ok, and is what a load gives back."""
    for step in (first, first + 1):
        ok = save_and_judge(checkpointer, step, False)
    assert ok
    live = {"t": torch.zeros(50_000), "n": 0}
    assert checkpointer.load(live).step == live["n"] == live["t"][0].item() == first + 1


@settings(max_examples=60)
@given(
    faulty=st.lists(st.one_of(st.none(), faults, st.just(LIMIT)), min_size=1, max_size=4),
    overlap=st.booleans(),
    mode=st.sampled_from(["log", "raise"]),
)
@example(faulty=[LIMIT], overlap=False, mode="log")
def test_what_fails_below_a_save_never_raises_out_of_it(faulty, overlap, mode):
    memory_dir = tempfile.mkdtemp(prefix="flashckpt-test-", dir="/dev/shm")
    config = CheckpointConfig(job="job", memory_dir=memory_dir, on_save_error=mode, save_timeout=5)
    try:
        with Checkpointer(config) as checkpointer:
            for step, fault in enumerate(faulty, 1):
                with few_descriptors() if fault == LIMIT else armed(fault or ""):
                    save_and_judge(checkpointer, step, overlap)
            check_saves_go_on(checkpointer, len(faulty) + 1)
    finally:
        shutil.rmtree(memory_dir)


@settings(max_examples=25)
@given(faulty=st.lists(st.one_of(st.none(), faults), min_size=1, max_size=3), mode=st.sampled_from(["log", "raise"]))
def test_nor_out_of_a_managers_save_or_an_optimizers_step(faulty, mode):
    memory_dir = tempfile.mkdtemp(prefix="flashckpt-test-", dir="/dev/shm")
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    allowed = flashckpt.FlashError if mode == "raise" else ()
    config = CheckpointConfig(job="job", memory_dir=memory_dir, on_save_error=mode, save_timeout=5)
    try:
        with flashckpt.CheckpointManager(config, model=model, optimizer=optimizer) as manager:
            for step, fault in enumerate([*faulty, None, None], 1):
                with armed(fault or ""):
                    model(torch.ones(8)).sum().backward()
                    optimizer.step()
                    try:
                        handle = manager.save(step)
                        manager.wait("sealed", timeout=30)
                    except allowed:
                        continue
            assert handle.outcome == "ok"
    finally:
        shutil.rmtree(memory_dir)


def test_a_process_that_ends_without_close_says_that_nothing_was_saved(memory_dir, run_python):
    code = (
        "import sys, torch, flashckpt\n"
        "config = flashckpt.CheckpointConfig(job='job', memory_dir=sys.argv[1], memory_budget_bytes=1 << 20)\n"
        "checkpointer = flashckpt.Checkpointer(config)\n"
        "for step in (1, 2, 3): checkpointer.save(step, {'t': torch.zeros(1 << 20)})\n"
    )
    ended = run_python(code, memory_dir)
    assert ended.returncode == 0, ended.stderr
    assert "job 'job', rank 0: NO CHECKPOINT WAS SAVED: 3 of 3 saves failed" in ended.stderr
    assert "FC-MEM-001" in ended.stderr


def test_what_the_state_is_to_blame_for_is_raised_as_it_is(memory_dir):
    class Broken:
        def state_dict(self):
            raise OSError("the user's own")

        def load_state_dict(self, state):
            pass

    with Checkpointer(CheckpointConfig(job="job", memory_dir=memory_dir)) as checkpointer:
        for state, error in (({"x": object()}, flashckpt.UnsupportedValueError), ({"x": Broken()}, OSError)):
            with pytest.raises(error, match=r"x: expected|own"):
                checkpointer.save(1, state)
        with pytest.raises(flashckpt.ConfigError, match="step"):
            checkpointer.save(-1, {})
        assert checkpointer.save(2, {"n": 1}).outcome == "ok"


@pytest.mark.parametrize("overlap", [False, True])
def test_a_shard_that_is_released_before_save_has_looked_at_it_again(memory_dir, overlap):
    """As an agent does once another rank has given the generation up."""
    with Checkpointer(CheckpointConfig(job="job", memory_dir=memory_dir)) as checkpointer:

        def release():
            while not (found := internals_of(checkpointer).store.scan()):
                time.sleep(0.01)
            internals_of(checkpointer).store.release(found[0], of_others=True)

        thread = threading.Thread(target=release)
        thread.start()
        with armed("after_seal=sleep(0.5)"):
            handle = checkpointer.save(1, {"t": torch.ones(50_000)}, overlap=overlap)
            assert handle.wait("sealed", timeout=30) == "ok"
        thread.join()
        assert not internals_of(checkpointer).store.scan()
        assert handle.size_bytes > 200_000


@pytest.mark.parametrize("mode", ["log", "raise"])
@pytest.mark.parametrize("overlap", [False, True])
def test_nor_does_the_end_of_the_memory_directory(memory_dir, mode, overlap):
    with Checkpointer(CheckpointConfig(job="job", memory_dir=memory_dir, on_save_error=mode)) as checkpointer:
        assert save_and_judge(checkpointer, 1, overlap)
        shutil.rmtree(memory_dir)
        for step in (2, 3):
            assert not save_and_judge(checkpointer, step, overlap)


@pytest.mark.parametrize("mode", ["log", "raise"])
def test_nor_does_anything_that_happens_to_the_agent(memory_dir, mode):
    """Killed before, within and after a save; stopped; its socket removed; the shard released at once."""
    job = "agents"
    config = CheckpointConfig(
        job=job, memory_dir=memory_dir, node_id="a", agent="auto", agent_linger=30, on_save_error=mode, save_timeout=6
    )

    def agent():
        return look(memory_dir, job).status["pid"]

    def drop():
        for path in internals_of(checkpointer).store.scan():
            internals_of(checkpointer).store.release(path)

    try:
        with Checkpointer(config) as checkpointer:
            assert save_and_judge(checkpointer, 1, False)
            os.kill(agent(), signal.SIGKILL)
            save_and_judge(checkpointer, 2, False)
            with armed("before_seal=sleep(0.3)*1"):
                save_and_judge(checkpointer, 3, True)
            for step, fault in enumerate(("after_seal=error(RuntimeError)*1", "after_attach=error(EMFILE)*1"), 4):
                with armed(fault):
                    save_and_judge(checkpointer, step, step % 2 == 0)
            drop()
            save_and_judge(checkpointer, 6, True)
            paused = agent()
            os.kill(paused, signal.SIGSTOP)
            began = time.monotonic()
            save_and_judge(checkpointer, 7, False)
            assert time.monotonic() - began < 30
            os.kill(paused, signal.SIGCONT)
            check_saves_go_on(checkpointer, 8)
    finally:
        with contextlib.suppress(flashckpt.FlashError):
            stop_agent(memory_dir, job, 10.0, kill=True)
