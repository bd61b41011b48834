"""What can be tested of the accelerator path without one: everything but the device's own calls."""

from __future__ import annotations

import itertools
import math
import mmap

import pytest
import torch

from flashckpt.devices import (
    Copier,
    DeviceCopy,
    as_bits,
    clone_on_device,
    has_accelerator,
    native_address,
    weighted_sum,
    weighted_sum_of_bytes,
)
from flashckpt.devices.bits import pieces
from flashckpt.devices.cuda import CudaRegistrar, runtime_libraries
from flashckpt.devices.registrar import RegisteredMemory
from flashckpt.devices.streams import synchronize
from flashckpt.errors import ConfigError, InternalError, UnsupportedValueError
from flashckpt.save.checksums import window


class Registrar:
    def __init__(self, most=99):
        self.registered = {}
        self.calls = 0
        self.most = most

    def register(self, address, length_bytes):
        assert address not in self.registered
        self.calls += 1
        if len(self.registered) == self.most:
            return False
        self.registered[address] = length_bytes
        return True

    def unregister(self, address):
        del self.registered[address]


def area(size):
    return memoryview(mmap.mmap(-1, size))


def address(data):
    return torch.frombuffer(data, dtype=torch.uint8).data_ptr()


def test_a_slot_is_registered_once_and_let_go_at_close():
    registrar = Registrar()
    memory = RegisteredMemory(registrar)
    first, second = area(8192), area(8192)
    for _ in range(3):
        assert memory.add(first)
        assert memory.add(second[4096:]), "the data area of a slot: the slot is registered as a whole"
    assert registrar.registered == {address(first): 8192, address(second): 8192}
    assert registrar.calls == 2
    memory.close()
    assert registrar.registered == {}


def test_slots_of_another_size_are_let_go():
    registrar = Registrar()
    memory = RegisteredMemory(registrar)
    memory.add(area(8192))
    grown = area(16384)
    memory.add(grown)
    assert registrar.registered == {address(grown): 16384}
    memory.keep_only(16384)
    assert registrar.registered == {address(grown): 16384}
    memory.keep_only(8192)
    assert registrar.registered == {}


def test_a_slot_that_is_gone_is_let_go():
    registrar = Registrar()
    memory = RegisteredMemory(registrar)
    first, second = area(8192), area(8192)
    for one in (first, second):
        memory.add(one)
    memory.remove(area(8192))
    memory.remove(first[4096:])
    assert registrar.registered == {address(second): 8192}


def test_registered_memory_stays_mapped():
    memory = mmap.mmap(-1, 8192)
    registered = RegisteredMemory(Registrar())
    with memoryview(memory) as view:
        registered.add(view[4096:])  # a slot's data area; the writer releases its views when it seals
    with pytest.raises(BufferError):
        memory.close()
    registered.close()
    memory.close()


class Raising(Registrar):
    def register(self, address, length_bytes):
        super().register(address, length_bytes)
        raise RuntimeError("no driver")


@pytest.mark.parametrize("registrar", [Registrar(most=1), Raising(most=0)])
def test_a_failure_is_for_good_and_leaves_nothing_registered(registrar):
    memory = RegisteredMemory(registrar)
    first, second = area(8192), area(8192)
    results = [memory.add(first), memory.add(second), memory.add(first)]
    assert results[1:] == [False, False]
    assert registrar.registered == {}, "what was registered is let go; what was not is not unregistered"
    calls = registrar.calls
    memory.add(first)
    assert registrar.calls == calls
    memory.close()


class Cudart:
    """As torch binds it: enumerations that convert to int, the last error kept until somebody asks."""

    def __init__(self, result, is_bound):
        self.result = result
        self.last = 0
        if is_bound:
            self.cudaGetLastError = self.take

    def take(self):
        last, self.last = self.last, 0
        return last

    def cudaHostRegister(self, address, length, flags):
        assert flags == 1
        self.last = self.result
        return self.result

    def cudaHostUnregister(self, address):
        self.last = self.result
        return self.result


@pytest.mark.parametrize("result", [0, 2, 712])
def test_cuda_tells_whether_memory_is_registered_and_keeps_no_error(monkeypatch, result):
    cudart = Cudart(result, is_bound=True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    assert CudaRegistrar().register(4096, 8192) is (result == 0)
    assert cudart.last == 0
    CudaRegistrar().unregister(4096)
    assert cudart.last == 0


def test_cuda_runtimes_are_found_among_the_mapped_files():
    maps = """\
7f00-7f01 r-xp 00000000 08:01 11 /usr/lib/nvidia/libcudart.so.12
7f01-7f02 r--p 00001000 08:01 11 /usr/lib/nvidia/libcudart.so.12
7f02-7f03 r-xp 00000000 08:01 12 /a place/torch/lib/libcudart-1b2c3d4e.so.12.4.127 (deleted)
7f03-7f04 r-xp 00000000 08:01 13 /opt/rocm/lib/libamdhip64.so.6
7f04-7f05 rw-p 00000000 00:00 0
7f05-7f06 r-xp 00000000 08:01 14 /usr/lib/libcudart_notes.txt
7f06-7f07 rw-p 00000000 00:00 0 [heap]
"""
    assert runtime_libraries(maps) == {
        "/usr/lib/nvidia/libcudart.so.12": "cudaGetLastError",
        "/a place/torch/lib/libcudart-1b2c3d4e.so.12.4.127": "cudaGetLastError",
        "/opt/rocm/lib/libamdhip64.so.6": "hipGetLastError",
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex128, torch.float8_e4m3fn, torch.bool])
def test_strided_copies_land_as_contiguous_bytes(dtype):
    raw = (torch.arange(24 * dtype.itemsize) % 2).to(torch.uint8)
    source = raw.view(dtype).reshape(4, 6).t()
    memory = bytearray(64 + raw.numel())
    Copier().copy(memoryview(memory), [DeviceCopy(source, 64, raw.numel())])
    landed = torch.frombuffer(memory, dtype=torch.uint8)[64:].view(dtype).reshape(6, 4)
    assert torch.equal(as_bits(landed), as_bits(source.contiguous()))
    assert not any(memory[:64])


