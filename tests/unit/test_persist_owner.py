"""persist_dir knows its job: what another job or program put there is neither loaded nor touched, and nothing that is
damaged or missing there is passed over without a word."""

from __future__ import annotations

import json
import logging
import os
import shutil

import pytest
import torch
import torch.distributed.checkpoint as dcp

import flashckpt
from flashckpt.persist.flush import flush
from flashckpt.persist.tenancy import mount_that_lacks
from flashckpt.protocol.flush_spec import FlushSpec
from flashckpt.store.slots import SlotStore
from flashckpt.types import Generation, PersistSettings

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out"


def state(step):
    return {"a": torch.full((500,), float(step)), "step": step}


def blank():
    return {"a": torch.zeros(500), "step": None}


def opened(memory_dir, out, job="A", **settings):
    # Without an agent nothing is written to persist_dir but by these tests.
    config = flashckpt.CheckpointConfig(
        job=job, memory_dir=memory_dir, persist_dir=str(out), persist_on_exit=False, **settings
    )
    return flashckpt.Checkpointer(config)


def to_disk(memory_dir, out, handle, job="A", known=None, **settings):
    return flush(
        FlushSpec(
            job=job,
            memory_dir=memory_dir,
            node_id="node",
            generation=handle.generation,
            world=1,
            writers=(("node", (0,)),),
            coordinates=True,
            attempt=f"{handle.step:016x}",
            reason="test",
            settings=PersistSettings(str(out), **settings),
            known=known,
        )
    )


def write_steps(memory_dir, out, *steps, job="A", **settings):
    """A run of the job that persists these steps; its memory is gone afterwards."""
    with opened(memory_dir, out, job) as checkpointer:
        for step in steps:
            to_disk(memory_dir, out, checkpointer.save(step, state(step)), job, **settings)
    forget_memory(memory_dir)


def forget_memory(memory_dir):
    for name in os.listdir(memory_dir):
        shutil.rmtree(os.path.join(memory_dir, name))


def contents(out):
    """Every byte that lies there."""
    return {
        str(path.relative_to(out)): os.readlink(path) if path.is_symlink() else path.read_bytes()
        for path in out.rglob("*")
        if path.is_file() or path.is_symlink()
    }


def test_the_first_flush_writes_whose_directory_it_is(memory_dir, out):
    write_steps(memory_dir, out, 1, 2)
    found = json.loads((out / "flashckpt.json").read_text())
    assert found["job"] == "A"
    assert found["created"] > 1e9


def test_another_jobs_steps_are_neither_loaded_nor_touched(memory_dir, out):
    write_steps(memory_dir, out, 1, 10)
    before = contents(out)
    with opened(memory_dir, out, "B") as checkpointer:
        with pytest.raises(flashckpt.UnusableError, match=r"belongs to job 'A'.*step-10") as caught:
            checkpointer.load(blank())
        assert "load(path=" in caught.value.hint
        with pytest.raises(flashckpt.NotFoundError, match="belongs to job 'A'"):
            checkpointer.load(blank(), step=10)
        assert checkpointer.load(blank(), allow_fresh=True) is None
        checkpointer.start_fresh()
        for step in (1, 2, 11):  # one is there, one is older, one is newer than all that lies there
            handle = checkpointer.save(step, state(-step))
            with pytest.raises(flashckpt.ForeignStepError, match="belongs to job 'A'") as caught:
                to_disk(memory_dir, out, handle, "B", keep_latest_k=2)
            assert "persist_overwrite" in caught.value.hint
    assert contents(out) == before
    forget_memory(memory_dir)
    with opened(memory_dir, out) as checkpointer:
        live = blank()
        assert checkpointer.load(live).step == 10
        assert torch.equal(live["a"], state(10)["a"])


def test_what_the_user_names_is_replaced_and_the_rest_stays(memory_dir, out):
    write_steps(memory_dir, out, 1, 10)
    with opened(memory_dir, out, "B", persist_overwrite=True) as checkpointer:
        assert checkpointer.load(blank()) is None
        for step in (1, 2, 3):
            to_disk(memory_dir, out, checkpointer.save(step, state(-step)), "B", overwrite=True, keep_latest_k=2)
    forget_memory(memory_dir)
    assert sorted(os.listdir(out)) == ["flashckpt.json", "latest", "step-10", "step-2", "step-3"]
    assert os.readlink(out / "latest") == "step-3"
    with opened(memory_dir, out, "B") as checkpointer:
        live = blank()
        assert checkpointer.load(live).step == 3
        assert torch.equal(live["a"], state(-3)["a"])


