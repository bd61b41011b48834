from __future__ import annotations

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
