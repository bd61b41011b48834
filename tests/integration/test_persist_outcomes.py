"""How flushes end reaches the training: a trainer with its agent, and a persist_dir that can't be written to."""

from __future__ import annotations

import contextlib
import logging
import os
import time

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import flashckpt
from flashckpt.agent.start import stop_agent
from tests.flushes import WAIT, persist_status, wait_until

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
    pytest.mark.timeout(900),
]


@pytest.fixture
def job(memory_dir, tmp_path):
    """job(**config): a model, its manager and the events it sent; agent and manager are gone when the test ends."""
    with contextlib.ExitStack() as stack:

        def make(**settings):
            events = []
            model = nn.Linear(16, 16)
            config = {
                "job": "run1",
                "memory_dir": memory_dir,
                "node_id": "a",
                "agent": "auto",
                "agent_linger": 60.0,
                "persist_dir": str(tmp_path / "out"),
                "persist_on_exit": False,
                "enable_first_step_checkpoint": False,
                "overlap": False,
                **settings,
            }
            manager = flashckpt.CheckpointManager(
                flashckpt.CheckpointConfig(**config), model=model, on_event=events.append
            )
            stack.callback(manager.close)
            return manager, events

        def stop():
            with contextlib.suppress(flashckpt.FlashError):
                stop_agent(memory_dir, "run1", 30.0, kill=True)

        stack.callback(stop)
        yield make


def is_a_file(out):
    out.write_text("not a directory")
    return out.unlink, "expected a directory, found something else"


def latest_is_a_directory(out):
    (out / "latest").mkdir(parents=True)
    return (out / "latest").rmdir, "expected a symbolic link"


def another_programs_step(out):
    dcp.save({"a": torch.ones(2)}, checkpoint_id=out / "step-1", no_dist=True)
    return lambda: os.rename(out / "step-1", out / "mine"), "FC-DISK-002"


@pytest.mark.parametrize("break_it", [is_a_file, latest_is_a_directory, another_programs_step])
def test_a_failed_flush_is_heard_of_everywhere(job, memory_dir, tmp_path, break_it, caplog):
    mend, reason = break_it(tmp_path / "out")
    caplog.set_level(logging.WARNING)
    manager, events = job()
    handle = manager.save(1, persist=True)
    upload = handle.upload_completion
    manager.wait("sealed", 30)
    wait_until(lambda: manager.metrics().flushes["failed"], "the failure to be heard of")
    assert reason in manager.metrics().flush_problem
    with pytest.raises(flashckpt.PersistError, match=r"step 1"):
        upload.result(WAIT)
    with pytest.raises(flashckpt.DeadlineError) as caught:
        handle.wait("persisted", timeout=0.5)
    assert reason in caught.value.message
    wait_until(lambda: manager.metrics().flushes["failed"] >= 2, "another attempt")
    assert reason in persist_status(memory_dir)["problem"]
    warnings = [one for one in caplog.records if "was not flushed to persist_dir" in one.getMessage()]
    assert len(warnings) == 1
    assert reason in warnings[0].getMessage()
    failed = [event for event in events if event.kind == "failed"]
    assert [(event.step, reason in event.reason) for event in failed] == [(1, True)]
    assert manager.metrics().saves["failed"] == 0  # the save itself is good
    mend()
    assert handle.wait("persisted", timeout=WAIT) == "ok"
    assert handle.upload_completion.result(1) is None
    wait_until(lambda: manager.metrics().flushes["done"], "the success to be heard of")
    assert manager.metrics().flush_problem == ""


def test_a_failed_flush_is_raised_where_that_is_asked_for(job, tmp_path):
    (tmp_path / "out").write_text("not a directory")
    manager, _ = job(on_save_error="raise")
    assert manager.save(1, persist=True).outcome == "ok"
    manager.wait("sealed", 30)
    wait_until(lambda: manager.metrics().flushes["failed"], "the failure to be heard of")
    with pytest.raises(flashckpt.PersistError, match="expected a directory"):
        manager.save(2)
    assert manager.save(3).outcome == "ok"  # once for each reason; and step 2 was saved all the same
    assert manager.checkpointer.status().saves["ok"] == 3


def test_what_can_not_be_persisted_is_refused(job):
    manager, _ = job(persist_dir=None)
    for argument in ({"persist": True}, {"permanent": True}):
        with pytest.raises(flashckpt.ConfigError, match="expected persist_dir too"):
            manager.save(1, **argument)
    handle = manager.save(2)
    assert handle.upload_completion.result(30) is None  # memory is as far as it goes
    with pytest.raises(flashckpt.ConfigError, match="keep_policy: expected persist_dir too"):
        flashckpt.CheckpointManager(manager.config, model=nn.Linear(2, 2), keep_policy=lambda step: True)


def test_an_emptied_directory_is_noticed_by_its_flush(job, memory_dir, tmp_path):
    """As after a mount that is gone: the agent remembers that a step lay there, and writes nothing in its place."""
    out = tmp_path / "out"
    manager, _ = job()
    assert manager.save(1, persist=True).wait("persisted", timeout=WAIT) == "ok"
    os.rename(out, tmp_path / "elsewhere")
    out.mkdir()
    handle = manager.save(2, persist=True)
    manager.wait("sealed", 30)
    wait_until(lambda: "persisted step 1 there" in manager.metrics().flush_problem, "the reason")
    assert os.listdir(out) == []
    out.rmdir()
    os.rename(tmp_path / "elsewhere", out)
    assert handle.wait("persisted", timeout=WAIT) == "ok"
    assert os.readlink(out / "latest") == "step-2"


BUSY = "while True: pass"


@pytest.mark.slow
def test_a_flush_that_somebody_waits_for_ends_in_time_on_a_busy_host(job, memory_dir, tmp_path, capsys):
    """Twice as many busy processes as cores, as data loaders make them."""
    import subprocess
    import sys

    manager, _ = job()
    manager.save(1).wait("sealed", 30)
    busy = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(2 * (os.cpu_count() or 1))]
    try:
        took = {}
        for step, urgent in ((2, True), (3, False)):
            began = time.monotonic()
            handle = manager.save(step)
            if urgent:
                assert handle.wait("persisted", timeout=WAIT) == "ok"
            else:
                handle.request_persist()
                with contextlib.suppress(AssertionError):
                    wait_until(lambda handle=handle: handle.level >= flashckpt.Level.PERSISTED, "it", timeout=45.0)
            took[urgent] = time.monotonic() - began
    finally:
        for one in busy:
            one.kill()
            one.wait()
    with capsys.disabled():
        print(f"\nflush of 1 KB on a busy host: {took[True]:.1f} s waited for, {took[False]:.1f} s in the background")
    assert took[True] < 60.0
