from __future__ import annotations

import subprocess
import sys

import torch

from flashckpt.format.dtypes import ITEMSIZE, QUANTIZED


def test_table_is_what_torch_has():
    found = {
        str(dtype).removeprefix("torch."): dtype.itemsize
        for dtype in vars(torch).values()
        if isinstance(dtype, torch.dtype)
    }
    quantized = {name for name in found if name.startswith(("qint", "quint"))}
    assert quantized == QUANTIZED
    assert {name: size for name, size in found.items() if name not in quantized} == dict(ITEMSIZE)


def test_format_imports_neither_torch_nor_numpy():
    code = (
        "import sys, flashckpt.format.shard, flashckpt.format.values, flashckpt.format.dtypes;"
        "from flashckpt.format.values import encode_values, decode_values;"
        "decode_values(encode_values({'a': [1, 2.0, {'x': (None, b'')}]}));"
        "print(sorted({'torch', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
