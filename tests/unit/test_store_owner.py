"""Who is dead, and who only looks like it."""

from __future__ import annotations

import dataclasses
import os
import resource
import threading

import pytest

from flashckpt.errors import ConfigError, StorageError
from flashckpt.store import owner as owner_module
from flashckpt.store.owner import LivenessCheck, Owner, is_dead, read_boot_id8


def test_this_process_is_alive():
    me = Owner.current()
    assert me.pid == os.getpid()
    assert not is_dead(me)


def test_other_namespace_is_never_dead():
    gone = Owner(pid=(1 << 22) + 5, start_ticks=1, boot_id8=read_boot_id8(), pid_namespace=1)
    assert not is_dead(gone)
    assert not LivenessCheck(gone).is_dead()
    assert is_dead(dataclasses.replace(gone, pid_namespace=Owner.current().pid_namespace))


def test_pid_that_names_a_thread_now():
    stop = threading.Event()
    started = threading.Event()
    seen = []

    def body():
        seen.append(threading.get_native_id())
        started.set()
        stop.wait()

    thread = threading.Thread(target=body)
    thread.start()
    try:
        started.wait()
        assert is_dead(dataclasses.replace(Owner.current(), pid=seen[0], start_ticks=1))
    finally:
        stop.set()
        thread.join()


def test_no_boot_id_is_said(monkeypatch, tmp_path):
    monkeypatch.setattr(owner_module, "BOOT_ID_PATH", tmp_path / "missing")
    with pytest.raises(ConfigError, match="boot id"):
        read_boot_id8()


def test_a_machine_without_proc_is_said(monkeypatch, tmp_path):
    monkeypatch.setattr(owner_module, "_PROC", tmp_path)
    with pytest.raises(ConfigError, match="start time") as refused:
        Owner.current()
    assert "mount proc" in refused.value.hint


def test_a_lack_of_descriptors_is_not_the_callers_fault():
    """A save in that moment is an outcome; ConfigError would be raised out of it."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, before[1]))
    try:
        for read in (Owner.current, read_boot_id8):
            with pytest.raises(StorageError, match="Too many open files") as refused:
                read()
            assert "ulimit -n" in refused.value.hint
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
