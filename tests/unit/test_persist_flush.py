"""Flush: what lies sealed in memory becomes a stock DCP checkpoint, bit for bit, in one moment."""

from __future__ import annotations

import dataclasses
import os
import time
import uuid

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import flashckpt
from flashckpt import failpoints
from flashckpt.errors import CorruptShardError, NotFoundError
from flashckpt.format.dtypes import ITEMSIZE
from flashckpt.move.throttle import Throttle
from flashckpt.persist.catalog import list_steps
from flashckpt.persist.exchange import Exchange
from flashckpt.persist.flush import flush, sweep
from flashckpt.persist.local import LocalStorage
from flashckpt.persist.names import METADATA, per_rank_key
from flashckpt.persist.storage import open_storage
from flashckpt.protocol.flush_spec import FlushSpec, decode_spec, encode_spec
from flashckpt.types import PersistSettings

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning"),
]


def spec_of(memory_dir, persist_dir, handle, **settings):
    return FlushSpec(
        job="job",
        memory_dir=memory_dir,
        node_id="node",
        generation=handle.generation,
        world=1,
        writers=(("node", (0,)),),
        coordinates=True,
        attempt=f"{handle.step:016x}",
        reason="test",
        settings=PersistSettings(str(persist_dir), **settings),
    )


@pytest.fixture
def checkpointer(memory_dir):
    with flashckpt.Checkpointer(flashckpt.CheckpointConfig(job="job", memory_dir=memory_dir)) as made:
        yield made


def every_dtype():
    """One tensor of each dtype that plain DCP can save and load, with all bytes different."""
    tensors = {}
    for name, itemsize in ITEMSIZE.items():
        data = torch.arange(6 * itemsize, dtype=torch.uint8)
        if name == "bool":
            data = data % 2
        tensors[name] = data.view(getattr(torch, name))
    return tensors


def bits(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8) if tensor.dim() else tensor.reshape(1).view(torch.uint8)


def test_every_dtype_comes_back_through_plain_dcp(checkpointer, memory_dir, tmp_path):
    tensors = every_dtype()
    handle = checkpointer.save(1, tensors)
    flush(spec_of(memory_dir, tmp_path, handle))
    reference = tmp_path / "reference"
    # What DCP itself can't bring back is not ours to answer for; everything else has to come back.
    able = []
    for name, tensor in tensors.items():
        try:
            dcp.save({name: tensor}, checkpoint_id=reference / name, no_dist=True)
            dcp.load({name: torch.zeros_like(tensor)}, checkpoint_id=reference / name, no_dist=True)
        except (Exception, CheckpointException):
            continue
        able.append(name)
    assert {"float32", "bfloat16", "float8_e4m3fn", "complex64", "bool", "int8", "uint16"} <= set(able)
    got = {name: torch.zeros_like(tensors[name]) for name in able}
    dcp.load(got, checkpoint_id=tmp_path / "step-1", no_dist=True)
    for name in able:
        assert torch.equal(bits(got[name]), bits(tensors[name])), name


def test_large_tensors_are_cut_and_spread_over_files(checkpointer, memory_dir, tmp_path, monkeypatch):
    from flashckpt.persist import flush as module
    from flashckpt.persist import plan as plans

    monkeypatch.setattr(module, "plan", lambda contributions: plans.plan(contributions, piece_bytes=256))
    state = {"a": torch.randn(40, 16), "b": torch.randn(100), "row": torch.randn(1, 1000)}
    handle = checkpointer.save(5, state)
    flush(spec_of(memory_dir, tmp_path, handle, concurrency=3))
    assert len(list((tmp_path / "step-5").glob("*.distcp"))) == 3
    got = {key: torch.zeros_like(value) for key, value in state.items()}
    dcp.load(got, checkpoint_id=tmp_path / "step-5", no_dist=True)
    assert all(torch.equal(got[key], state[key]) for key in state)
    # A slice of what was cut is put together from the right parts.
    part = {"a": torch.zeros(40, 16)}
    dcp.load(part, checkpoint_id=tmp_path / "step-5", no_dist=True)
    assert torch.equal(part["a"], state["a"])


