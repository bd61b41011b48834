"""Every layout, saved at one world size and loaded at every other, through our API and through DCP."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest

from tests.conftest import torchrun as run_torchrun
from tests.once import once

WORKER = Path(__file__).parent / "layout_worker.py"
WORLDS = (1, 2, 3, 4)

# The first test pays for all saves; a loaded machine takes several times as long as a quiet one.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


@pytest.fixture
def saved(tmp_path_factory):
    """A copy of a memory directory that holds what each world size saved."""

    def save(directory):
        path = tempfile.mkdtemp(prefix="flashckpt-test-", dir="/dev/shm")
        try:
            for world in WORLDS:
                code, output = run_torchrun(world, WORKER, "save", path)
                assert code == 0, output
            shutil.copytree(path, directory, dirs_exist_ok=True)
        finally:
            shutil.rmtree(path, ignore_errors=True)

    return once(tmp_path_factory, "layouts-saved", save)


@pytest.mark.parametrize("world", WORLDS)
def test_load_at(world, saved, memory_dir, torchrun):
    # A copy, because a load puts up a line.
    shutil.copytree(saved, memory_dir, dirs_exist_ok=True)
    code, output = torchrun(world, WORKER, "load", memory_dir, *WORLDS)
    assert code == 0, output
