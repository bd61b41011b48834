"""A disk that hangs at a load: every wait for it ends, with an error that says so."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from flashckpt.errors import DeadlineError
from flashckpt.load.context import LoadContext
from flashckpt.load.disk import restore
from flashckpt.load.disk.restore import DiskAttempt, OnDisk, look_at
from flashckpt.ranks.group import PrivateGroup
from flashckpt.types import Generation

ONE = OnDisk("step-3", Generation(100, 7, 3, 1), "")
TIMEOUT = 0.25  # what does not hang has to be done by then, also on a busy machine


@pytest.fixture
def hang():
    """A call that does not return before the test has ended; a wait without a limit would end after seconds."""
    released = threading.Event()
    yield lambda *_: released.wait(5)
    released.set()


def attempt(rank, opener, directory="/nowhere", timeout=TIMEOUT):
    group = PrivateGroup.alone()
    context = LoadContext(None, None, group, rank, 0, True, (), ((0,),), "job", verify=True, threads=1, timeout=timeout)
    return DiskAttempt(context, str(directory), ONE, opener)


def test_looking_at_a_disk_that_hangs_finds_a_problem(hang, monkeypatch):
    monkeypatch.setattr(restore, "_look", hang)
    found = look_at("/slow", "job", TIMEOUT)
    expected = "listing /slow: expected it to take at most 0.25 s, found that it hangs"
    assert found.problem == f"/slow can't be read: {expected}"
    assert found.steps == ()


def test_opening_a_step_on_a_disk_that_hangs_fails(hang, tmp_path):
    with pytest.raises(DeadlineError, match=r"opening step-3 on disk: .* found that it hangs"):
        attempt(0, hang, tmp_path).describe()


def test_reading_from_a_disk_that_hangs_fails(hang, tmp_path):
    found = SimpleNamespace(
        generation=ONE.generation,
        world=2,
        stored={},
        where="/slow/step-3",
        read=lambda transfers, targets, within: within(hang),
    )
    one = attempt(0, lambda *_: found, tmp_path)
    one.describe()
    with pytest.raises(DeadlineError, match=r"reading /slow/step-3: .* found that it hangs"):
        one.read([], [])
    assert one.touched


@pytest.mark.parametrize(("rank", "layout"), [(0, 0), (1, 1), (2, None), (3, None)])
def test_a_rank_above_all_that_saved_has_no_layout_of_its_own(rank, layout, tmp_path):
    found = SimpleNamespace(generation=ONE.generation, world=2, stored={}, where="")
    one = attempt(rank, lambda *_: found, tmp_path, timeout=60)
    one.describe()
    assert (one.reader.rank, one.reader.layout) == (rank, layout)
