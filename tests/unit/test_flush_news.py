"""What became of flushes: each change is told once, and whoever waits for the upload never waits for ever."""

from __future__ import annotations

import concurrent.futures
import gc
import logging
import threading
import weakref

import pytest

from flashckpt.config import CheckpointConfig, resolve
from flashckpt.errors import ConfigError, DeadlineError, PersistError
from flashckpt.persist.hints import hint_of
from flashckpt.save.flush_news import FlushNews
from flashckpt.save.handle import SaveHandle
from flashckpt.training.metrics import Recorder
from flashckpt.types import Generation, Level, Outcome

GENERATION = Generation(1, 2, 3, 4)


def test_one_warning_per_change(caplog):
    caplog.set_level(logging.WARNING)
    news = FlushNews()
    for attempt in range(5):
        news.failed(attempt, f"No space left on device: '/p/step-{attempt}.tmp-{attempt:016x}/x'")
    assert len(caplog.records) == 1
    news.failed(9, "Permission denied")
    assert len(caplog.records) == 2
    news.done(9)
    assert news.problem == ""
    assert "succeed again" in caplog.records[2].getMessage()
    news.failed(10, "Permission denied")
    assert len(caplog.records) == 4


def test_events_and_figures():
    events = []
    recorder, news = Recorder(events.append), FlushNews()
    recorder.flush_news = news
    news.failed(1, "disk full")
    news.failed(2, "disk full")
    found = recorder.metrics(0.0)
    assert (found.flushes, found.flush_problem) == ({"done": 0, "failed": 2}, "disk full")
    news.done(3)
    found = recorder.metrics(0.0)
    assert (found.flushes, found.flush_problem) == ({"done": 1, "failed": 2}, "")
    assert [(event.kind, event.step) for event in events] == [("failed", 1)]
    assert "disk full" in events[0].reason


def test_each_failure_is_raised_once():
    news = FlushNews()
    assert news.take_failure() is None
    news.failed(1, "disk full")
    news.failed(2, "disk full")
    assert news.take_failure().step == 1
    assert news.take_failure() is None
    news.failed(3, "Permission denied")
    news.done(3)
    assert news.take_failure() is None


def handle_of(asked, highest=Level.SEALED):
    handle = SaveHandle(3, GENERATION, highest, persists=True)
    handle.ask_persist = asked.append
    return handle


def seal(handle):
    handle.advance(Level.SEALED)
    handle.finish(Outcome.OK, "")


def test_a_wait_for_the_disk_says_what_went_wrong():
    handle = handle_of([])
    handle.flush_problem = lambda: "disk full"
    seal(handle)
    with pytest.raises(DeadlineError, match="found sealed; the last flush failed: disk full") as caught:
        handle.wait("persisted", timeout=0.01)
    assert caught.value.problem == "disk full"


def test_the_upload_is_complete_on_disk():
    asked = []
    handle = handle_of(asked)
    upload = handle.upload_completion
    seal(handle)
    assert not upload.done()
    handle.advance(Level.REPLICATED)
    assert not upload.done()
    assert asked == []
    with pytest.raises(concurrent.futures.TimeoutError):
        upload.result(0.2)
    assert asked == [True]
    handle.advance(Level.PERSISTED)
    assert upload.result(10) is None
    assert handle.upload_completion.done()


@pytest.mark.parametrize("highest", [Level.SEALED, Level.REPLICATED])
def test_without_a_disk_the_upload_is_complete_where_memory_ends(highest):
    handle = SaveHandle(3, GENERATION, highest)
    upload = handle.upload_completion
    seal(handle)
    assert upload.done() is (highest is Level.SEALED)
    handle.advance(Level.REPLICATED)
    assert upload.result(1) is None


@pytest.mark.parametrize("early", [False, True])
def test_a_step_that_is_never_flushed_ends_the_wait_for_its_upload(early):
    handle = handle_of([])
    if early:
        upload = handle.upload_completion
    seal(handle)
    handle.stop("step 5 was persisted before it")
    if not early:
        upload = handle.upload_completion
    with pytest.raises(PersistError, match="step 5 was persisted before it"):
        upload.result(1)


