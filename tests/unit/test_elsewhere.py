"""Checkpoints that are named by their path: loaded by a manager, as a start, key by key, and exported."""

from __future__ import annotations

import json
import os
import shutil

import pytest
import torch
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

import flashckpt
from flashckpt import CheckpointConfig, CheckpointManager
from flashckpt.cli.entry import group
from flashckpt.persist.flush import flush
from flashckpt.protocol.flush_spec import FlushSpec
from flashckpt.types import PersistSettings

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def build(memory_dir, seed=0, **settings):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    config = CheckpointConfig(**{"job": "job", "memory_dir": memory_dir, **settings})
    return model, optimizer, CheckpointManager(config, model=model, optimizer=optimizer)


def step(model, optimizer):
    model(torch.ones(2, 8)).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def to_disk(memory_dir, out, handle, **settings):
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
            settings=PersistSettings(str(out), **settings),
        )
    )


@pytest.fixture
def trained(memory_dir, tmp_path):
    """(model, optimizer, random state) whose step 3 lies in tmp_path/out; the memory is empty again."""
    model, optimizer, manager = build(memory_dir)
    with manager:
        for _ in range(3):
            step(model, optimizer)
        handle = manager.save(3, extra={"tokens": 30}, compat={"width": 8})
        handle.wait("sealed", timeout=60)
        random_state = torch.get_rng_state()
        to_disk(memory_dir, tmp_path / "out", handle)
    for name in os.listdir(memory_dir):
        shutil.rmtree(os.path.join(memory_dir, name))
    return model, optimizer, random_state


def same(model, other):
    return all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_all_memory_is_gone_and_the_manager_resumes_from_its_own_directory(trained, memory_dir, tmp_path):
    model, optimizer, manager = build(memory_dir, seed=5, persist_dir=str(tmp_path / "out"), load_only=True)
    with manager:
        assert manager.peek_saved_step() == 3
        with pytest.raises(flashckpt.MismatchError, match="width: 8 in the checkpoint, 9 now"):
            manager.load(expect={"width": 9})
        assert not optimizer.state
        result = manager.load(expect={"width": 8})
        assert (result.step, result.source, result.extra) == (3, "persist", {"tokens": 30})
        assert same(model, trained[0])
        step(model, optimizer)
    # Weights, moments and dropout: the next step is the one that the first run would have taken.
    torch.set_rng_state(trained[2])
    step(*trained[:2])
    assert same(model, trained[0])


@pytest.mark.parametrize("path", ["out/step-3", "out/latest", "out"])
def test_a_path_is_loaded_as_a_whole(trained, memory_dir, tmp_path, path):
    model, optimizer, manager = build(memory_dir, seed=5, job="other")
    with manager:
        result = manager.load(path=str(tmp_path / path))
        assert (result.step, result.source) == (3, "persist")
        assert same(model, trained[0])
        assert optimizer.state[model[0].weight]["step"].item() == 3
        step(model, optimizer)
        assert manager.save(4).wait("sealed", timeout=60) == "ok"


def test_paths_that_are_no_checkpoint(trained, memory_dir, tmp_path):
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "model.safetensors").write_text("x")
    (tmp_path / "olmo" / "model_and_optim").mkdir(parents=True)
    _, _, manager = build(memory_dir, job="other")
    with manager:
        with pytest.raises(FileNotFoundError, match="expected a checkpoint"):
            manager.load(path=str(tmp_path / "absent"))
        with pytest.raises(flashckpt.UnusableError, match="expected 8 bytes at 0, found 1"):
            manager.load(path=str(tmp_path / "hf"))
        with pytest.raises(FileNotFoundError, match="expected a checkpoint"):
            manager.load(path=str(tmp_path / "olmo"))
        with pytest.raises(flashckpt.ConfigError, match="path and step"):
            manager.load(3, path=str(tmp_path / "out"))
        data = next((tmp_path / "out" / "step-3").glob("__0_*.distcp"))
        os.truncate(data, data.stat().st_size - 1)
        with pytest.raises(flashckpt.UnusableError, match=r"expected \d+ bytes"):
            manager.load(path=str(tmp_path / "out" / "step-3"))


def test_a_start_from_another_run(trained, memory_dir, tmp_path):
    settings = {"job": "new", "initial_load_path": str(tmp_path / "out"), "interval": 1}
    model, optimizer, manager = build(memory_dir, seed=5, **settings)
    with manager:
        assert manager.load() is None  # a fresh start: from step 1
        assert manager.initial_load.step == 3
        assert same(model, trained[0])
        assert not optimizer.state
        step(model, optimizer)
        manager.save(1)
    model, optimizer, manager = build(memory_dir, seed=6, **settings)
    with manager:
        assert manager.load().step == 1  # the same arguments: what the job itself saved wins
        assert manager.initial_load is None
    shutil.rmtree(tmp_path / "out")
    _, _, manager = build(memory_dir, **settings)
    with manager:
        assert manager.load().step == 1  # not even looked at


def test_a_start_from_the_whole_state_of_another_run(trained, memory_dir, tmp_path):
    model, optimizer, manager = build(
        memory_dir, seed=5, job="new", initial_load_path=str(tmp_path / "out"), initial_load_model_only=False
    )
    with manager:
        assert manager.load().step == 3
        assert same(model, trained[0])
        assert optimizer.state[model[0].weight]["step"].item() == 3


def test_a_start_that_is_not_there_is_no_fresh_start(memory_dir, tmp_path):
    _, _, manager = build(memory_dir, job="new", initial_load_path=str(tmp_path / "absent"))
    with manager, pytest.raises(flashckpt.NotFoundError):
        manager.load()