def test_a_source_that_does_not_fill_its_range_is_refused():
    with pytest.raises(InternalError, match=r"expected 8 bytes, found a torch\.float32 of shape"):
        Copier().copy(memoryview(bytearray(64)), [DeviceCopy(torch.zeros(3).expand(2, 3), 0, 8)])


SHAPES = [(), (0,), (1,), (7,), (3, 5), (1, 1, 6), (4, 1, 3), (2, 3, 4), (2, 0, 3)]


@pytest.mark.parametrize(("shape", "limit"), [*itertools.product(SHAPES, [1, 8, 24, 4096])])
def test_pieces_make_up_the_contiguous_bytes(shape, limit):
    count = math.prod(shape)
    whole = torch.arange(count, dtype=torch.int64).reshape(shape)
    for bits in (whole, whole.permute(tuple(reversed(range(len(shape))))), whole.expand(2, *shape)):
        rebuilt = bytearray(bits.numel() * 8)
        end = 0
        for piece, offset in pieces(bits, limit):
            assert offset == end, "in order, without gaps"
            assert 0 < piece.numel() * 8 <= max(limit, 8)
            end = offset + piece.numel() * 8
            rebuilt[offset:end] = piece.contiguous().numpy().tobytes()
        assert bytes(rebuilt) == bits.contiguous().numpy().tobytes()
        assert end == len(rebuilt)


class Stream:
    def __init__(self, *errors):
        self.errors = list(errors)
        self.calls = 0

    def synchronize(self):
        self.calls += 1
        if self.errors:
            raise self.errors.pop(0)


def test_every_stream_is_waited_for_whatever_is_raised():
    streams = [Stream(), Stream(RuntimeError("first")), Stream(KeyboardInterrupt()), Stream(RuntimeError("second"))]
    with pytest.raises(RuntimeError, match="first"):
        synchronize(streams)
    assert [one.calls for one in streams] == [1, 1, 2, 1], "an interrupt ends no wait"


def test_an_interrupt_is_raised_once_all_have_ended():
    streams = [Stream(KeyboardInterrupt(), KeyboardInterrupt()), Stream()]
    with pytest.raises(KeyboardInterrupt):
        synchronize(streams)
    assert [one.calls for one in streams] == [3, 1]


def test_host_tensors_have_no_copy_on_a_device():
    assert clone_on_device([torch.zeros(3), torch.zeros(())]) == [None, None]


def test_without_an_accelerator_the_way_is_the_host_alone():
    assert not has_accelerator()
    copier = Copier(registrars={"cuda": Registrar})
    copier.pin(area(8192))
    copier.keep_only(8192)
    assert copier.ways == {"cpu": "host only"}
    copier.close()


def test_a_budget_has_to_be_a_number_of_bytes():
    with pytest.raises(ConfigError, match="bytes_per_second"):
        Copier(bytes_per_second=-1)


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


@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.bool, torch.bfloat16, torch.float32, torch.int64, torch.complex128]
)
@pytest.mark.parametrize("count", [0, 1, 1000, (1 << 20) + 5])
def test_device_and_host_sum_bits_alike(dtype, count):
    tensor = torch.arange(count).remainder(251).to(dtype)
    area = as_bits(tensor).numpy().tobytes()
    assert int(weighted_sum(tensor)) == weighted_sum_of_bytes(memoryview(area), tensor.itemsize)


def test_sums_see_places_signs_and_single_bits():
    rows = torch.arange(1.0, 1 << 21).sub(1 << 20)[1:].reshape(2, -1)  # each row is a piece of its own
    small = torch.tensor([1.0, -1.0, -1.0, 1.0])
    bit = rows.clone()
    as_bits(bit).view(-1)[-1] ^= 1
    found = [int(weighted_sum(one)) for one in (rows, rows.flip(0), rows.flip(1), -rows, bit)]
    assert len(set(found)) == len(found)
    assert int(weighted_sum(small)) != int(weighted_sum(-small))
    assert int(weighted_sum(rows)) == int(weighted_sum(rows.t().contiguous().t()))


@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 5, 7), (1, 9), (0, 4)])
@pytest.mark.parametrize("most_bytes", [1, 8, 100, 10_000])
@pytest.mark.parametrize("at", [0.0, 0.5, 0.999])
def test_a_window_is_where_it_says(shape, most_bytes, at):
    tensor = torch.arange(math.prod(shape), dtype=torch.int32).reshape(shape)
    view, skipped = window(tensor, most_bytes, at)
    taken = tensor.reshape(-1)[skipped // 4 : skipped // 4 + view.numel()]
    assert torch.equal(view.reshape(-1), taken)
    assert view.numel() * 4 <= max(4, most_bytes)
    assert view.numel() or not tensor.numel()


def test_windows_reach_both_ends():
    tensor = torch.arange(100, dtype=torch.int32).reshape(10, 10)
    ends = [window(tensor, 40, at)[0] for at in (0.0, 0.999)]
    assert [one.reshape(-1)[0].item() for one in ends] == [0, 90]
