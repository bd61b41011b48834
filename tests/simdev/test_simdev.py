"""The simulated accelerator itself: whatever a test of accelerators relies on. Runs in one process, see `Cases`."""

from __future__ import annotations

import copy
import ctypes
import io
import mmap
import os
import threading
import time

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests import simdev
from tests.simdev import Cases

MIB = 1 << 20


def poisoned(tensor):
    return bool((tensor.cpu().view(torch.uint8) == simdev.POISON).all())


def aligned_host_memory(size_bytes):
    """Pageable memory of its own pages, as a tensor and its address."""
    tensor = torch.frombuffer(mmap.mmap(-1, size_bytes), dtype=torch.uint8)
    return tensor, tensor.data_ptr()


# ---- What torch sees


def case_torch_sees_two_devices():
    assert torch.accelerator.is_available()
    assert torch.accelerator.current_accelerator().type == "sim"
    assert torch.accelerator.device_count() == torch.sim.device_count() == 2
    assert torch.get_device_module("sim") is torch.sim
    with pytest.raises(RuntimeError, match="expected a device of sim from sim:0 to sim:1, found index 2"):
        torch.zeros(1, device="sim:2")


def case_device_and_stream_are_current_per_thread():
    torch.accelerator.set_device_index(1)
    stream = torch.Stream(device="sim:1")
    torch.accelerator.set_stream(stream)
    seen = []

    def look():
        seen.append((torch.accelerator.current_device_index(), torch.accelerator.current_stream(1).stream_id))

    other = threading.Thread(target=look)
    other.start()
    other.join()
    look()
    assert seen == [(0, 0), (1, stream.stream_id)]
    assert torch.zeros(1, device="sim").device == torch.device("sim:1")


def case_streams_and_events_have_the_generic_interface():
    streams = [torch.Stream(device="sim"), torch.Stream(device="sim", priority=-1), torch.sim.Stream(priority=-1)]
    assert len({stream.stream_id for stream in streams}) == 3
    with streams[0]:
        assert torch.accelerator.current_stream() == streams[0]
        first, second = (torch.Event(device="sim", enable_timing=True) for _ in range(2))
        first.record()
        simdev.busy(0.02)
        second.record()
    second.synchronize()
    assert first.elapsed_time(second) >= 20
    assert torch.accelerator.current_stream().stream_id == 0


def case_views_of_every_type():
    types = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16]
    types += [torch.float32, torch.float64, torch.float8_e4m3fn, torch.bool, torch.complex64]
    types += [torch.uint16, torch.uint32, torch.uint64]
    data = torch.randint(0, 2, (64,), dtype=torch.uint8)
    device = data.to("sim")
    for dtype in types:
        assert torch.equal(device.view(dtype).view(torch.uint8).cpu(), data), dtype
        expected = data.view(dtype).view(2, -1)
        assert torch.equal(device.view(dtype).view(2, -1).cpu().view(torch.uint8), expected.view(torch.uint8)), dtype
        strided = device.view(dtype).view(2, -1).t()[1:].contiguous().cpu()
        assert torch.equal(strided.view(torch.uint8), expected.t()[1:].contiguous().view(torch.uint8)), dtype


def case_storages_are_resized_shared_and_serialized():
    original = torch.randn(33)
    tensor = original.to("sim:1")
    alias = tensor[3:].view(5, 6)
    alias.zero_()
    original[3:] = 0
    assert torch.equal(tensor.cpu(), original)
    tensor.untyped_storage().resize_(0)
    tensor.untyped_storage().resize_(33 * 4)
    tensor.copy_(original)
    assert torch.equal(copy.deepcopy(tensor).cpu(), original)
    saved = io.BytesIO()
    torch.save(tensor, saved)
    saved.seek(0)
    loaded = torch.load(saved, map_location="sim:0")
    assert loaded.device == torch.device("sim:0")
    assert torch.equal(loaded.cpu(), original)


# ---- Asynchrony


def case_kernels_are_asynchronous():
    x = torch.ones(4, device="sim")
    torch.accelerator.synchronize()
    with simdev.hold():
        y = (x * 2).add_(1)
        event = torch.accelerator.current_stream().record_event()
        assert not event.query()
        assert not torch.accelerator.current_stream().query()
    event.synchronize()
    assert event.query()
    assert y.tolist() == [3, 3, 3, 3]


