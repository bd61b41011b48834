"""Files of the user's own beside the checkpoints."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from flashckpt import ConfigError, ExistsError, NotFoundError
from flashckpt.training.files import write_file


def test_whole_and_only_once(tmp_path):
    where = write_file(str(tmp_path), "config.yaml", "a: 1")
    assert Path(where).read_text() == "a: 1"
    with pytest.raises(ExistsError):
        write_file(str(tmp_path), "config.yaml", "a: 2")
    assert Path(where).read_text() == "a: 1"
    write_file(str(tmp_path), "config.yaml", b"a: 2", overwrite=True)
    assert Path(where).read_text() == "a: 2"
    assert os.listdir(tmp_path) == ["config.yaml"]


def test_beside_a_step(tmp_path):
    with pytest.raises(NotFoundError, match="step 5"):
        write_file(str(tmp_path), "notes", "x", step=5)
    (tmp_path / "step-5").mkdir()
    assert write_file(str(tmp_path), "notes", "x", step=5) == str(tmp_path / "step-5" / "notes")


@pytest.mark.parametrize(
    "name",
    ["", "..", "a/b", "/etc/passwd", "meta.json", ".metadata", *("latest", "history.json", "fence.json", "step-3", 5)],
)
def test_bad_names(tmp_path, name):
    with pytest.raises(ConfigError, match="write_file"):
        write_file(str(tmp_path), name, "x")
    assert os.listdir(tmp_path) == []


def test_without_a_directory():
    with pytest.raises(ConfigError, match="persist_dir"):
        write_file(None, "a", "x")