def test_a_foreign_checkpoint(trained, memory_dir, tmp_path):
    model = trained[0]
    dcp.save({"model": model.state_dict(), "epoch": 7}, checkpoint_id=tmp_path / "foreign", no_dist=True)
    other, _, manager = build(memory_dir, seed=5, job="other")
    with manager:
        assert manager.load(path=str(tmp_path / "foreign"), exclude_from_loading=["optimizer"]).step == 0
        assert same(other, model)


def test_a_foreign_checkpoint_with_its_model_at_the_top(trained, memory_dir, tmp_path):
    model = trained[0]
    dcp.save(model.state_dict(), checkpoint_id=tmp_path / "bare", no_dist=True)
    other, _, manager = build(memory_dir, seed=5, job="other")
    with manager:
        manager.load(path=str(tmp_path / "bare"), exclude_from_loading=["optimizer", "lr_scheduler"])
        assert same(other, model)
        third = build(memory_dir, seed=6, job="third")[0]
        # For a state dict of the caller's, names are what they are.
        with pytest.raises(flashckpt.MissingKeyError, match=r"model\.0\.weight"):
            manager.checkpointer.load_path(str(tmp_path / "bare"), {"model": third.state_dict()})
        manager.checkpointer.load_path(str(tmp_path / "bare"), third.state_dict())
        assert same(third, model)


def foreign_optimizer(model, optimizer, form):
    flattened = StateDictOptions(flatten_optimizer_state_dict=form == "flattened")
    return get_optimizer_state_dict(model, optimizer, options=flattened)


@pytest.mark.parametrize("form", ["in groups", "flattened"])
@pytest.mark.parametrize("part", ["optimizer", "optim"])
def test_a_foreign_optimizer_is_recognised(trained, memory_dir, tmp_path, form, part):
    model, optimizer, _ = trained
    optimizer.param_groups[0]["lr"] = 0.123
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    for _ in range(4):
        step(model, optimizer)
        scheduler.step()
    state = {"model": model.state_dict(), part: foreign_optimizer(model, optimizer, form)}
    dcp.save(
        {**state, "lr_scheduler": scheduler.state_dict()}, checkpoint_id=tmp_path / "their" / "step-7", no_dist=True
    )
    # By its path, and as a step that somebody imported into this job's own directory.
    (tmp_path / "their" / "step-7" / "flashckpt-import.json").write_text("{}")
    their = str(tmp_path / "their")
    for settings, path in (({"job": "a"}, their), ({"persist_dir": their, "load_only": True}, None)):
        torch.manual_seed(9)
        other = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 2))
        fresh = torch.optim.AdamW(other.parameters())
        schedule = torch.optim.lr_scheduler.LambdaLR(fresh, lambda step: 1 / (step + 1))
        config = CheckpointConfig(**{"job": "b", "memory_dir": memory_dir, **settings})
        with CheckpointManager(config, model=other, optimizer=fresh, lr_scheduler=schedule) as manager:
            assert manager.load(path=path).step == 7
        assert same(other, model)
        for mine, theirs in zip(other.parameters(), model.parameters(), strict=True):
            assert torch.equal(fresh.state[mine]["exp_avg_sq"], optimizer.state[theirs]["exp_avg_sq"])
            assert fresh.state[mine]["step"].item() == 7
        assert fresh.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
        assert schedule.state_dict()["last_epoch"] == 4


def test_an_optimizer_by_numbers_is_refused_with_the_way_out(trained, memory_dir, tmp_path, caplog):
    model, optimizer, _ = trained
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    dcp.save(state, checkpoint_id=tmp_path / "their" / "step-7", no_dist=True)
    other, _, manager = build(memory_dir, seed=5, job="other")
    with manager:
        with pytest.raises(flashckpt.MissingKeyError, match="optimizer"):
            manager.load(path=str(tmp_path / "their"))
        assert "numbered instead of named" in caplog.text
        manager.load(path=str(tmp_path / "their"), exclude_from_loading=["optimizer", "lr_scheduler"])
        assert same(other, model)


def test_load_keys(trained, tmp_path):
    model, optimizer, _ = trained
    found = flashckpt.load_keys(str(tmp_path / "out"), ["model.0", "optimizer.state.2.bias.exp_avg"])
    assert set(found) == {"model.0.weight", "model.0.bias", "optimizer.state.2.bias.exp_avg"}
    assert torch.equal(found["model.0.weight"], model[0].weight)
    assert torch.equal(found["optimizer.state.2.bias.exp_avg"], optimizer.state[model[2].bias]["exp_avg"])
    options = flashckpt.load_keys(str(tmp_path / "out"), ["optimizer.param_groups.0.weight"])
    assert options["optimizer.param_groups.0.weight"]["lr"] == 1e-3
    with pytest.raises(flashckpt.MissingKeyError, match=r"'model\.9'"):
        flashckpt.load_keys(str(tmp_path / "out"), ["model.9"])


def test_export_of_a_persisted_step(trained, tmp_path):
    arguments = ["export", str(tmp_path / "hf"), "--from", str(tmp_path / "out"), "--json"]
    result = CliRunner().invoke(group, arguments, catch_exceptions=False)
    assert json.loads(result.stdout)["step"] == 3
    tensors = load_file(tmp_path / "hf" / "model.safetensors")
    assert torch.equal(tensors["2.weight"], trained[0][2].weight)
    result = CliRunner().invoke(group, [*arguments, "--step", "3"])
    assert result.exit_code == 2