def test_rot_is_never_written(checkpointer, memory_dir, tmp_path):
    handle = checkpointer.save(1, {"a": torch.randn(1000)})
    flush(spec_of(memory_dir, tmp_path, handle))
    second = checkpointer.save(2, {"a": torch.randn(1000)})
    shards = [os.path.join(root, name) for root, _, names in os.walk(memory_dir) for name in names]
    shard = max((path for path in shards if "/sealed/" in path), key=os.path.getmtime)
    from flashckpt.format.shard import read_header

    fd = os.open(shard, os.O_RDWR)
    header = read_header(fd)
    assert header.shard.generation == second.generation
    entry = header.layout.entries[0]
    os.pwrite(fd, b"\xff" * 8, header.data_offset_bytes + entry.offset_bytes + 16)
    os.close(fd)
    with pytest.raises(CorruptShardError, match="crc32c"):
        flush(spec_of(memory_dir, tmp_path, second))
    assert not (tmp_path / "step-2").exists()
    assert os.readlink(tmp_path / "latest") == "step-1"


def test_a_step_that_is_written_once_more_replaces_the_old_one(checkpointer, memory_dir, tmp_path):
    first = checkpointer.save(4, {"a": torch.zeros(3)})
    flush(spec_of(memory_dir, tmp_path, first))
    checkpointer.start_fresh()
    second = checkpointer.save(4, {"a": torch.ones(3)})
    spec = spec_of(memory_dir, tmp_path, second)
    flush(decode_spec(encode_spec(spec)))
    got = {"a": torch.zeros(3)}
    dcp.load(got, checkpoint_id=tmp_path / "latest", no_dist=True)
    assert torch.equal(got["a"], torch.ones(3))
    # Beside it: that the launch before was given up.
    assert sorted(os.listdir(tmp_path)) == ["flashckpt.json", "history.json", "latest", "step-4"]


@pytest.mark.parametrize("concurrency", [1, 3])
def test_a_limited_flush_is_as_slow_as_it_is_told_to_be(checkpointer, memory_dir, tmp_path, concurrency):
    handle = checkpointer.save(1, {str(number): torch.randn(50_000) for number in range(3)})
    told = flush(spec_of(memory_dir, tmp_path, handle, max_mbps=8.0, concurrency=concurrency))
    assert told["size_bytes"] > 600_000
    # A byte a microsecond, for all files together; what goes at once after a pause is 50 ms of it.
    assert told["seconds"] > 0.6 - 0.05


def test_leftovers_of_dead_flushes_go_and_retention_keeps_its_promises(checkpointer, memory_dir, tmp_path):
    (tmp_path / "step-1.tmp-00000000000000aa").mkdir()
    (tmp_path / "step-0.deleting-00000000000000ab").mkdir()
    (tmp_path / "notes").mkdir()
    for step in (1, 2, 3, 4, 5):
        handle = checkpointer.save(step, {"a": torch.full((2,), float(step))})
        flush(spec_of(memory_dir, tmp_path, handle, keep_latest_k=2, keep_every=2))
    assert sorted(os.listdir(tmp_path)) == [
        "flashckpt.json",
        "latest",
        "notes",
        "step-2",
        "step-3",
        "step-4",
        "step-5",
    ]
    assert os.readlink(tmp_path / "latest") == "step-5"


@pytest.mark.parametrize("kind", ["local", "memory"])
def test_what_is_being_written_is_not_swept(tmp_path, kind):
    """By quicker nodes of the same attempt. Of other steps, what dead attempts left goes."""
    url = str(tmp_path / "out") if kind == "local" else f"memory://{uuid.uuid4().hex}/out"
    storage = open_storage(url)
    dead, present = "00000000000000aa", "00000000000000bb"
    left = storage.stage(3, dead)
    Exchange(storage, left, ["a", "b"], "b", 0.0).offer([])
    stage = storage.stage(4, present)
    quick = Exchange(storage, stage, ["a", "b"], "b", 0.0)
    quick.offer([])
    sweep(storage, 4, present)
    assert not storage.list(left.place)
    assert len(storage.list(stage.place)) == 1
    Exchange(storage, stage, ["a", "b"], "a", 0.0).offer([])
    assert quick.offered() == []


def test_a_dead_attempt_at_the_same_step_goes_with_the_commit(checkpointer, memory_dir):
    url = f"memory://{uuid.uuid4().hex}/out"
    storage = open_storage(url)
    dead = storage.stage(3, "00000000000000aa")
    Exchange(storage, dead, ["a", "b"], "b", 0.0).offer([])
    flush(spec_of(memory_dir, url, checkpointer.save(3, {"a": torch.zeros(3)})))
    names = storage.list("step-3")
    assert METADATA in names
    assert not [name for name in names if dead.suffix in name]


def test_a_history_that_is_being_written_is_not_swept(tmp_path):
    now = time.time()
    aside = {"history.json.tmp-00000000000000aa": now, "history.json.tmp-00000000000000ab": now - 7200}
    for name, written_at in aside.items():
        (tmp_path / name).write_text("{}")
        os.utime(tmp_path / name, (written_at, written_at))
    sweep(LocalStorage(str(tmp_path)), 1, "00000000000000aa")
    assert os.listdir(tmp_path) == ["history.json.tmp-00000000000000aa"]


