"""Loading from persist_dir: in one order with memory, ours and foreign ones, and nothing that is not to be trusted."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
from dataclasses import replace

import pytest
import torch
import torch.distributed.checkpoint as dcp

import flashckpt
from flashckpt.errors import CorruptShardError, DeniedError, UnsafeDirectoryError
from flashckpt.format.dtypes import ITEMSIZE
from flashckpt.load.disk.restore import DiskInventory, OnDisk, choose_on_disk
from flashckpt.load.disk.unpickle import read_index
from flashckpt.load.histories import pick
from flashckpt.persist.catalog import read_lines, write_line
from flashckpt.persist.flush import flush
from flashckpt.persist.storage import open_storage
from flashckpt.protocol.flush_spec import FlushSpec
from flashckpt.protocol.line import begun, from_fence
from flashckpt.types import Generation, Launch, PersistSettings

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning"),
]


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out"


def open_checkpointer(memory_dir, out):
    # Without an agent nothing is written to persist_dir but by `to_disk`.
    config = flashckpt.CheckpointConfig(job="job", memory_dir=memory_dir, persist_dir=str(out), persist_on_exit=False)
    return flashckpt.Checkpointer(config)


def to_disk(memory_dir, out, handle):
    flush(
        FlushSpec(
            job="job",
            memory_dir=memory_dir,
            node_id="node",
            generation=handle.generation,
            world=1,
            writers=(("node", (0,)),),
            coordinates=True,
            attempt=f"{handle.step:016x}",
            reason="test",
            settings=PersistSettings(str(out)),
        )
    )


def forget_memory(memory_dir):
    for name in os.listdir(memory_dir):
        shutil.rmtree(os.path.join(memory_dir, name))


def state(step):
    return {
        "model": {"a": torch.full((50, 4), float(step)), "b": torch.arange(5) + step},
        "lr": 0.5 * step,
        "names": ("a", 2, frozenset({1})),
        "own": flashckpt.PerRank({"seed": step, "noise": torch.full((3,), step)}),
    }


def blank():
    return {
        "model": {"a": torch.zeros(50, 4), "b": torch.zeros(5, dtype=torch.int64)},
        "lr": None,
        "names": None,
        "own": flashckpt.PerRank({"seed": None, "noise": torch.zeros(3, dtype=torch.int64)}),
    }


def check(live, step):
    expected = state(step)
    assert torch.equal(live["model"]["a"], expected["model"]["a"])
    assert torch.equal(live["model"]["b"], expected["model"]["b"])
    assert (live["lr"], live["names"]) == (expected["lr"], expected["names"])
    assert live["own"].value["seed"] == step
    assert torch.equal(live["own"].value["noise"], expected["own"].value["noise"])


def test_when_all_memory_is_gone_the_disk_has_it(memory_dir, out):
    with open_checkpointer(memory_dir, out) as checkpointer:
        handle = checkpointer.save(3, state(3), extra={"tokens": 7})
        to_disk(memory_dir, out, handle)
    forget_memory(memory_dir)
    with open_checkpointer(memory_dir, out) as checkpointer:
        live = blank()
        result = checkpointer.load(live)
        assert (result.step, result.source, result.extra) == (3, "persist", {"tokens": 7})
        assert (result.generation, result.saved_world_size) == (handle.generation, 1)
        check(live, 3)
        # And the job goes on from there.
        assert checkpointer.save(4, state(4)).outcome == "ok"
        assert checkpointer.load(live).step == 4


def test_an_object_store_is_as_good_as_a_disk(memory_dir):
    """fsspec's memory is one of this process; a real server is in the contract's suite."""
    pytest.importorskip("fsspec")
    url = f"memory://{os.path.basename(memory_dir)}/run"
    with open_checkpointer(memory_dir, url) as checkpointer:
        to_disk(memory_dir, url, checkpointer.save(3, state(3)))
        to_disk(memory_dir, url, checkpointer.save(4, state(4)))
    forget_memory(memory_dir)
    with open_checkpointer(memory_dir, url) as checkpointer:
        live = blank()
        result = checkpointer.load(live)
        assert (result.step, result.source) == (4, "persist")
        check(live, 4)
        assert checkpointer.load(live, step=3, read_only=True).step == 3
        check(live, 3)
        # An attempt that died leaves nothing for ever; what somebody else is writing is not ours to remove.
        storage = open_storage(url)
        for step, name in ((8, f"__0_0-{'a' * 16}.distcp"), (9, "__0_0.distcp")):
            with storage.open_write(f"step-{step}/{name}") as file:
                file.write(b"half")
        to_disk(memory_dir, url, checkpointer.save(5, state(5)))
        assert sorted(name for name in storage.list() if "step" in name) == ["step-3", "step-4", "step-5", "step-9"]


def test_the_newer_of_memory_and_disk_is_loaded(memory_dir, out):
    with open_checkpointer(memory_dir, out) as checkpointer:
        to_disk(memory_dir, out, checkpointer.save(3, state(3)))
        checkpointer.save(4, state(4))
        live = blank()
        result = checkpointer.load(live, read_only=True)
        assert (result.step, result.source) == (4, "memory")
        check(live, 4)
        # An older step that only the disk has is found by its number.
        checkpointer.save(5, state(5))
        checkpointer.save(6, state(6))
        result = checkpointer.load(live, step=3, read_only=True)
        assert (result.step, result.source) == (3, "persist")
        check(live, 3)
        with pytest.raises(flashckpt.NotFoundError, match="nor on disk"):
            checkpointer.load(live, step=99)


def test_bad_memory_leads_to_the_disk(memory_dir, out):
    with open_checkpointer(memory_dir, out) as checkpointer:
        to_disk(memory_dir, out, checkpointer.save(3, state(3)))
        checkpointer.save(4, state(4))
    for root, _, names in os.walk(memory_dir):
        for name in names if root.endswith("sealed") else ():
            with open(os.path.join(root, name), "r+b") as file:
                file.seek(-4096, os.SEEK_END)
                file.seek(5000)
                file.write(b"\xff" * 3000)
    with open_checkpointer(memory_dir, out) as checkpointer:
        live = blank()
        result = checkpointer.load(live)
        assert (result.step, result.source) == (3, "persist")
        check(live, 3)


def test_damage_on_disk_is_never_loaded(memory_dir, out):
    with open_checkpointer(memory_dir, out) as checkpointer:
        to_disk(memory_dir, out, checkpointer.save(3, state(3)))
        to_disk(memory_dir, out, checkpointer.save(4, state(4)))
    forget_memory(memory_dir)
    (data,) = (out / "step-4").glob("*_0.distcp")
    content = bytearray(data.read_bytes())
    at = content.find(torch.full((4,), 4.0).numpy().tobytes())
    content[at] ^= 1
    data.write_bytes(content)
    with open_checkpointer(memory_dir, out) as checkpointer:
        live = blank()
        result = checkpointer.load(live, read_only=True)
        assert (result.step, result.source) == (3, "persist")
        check(live, 3)
    # Shorter: it is passed over before anything is opened. And with nothing else left, that is an error.
    data.write_bytes(bytes(content[:-1]))
    shutil.rmtree(out / "step-3")
    forget_memory(memory_dir)
    with open_checkpointer(memory_dir, out) as checkpointer:
        with pytest.raises(flashckpt.UnusableError, match=r"step-4 on disk: .*distcp: expected \d+ bytes"):
            checkpointer.load(blank())
        assert checkpointer.load(blank(), allow_fresh=True) is None


def test_what_a_load_left_behind_stays_behind_though_memory_is_gone(memory_dir, out):
    with open_checkpointer(memory_dir, out) as checkpointer:
        to_disk(memory_dir, out, checkpointer.save(3, state(3)))
        to_disk(memory_dir, out, checkpointer.save(9, state(9)))
    with open_checkpointer(memory_dir, out) as checkpointer:
        assert checkpointer.load(blank(), step=3).step == 3
    forget_memory(memory_dir)
    with open_checkpointer(memory_dir, out) as checkpointer:
        assert checkpointer.load(blank()).step == 3


def test_every_dtype_comes_back(memory_dir, out):
    tensors = {}
    for name, itemsize in ITEMSIZE.items():
        data = torch.arange(6 * itemsize, dtype=torch.uint8) % (2 if name == "bool" else 255)
        tensors[name] = data.view(getattr(torch, name))
    with open_checkpointer(memory_dir, out) as checkpointer:
        to_disk(memory_dir, out, checkpointer.save(1, tensors))
    forget_memory(memory_dir)
    live = {name: torch.zeros(6 * ITEMSIZE[name], dtype=torch.uint8).view(one.dtype) for name, one in tensors.items()}
    with open_checkpointer(memory_dir, out) as checkpointer:
        assert checkpointer.load(live).source == "persist"
    for name, one in tensors.items():
        assert torch.equal(live[name].view(torch.uint8), one.view(torch.uint8)), name


def test_a_foreign_checkpoint_is_imported(memory_dir, out):
    foreign = {"model": {"a": torch.randn(7, 3)}, "lr": 0.25, "betas": (0.9, 0.95), "step": torch.tensor(5)}
    dcp.save(foreign, checkpoint_id=out / "step_12", no_dist=True)
    with open_checkpointer(memory_dir, out) as checkpointer:
        live = {"model": {"a": torch.zeros(7, 3)}, "lr": None, "betas": None, "step": torch.tensor(0)}
        assert checkpointer.load(live) is None  # nobody named it
        result = checkpointer.load_path(str(out / "step_12"), live)
        assert (result.step, result.source) == (12, "persist")
        assert torch.equal(live["model"]["a"], foreign["model"]["a"])
        assert (live["lr"], live["betas"], live["step"]) == (0.25, (0.9, 0.95), torch.tensor(5))
        assert checkpointer.save(13, live).outcome == "ok"


class Exploit:
    def __reduce__(self):
        return os.system, ("touch /tmp/flashckpt-exploited",)


def test_a_foreign_value_that_would_run_code_is_refused(memory_dir, out):
    dcp.save({"a": torch.ones(2), "evil": Exploit()}, checkpoint_id=out / "step-1", no_dist=True)
    with open_checkpointer(memory_dir, out) as checkpointer:
        with pytest.raises(flashckpt.UnsupportedValueError, match="weights_only"):
            checkpointer.load_path(str(out), {"a": torch.zeros(2), "evil": None})
        live = {"a": torch.zeros(2)}
        assert checkpointer.load_path(str(out), live, strict=False).step == 1
        assert torch.equal(live["a"], torch.ones(2))
    assert not os.path.exists("/tmp/flashckpt-exploited")


def test_an_index_that_would_run_code_is_refused(memory_dir, out):
    dcp.save({"a": torch.ones(2)}, checkpoint_id=out / "step-1", no_dist=True)
    (out / "step-1" / ".metadata").write_bytes(pickle.dumps({"state_dict_metadata": Exploit()}))
    with open_checkpointer(memory_dir, out) as checkpointer, pytest.raises(DeniedError, match=r"posix\.system"):
        checkpointer.load_path(str(out), {"a": torch.zeros(2)})
    assert not os.path.exists("/tmp/flashckpt-exploited")


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_every_real_index_is_read(tmp_path, protocol):
    """With paths of every kind, layouts, fp8, and in every protocol of pickle that objects like these need."""
    tensors = {
        "a": torch.ones(4, 2),
        "e": torch.empty(0),
        "s": torch.tensor(1.0),
        "f": torch.ones(2).to(torch.float8_e5m2),
    }
    metadata = dcp.save({**tensors, "v": {"deep": [1, 2]}}, checkpoint_id=tmp_path / "x", no_dist=True)
    metadata.storage_meta.checkpoint_id = tmp_path
    index = read_index(pickle.dumps(metadata, protocol=protocol), "x")
    assert index.tensors["a"].shape == (4, 2)
    assert index.tensors["f"].dtype == "float8_e5m2"
    assert index.values == {"v.deep"}
    assert set(index.locations) >= {("a", (0, 0)), ("s", ()), ("v.deep", None)}


@pytest.mark.parametrize(
    "payload",
    [
        b"cposix\nsystem\n(S'true'\ntR.",
        b"cbuiltins\neval\n(S'1'\ntR.",
        b"ctorch\nload\n(S'x'\ntR.",
        pickle.dumps(io.BytesIO),
        pickle.dumps(print),
    ],
)
def test_everything_else_is_refused(payload):
    with pytest.raises(DeniedError, match="it asks for"):  # before anything is called
        read_index(payload, "x")


@pytest.mark.parametrize("payload", [pickle.dumps({"not": "an index"}), b"garbage", b""])
def test_what_is_no_index(payload):
    with pytest.raises(CorruptShardError, match="expected"):
        read_index(payload, "x")


def test_an_index_never_leads_out_of_its_directory(tmp_path):
    metadata = dcp.save({"a": torch.ones(2)}, checkpoint_id=tmp_path / "x", no_dist=True)
    for path in ("../y", "/etc/passwd", "a/../../b", ""):
        for info in metadata.storage_data.values():
            info.relative_path = path
        with pytest.raises(CorruptShardError, match="file beside it"):
            read_index(pickle.dumps(metadata), "x")


def test_a_checkpoint_of_somebody_else_is_not_loaded(memory_dir, out, monkeypatch):
    with open_checkpointer(memory_dir, out) as checkpointer:
        to_disk(memory_dir, out, checkpointer.save(3, state(3)))
    forget_memory(memory_dir)
    if os.geteuid() != 0:
        pytest.skip("only root can give files away")
    os.chown(out / "step-3" / ".metadata", 12345, -1)
    with open_checkpointer(memory_dir, out) as checkpointer, pytest.raises(UnsafeDirectoryError, match="12345"):
        checkpointer.load(blank())


def test_nothing_anywhere_is_a_fresh_start_but_a_disk_that_fails_is_not(memory_dir, out, monkeypatch):
    def fail(*_):
        raise OSError(5, "Input/output error")

    with open_checkpointer(memory_dir, out) as checkpointer:
        assert checkpointer.load(blank()) is None
    out.mkdir()
    monkeypatch.setattr("flashckpt.load.disk.restore.look_around", fail)
    with (
        open_checkpointer(memory_dir, out) as checkpointer,
        pytest.raises(flashckpt.UnusableError, match="can't be read"),
    ):
        checkpointer.load(blank())


# --- the job's history beside its steps


def two_steps_and_a_rollback(memory_dir, out):
    """Steps 3 and 4 lie on disk, the job went on from 3, and no memory is left."""
    with open_checkpointer(memory_dir, out) as checkpointer:
        for step in (3, 4):
            to_disk(memory_dir, out, checkpointer.save(step, state(step)))
    with open_checkpointer(memory_dir, out) as checkpointer:
        assert checkpointer.load(blank(), step=3).step == 3
    forget_memory(memory_dir)


def test_when_all_memory_is_gone_the_disk_remembers_what_was_abandoned(memory_dir, out):
    two_steps_and_a_rollback(memory_dir, out)
    assert "history.json" in os.listdir(out)
    assert "fence.json" not in os.listdir(out)
    with open_checkpointer(memory_dir, out) as checkpointer:
        live = blank()
        assert checkpointer.load(live).step == 3
        check(live, 3)


def test_what_an_earlier_version_remembered_counts(memory_dir, out):
    two_steps_and_a_rollback(memory_dir, out)
    line = read_lines(open_storage(str(out)))[-1]
    (out / "history.json").unlink()
    fence = {"step": 3, "epoch": line.head.epoch, "nonce": f"{line.head.nonce:016x}"}
    (out / "fence.json").write_text(json.dumps(fence))
    with open_checkpointer(memory_dir, out) as checkpointer:
        assert checkpointer.load(blank()).step == 3
    (later,) = read_lines(open_storage(str(out)))
    assert later.supersedes(line)


@pytest.mark.parametrize("content", ["", "not json", "[]", "{}", '{"schema": "flashckpt.history/v1", "lines": [7]}'])
@pytest.mark.parametrize("name", ["history.json", "fence.json"])
def test_a_damaged_history_costs_no_step_and_is_set_aside(memory_dir, out, caplog, name, content):
    two_steps_and_a_rollback(memory_dir, out)
    (out / "history.json").unlink()
    (out / name).write_text(content)
    with open_checkpointer(memory_dir, out) as checkpointer:
        assert checkpointer.load(blank(), read_only=True).step == 4, "that it was abandoned is not known any more"
        assert f"{name}: expected" in caplog.text
        assert "load(step=…) loads the one that you name" in caplog.text
        assert (out / name).read_text() == content
        live = blank()
        assert checkpointer.load(live, step=3).step == 3
        check(live, 3)
    assert f"it was set aside as {name}.damaged-" in caplog.text
    (aside,) = [path for path in out.iterdir() if path.name.startswith(f"{name}.damaged-")]
    assert aside.read_text() == content
    forget_memory(memory_dir)
    with open_checkpointer(memory_dir, out) as checkpointer:
        assert checkpointer.load(blank()).step == 3


def at(launch, step):
    return Generation(launch.epoch, launch.nonce, step, 1)


def test_the_history_keeps_each_line_that_no_other_knows_of(tmp_path):
    storage = open_storage(str(tmp_path))
    a, b, stranger = (Launch(epoch, (1 << 64) - epoch) for epoch in (10, 20, 15))
    assert read_lines(storage) == ()
    write_line(storage, begun(a))
    write_line(storage, begun(stranger))
    assert read_lines(storage) == (begun(a), begun(stranger))
    line = begun(a).continued(b, at(a, 7))
    write_line(storage, line)
    assert read_lines(storage) == (begun(stranger), line)
    write_line(storage, line)
    assert read_lines(storage) == (begun(stranger), line)
    assert json.loads((tmp_path / "history.json").read_text()) == {
        "schema": "flashckpt.history/v1",
        "lines": [
            {"head": [15, "fffffffffffffff1"], "root": [15, "fffffffffffffff1"], "floor": None, "listed": []},
            {
                "head": [20, "ffffffffffffffec"],
                "root": [10, "fffffffffffffff6"],
                "floor": None,
                "listed": [[10, "fffffffffffffff6", 7]],
            },
        ],
    }


def test_the_history_remembers_what_memory_has_folded(tmp_path):
    storage = open_storage(str(tmp_path))
    full = memory = begun(Launch(1, 1))
    for epoch in range(2, 80):
        base = Generation(epoch - 1, epoch - 1, epoch, 1)
        full, memory = (line.continued(Launch(epoch, epoch), base) for line in (full, memory))
        memory = memory.compacted()
        write_line(storage, memory)
    assert memory.floor is not None
    (found,) = read_lines(storage)
    assert replace(found, floor=None) == full


def generation(step, epoch):
    return Generation(epoch, epoch, step, 0)


def test_choice_on_disk():
    steps = tuple(OnDisk(f"step-{step}", generation(step, epoch), "") for step, epoch in ((5, 1), (9, 1), (7, 2)))
    line = from_fence(5, 2, 2)
    inventory = DiskInventory(steps, (line,))
    chosen = choose_on_disk(inventory, pick(inventory.lines, inventory.whole), None)
    assert [one.name for one in chosen.candidates] == ["step-7", "step-5"]
    assert chosen.passed_over == ("step-9 on disk: abandoned: the job went on from step 5 of launch 0000000000000001",)
    with pytest.raises(flashckpt.AmbiguousHistoryError):
        pick((), inventory.whole)
    assert [
        one.name for one in choose_on_disk(DiskInventory(steps), pick((), inventory.whole, step=9), 9).candidates
    ] == ["step-9"]
