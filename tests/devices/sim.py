"""For tests that run in a process of their own, with the simulated accelerator: see test_on_sim.py."""

from __future__ import annotations

import mmap
import time

import torch

from flashckpt import CheckpointConfig, CheckpointManager
from flashckpt.devices import Copier, DeviceCopy, as_bits
from flashckpt.format.dtypes import ITEMSIZE
from tests import simdev

simdev.load()


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


def gate_hold(memory_dir, busy_seconds, **settings):
    """Saves with work queued on the device; returns how long the next optimizer.step() held the host, and the handle.

    What came back is compared with the state at save().
    """
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64).to("sim:0")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def backward():
        optimizer.zero_grad()
        model(torch.ones(2, 64, device="sim:0")).square().sum().backward()

    backward()
    optimizer.step()
    config = CheckpointConfig(
        job="gate", memory_dir=str(memory_dir), agent="off", verify=True, enable_first_step_checkpoint=False, **settings
    )
    with CheckpointManager(config, model=model, optimizer=optimizer, rng=False) as manager:
        for step in range(1, 4):  # the first two are proved by checksums, for which the host waits
            manager.save(step).wait("sealed", timeout=60)
        backward()
        wanted = {key: tensor.to("cpu", copy=True) for key, tensor in model.state_dict().items()}
        simdev.busy(busy_seconds)
        handle = manager.save(4)
        began = time.perf_counter()
        optimizer.step()
        hold = time.perf_counter() - began
        handle.wait("sealed", timeout=60)
        assert any(not torch.equal(wanted[key], tensor.cpu()) for key, tensor in model.state_dict().items())
        if handle.outcome == "ok":
            assert manager.load(4).step == 4
            assert all(torch.equal(wanted[key], tensor.cpu()) for key, tensor in model.state_dict().items())
    return hold, handle