def case_pinned_copies_are_asynchronous_in_both_directions():
    device = torch.zeros(1000, device="sim")
    inbound, outbound = torch.ones(1000).pin_memory(), torch.zeros(1000).pin_memory()
    assert inbound.is_pinned()
    assert not torch.ones(1).is_pinned()
    simdev.reset_counts()
    with simdev.hold():
        device.copy_(inbound, non_blocking=True)
        outbound.copy_(device, non_blocking=True)
        inbound.fill_(7)  # too early: the copy has not read it yet
        assert outbound.sum() == 0
    torch.accelerator.synchronize()
    assert outbound.sum() == 7000
    counts = simdev.counts()
    assert counts.h2d == simdev.Copies(asynchronous=1, synchronous=0, bytes=4000)
    assert counts.d2h == simdev.Copies(asynchronous=1, synchronous=0, bytes=4000)


def case_which_copies_are_synchronous():
    device = torch.ones(8, 8, device="sim")
    pinned, pageable = torch.zeros(8, 8).pin_memory(), torch.zeros(8, 8)
    table = [
        ("pageable", pageable, device, 0),
        ("to pageable", device, pageable, 0),
        ("pinned", pinned, device, 1),
        ("strided on the host", pinned.t(), device, 0),
        ("other type, inbound", torch.zeros(8, 8, dtype=torch.float64).pin_memory(), device, 0),
        ("other type, outbound", device, torch.zeros(8, 8, dtype=torch.float64).pin_memory(), 1),
        ("within the device", device, torch.zeros(8, 8, device="sim"), 1),
        ("to the other device", device, torch.zeros(8, 8, device="sim:1"), 1),
    ]
    for name, source, target, asynchronous in table:
        simdev.reset_counts()
        target.copy_(source, non_blocking=True)
        counts = simdev.counts()
        copies = [counts.h2d, counts.d2h, counts.d2d]
        assert sum(one.asynchronous for one in copies) == asynchronous, name
        assert sum(one.synchronous for one in copies) == 1 - asynchronous, name
    simdev.reset_counts()
    device.copy_(pinned)
    assert simdev.counts().h2d.synchronous == 1


def case_a_training_step_never_waits():
    model = nn.Sequential(nn.Embedding(20, 8), nn.Flatten(), nn.LayerNorm(24), nn.Linear(24, 20)).to("sim")
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    x, y = torch.randint(0, 20, (4, 3)).to("sim"), torch.randint(0, 20, (4,)).to("sim")
    torch.accelerator.synchronize()
    simdev.reset_counts()
    with simdev.hold():
        F.cross_entropy(model(x), y).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    assert simdev.operators_that_waited() == {}
    assert simdev.counts().d2h.synchronous == 0


def case_operators_whose_result_depends_on_data_wait():
    x = torch.tensor([0, 3, 0, 5], device="sim")
    simdev.reset_counts()
    assert x.nonzero().flatten().tolist() == [1, 3]
    assert simdev.operators_that_waited() == {"aten::nonzero": 1}


def case_bandwidth_of_pinned_and_pageable_memory():
    simdev.bandwidth(pinned=200 * MIB, pageable=50 * MIB)
    device = torch.zeros(4 * MIB, dtype=torch.uint8, device="sim")
    pinned = torch.ones(4 * MIB, dtype=torch.uint8).pin_memory()
    pageable = torch.ones(4 * MIB, dtype=torch.uint8)
    torch.accelerator.synchronize()
    took = {}
    for name, host in (("pinned", pinned), ("pageable", pageable)):
        started = time.monotonic()
        device.copy_(host, non_blocking=True)
        torch.accelerator.synchronize()
        took[name] = time.monotonic() - started
    assert took["pinned"] >= 0.019
    assert took["pageable"] >= 0.079
    # Two streams share the link, so both together take as long as one after the other.
    started = time.monotonic()
    for stream in (torch.Stream(device="sim"), torch.Stream(device="sim")):
        with stream:
            device.copy_(pinned, non_blocking=True)
    torch.accelerator.synchronize()
    assert time.monotonic() - started >= 0.038


