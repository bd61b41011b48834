"""What importing the store and the format costs, in a fresh interpreter."""

from __future__ import annotations

import subprocess
import sys

from tests.unit.test_shape import ROOT


def test_importing_the_store_and_the_format_takes_neither_torch_nor_numpy():
    code = (
        "import sys, flashckpt, flashckpt.store.slots, flashckpt.format.shard, flashckpt.format.values\n"
        "sys.exit(' '.join({'torch', 'numpy', 'grpc', 'rich', 'fsspec'} & set(sys.modules)) or 0)"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT.parent, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