def test_a_directory_from_before_there_were_identities(memory_dir, out):
    write_steps(memory_dir, out, 4)
    (out / "flashckpt.json").unlink()
    with opened(memory_dir, out, "B") as checkpointer:
        handle = checkpointer.save(9, state(9))
        with pytest.raises(flashckpt.ForeignStepError, match="'A'"):
            to_disk(memory_dir, out, handle, "B")
    forget_memory(memory_dir)
    with opened(memory_dir, out) as checkpointer:
        assert checkpointer.load(blank()).step == 4
        to_disk(memory_dir, out, checkpointer.save(5, state(5)))
    assert json.loads((out / "flashckpt.json").read_text())["job"] == "A"


@pytest.mark.parametrize("content", [b"", b"{", b'{"job": 5}'])
def test_a_damaged_identity_is_written_anew(memory_dir, out, content, caplog):
    write_steps(memory_dir, out, 4)
    (out / "flashckpt.json").write_bytes(content)
    with opened(memory_dir, out) as checkpointer:
        assert checkpointer.load(blank()).step == 4
        to_disk(memory_dir, out, checkpointer.save(5, state(5)))
    assert "flashckpt.json: expected" in caplog.text
    assert json.loads((out / "flashckpt.json").read_text())["job"] == "A"


@pytest.mark.parametrize("latest", [False, True])
def test_another_systems_step_stays_as_it_is(memory_dir, out, latest, caplog):
    dcp.save({"a": torch.full((500,), -1.0), "step": 12}, checkpoint_id=out / "step-12", no_dist=True)
    if latest:
        (out / "latest").symlink_to("step-12")
    before = contents(out)
    with opened(memory_dir, out) as checkpointer:
        assert checkpointer.load(blank()) is None
        assert "step-12" in caplog.text
        assert "load(path=" in caplog.text
        with pytest.raises(flashckpt.NotFoundError, match=r"step-12 .*not written by this job"):
            checkpointer.load(blank(), step=12)
        checkpointer.start_fresh()
        if not latest:
            for step in (3, 5, 7):
                to_disk(memory_dir, out, checkpointer.save(step, state(step)), keep_latest_k=2)
        handle = checkpointer.save(12, state(12))
        with pytest.raises(flashckpt.ForeignStepError, match="latest" if latest else "step-12") as caught:
            to_disk(memory_dir, out, handle, keep_latest_k=2)
        assert "persist_overwrite" in caught.value.hint
        after = contents(out)
        assert {name: after[name] for name in before} == before
        # Whoever names it gets it.
        live = blank()
        assert checkpointer.load_path(str(out / "step-12"), live).step == 12
        assert live["step"] == 12
        to_disk(memory_dir, out, handle, overwrite=True, keep_latest_k=2)
    assert os.readlink(out / "latest") == "step-12"
    if not latest:
        assert sorted(os.listdir(out)) == ["flashckpt.json", "latest", "step-12", "step-7"]


DAMAGE = {
    "no .metadata": lambda step: (step / ".metadata").unlink(),
    "cut .metadata": lambda step: os.truncate(step / ".metadata", 20),
    "missing data file": lambda step: next(step.glob("*.distcp")).unlink(),
    "cut data file": lambda step: os.truncate(next(step.glob("*.distcp")), 100),
    "flipped bytes": lambda step: flip(next(step.glob("*.distcp")), 800),
    "damaged meta.json": lambda step: os.truncate(step / "meta.json", 40),
    "no meta.json": lambda step: (step / "meta.json").unlink(),
    "damaged checksums": lambda step: flip(step / "__checksums.flash", 5),
    "gone": lambda step: shutil.rmtree(step),
}


def flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 0xFF
    path.write_bytes(data)


@pytest.mark.parametrize("kind", DAMAGE)
@pytest.mark.parametrize("identity", [True, False])
def test_a_damaged_step_is_named_where_an_older_one_is_taken(memory_dir, out, kind, identity, caplog):
    write_steps(memory_dir, out, 4, 6)
    assert os.readlink(out / "latest") == "step-6"
    DAMAGE[kind](out / "step-6")
    if not identity:
        (out / "flashckpt.json").unlink()
    caplog.set_level(logging.WARNING)
    with opened(memory_dir, out) as checkpointer:
        live = blank()
        result = checkpointer.load(live, read_only=True)
        assert (result.step, result.source) == (4, "persist")
        assert torch.equal(live["a"], state(4)["a"])
        assert "step-6" in "".join(result.stepped_over), result.stepped_over
        assert [one for one in caplog.records if one.levelname == "WARNING" and "step-6" in one.getMessage()]
        # And the step can be written once more: it is this job's, whatever became of it.
        checkpointer.load(live)
        to_disk(memory_dir, out, checkpointer.save(6, state(7)))
    forget_memory(memory_dir)
    with opened(memory_dir, out) as checkpointer:
        assert checkpointer.load(blank()).step == 6


