"""Hugging Face models as a start: read by parts, renamed, converted; what is not as the format says is refused."""

from __future__ import annotations

import json
import shutil
import struct

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file
from torch import nn

import flashckpt
from flashckpt import CheckpointConfig, CheckpointManager
from flashckpt.cli.entry import group
from flashckpt.errors import CorruptShardError, IncompatibleError
from flashckpt.load.disk import safetensors as module
from flashckpt.load.disk.safetensors import SafetensorsSource
from flashckpt.persist.storage import open_storage

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

NAMES = {"layers.{}.wq": "model.layers.{}.self_attn.q_proj", "tok": "model.embed_tokens", "out": "lm_head"}


class Model(nn.Module):
    """Its names are not those of Hugging Face, and two of them are one tensor."""

    def __init__(self, tie=True):
        super().__init__()
        self.tok = nn.Embedding(16, 8)
        self.layers = nn.ModuleList(nn.ModuleDict({"wq": nn.Linear(8, 8)}) for _ in range(3))
        self.out = nn.Linear(8, 16, bias=False)
        if tie:
            self.out.weight = self.tok.weight


def theirs(model):
    """As Hugging Face has it: its names, bfloat16, tied weights once."""
    found = {"model.embed_tokens.weight": model.tok.weight}
    for number, layer in enumerate(model.layers):
        found[f"model.layers.{number}.self_attn.q_proj.weight"] = layer["wq"].weight
        found[f"model.layers.{number}.self_attn.q_proj.bias"] = layer["wq"].bias
    return {name: value.detach().to(torch.bfloat16).contiguous() for name, value in found.items()}


def publish(directory, tensors, files=1):
    directory.mkdir()
    if files == 1:
        save_file(tensors, directory / "model.safetensors")
        return directory
    weight_map = {}
    for number in range(files):
        part = dict(list(tensors.items())[number::files])
        name = f"model-{number + 1:05}-of-{files:05}.safetensors"
        save_file(part, directory / name)
        weight_map |= dict.fromkeys(part, name)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return directory


@pytest.fixture
def model():
    torch.manual_seed(3)
    return Model()


def manager_of(memory_dir, model, **settings):
    config = CheckpointConfig(**{"job": "job", "memory_dir": memory_dir, "interval": 1, **settings})
    return CheckpointManager(config, model=model, optimizer=torch.optim.AdamW(model.parameters()))


def as_published(model, other):
    mine, their = dict(model.named_parameters()), dict(other.named_parameters())
    return all(torch.equal(mine[name].to(torch.bfloat16).float(), their[name]) for name in mine)


@pytest.mark.parametrize("files", [1, 3])
def test_a_job_starts_from_a_hugging_face_model(memory_dir, tmp_path, model, files, monkeypatch):
    monkeypatch.setattr(module, "_PIECE_BYTES", 32)  # a row or two at a time
    path = publish(tmp_path / "hf", theirs(model), files)
    settings = {
        "initial_load_path": str(path),
        "initial_load_in_hf": True,
        "initial_load_key_mapping": {key: value for key, value in NAMES.items() if key != "out"},
    }
    torch.manual_seed(4)
    other = Model()
    with manager_of(memory_dir, other, **settings) as manager:
        assert manager.load() is None
        assert manager.initial_load.step == 0
        assert as_published(model, other)
        assert other.out.weight is other.tok.weight
        manager.save(1)
    # The same arguments: what the job itself has saved wins, under its own names.
    shutil.rmtree(path)
    with manager_of(memory_dir, Model(), **settings) as manager:
        assert manager.load().step == 1


def test_what_is_not_tied_here_is_missing(memory_dir, tmp_path, model):
    path = publish(tmp_path / "hf", theirs(model))
    with manager_of(memory_dir, Model(tie=False)) as manager:
        with pytest.raises(flashckpt.MissingKeyError, match=r"lm_head\.weight"):
            manager.load(path=str(path), key_mapping=NAMES, exclude_from_loading=["optimizer", "lr_scheduler"])
        manager.load(path=str(path), key_mapping=NAMES, strict=False)


def test_something_else_where_a_hugging_face_model_was_promised(memory_dir, tmp_path, model):
    flashckpt_like = tmp_path / "dcp"
    torch.distributed.checkpoint.save({"model": model.state_dict()}, checkpoint_id=flashckpt_like, no_dist=True)
    settings = {"initial_load_path": str(flashckpt_like), "initial_load_in_hf": True}
    refused = pytest.raises(IncompatibleError, match="expected a Hugging Face model")
    with manager_of(memory_dir, Model(), **settings) as manager, refused:
        manager.load()


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"initial_load_in_hf": True}, "expected initial_load_path"),
        (
            {"initial_load_in_hf": True, "initial_load_path": "/hf", "initial_load_model_only": False},
            "initial_load_model_only=True",
        ),
        ({"initial_load_key_mapping": {"a": "b"}}, "expected initial_load_path"),
        ({"initial_load_in_hf": "yes"}, "expected True or False"),
    ],
)
def test_settings_that_do_not_go_together(settings, match):
    with pytest.raises(flashckpt.ConfigError, match=match):
        CheckpointConfig(**settings)