def case_a_slow_copy_is_seen_half_done():
    simdev.bandwidth(pinned=20 * MIB)
    device = torch.ones(4 * MIB, dtype=torch.uint8, device="sim")
    host = torch.zeros(4 * MIB, dtype=torch.uint8).pin_memory()
    torch.accelerator.synchronize()
    host.copy_(device, non_blocking=True)
    while host[0] == 0:
        time.sleep(0.001)
    assert host[-1] == 0
    torch.accelerator.synchronize()
    assert bool(host.all())


def case_queued_work_that_fails_is_reported_once():
    weight = torch.zeros(3, 2, device="sim")
    F.embedding(torch.tensor([5], device="sim"), weight)
    with pytest.raises(IndexError, match="raised by aten::index_select, which sim had queued"):
        torch.accelerator.synchronize()
    torch.accelerator.synchronize()


# ---- Memory


def case_the_host_can_not_read_device_memory():
    tensor = torch.ones(1000, dtype=torch.uint8, device="sim")
    torch.accelerator.synchronize()
    libc = ctypes.CDLL(None, use_errno=True)
    reader, writer = os.pipe()
    # The kernel answers EFAULT where the process itself would get SIGSEGV.
    assert libc.write(writer, ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(1000)) == -1
    assert ctypes.get_errno() == 14
    os.close(reader)
    os.close(writer)


def case_freed_memory_is_poisoned_in_the_order_of_its_stream():
    x = torch.ones(5000, device="sim")
    torch.accelerator.synchronize()
    with simdev.hold():
        kept = x.clone()
        del x  # its memory is needed until the clone was made
    assert kept.sum().item() == 5000


def read_late(*, record):
    """Free a tensor of ones while another stream has yet to copy it; return the copy."""
    default = torch.accelerator.current_stream()
    side = torch.Stream(device="sim")
    x = torch.ones(5000, device="sim")
    torch.accelerator.synchronize()
    with side:
        late = torch.empty(5000, device="sim")
        with simdev.hold():
            late.copy_(x)
            if record:
                x.record_stream(side)
            del x
            default.synchronize()
    torch.accelerator.synchronize()
    return late


def case_memory_freed_under_another_stream_is_poison():
    assert poisoned(read_late(record=False))


def case_record_stream_keeps_freed_memory():
    late = read_late(record=True)  # named, as it is freed in the order of the side stream: not before it was summed
    assert late.sum().item() == 5000


def case_fresh_memory_belongs_to_the_stream_it_was_allocated_on():
    side = torch.Stream(device="sim")
    source = torch.ones(5000, device="sim")
    torch.accelerator.synchronize()
    with simdev.hold():
        fresh = torch.empty(5000, device="sim")
        with side:
            fresh.copy_(source)  # without waiting for the stream of the allocation
        side.synchronize()
    assert poisoned(fresh)


def case_pinned_memory_is_kept_until_its_copies_are_done():
    device = torch.zeros(50_000, device="sim")
    torch.accelerator.synchronize()
    with simdev.hold():
        for value in range(20):
            device.copy_(torch.full((50_000,), float(value)).pin_memory(), non_blocking=True)
    assert bool((device == 19).all())


def case_memory_limit():
    simdev.memory_limit(4 * MIB, 1)
    first = torch.zeros(3 * MIB, dtype=torch.uint8, device="sim:1")
    assert torch.accelerator.get_memory_info(1) == (MIB, 4 * MIB)
    with pytest.raises(torch.OutOfMemoryError, match="sim:1 out of memory: tried to allocate 2097152 bytes"):
        torch.zeros(2 * MIB, dtype=torch.uint8, device="sim:1")
    torch.zeros(5 * MIB, dtype=torch.uint8, device="sim:0")
    side = torch.Stream(device="sim:1")
    first.record_stream(side)
    del first
    second = torch.zeros(2 * MIB, dtype=torch.uint8, device="sim:1")
    assert torch.accelerator.memory_allocated(1) == 2 * MIB
    assert second.sum().item() == 0


# ---- Registration of host memory