def test_a_damaged_step_is_named_too_where_memory_has_the_one_before(memory_dir, out):
    with opened(memory_dir, out) as checkpointer:
        checkpointer.save(4, state(4))
        kept = checkpointer.save(5, state(5))
        to_disk(memory_dir, out, kept)
    os.truncate(out / "step-5" / ".metadata", 9)
    for root, _, names in os.walk(memory_dir):
        for name in names if root.endswith("sealed") else ():
            if kept.generation == SlotStoreName.generation_of(name):
                os.unlink(os.path.join(root, name))
    with opened(memory_dir, out) as checkpointer:
        result = checkpointer.load(blank())
    assert (result.step, result.source) == (4, "memory")
    assert "step-5" in "".join(result.stepped_over)


class SlotStoreName:
    @staticmethod
    def generation_of(name):
        from flashckpt.store.names import parse_sealed_name

        return parse_sealed_name(name).shard.generation


def test_an_empty_directory_where_the_job_has_persisted_is_an_error(memory_dir, out, caplog):
    write_steps(memory_dir, out, 8)
    with SlotStore.open(memory_dir, "A") as store:  # as this node's agent does, once a step is persisted
        store.write_persisted(str(out), Generation(1, 2, 8, 1))
    shutil.rmtree(out)
    out.mkdir()
    with opened(memory_dir, out) as checkpointer:
        with pytest.raises(flashckpt.UnusableError, match="persisted step 8 there") as caught:
            checkpointer.load(blank())
        assert "mount" in str(caught.value)
        handle = checkpointer.save(9, state(9))
        with pytest.raises(flashckpt.PersistError, match="persisted step 8 there"):
            to_disk(memory_dir, out, handle, known=8)
        assert os.listdir(out) == []
        # Memory that has something newer is taken, but not without a word.
        result = checkpointer.load(blank())
        assert (result.step, result.source) == (9, "memory")
        assert "persisted step 8 there" in "".join(result.stepped_over)
        # Somebody who has emptied it says so.
        checkpointer.start_fresh()
        with SlotStore.open(memory_dir, "A") as store:
            assert store.read_persisted() is None
        to_disk(memory_dir, out, checkpointer.save(9, state(9)))
    assert os.readlink(out / "latest") == "step-9"


@pytest.mark.parametrize("part", ["out", "parent"])
def test_a_link_to_what_is_not_mounted_is_no_empty_directory(memory_dir, tmp_path, part):
    """All memory is lost, and persist_dir, or a directory above it, is a link to below an empty mount point."""
    out = tmp_path / "data" if part == "out" else tmp_path / "data" / "run"
    (tmp_path / "data").symlink_to(tmp_path / "mnt" / "job")
    with opened(memory_dir, out) as checkpointer:
        with pytest.raises(flashckpt.UnusableError, match=r"is a link to .*, which is not there"):
            checkpointer.load(blank())
        handle = checkpointer.save(1, state(1))
        with pytest.raises(flashckpt.PersistError, match=r"is a link to .*, which is not there"):
            to_disk(memory_dir, out, handle)
        assert not (tmp_path / "mnt").exists()
        # Once it is there, it is a directory like any other.
        (tmp_path / "mnt" / "job").mkdir(parents=True)
        assert checkpointer.load(blank()).step == 1
        to_disk(memory_dir, out, checkpointer.save(2, state(2)))
    assert os.readlink(out / "latest") == "step-2"


FSTAB = """# comment
/dev/sda1 / ext4 defaults 0 1
nas:/ckpt /mnt/ck\\040pt nfs4 rw,hard 0 0
nas:/old /mnt/old nfs noauto 0 0
/dev/sdb1 none swap sw 0 0
"""


@pytest.mark.parametrize(
    ("path", "mounted", "expected"),
    [
        ("/mnt/ck pt/run", {"/"}, "/mnt/ck pt"),
        ("/mnt/ck pt", {"/"}, "/mnt/ck pt"),
        ("/mnt/ck pt/run", {"/", "/mnt/ck pt"}, None),
        ("/mnt/ck pt2/run", {"/"}, None),
        ("/mnt/old/run", {"/"}, None),
        ("/data", {"/"}, None),
    ],
)
def test_what_fstab_mounts_above_it_has_to_be_mounted(path, mounted, expected):
    assert mount_that_lacks(path, FSTAB, mounted) == expected