def test_a_failed_deletion_fails_no_flush_and_is_repeated(checkpointer, memory_dir, tmp_path, monkeypatch, caplog):
    def deny(*_):
        raise OSError(13, "Permission denied")

    def save(step):
        handle = checkpointer.save(step, {"a": torch.full((2,), float(step))})
        flush(spec_of(memory_dir, tmp_path, handle, keep_latest_k=2))

    for step in (1, 2, 3):
        save(step)
    assert not (tmp_path / "step-1").exists()
    with monkeypatch.context() as broken:
        broken.setattr(LocalStorage, "remove", deny)
        save(4)
    assert "step-2 could not be removed" in caplog.text
    assert os.readlink(tmp_path / "latest") == "step-4"
    save(5)
    assert sorted(name for name in os.listdir(tmp_path) if name.startswith("step")) == ["step-4", "step-5"]


def test_a_deletion_that_dies_half_way_leaves_no_step(checkpointer, memory_dir, tmp_path, monkeypatch):
    """Invalid first, gone then: nobody may take the rest for a checkpoint."""
    for step in (1, 2):
        handle = checkpointer.save(step, {"a": torch.full((2,), float(step))})
        flush(spec_of(memory_dir, tmp_path, handle))
    monkeypatch.setattr(failpoints, "_armed", failpoints.parse("mid_delete=error(EIO)*1"))
    with pytest.raises(OSError, match="Input/output error"):
        LocalStorage(str(tmp_path)).remove("step-1")
    assert [one.name for one in list_steps(LocalStorage(str(tmp_path)))] == ["step-2"]
    assert any(".deleting-" in name for name in os.listdir(tmp_path))
    flush(spec_of(memory_dir, tmp_path, checkpointer.save(3, {"a": torch.zeros(2)})))
    assert sorted(os.listdir(tmp_path)) == ["flashckpt.json", "latest", "step-2", "step-3"]


def test_every_byte_goes_past_the_limit_of_the_node(checkpointer, memory_dir, tmp_path, monkeypatch):
    taken = []

    class Counted(Throttle):
        def __init__(self, bytes_per_second):
            super().__init__(None)
            taken.append((bytes_per_second, []))

        def take(self, size_bytes):
            taken[-1][1].append(size_bytes)
            return super().take(size_bytes)

    monkeypatch.setattr("flashckpt.persist.flush.Throttle", Counted)
    handle = checkpointer.save(1, {"a": torch.zeros(300_000)})
    flush(spec_of(memory_dir, tmp_path, handle, max_mbps=8000.0))
    ((limit, sizes),) = taken
    assert limit == 1e9
    assert sum(sizes) == sum(path.stat().st_size for path in (tmp_path / "step-1").glob("*.distcp")) > 1_200_000


def test_per_rank_keys():
    assert per_rank_key(3, "rng.cpu") == "__rank__.3.rng.cpu"


@pytest.mark.parametrize(("ranks", "found"), [((), r"\[\]"), ((0, 0), r"\[0, 0\]")], ids=["left out", "named twice"])
def test_a_flush_without_every_rank_exactly_once_leaves_no_step(checkpointer, memory_dir, tmp_path, ranks, found):
    """Sharded tensors would be missed anyway; of a rank that has only values of its own nothing else would tell."""
    first, second = (checkpointer.save(step, {"own": flashckpt.PerRank({"seed": step})}) for step in (1, 2))
    flush(spec_of(memory_dir, tmp_path, first))
    spec = dataclasses.replace(spec_of(memory_dir, tmp_path, second), writers=(("node", ranks),))
    with pytest.raises(CorruptShardError, match=rf"expected shards of ranks 0 to 0, found {found}"):
        flush(spec)
    assert os.readlink(tmp_path / "latest") == "step-1"
    assert [one.name for one in list_steps(LocalStorage(str(tmp_path)))] == ["step-1"]


def test_a_generation_that_is_gone_is_not_flushed(checkpointer, memory_dir, tmp_path):
    handle = checkpointer.save(1, {"a": torch.zeros(3)})
    spec = spec_of(memory_dir, tmp_path, handle)
    gone = dataclasses.replace(spec, generation=handle.generation._replace(seq=9))
    with pytest.raises(NotFoundError, match=r"expected it in .*, found that it is gone"):
        flush(gone)
    assert not list_steps(LocalStorage(str(tmp_path)))
