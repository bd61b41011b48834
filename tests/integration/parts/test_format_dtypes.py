"""What importing the format costs, in a fresh interpreter."""

from __future__ import annotations

import subprocess
import sys


def test_format_imports_neither_torch_nor_numpy():
    code = (
        "import sys, flashckpt.format.shard, flashckpt.format.values, flashckpt.format.dtypes;"
        "from flashckpt.format.values import encode_values, decode_values;"
        "decode_values(encode_values({'a': [1, 2.0, {'x': (None, b'')}]}));"
        "print(sorted({'torch', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
