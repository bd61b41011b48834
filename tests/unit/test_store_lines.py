"""The fence: only ever newer, and nothing torn or foreign is believed."""

from __future__ import annotations

import itertools
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from flashckpt.store.fence import RECORD_BYTES, decode_fence, encode_fence, newer

from flashckpt.store.slots import SlotStore
from flashckpt.types import Fence

ROOT = Path(__file__).parents[2]
FENCES = [Fence(step=s, epoch=e, nonce=n) for e in (5, 6) for n in (1, 2) for s in (-1, 10, 20)]


@pytest.fixture
def memory_dir():
    path = Path(tempfile.mkdtemp(prefix="flashckpt-test-", dir="/dev/shm"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def store(memory_dir):
    with SlotStore.open(memory_dir, "job") as store:
        yield store


def test_order_is_total_and_merging_it_does_not_depend_on_the_order():
    assert newer(None, None) is None
    assert newer(FENCES[0], None) == newer(None, FENCES[0]) == FENCES[0]
    for a, b, c in itertools.product(FENCES, repeat=3):
        assert newer(a, b) == newer(b, a)
        assert newer(newer(a, b), c) == newer(a, newer(b, c))


def test_adopted_only_when_newer(store):
    assert store.read_fence() is None
    first = Fence(step=100, epoch=5, nonce=7)
    assert store.write_fence(first) == first == store.read_fence()
    assert store.write_fence(Fence(step=1, epoch=4, nonce=99)) == first, "an older epoch"
    assert store.write_fence(Fence(step=101, epoch=5, nonce=7)) == first, "would revive step 101"
    lower = Fence(step=90, epoch=5, nonce=7)
    assert store.write_fence(lower) == lower, "the launch stepped back further"
    later = Fence(step=500, epoch=6, nonce=1)
    assert store.write_fence(later) == later == store.read_fence()
    assert [path.name for path in store.path.glob("fence*")] == ["fence-6-0000000000000001-500"]


def test_survives_its_process(store, memory_dir):
    code = (
        "import sys\nfrom flashckpt.store.slots import SlotStore\nfrom flashckpt.types import Fence\n"
        "SlotStore.open(sys.argv[1], 'job').write_fence(Fence(step=3, epoch=4, nonce=5))"
    )
    subprocess.run([sys.executable, "-c", code, str(memory_dir)], cwd=ROOT, check=True)
    assert store.read_fence() == Fence(step=3, epoch=4, nonce=5)


def test_every_damaged_record_is_refused():
    fence = Fence(step=3, epoch=4, nonce=5)
    record = encode_fence(fence, "job")
    assert len(record) == RECORD_BYTES
    assert decode_fence(record, "job") == fence
    assert decode_fence(record, "job2") is None
    assert decode_fence(record + b"\0", "job") is None
    for length in range(RECORD_BYTES):
        assert decode_fence(record[:length], "job") is None
    for bit in range(8 * RECORD_BYTES):
        damaged = bytearray(record)
        damaged[bit // 8] ^= 1 << bit % 8
        assert decode_fence(bytes(damaged), "job") is None


def damage_torn(path, other):
    path.write_bytes(path.read_bytes()[:20])


def damage_foreign(path, other):
    path.write_bytes(other.read_bytes())


def damage_link(path, other):
    path.unlink()
    path.symlink_to(other)


@pytest.mark.parametrize("damage", [damage_torn, damage_foreign, damage_link])
def test_bad_record_is_ignored_with_a_warning_and_can_be_replaced(store, memory_dir, caplog, damage):
    fence = Fence(step=3, epoch=4, nonce=5)
    store.write_fence(fence)
    with SlotStore.open(memory_dir, "other job") as other:
        other.write_fence(fence)
        (theirs,) = other.path.glob("fence-*")
    (ours,) = store.path.glob("fence-*")
    damage(ours, theirs)
    assert store.read_fence() is None
    assert "ignored" in caplog.text
    assert store.write_fence(fence) == fence == store.read_fence()


def test_older_fence_of_a_process_that_was_paused_changes_nothing(store):
    """It had read the old state, and renames its record when the newer one is there already."""
    old, new = Fence(step=3, epoch=4, nonce=5), Fence(step=30, epoch=40, nonce=50)
    store.write_fence(new)
    (store.path / "fence-4-0000000000000005-3").write_bytes(encode_fence(old, "job"))
    (store.path / "fence-4-0000000000000005-3").chmod(0o600)
    assert store.read_fence() == new
    assert store.write_fence(old) == new
