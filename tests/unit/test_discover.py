"""Finding checkpoints in a directory."""

from __future__ import annotations

import json

import pytest

import flashckpt


@pytest.fixture
def tree(tmp_path):
    def make(name, **files):
        place = tmp_path / name
        place.mkdir(parents=True)
        for file, content in files.items():
            (place / {"index": ".metadata", "hf": "model.safetensors.index.json"}.get(file, file)).write_text(content)
        return place

    make("step-10", index="x")
    make("step_20", index="x")
    make("checkpoint-5", hf="{}")
    make("step-30_ckpt", index="x")
    make("step-40", data="no marker: never completed")
    make("step7/model_and_optim", index="x")
    make("step-50.tmp-0123456789abcdef", index="x")
    make("ft-replica-1", index="x")
    (tmp_path / "step-60").write_text("a file")
    return tmp_path


def test_every_complete_one_is_found_in_order(tree):
    found = list(flashckpt.find_checkpoints(str(tree)))
    assert [step for step, _ in found] == [5, 7, 10, 20, 30]
    assert all(flashckpt.dir_is_checkpoint(path) for _, path in found)
    assert flashckpt.latest_checkpoint(str(tree)) == str(tree / "step-30_ckpt")
    assert flashckpt.contains_checkpoint(str(tree))
    assert flashckpt.checkpoint_dirname(7) == "step-7"


def test_nothing_there(tmp_path):
    for path in (tmp_path, tmp_path / "absent"):
        assert list(flashckpt.find_checkpoints(str(path))) == []
        assert not flashckpt.contains_checkpoint(str(path))
        assert not flashckpt.dir_is_checkpoint(str(path))
        assert flashckpt.peek(str(path)) is None
        with pytest.raises(FileNotFoundError):
            flashckpt.latest_checkpoint(str(path))


def test_peek(tree, tmp_path):
    assert flashckpt.peek(str(tree)) == 30
    assert flashckpt.peek(str(tree / "step-10")) == 10
    (tree / "step-10" / "meta.json").write_text(json.dumps({"step": 11}))
    assert flashckpt.peek(str(tree / "step-10")) == 11
    (tree / "step_20" / "metadata.json").write_text(json.dumps({"step": 21, "tokens_seen": 5}))
    assert flashckpt.peek(str(tree / "step_20")) == 21
    for broken in ("not json", "[]", '{"step": "x"}', ""):
        (tree / "step_20" / "metadata.json").write_text(broken)
        assert flashckpt.peek(str(tree / "step_20")) in (20, None)
