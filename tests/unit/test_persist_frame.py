"""What is written around a tensor's bytes is what torch.save writes: any reader of torch takes it."""

from __future__ import annotations

import io
import resource

import numpy as np
import pytest
import torch

from flashckpt.persist import frame as module
from flashckpt.persist.frame import frame_of

DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.uint16, torch.bool, torch.complex64]
SHAPES = [(), (0,), (3, 0), (1,), (7,), (5, 3), (2, 3, 4), (700_001,)]


def framed(tensor):
    data = tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
    found = frame_of(tensor.dtype, tuple(tensor.shape), len(data))
    assert found is not None
    return found.head + data + found.tail


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_torch_loads_it(dtype, shape, tmp_path):
    count = int(np.prod(shape))
    raw = torch.arange(count * dtype.itemsize, dtype=torch.int64).remainder(251).to(torch.uint8)
    tensor = (raw % 2 if dtype is torch.bool else raw).view(dtype).view(shape)
    blob = framed(tensor)
    (tmp_path / "blob.pt").write_bytes(blob)
    for got in (
        torch.load(io.BytesIO(blob), weights_only=True),
        torch.load(tmp_path / "blob.pt", weights_only=True, mmap=True),
    ):
        assert (got.dtype, tuple(got.shape)) == (dtype, shape)
        assert torch.equal(got.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))


def test_but_for_checksums_it_is_what_torch_writes():
    tensor = torch.randn(1000)
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        buffer = io.BytesIO()
        torch.save(tensor, buffer)
    finally:
        torch.serialization.set_crc32_options(before)
    assert framed(tensor) == buffer.getvalue()
    assert torch.serialization.get_crc32_options() is before


def test_asking_for_a_frame_takes_no_memory_of_its_size():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = frame_of(torch.uint8, (2 << 30,), 2 << 30)
    assert found is not None
    assert len(found.head) + len(found.tail) < 10_000
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10  # KiB


def test_a_torch_that_copies_gives_no_frame(monkeypatch):
    def copying(tensor, target):
        target.write(b"head")
        target.write(bytes(tensor.numel()))
        target.write(b"tail")

    monkeypatch.setattr(module.torch, "save", copying)
    assert frame_of(torch.uint8, (123_457,), 123_457) is None


def test_a_torch_that_writes_backwards_gives_no_frame(monkeypatch):
    def backwards(tensor, target):
        view = memoryview(tensor.numpy())
        target.write(view[50:])
        target.write(view[:50])

    monkeypatch.setattr(module.torch, "save", backwards)
    assert frame_of(torch.uint8, (123_459,), 123_459) is None
