"""Copier and clone_on_device on the simulated accelerator. Run by test_on_sim.py."""

from __future__ import annotations

import logging
import time

import pytest
import torch

from flashckpt.devices import DeviceCopy, clone_on_device
from flashckpt.errors import InternalError
from tests import simdev
from tests.devices.sim import (
    DTYPES,
    area,
    contiguous_bytes,
    copier_of,
    examples,
    laid_out,
    on_device,
    without_pinned_memory,
)

WAYS = ["registered", "ring", "plain"]
M = 1 << 20


@pytest.fixture
def copier():
    """Makes copiers, and closes them."""
    made = []

    def make(way, **options):
        made.append(copier_of(way, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()
    assert simdev.registered_bytes() == 0, "all that was registered is let go"


@pytest.fixture(autouse=True)
def _as_it_was():
    simdev.reset_counts()
    yield
    simdev.bandwidth()
    simdev.fail_registration(0)
    for device in range(2):
        torch.accelerator.synchronize(device)
        simdev.memory_limit(None, device)
    assert simdev.take_last_error() == 0


@pytest.mark.parametrize("way", WAYS)
def test_every_dtype_and_stride_from_two_devices_is_bit_exact(way, monkeypatch, copier):
    if way == "plain":
        without_pinned_memory(monkeypatch)
    copying = copier(way)
    for dtype in DTYPES:
        hosts = [*examples(dtype, 1).values(), *examples(dtype, 2).values(), *examples(dtype, 3).values()]
        count = len(hosts) // 3
        tensors = [on_device(one, "sim:0") for one in hosts[:count]]
        tensors += [on_device(one, "sim:1") for one in hosts[count : 2 * count]] + hosts[2 * count :]
        copies, size = laid_out(tensors)
        data = area(size)
        copying.copy(data, copies)
        for one, host in zip(copies, hosts, strict=True):
            found = bytes(data[one.offset_bytes : one.offset_bytes + one.length_bytes])
            assert found == contiguous_bytes(host), (way, dtype, tuple(host.shape), host.stride())
    assert copying.ways == {"sim": way}


def test_all_copies_from_a_registered_device_are_asynchronous(copier):
    tensors = [torch.arange(1000 + one).to("sim:0") for one in range(64)]
    copies, size = laid_out(tensors)
    data = area(size)
    copying = copier("registered")
    simdev.reset_counts()
    simdev.busy(0.5)
    began = time.perf_counter()
    queued = copying.queue(data, copies)
    assert time.perf_counter() - began < 0.4, "queued, not waited for"
    assert (simdev.counts().d2h.asynchronous, simdev.counts().d2h.synchronous) == (64, 0)
    assert queued.is_queued
    assert not any(data), "nothing has been copied yet"
    # What the caller does with his own stream is all it takes to change the tensors.
    stream = torch.accelerator.current_stream()
    stream.wait_event(queued.events[torch.device("sim:0")])
    for tensor in tensors:
        tensor.fill_(7)
    queued.finish()
    for number, one in enumerate(copies):
        found = torch.frombuffer(data[one.offset_bytes :], dtype=torch.int64, count=1000 + number)
        assert torch.equal(found, torch.arange(1000 + number))


@pytest.mark.parametrize("way", WAYS)
def test_tensors_may_be_freed_once_they_are_queued(way, monkeypatch, copier):
    if way == "plain":
        without_pinned_memory(monkeypatch)
    hosts = [torch.arange(50_000) + one for one in range(8)]
    copying = copier(way)
    tensors = [one.to("sim:0") for one in hosts]
    copies, size = laid_out(tensors)
    simdev.busy(0.2)
    queued = copying.queue(area_of := area(size), list(copies))
    offsets = [one.offset_bytes for one in copies]
    del tensors, copies
    others = [torch.full((50_000,), -1).to("sim:0") for _ in range(8)]
    queued.finish()
    for host, offset in zip(hosts, offsets, strict=True):
        assert bytes(area_of[offset : offset + 400_000]) == contiguous_bytes(host)
    del others


def test_copies_start_behind_what_was_queued_before(copier):
    tensor = torch.zeros(1000, device="sim:1")
    data = area(4096)
    for way in ("registered", "ring"):
        copying = copier(way)
        with torch.Stream(device="sim:1"):
            simdev.busy(0.1)
            tensor.fill_(3 if way == "ring" else 2)
            ready = {torch.device("sim:1"): torch.accelerator.current_stream("sim:1").record_event()}
        copying.copy(data, [DeviceCopy(tensor, 0, 4000)], ready)
        assert torch.frombuffer(data, dtype=torch.float32, count=1000).eq(3 if way == "ring" else 2).all()


def test_a_device_that_nobody_announced_is_waited_for(copier):
    """Its backend was registered after the events were taken: a raw KeyError once."""
    tensor = torch.zeros(1000, device="sim:0")
    simdev.busy(0.1)
    tensor.fill_(5)
    data = area(4096)
    copying = copier("ring")
    copying.copy(data, [DeviceCopy(tensor, 0, 4000)], {})
    assert torch.frombuffer(data, dtype=torch.float32, count=1000).eq(5).all()


def test_the_ring_is_taken_for_good_where_registration_fails(caplog, copier):
    tensor = torch.arange(100_000).to("sim:0")
    copying = copier("registered")
    first, second = area(M), area(M)
    caplog.set_level(logging.INFO)
    copying.copy(first, [DeviceCopy(tensor, 0, 800_000)])
    assert copying.ways == {"sim": "registered"}
    assert simdev.registered_bytes() == M
    simdev.fail_registration()
    simdev.reset_counts()
    for data in (second, first, second):
        copying.copy(data, [DeviceCopy(tensor, 0, 800_000)])
        assert bytes(data[:800_000]) == contiguous_bytes(tensor.cpu())
    assert simdev.registered_bytes() == 0
    simdev.fail_registration(0)
    copying.copy(second, [DeviceCopy(tensor, 0, 800_000)])
    assert simdev.registered_bytes() == 0, "it is not tried again"
    assert copying.ways == {"sim": "ring"}
    assert [one.message for one in caplog.records if one.levelno == logging.WARNING] == [
        "saves from sim: registering memory failed; they go through pinned buffers from now on"
    ]


def test_the_log_says_once_which_way_is_taken(caplog, monkeypatch, copier):
    caplog.set_level(logging.INFO)
    tensor = torch.arange(1000).to("sim:0")
    for way, said in (
        ("registered", "directly into the slots"),
        ("ring", "flashckpt can't register"),
        ("plain", "slow"),
    ):
        if way == "plain":
            without_pinned_memory(monkeypatch)
        caplog.clear()
        copying = copier(way)
        for _ in range(3):
            copying.copy(area(8192), [DeviceCopy(tensor, 0, 8000)])
        assert copying.ways == {"sim": way}
        assert [said in one.message for one in caplog.records if one.name.endswith("copier")] == [True]


@pytest.mark.parametrize("way", WAYS)
def test_a_copy_that_raises_midway_leaves_nothing_writing(way, monkeypatch, copier):
    if way == "plain":
        without_pinned_memory(monkeypatch)
    simdev.bandwidth(pinned=40e6, pageable=40e6)
    tensors = [torch.full((M,), one + 1, dtype=torch.uint8, device=f"sim:{one % 2}") for one in range(6)]
    copies, size = laid_out(tensors)
    copies.append(DeviceCopy(tensors[0], 0, 17))  # not as long as it says
    data = area(size)
    copying = copier(way)
    with pytest.raises(InternalError):
        copying.copy(data, copies)
    before = bytes(data)
    time.sleep(0.3)
    assert bytes(data) == before, "the slot may be somebody else's by now"


@pytest.mark.parametrize("way", ["registered", "ring"])
def test_leaving_the_copy_early_leaves_nothing_writing(way, copier):
    simdev.bandwidth(pinned=20e6)
    tensors = [torch.full((M,), one + 1, dtype=torch.uint8, device="sim:0") for one in range(4)]
    copies, size = laid_out(tensors)
    data = area(size)
    copying = copier(way)
    with pytest.raises(KeyError), copying.queue(data, copies):
        raise KeyError
    before = bytes(data)
    time.sleep(0.2)
    assert bytes(data) == before


@pytest.mark.parametrize("way", ["registered", "ring"])
def test_tensors_larger_than_a_buffer_are_split(way, copier):
    host = torch.randint(0, 256, (40 * M + 12,), dtype=torch.uint8)
    turned = torch.randint(0, 1 << 20, (3000, 2500)).t()
    copies, size = laid_out([on_device(host, "sim:0"), on_device(turned, "sim:0")])
    data = area(size)
    copying = copier(way)
    copying.copy(data, copies)
    for one, wanted in zip(copies, (host, turned), strict=True):
        assert bytes(data[one.offset_bytes : one.offset_bytes + one.length_bytes]) == contiguous_bytes(wanted)


@pytest.mark.parametrize("way", WAYS)
def test_the_budget_is_kept_between_chunks(way, monkeypatch, copier):
    if way == "plain":
        without_pinned_memory(monkeypatch)
    tensor = torch.arange(M, dtype=torch.int64).to("sim:0")
    data = area(8 * M)
    copying = copier(way, bytes_per_second=20 * M)
    simdev.reset_counts()
    began = time.perf_counter()
    copying.copy(data, [DeviceCopy(tensor, 0, 8 * M)])
    took = time.perf_counter() - began
    assert took > 0.3, "8 MiB at 20 MiB per second"
    assert simdev.counts().d2h.bytes == 8 * M
    copies = simdev.counts().d2h
    assert copies.asynchronous + copies.synchronous >= 8, "chunks of at most 50 ms"
    assert bytes(data) == contiguous_bytes(tensor.cpu())


def test_the_ring_is_faster_than_pageable_copies(monkeypatch, copier):
    """Where pinned copies are: here 4 times as fast."""
    simdev.bandwidth(pinned=100e6, pageable=25e6)
    tensor = torch.zeros(32 * M, dtype=torch.uint8, device="sim:0")
    data = area(32 * M)
    seconds = {}
    for way in ("ring", "plain"):
        if way == "plain":
            without_pinned_memory(monkeypatch)
        copying = copier(way)
        copying.copy(data, [DeviceCopy(tensor[:64], 0, 64)])
        began = time.perf_counter()
        copying.copy(data, [DeviceCopy(tensor, 0, 32 * M)])
        seconds[way] = time.perf_counter() - began
    assert seconds["ring"] < 0.7 * seconds["plain"], seconds


def test_slots_are_registered_ahead_for_the_devices_that_are_expected(copier):
    copying = copier("registered")
    first, second = area(8192), area(8192)
    copying.pin(first)
    assert simdev.registered_bytes() == 0, "no state is known to be on a device"
    copying.expect([torch.device("cpu"), torch.device("sim:1"), torch.device("sim:0")])
    copying.pin(first)
    copying.pin(second)
    assert simdev.registered_bytes() == 16384
    assert copying.ways == {"sim": "registered"}
    copying.keep_only(4096)
    assert simdev.registered_bytes() == 0


def test_copies_on_the_device_are_in_the_order_of_the_stream():
    hosts = [host for dtype in DTYPES for host in examples(dtype).values()]
    tensors = [on_device(host, f"sim:{number % 2}") for number, host in enumerate(hosts)]
    simdev.busy(0.2)
    began = time.perf_counter()
    clones = clone_on_device(tensors)
    assert time.perf_counter() - began < 5
    for tensor in tensors:
        torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage()).fill_(0xAA)
    for host, clone in zip(hosts, clones, strict=True):
        assert clone.is_contiguous()
        assert not clone.is_cpu
        assert clone.cpu().view(-1).view(torch.uint8).numpy().tobytes() == contiguous_bytes(host), host.dtype


def test_tensors_without_room_on_their_device_are_left_out():
    large = [torch.zeros(4 * M, dtype=torch.uint8, device="sim:0") for _ in range(3)]
    small = torch.zeros(1000, dtype=torch.uint8, device="sim:0")
    other = torch.zeros(4 * M, dtype=torch.uint8, device="sim:1")
    torch.accelerator.synchronize(0)
    simdev.memory_limit(torch.accelerator.memory_allocated(0) + 5 * M, 0)
    clones = clone_on_device([large[0], large[1], small, large[2], torch.zeros(4), other])
    assert [one is not None for one in clones] == [True, False, True, False, False, True]
