"""Lines outlive the process that wrote them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from flashckpt.protocol.line import from_fence
from tests.unit.test_store_lines import memory_dir, store

__all__ = ["memory_dir", "store"]  # the fixtures

ROOT = Path(__file__).parents[3]


def test_survives_its_process(store, memory_dir):
    code = (
        "import sys\nfrom flashckpt.store.slots import SlotStore\nfrom flashckpt.protocol.line import from_fence\n"
        "SlotStore.open(sys.argv[1], 'job').write_line(from_fence(step=3, epoch=4, nonce=5))"
    )
    subprocess.run([sys.executable, "-c", code, str(memory_dir)], cwd=ROOT, check=True)
    assert store.read_line() == from_fence(step=3, epoch=4, nonce=5)