def case_registered_memory_is_pinned():
    tensor, address = aligned_host_memory(3 * MIB)
    assert not tensor.is_pinned()
    assert simdev.host_register(address, 2 * MIB) == 0
    assert tensor.is_pinned()
    assert simdev.registered_bytes() == 2 * MIB
    assert simdev.host_register(address + MIB, MIB) == simdev.ALREADY_REGISTERED
    assert simdev.take_last_error() == simdev.ALREADY_REGISTERED
    device = torch.zeros(3 * MIB, dtype=torch.uint8, device="sim")
    with pytest.raises(RuntimeError, match="only the first 2097152 are"):
        device.copy_(tensor, non_blocking=True)
    assert simdev.host_register(address + 2 * MIB, MIB) == 0
    simdev.reset_counts()
    device.copy_(tensor, non_blocking=True)
    assert simdev.counts().h2d.asynchronous == 1
    torch.accelerator.synchronize()
    assert simdev.host_unregister(address) == simdev.host_unregister(address + 2 * MIB) == 0
    assert simdev.host_unregister(address) == simdev.NOT_REGISTERED
    assert simdev.take_last_error() == simdev.NOT_REGISTERED
    assert simdev.registered_bytes() == 0


def case_registration_fails_on_demand():
    address = aligned_host_memory(4 * MIB)[1]
    attempts = [(address + number * MIB, MIB) for number in range(3)]

    def codes():
        found = [simdev.host_register(*one) for one in attempts]
        for one, _ in attempts:
            simdev.host_unregister(one)
        simdev.take_last_error()
        return found

    assert codes() == [0, 0, 0]
    simdev.fail_registration()
    assert codes() == [simdev.OUT_OF_MEMORY] * 3
    simdev.fail_registration(simdev.INVALID_VALUE, after=2)
    assert codes() == [0, 0, simdev.INVALID_VALUE]
    simdev.fail_registration(above=MIB)
    assert codes() == [0, 0, 0]
    assert simdev.host_register(address, MIB + 1) == simdev.OUT_OF_MEMORY
    simdev.fail_registration(0)
    simdev.take_last_error()
    assert codes() == [0, 0, 0]


def case_an_unread_error_makes_the_next_launch_of_its_thread_raise():
    x = torch.ones(3, device="sim")
    simdev.fail_registration()
    assert simdev.host_register(*aligned_host_memory(MIB)[1:], MIB) == simdev.OUT_OF_MEMORY
    passed = []
    other = threading.Thread(target=lambda: passed.append(x.sum().item()))
    other.start()
    other.join()
    assert passed == [3]
    with pytest.raises(RuntimeError, match="sim error 2: an earlier call of this thread failed"):
        x.add_(1)
    assert x.sum().item() == 3
    assert simdev.host_register(*aligned_host_memory(MIB)[1:], MIB) == simdev.OUT_OF_MEMORY
    assert simdev.take_last_error() == simdev.OUT_OF_MEMORY
    assert simdev.take_last_error() == 0
    assert x.add_(1).sum().item() == 6


# ---- Two devices


def case_devices_run_independently_and_events_order_them():
    first, second = torch.zeros(100, device="sim:0"), torch.zeros(100, device="sim:1")
    torch.accelerator.synchronize(0)
    torch.accelerator.synchronize(1)
    with simdev.hold():  # sim:0
        first.fill_(5)
        event = torch.accelerator.current_stream(0).record_event()
        assert second.add_(1).sum().item() == 100
        torch.accelerator.current_stream(1).wait_event(event)
        second.add_(1)
        assert not torch.accelerator.current_stream(1).query()
    torch.accelerator.synchronize(1)
    assert event.query()
    assert second.sum().item() == 200


def case_copies_between_devices_wait_for_both():
    source, target = torch.ones(1000, device="sim:0"), torch.zeros(1000, device="sim:1")
    with simdev.hold():
        source.mul_(3)
        target.copy_(source)
        after = target + 1
        assert not torch.accelerator.current_stream(1).query()
    assert target.sum().item() == 3000
    assert after.sum().item() == 4000


