"""What can be tested of the accelerator path without one: everything but the device's own calls."""

from __future__ import annotations

import mmap

import pytest
import torch

from flashckpt.devices import Copier, DeviceCopy, as_bits, native_address
from flashckpt.errors import UnsupportedValueError


class Registrar:
    def __init__(self):
        self.registered = {}
        self.calls = 0

    def register(self, address, length_bytes):
        assert address not in self.registered
        self.registered[address] = length_bytes
        self.calls += 1

    def unregister(self, address):
        del self.registered[address]


def area(size):
    return memoryview(mmap.mmap(-1, size))


def address(data):
    return torch.frombuffer(data, dtype=torch.uint8).data_ptr()


def test_a_slot_is_registered_once_and_let_go_at_close():
    registrar = Registrar()
    copier = Copier(registrar)
    first, second = area(8192), area(8192)
    for _ in range(3):
        copier.pin(first)
        copier.pin(second)
    assert registrar.registered == {address(first): 8192, address(second): 8192}
    assert registrar.calls == 2
    copier.close()
    assert registrar.registered == {}


def test_slots_of_another_size_are_let_go():
    registrar = Registrar()
    copier = Copier(registrar)
    copier.pin(area(8192))
    grown = area(16384)
    copier.pin(grown)
    assert registrar.registered == {address(grown): 16384}


def test_registered_memory_stays_mapped():
    memory = mmap.mmap(-1, 8192)
    copier = Copier(Registrar())
    with memoryview(memory) as view:
        copier.pin(view[4096:])  # a slot's data area; the writer releases its views when it seals
    with pytest.raises(BufferError):
        memory.close()
    copier.close()
    memory.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex128, torch.float8_e4m3fn, torch.bool])
def test_strided_copies_land_as_contiguous_bytes(dtype):
    raw = (torch.arange(24 * dtype.itemsize) % 2).to(torch.uint8)
    source = raw.view(dtype).reshape(4, 6).t()
    memory = bytearray(64 + raw.numel())
    Copier(Registrar()).copy(memoryview(memory), [DeviceCopy(source, 64, raw.numel())])
    landed = torch.frombuffer(memory, dtype=torch.uint8)[64:].view(dtype).reshape(6, 4)
    assert torch.equal(as_bits(landed), as_bits(source.contiguous()))
    assert not any(memory[:64])


def test_what_the_native_core_may_read_itself():
    plain = torch.randn(4, 4)
    numbers = torch.randn(4, dtype=torch.complex64)
    assert native_address("key", plain) == plain.data_ptr()
    for other in (plain.t(), plain[:, 1], numbers.conj(), numbers.conj().imag, torch.empty(2, device="meta")):
        assert native_address("key", other) is None


def test_memory_that_was_freed_is_refused_by_key():
    """Address 0 means "already in place" to the native core: stale bytes of the slot would pass as the tensor's."""
    tensor = torch.randn(4)
    tensor.untyped_storage().resize_(0)
    with pytest.raises(UnsupportedValueError, match=r"'key'.*without storage"):
        native_address("key", tensor)
