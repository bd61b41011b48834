"""persist_dir on real disks that are full, over quota, read-only or hang: training goes on, what is there stays good,
the failure is shown and tried again, and once the disk is well so is the flush."""

from __future__ import annotations

import contextlib
import functools
import os
import subprocess
import sys

import pytest
import torch
import torch.distributed.checkpoint as dcp

import flashckpt
from flashckpt.persist.catalog import list_steps
from flashckpt.persist.storage import open_storage
from flashckpt.protocol.flush_spec import FlushSpec
from flashckpt.types import PersistSettings
from tests.conftest import environment
from tests.fault import disks
from tests.fault.test_persist_kill import POINTS, flush_in_child
from tests.flushes import JOB, WAIT, assert_holds, checkpointers, flushers, persist_status, state, wait_until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(2400),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
]


@functools.cache
def reason_against(kind):
    return disks.unavailable(kind)


@pytest.fixture
def mounted(tmp_path):
    """mounted(kind, options): such a disk, or the test is skipped with the reason."""
    with contextlib.ExitStack() as stack:

        def mount(kind, options=""):
            if reason_against(kind):
                pytest.skip(reason_against(kind))
            return stack.enter_context(disks.disk(kind, tmp_path, options))

        yield mount


def shown_status(memory_dir):
    told = subprocess.run(
        [sys.executable, "-m", "flashckpt.cli", "status", "--job", JOB, "--memory-dir", memory_dir],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return told.stdout + told.stderr


def suffer(checkpointer, memory_dir, out, problem, *, timeout=WAIT):
    """Steps 2 to 9 are saved while the disk is not well: none waits for it, and what lies there is left alone."""
    checkpointer.save(2, state(2))
    checkpointer.flush()
    for step in range(3, 10):
        assert checkpointer.save(step, state(step)).outcome == "ok"
    found = wait_until(lambda: (p := persist_status(memory_dir))["failures"] and p, "a failure", timeout)
    assert problem in found["problem"], found
    assert found["step"] == 1
    assert os.readlink(out / "latest") == "step-1"
    assert_holds(out / "latest", 1)
    shown = shown_status(memory_dir)
    assert "on disk: step 1" in shown, shown
    assert problem in shown
    # Tried again by itself, and again without success.
    wait_until(lambda: persist_status(memory_dir)["failures"] >= 2, "another attempt", timeout)
    assert checkpointer.save(10, state(10)).outcome == "ok"


def recover(memory_dir, out):
    """Nobody asks: the agent's next attempt brings the newest step."""
    wait_until(lambda: persist_status(memory_dir)["step"] == 10, "the next attempt to succeed")
    assert os.readlink(out / "latest") == "step-10"
    assert_holds(out / "latest", 10)
    assert_holds(out / "step-1", 1)
    assert sorted(os.listdir(out)) == ["flashckpt.json", "latest", "step-1", "step-10"]
    assert persist_status(memory_dir)["problem"] == ""


@pytest.mark.parametrize("kind", ["ext4", "tmpfs"])
def test_a_full_disk(mounted, memory_dir, kind):
    disk = mounted(kind)
    out = disk.point / "out"
    with checkpointers(memory_dir, out) as make:
        checkpointer = make()
        assert checkpointer.save(1, state(1)).wait("persisted", timeout=WAIT) == "ok"
        disk.fill(left_bytes=150_000)
        suffer(checkpointer, memory_dir, out, "No space left on device")
        disk.make_room()
        recover(memory_dir, out)


def test_a_quota(mounted, memory_dir):
    disk = mounted("btrfs")
    disk.limit("data", 64 * disks.MIB)
    out = disk.point / "data" / "out"
    with checkpointers(memory_dir, out) as make:
        checkpointer = make()
        assert checkpointer.save(1, state(1)).wait("persisted", timeout=WAIT) == "ok"
        disk.limit("data", 512 << 10)
        suffer(checkpointer, memory_dir, out, "Disk quota exceeded")
        disk.limit("data", None)
        recover(memory_dir, out)


def test_a_disk_that_turned_read_only(mounted, memory_dir):
    disk = mounted("ext4")
    out = disk.point / "out"
    with checkpointers(memory_dir, out) as make:
        checkpointer = make()
        assert checkpointer.save(1, state(1)).wait("persisted", timeout=WAIT) == "ok"
        disk.read_only(True)
        suffer(checkpointer, memory_dir, out, "Read-only file system")
        disk.read_only(False)
        recover(memory_dir, out)


def test_a_disk_that_hangs_in_the_kernel(mounted, memory_dir):
    """Its flusher can't even be killed: no second one is started beside it, and training does not notice."""
    disk = mounted("ext4")
    out = disk.point / "out"
    with checkpointers(memory_dir, out) as make:
        checkpointer = make(persist_timeout=1.0)
        assert checkpointer.save(1, state(1)).wait("persisted", timeout=WAIT) == "ok"
        disk.freeze()
        try:
            suffer(checkpointer, memory_dir, out, "hangs")
            assert len(flushers(memory_dir)) == 1
        finally:
            disk.thaw()
        recover(memory_dir, out)
        assert not flushers(memory_dir)


@pytest.mark.parametrize("kind", ["tmpfs", "ext4"])
def test_a_disk_that_fills_up_after_every_so_many_bytes(mounted, memory_dir, tmp_path, kind):
    """The room ends in the middle of each file in turn, and of each directory: with a page more every time, until it
    suffices. However far the flush gets, the step before it stays, and so does `latest`."""
    disk = mounted(kind)
    out = disk.point / "out"
    storage = open_storage(str(out))
    config = flashckpt.CheckpointConfig(job="job", memory_dir=memory_dir)
    settings = PersistSettings(str(out), keep_latest_k=2)
    page = os.statvfs(disk.point).f_frsize

    def content(step):
        return {"a": torch.arange(12_000.0) + step, "values": ["x" * 5000, step]}

    def flushed(step, attempt):
        spec = FlushSpec(
            job="job",
            memory_dir=memory_dir,
            node_id="n",
            generation=saved[step],
            world=1,
            writers=(("n", (0,)),),
            coordinates=True,
            attempt=f"{attempt:016x}",
            reason="test",
            settings=settings,
        )
        return flush_in_child(spec, "", tmp_path / "fired")

    saved = {}
    with flashckpt.Checkpointer(config) as checkpointer:
        for step in (1, 2):
            saved[step] = checkpointer.save(step, content(step)).generation
            if step == 1:
                assert flushed(1, 1)
        failures = 0
        for pages in range(200):
            disk.fill(left_bytes=pages * page)
            if flushed(2, 100 + pages):
                break
            failures += 1
            assert storage.latest() == "step-1", pages
            assert [one.step for one in list_steps(storage) if not one.problem] == [1], pages
            disk.make_room()
            check_content(out / "latest", content(1))
    # The data, the values, the checksums, meta.json and the index are each larger than a page.
    assert failures > 10
    assert storage.latest() == "step-2"
    check_content(out / "latest", content(2))
    assert not [name for name in os.listdir(out) if "tmp" in name or "deleting" in name]


@pytest.mark.parametrize("options", ["commit=1000", "commit=1000,data=writeback"])
def test_power_failures(mounted, memory_dir, tmp_path, options):
    """At each failpoint, and right after each flush that went well, the machine loses its power: what was promised is
    there when it comes back. The file system itself syncs nothing for a quarter of an hour."""
    disk = mounted("ext4", options)
    out = disk.point / "out"
    settings = PersistSettings(str(out), keep_latest_k=2)
    promised, step = 0, 0
    with flashckpt.Checkpointer(flashckpt.CheckpointConfig(job="job", memory_dir=memory_dir)) as checkpointer:
        for number, point in enumerate([None, None, *POINTS, None]):
            step += 1
            handle = checkpointer.save(step, {"a": torch.arange(12_000.0) + step, "values": ["x", step]})
            spec = FlushSpec(
                job="job",
                memory_dir=memory_dir,
                node_id="n",
                generation=handle.generation,
                world=1,
                writers=(("n", (0,)),),
                coordinates=True,
                attempt=f"{number:016x}",
                reason="test",
                settings=settings,
            )
            if flush_in_child(spec, "" if point is None else f"{point}=kill", tmp_path / "fired"):
                promised = step
            with disk.after_power_failure() as found:
                latest = os.readlink(found / "out" / "latest")
                assert int(latest.removeprefix("step-")) >= promised, point
                for one in list_steps(open_storage(str(found / "out"))):
                    if one.problem:
                        continue
                    check_content(
                        found / "out" / one.name, {"a": torch.arange(12_000.0) + one.step, "values": ["x", one.step]}
                    )
                assert not {one.name: one.problem for one in list_steps(open_storage(str(found / "out")))}[latest]
    assert {line.split()[0] for line in (tmp_path / "fired").read_text().splitlines()} == set(POINTS)
    assert promised == step


def check_content(path, expected):
    got = {"a": torch.zeros(12_000), "values": [None, None]}
    dcp.load(got, checkpoint_id=path, no_dist=True)
    assert torch.equal(got["a"], expected["a"])
    assert got["values"] == expected["values"]
