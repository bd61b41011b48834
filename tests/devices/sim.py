"""For tests that run in a process of their own, with the simulated accelerator: see test_on_sim.py."""

from __future__ import annotations

import mmap

import torch

from flashckpt.devices import Copier, DeviceCopy, as_bits
from flashckpt.format.dtypes import ITEMSIZE
from tests import simdev

simdev.load()
# As CUDA's kernels, the simulated device's copy knows conjugate and negative views; torch is not to resolve them first.
_library = torch.library.Library("aten", "IMPL")
for _key in ("Conjugate", "Negative"):
    _library.impl("_copy_from", torch.library.fallthrough_kernel, _key)


class SimRegistrar:
    """As CUDA's: whoever fails clears the thread's last error."""

    def register(self, address, length_bytes):
        if simdev.host_register(address, length_bytes) == 0:
            return True
        simdev.take_last_error()
        return False

    def unregister(self, address):
        assert simdev.host_unregister(address) == 0, "what was not registered is not unregistered"


REGISTERED = {"sim": SimRegistrar}


def copier_of(way, **options):
    """A copier that goes this way for the simulated device; `plain` needs `without_pinned_memory` as well."""
    return Copier(registrars=REGISTERED if way == "registered" else {}, **options)


def without_pinned_memory(monkeypatch):
    """Lets torch's allocator of pinned memory fail."""
    empty = torch.empty

    def fail(*arguments, **options):
        if options.get("pin_memory"):
            raise RuntimeError("CUDA error: out of memory")
        return empty(*arguments, **options)

    monkeypatch.setattr(torch, "empty", fail)


def area(size):
    return memoryview(mmap.mmap(-1, size))


def laid_out(tensors):
    """Copies of tensors to offsets in one area, and how large that is."""
    copies, offset = [], 0
    for tensor in tensors:
        length = tensor.numel() * tensor.itemsize
        copies.append(DeviceCopy(tensor, offset, length))
        offset = -(-(offset + length) // 64) * 64
    return copies, max(offset, 64)


def contiguous_bytes(host):
    return as_bits(host).contiguous().view(-1).view(torch.uint8).numpy().tobytes() if host.numel() else b""


DTYPES = [getattr(torch, name) for name in sorted(ITEMSIZE) if hasattr(torch, name)]


def examples(dtype, seed=0):
    """Host tensors of every shape and stride that matters."""
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 2 if dtype is torch.bool else 256, (240 * dtype.itemsize,), generator=generator)
    raw = raw.to(torch.uint8)

    def first(count):
        # Some dtypes can do nothing but be viewed.
        return raw[: count * dtype.itemsize].clone().view(dtype)

    found = {
        "plain": first(240),
        "scalar": first(1).view(()),
        "empty": first(0),
        "turned": first(24).view(4, 6).t(),
        "column": first(240).view(8, 30)[:, 3:7],
        "every other": first(240)[::2],
        "expanded": first(5).expand(3, 5),
        "deep": first(240).view(2, 4, 30).permute(2, 0, 1),
    }
    if dtype in (torch.complex64, torch.complex128):
        found["conjugated"] = first(240).conj()
        found["negated"] = first(240).conj().imag
    return found


def on_device(host, device):
    """The same tensor there: shape, strides, and whether it is a conjugate or negative view. By bits."""
    if host.is_conj():
        return on_device(host.conj(), device).conj()
    if host.is_neg():
        return on_device(host._neg_view(), device)._neg_view()
    storage = torch.empty(host.untyped_storage().nbytes(), dtype=torch.uint8, device=device)
    storage.copy_(torch.empty(0, dtype=torch.uint8).set_(host.untyped_storage()))
    base = storage.view(host.dtype)
    return base.as_strided(host.shape, host.stride(), host.storage_offset())
