"""Exports of a saved step: whole tensors under the model's names, in a form that other programs read."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file
from torch import nn

import flashckpt
from flashckpt import CheckpointConfig, CheckpointManager
from flashckpt.cli.entry import group
from flashckpt.export.source import memory_source
from flashckpt.export.write import export
from flashckpt.store.slots import SlotStore


@pytest.fixture
def model(memory_dir):
    """Saved as step 3 of job "job"."""
    torch.manual_seed(1)
    model = nn.ModuleDict({"a": nn.Linear(8, 4), "norm": nn.BatchNorm1d(4), "tied": nn.Linear(8, 4, bias=False)})
    model["tied"].weight = model["a"].weight
    optimizer = torch.optim.AdamW(model.parameters())
    model["a"](torch.ones(2, 8)).sum().backward()
    optimizer.step()
    config = CheckpointConfig(job="job", memory_dir=memory_dir)
    with CheckpointManager(config, model=model, optimizer=optimizer) as manager:
        manager.save(3)
    return model


@pytest.fixture
def source(model, memory_dir):
    with SlotStore.open(memory_dir, "job", create=False) as store:
        generation = store.scan()[0].shard.generation
        with memory_source(store, "job", generation) as source:
            yield source


def same(tensors, model, dtype=None):
    wanted = {k: v.to(dtype) if dtype and v.is_floating_point() else v for k, v in model.state_dict().items()}
    assert tensors.keys() == wanted.keys()
    for key, value in wanted.items():
        assert tensors[key].dtype == value.dtype, key
        assert torch.equal(tensors[key], value), key


def test_safetensors(source, model, tmp_path):
    done = export(source, str(tmp_path / "out"))
    assert (done.step, done.tensors) == (3, len(model.state_dict()))
    same(load_file(tmp_path / "out" / "model.safetensors"), model)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(model.state_dict())
    assert index["metadata"]["total_size"] == sum(v.numel() * v.itemsize for v in model.state_dict().values())


def test_converted_and_in_several_files(source, model, tmp_path):
    done = export(source, str(tmp_path / "out"), dtype=torch.bfloat16, shard_bytes=64)
    assert len(done.files) > 2
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    tensors = {}
    for name in set(index["weight_map"].values()):
        tensors |= load_file(tmp_path / "out" / name)
    same(tensors, model, torch.bfloat16)
    assert tensors["norm.num_batches_tracked"].dtype == torch.int64


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized, assuming.*load")
def test_torch_and_dcp(source, model, tmp_path):
    export(source, str(tmp_path / "pt"), form="torch")
    same(torch.load(tmp_path / "pt" / "model.pt", weights_only=True), model)
    export(source, str(tmp_path / "dcp"), form="dcp")  # without DCP's warning that there is one process
    state = {key: torch.zeros_like(value) for key, value in model.state_dict().items()}
    torch.distributed.checkpoint.load(state, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    same(state, model)


def test_another_part(source, model, tmp_path):
    export(source, str(tmp_path / "out"), part="optimizer")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert "state.a.weight.exp_avg" in tensors


def test_what_is_there_stays_unless_asked(source, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine").write_text("x")
    with pytest.raises(flashckpt.ExistsError):
        export(source, str(out))
    with pytest.raises(FileExistsError):
        export(source, str(out))
    assert (out / "mine").read_text() == "x"
    export(source, str(out), overwrite=True)
    assert not (out / "mine").exists()
    assert os.listdir(tmp_path) == ["out"]


def test_bad_exports_leave_nothing(source, memory_dir, tmp_path):
    with pytest.raises(flashckpt.MissingKeyError, match="no tensor below 'mode'; there are model, optimizer"):
        export(source, str(tmp_path / "out"), part="mode")
    with pytest.raises(flashckpt.ConfigError, match="form"):
        export(source, str(tmp_path / "out"), form="onnx")
    shard = next(Path(memory_dir, "job", "sealed").iterdir())
    with shard.open("r+b") as file:  # rot in the tensors
        file.seek(source._shards[0].head.data_offset_bytes)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 1]))
    with pytest.raises(flashckpt.CorruptShardError):
        export(source, str(tmp_path / "out"))
    assert os.listdir(tmp_path) == []


def test_the_command(model, memory_dir, tmp_path):
    arguments = ["export", str(tmp_path / "out"), "--memory-dir", memory_dir, "--job", "job", "--dtype", "bfloat16"]
    result = CliRunner().invoke(group, [*arguments, "--json"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["step"] == 3
    same(load_file(tmp_path / "out" / "model.safetensors"), model, torch.bfloat16)
    with pytest.raises(flashckpt.ExistsError):
        CliRunner().invoke(group, arguments, catch_exceptions=False)
    with pytest.raises(flashckpt.NotFoundError, match="found steps"):
        CliRunner().invoke(group, [*arguments, "--step", "9"], catch_exceptions=False)