def case_operators_refuse_tensors_of_two_devices():
    with pytest.raises(RuntimeError, match="two devices, sim:0 and sim:1"):
        torch.zeros(3, device="sim:0") + torch.zeros(3, device="sim:1")
    with pytest.raises(RuntimeError, match="expected all tensors on one device, found sim:0 and sim:1"):
        torch.zeros(3, device="sim:0").masked_fill_(torch.ones(3, dtype=torch.bool, device="sim:1"), 1)
    with pytest.raises(RuntimeError, match=r"expected all tensors on sim, found one of shape \[3\] on cpu"):
        torch.zeros(3, device="sim:0").masked_fill_(torch.ones(3, dtype=torch.bool), 1)


def case_autograd_crosses_devices():
    torch.manual_seed(0)
    lower, upper = nn.Linear(6, 5), nn.Linear(5, 4)
    expected = copy.deepcopy(lower), copy.deepcopy(upper)
    lower.to("sim:0")
    upper.to("sim:1")
    x = torch.randn(3, 6)
    expected[1](expected[0](x).relu()).square().sum().backward()
    upper(lower(x.to("sim:0")).relu().to("sim:1")).square().sum().backward()
    for ours, theirs in ((lower, expected[0]), (upper, expected[1])):
        assert torch.equal(ours.weight.grad.cpu(), theirs.weight.grad)
        assert ours.weight.grad.device == ours.weight.device


# ---- Numbers


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(30, 16)
        self.block = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
        self.head = nn.Linear(16, 30)

    def forward(self, x):
        hidden = self.embedding(x)
        return self.head(hidden + self.block(hidden))


def trained(device, make_optimizer):
    """Parameters, their average and the optimizer's state after some steps on a device, all on the host."""
    torch.manual_seed(1)
    model = Model().to(device)
    average = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = make_optimizer(model.parameters())
    for _ in range(3):
        x, y = torch.randint(0, 30, (4, 7)).to(device), torch.randint(0, 30, (4, 7)).to(device)
        F.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        torch._foreach_lerp_(average, [parameter.detach() for parameter in model.parameters()], 0.1)
        with torch.no_grad():
            model.head.weight.clamp_(-0.2, 0.2)
    state = [value for one in optimizer.state.values() for value in one.values() if isinstance(value, torch.Tensor)]
    return [tensor.detach().cpu() for tensor in (*model.parameters(), *average, *state)]


def case_training_gives_the_numbers_of_the_cpu():
    table = {
        "AdamW, foreach": lambda parameters: torch.optim.AdamW(parameters, foreach=True),
        "AdamW, single": lambda parameters: torch.optim.AdamW(parameters, foreach=False),
        "AdamW, fused": lambda parameters: torch.optim.AdamW(parameters, fused=True),
        "AdamW, amsgrad": lambda parameters: torch.optim.AdamW(parameters, foreach=True, amsgrad=True),
        "SGD with momentum": lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9),
    }
    for name, make_optimizer in table.items():
        for number, (ours, theirs) in enumerate(
            zip(trained("sim:1", make_optimizer), trained("cpu", make_optimizer), strict=True)
        ):
            assert torch.equal(ours, theirs), f"{name}: tensor {number}"


def case_convolutions_losses_and_masks_give_the_numbers_of_the_cpu():
    torch.manual_seed(2)
    table = {
        "convolution": lambda x: F.conv2d(x.view(1, 2, 6, 6), x.view(2, 2, 3, 6)),
        "pooling": lambda x: F.max_pool2d(x.view(1, 2, 6, 6), 2),
        "mean squared error": lambda x: F.mse_loss(x[:36], x[36:]),
        "index by a mask": lambda x: x[x > 0],
        "softmax": lambda x: x.view(6, 12).softmax(-1),
        "matrix product": lambda x: x.view(6, 12) @ x.view(12, 6),
        "norm": torch.norm,
        "cast": lambda x: (x.bfloat16() * 3).float(),
        "complex": lambda x: torch.view_as_complex(x.view(36, 2)).conj().mul(2).abs(),
    }
    for name, function in table.items():
        host = torch.randn(72).requires_grad_()
        device = host.detach().to("sim").requires_grad_()
        expected, found = function(host), function(device)
        assert torch.equal(found.cpu(), expected), name
        expected.sum().backward()
        found.sum().backward()
        assert torch.equal(device.grad.cpu(), host.grad), name


CASES = Cases(__name__)


@pytest.mark.parametrize("name", CASES.names)
def test_on_sim(name):
    CASES.check(name)