def test_there_and_back(memory_dir, tmp_path, model):
    """Export to Hugging Face's names, import again, start from it: the same numbers."""
    with manager_of(memory_dir, model) as manager:
        manager.save(7, force=True).wait("sealed", timeout=60)
    names = tmp_path / "names.json"
    names.write_text(json.dumps(NAMES))
    where = ["--job", "job", "--memory-dir", str(memory_dir)]
    hf, seed = str(tmp_path / "hf"), str(tmp_path / "run" / "step-0")
    run = CliRunner().invoke(group, ["export", hf, *where, "--key-map", str(names)], catch_exceptions=False)
    assert run.exit_code == 0
    assert (
        "model.layers.2.self_attn.q_proj.bias"
        in json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())["weight_map"]
    )
    run = CliRunner().invoke(group, ["import", hf, seed, "--key-map", str(names), "--json"], catch_exceptions=False)
    assert json.loads(run.stdout)["tensors"] == len(model.state_dict())
    torch.manual_seed(5)
    other = Model()
    with manager_of(memory_dir, other, job="next", persist_dir=str(tmp_path / "run"), load_only=True) as manager:
        assert manager.load().step == 0  # a seed: only the model
        for name, value in model.state_dict().items():
            assert torch.equal(value, other.state_dict()[name])
    run = CliRunner().invoke(group, ["import", hf, seed])
    assert isinstance(run.exception, flashckpt.FlashError)
    assert "it already exists" in str(run.exception)


@pytest.mark.parametrize("content", ["no json", "[]", '{"a": 1}', '{"a.{}": "b"}'])
def test_a_key_map_that_is_none(tmp_path, content):
    path = tmp_path / "names.json"
    path.write_text(content)
    run = CliRunner().invoke(group, ["import", "/nowhere", str(tmp_path / "out"), "--key-map", str(path)])
    assert isinstance(run.exception, flashckpt.ConfigError)


# --- what a file says is not believed


def write(path, header, data=b"", length=None):
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(encoded) if length is None else length) + encoded + data)


def info(start, stop, shape, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


BAD = {
    "no JSON": (b"{", b""),
    "not an object": ([], b""),
    "cut short": ({"a": info(0, 8, [2])}, b"1234567"),
    "too long": ({"a": info(0, 8, [2])}, b"123456789"),
    "a hole": ({"a": info(0, 4, [1]), "b": info(8, 12, [1])}, bytes(12)),
    "an overlap": ({"a": info(0, 8, [2]), "b": info(4, 12, [2])}, bytes(12)),
    "another length": ({"a": info(0, 8, [3])}, bytes(8)),
    "negative": ({"a": info(0, 8, [-2])}, bytes(8)),
    "overflow": ({"a": info(0, 8, [1 << 62, 1 << 62])}, bytes(8)),
    "no range": ({"a": {"dtype": "F32", "shape": [2]}}, bytes(8)),
    "no name": ({"": info(0, 8, [2])}, bytes(8)),
}


@pytest.mark.parametrize("bad", BAD)
def test_a_bad_header(tmp_path, bad):
    (tmp_path / "hf").mkdir()
    write(tmp_path / "hf" / "model.safetensors", *BAD[bad])
    with pytest.raises(CorruptShardError, match=r"model\.safetensors"):
        SafetensorsSource(open_storage(str(tmp_path)), "hf", 0)


def test_a_header_that_claims_the_whole_memory(tmp_path):
    (tmp_path / "hf").mkdir()
    write(tmp_path / "hf" / "model.safetensors", {}, length=1 << 60)
    with pytest.raises(CorruptShardError, match="at most"):
        SafetensorsSource(open_storage(str(tmp_path)), "hf", 0)


@pytest.mark.parametrize(
    "weight_map", [{"a": "../other.safetensors"}, {"a": "model.bin"}, {"a": 3}, {}, [], {"b": "x.safetensors"}]
)
def test_a_bad_index(tmp_path, weight_map):
    (tmp_path / "hf").mkdir()
    write(tmp_path / "hf" / "x.safetensors", {"a": info(0, 8, [2])}, bytes(8))
    index = tmp_path / "hf" / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CorruptShardError):
        SafetensorsSource(open_storage(str(tmp_path)), "hf", 0)


def test_quantized_numbers_are_refused(tmp_path):
    (tmp_path / "hf").mkdir()
    path = tmp_path / "hf" / "model.safetensors"
    write(path, {"a": info(0, 8, [8], "F8_E4M3")}, bytes(8))
    with pytest.raises(IncompatibleError, match="F8_E4M3"):
        SafetensorsSource(open_storage(str(tmp_path)), "hf", 0)
    write(path, {"a": info(0, 8, [8], "U8")}, bytes(8))
    (tmp_path / "hf" / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "mxfp4"}}))
    with pytest.raises(IncompatibleError, match="quantization_config"):
        SafetensorsSource(open_storage(str(tmp_path)), "hf", 0)


def test_scalars_and_empty_tensors(tmp_path):
    tensors = {"scalar": torch.tensor(3.5), "empty": torch.empty(0, 4), "flag": torch.tensor([True, False])}
    publish(tmp_path / "hf", tensors)
    found = flashckpt.load_keys(str(tmp_path / "hf"), ["model"])
    assert {key.removeprefix("model.") for key in found} == set(tensors)
    assert all(torch.equal(found[f"model.{name}"], value) for name, value in tensors.items())