def test_who_waits_before_the_copy_is_made_asks_once_it_is():
    asked, told = [], threading.Event()
    handle = handle_of(asked)
    handle.upload_completion.add_done_callback(lambda _: told.set())
    assert asked == []
    gc.collect()  # the callback counts though nobody keeps the future
    seal(handle)
    handle.wait("sealed", 10)
    handle.advance(Level.PERSISTED)
    assert told.wait(10)


def test_a_failed_flush_ends_the_wait_of_whoever_waits():
    handle, other = handle_of([]), handle_of([])
    waiting, idle = handle.upload_completion, other.upload_completion
    seal(handle)
    seal(other)
    with pytest.raises(concurrent.futures.TimeoutError):
        waiting.result(0.01)
    for one in (handle, other):
        one.flush_failed("disk full")
    with pytest.raises(PersistError, match="step 3: disk full"):
        waiting.result(1)
    assert not idle.done()
    handle.advance(Level.PERSISTED)  # the next attempt
    assert handle.level is Level.PERSISTED


def test_a_handle_that_nobody_keeps_goes():
    handle = handle_of([])
    assert handle.upload_completion is not None
    seal(handle)
    gone = weakref.ref(handle)
    gc.disable()
    try:
        del handle
        assert gone() is None
    finally:
        gc.enable()


@pytest.mark.parametrize(
    "settings",
    [
        {"keep_latest_k": 2},
        {"keep_every": 5},
        {"keep_steps": (1,)},
        {"persist_max_mbps": 5.0},
        {"persist_concurrency": 3},
        {"persist_timeout": 5.0},
        {"persist_drain_timeout": 5.0},
        {"persist_overwrite": True},
    ],
)
def test_settings_without_effect_are_refused(settings):
    (name,) = settings
    with pytest.raises(ConfigError, match=f"{name}: expected persist_dir too"):
        CheckpointConfig(**settings)
    CheckpointConfig(persist_dir="/p", **settings)


def test_a_persist_dir_that_nobody_would_write_to_is_refused():
    config = CheckpointConfig(job="j", persist_dir="/p")
    for environ in ({"FLASHCKPT_AGENT": "off"}, {"FLASHCKPT_AGENT": "off", "FLASHCKPT_DISABLE": "0"}):
        with pytest.raises(ConfigError, match="persist_dir with agent='off'"):
            resolve(config, environ)
    assert resolve(config, {}).uses_agent
    for reads in ({"load_only": True}, {"persist_on_exit": False}):
        assert not resolve(CheckpointConfig(job="j", persist_dir="/p", agent="off", **reads), {}).uses_agent
    timed = CheckpointConfig(job="j", persist_dir="/p", agent="off", persist_on_exit=False, persist_interval=5)
    with pytest.raises(ConfigError, match="persist_dir with agent='off'"):
        resolve(timed, {})
    assert resolve(config, {"FLASHCKPT_AGENT": "off", "FLASHCKPT_DISABLE": "1"}).disabled


@pytest.mark.parametrize(
    ("error", "part"),
    [
        (OSError(28, "No space left on device"), "free space"),
        (OSError(122, "Disk quota exceeded"), "quota"),
        (PermissionError(13, "Permission denied"), "chown"),
        (NotADirectoryError(20, "Not a directory"), "is a file"),
        (OSError(30, "Read-only file system"), "remount"),
        (OSError(116, "Stale file handle"), "mount persist_dir again"),
        (OSError(5, "Input/output error"), "dmesg"),
        (OSError("odd"), "look at persist_dir"),
        (ValueError("x"), ""),
    ],
)
def test_the_hint_fits_the_error(error, part):
    hint = hint_of(error)
    assert part in hint
    assert bool(hint) is bool(part)
