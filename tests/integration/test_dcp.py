"""Plain DCP on our writer and reader, driven in every way it knows."""

from __future__ import annotations

from pathlib import Path

import pytest

WORKER = Path(__file__).parent / "dcp_worker.py"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("ranks", [1, 2])
def test_dcp(ranks, memory_dir, torchrun):
    code, output = torchrun(ranks, WORKER, memory_dir)
    assert code == 0, output
    assert output.count("all ok on rank") == ranks
