"""Saves and loads of states on the simulated accelerator. Run by test_on_sim.py."""

from __future__ import annotations

import gc
import shutil
import tempfile
import time
from pathlib import Path

import pytest
import torch

from flashckpt import CheckpointConfig, Checkpointer, UnusableError
from flashckpt.checkpointer import internals_of
from flashckpt.devices import Copier, add_registrar, as_bits, upload
from flashckpt.load import read
from flashckpt.ranks.topology import Node, Topology
from flashckpt.save.deferred import Deferrals
from flashckpt.save.handle import SaveHandle
from flashckpt.save.plan import Planner
from flashckpt.save.snapshot import snapshot, when_ready
from flashckpt.state.flatten import flatten
from flashckpt.types import Level
from tests import simdev
from tests.devices.sim import (
    DTYPES,
    REGISTERED,
    SimRegistrar,
    area,
    contiguous_bytes,
    copier_of,
    examples,
    gate_hold,
    on_device,
    without_pinned_memory,
)

add_registrar("sim", SimRegistrar)
M = 1 << 20
ALONE = Topology(0, 1, (Node("here", "", (0,)),), (0,))
DEVICES = ["sim:0", "sim:1", "cpu"]


@pytest.fixture
def make():
    memory_dir = tempfile.mkdtemp(prefix="flashckpt-test-", dir="/dev/shm")
    opened = []

    def make(**settings):
        opened.append(Checkpointer(CheckpointConfig(**{"job": "job", "memory_dir": memory_dir, **settings})))
        return opened[-1]

    make.directory = Path(memory_dir, "job")
    yield make
    assert all(internals_of(one).store.check() == [] for one in opened[-1:])
    for one in opened:
        one.close()
    shutil.rmtree(memory_dir, ignore_errors=True)


@pytest.fixture(autouse=True)
def _as_it_was():
    simdev.reset_counts()
    yield
    simdev.bandwidth()
    simdev.fail_registration(0)
    assert simdev.take_last_error() == 0
    assert simdev.registered_bytes() == 0


def every_state():
    """Hosts by key, and the same tensors on the devices."""
    hosts, tensors = {}, {}
    for number, dtype in enumerate(DTYPES):
        for name, host in examples(dtype, number).items():
            for device in DEVICES:
                key = f"{device} {dtype} {name}".replace(".", "_")
                hosts[key] = host
                tensors[key] = on_device(host, device)
    return hosts, tensors


def host_bytes(tensor):
    """What torch reads back, by bits: odd dtypes have no copy of their own."""
    return contiguous_bytes(tensor if tensor.is_cpu else as_bits(tensor).cpu())


@pytest.mark.parametrize("way", ["registered", "ring"])
@pytest.mark.parametrize("overlap", [True, False])
def test_every_dtype_and_stride_on_two_devices_comes_back(make, way, overlap):
    if way == "ring":
        simdev.fail_registration()
    hosts, state = every_state()
    checkpointer = make()
    handle = checkpointer.save(1, state, overlap=overlap)
    handle.wait("sealed", timeout=60)
    assert handle.outcome == "ok"
    assert checkpointer.status().device_copies == {"sim": way}
    fresh = {}
    for key, host in hosts.items():
        device = key.partition(" ")[0]
        fresh[key] = on_device(blank_like(host), device)
    simdev.reset_counts()
    checkpointer.load(fresh)
    for key, host in hosts.items():
        assert host_bytes(fresh[key]) == contiguous_bytes(host), key


def blank_like(host):
    """Zeros of the same strides. What is expanded can't be written to: it becomes contiguous."""
    if host.is_conj():
        return blank_like(host.conj()).conj()
    if host.is_neg():
        return blank_like(host._neg_view())._neg_view()
    if 0 in host.stride() and host.numel() > 1:
        return torch.zeros(host.numel() * host.itemsize, dtype=torch.uint8).view(host.dtype).view(host.shape)
    blank = torch.zeros(host.untyped_storage().nbytes(), dtype=torch.uint8).view(host.dtype)
    return blank.as_strided(host.shape, host.stride(), host.storage_offset())


def test_loads_to_devices_are_asynchronous_and_staged_in_bounds(make, monkeypatch):
    allocated = []
    pinned_buffer = upload.pinned_buffer

    def record(device, size_bytes):
        allocated.append(size_bytes)
        return pinned_buffer(device, size_bytes)

    monkeypatch.setattr(upload, "pinned_buffer", record)
    monkeypatch.setattr(read, "BOUNCE_BYTES", M)
    state = {f"small {n}": torch.arange(n + 1).to("sim:0") for n in range(64)}
    state["large"] = torch.randint(0, 256, (7 * M + 5,), dtype=torch.uint8).to("sim:1")
    state["grid"] = torch.randn(700, 900).to("sim:0")
    hosts = {key: tensor.cpu() for key, tensor in state.items()}
    checkpointer = make()
    checkpointer.save(1, state)
    fresh = {key: torch.zeros_like(tensor, device=tensor.device) for key, tensor in state.items()}
    simdev.reset_counts()
    simdev.bandwidth(pinned=30e6)  # slower than the host fills buffers: it has to wait until one is free
    checkpointer.load(fresh)
    copies = simdev.counts().h2d
    assert copies.asynchronous >= 64 + 15
    assert copies.synchronous == 0
    assert copies.bytes == sum(host.numel() * host.itemsize for host in hosts.values())
    assert sum(allocated) <= M
    for key, host in hosts.items():
        assert torch.equal(fresh[key].cpu(), host), key


def test_loads_convert_turn_and_leave_neighbours_alone(make):
    checkpointer = make()
    grid = torch.randn(40, 60)
    checkpointer.save(1, {"half": grid.to("sim:0"), "turned": grid.to("sim:1"), "part": grid.to("sim:0"), "host": grid})
    base = torch.full((50, 70), -1.0).to("sim:0")
    fresh = {
        "half": torch.zeros(40, 60, dtype=torch.bfloat16, device="sim:0"),
        "turned": torch.zeros(60, 40, device="sim:1").t(),
        "part": base[5:45, 3:63],
        "host": torch.zeros(60, 40).t(),
    }
    checkpointer.load(fresh, cast=True)
    assert torch.equal(fresh["half"].cpu(), grid.bfloat16())
    assert torch.equal(fresh["turned"].cpu(), grid)
    assert torch.equal(fresh["host"], grid)
    wanted = torch.full((50, 70), -1.0)
    wanted[5:45, 3:63] = grid
    assert torch.equal(base.cpu(), wanted)


def test_a_load_from_host_memory_to_a_device_and_back(make):
    checkpointer = make()
    checkpointer.save(1, {"a": torch.arange(5000.0), "b": torch.arange(50).to("sim:0")})
    fresh = {"a": torch.zeros(5000).to("sim:1"), "b": torch.zeros(50, dtype=torch.int64)}
    checkpointer.load(fresh)
    assert torch.equal(fresh["a"].cpu(), torch.arange(5000.0))
    assert torch.equal(fresh["b"], torch.arange(50))


def test_a_load_starts_behind_the_callers_stream_and_ends_before_it_returns(make):
    checkpointer = make()
    checkpointer.save(1, {"a": torch.arange(100_000).to("sim:0")})
    fresh = {"a": torch.zeros(100_000, dtype=torch.int64, device="sim:0")}
    simdev.busy(0.2)
    fresh["a"].fill_(9)  # queued before the load: it must not come after it
    checkpointer.load(fresh)
    assert torch.equal(fresh["a"].cpu(), torch.arange(100_000))


def test_a_load_that_raises_midway_leaves_no_copy_under_way(make, monkeypatch):
    monkeypatch.setattr(read, "BOUNCE_BYTES", M)
    checkpointer = make()
    state = {"a": torch.full((6 * M,), 1, dtype=torch.uint8).to("sim:0")}
    checkpointer.save(1, state)
    (shard,) = (make.directory / "sealed").iterdir()
    with shard.open("r+b") as file:  # a chunk that is read late
        file.seek(shard.stat().st_size - 600_000)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 1]))
    simdev.bandwidth(pinned=20e6)
    fresh = {"a": torch.zeros(6 * M, dtype=torch.uint8, device="sim:0")}
    with pytest.raises(UnusableError):
        checkpointer.load(fresh)
    simdev.bandwidth()
    with torch.Stream(device="sim:0"):
        first = fresh["a"].cpu()
        time.sleep(0.3)
        assert torch.equal(fresh["a"].cpu(), first)
    assert first.any(), "what came before was copied"
    make(job="other")  # whose store is looked at when the test ends


def test_slots_are_registered_before_the_first_save(make):
    checkpointer = make()
    state = {"a": torch.arange(100_000).to("sim:1"), "b": torch.zeros(10)}
    checkpointer.prewarm(state)
    ahead = simdev.registered_bytes()
    assert ahead > 2 * 800_000
    assert checkpointer.status().device_copies == {"sim": "registered"}
    for step in range(1, 4):
        simdev.reset_counts()
        assert checkpointer.save(step, state).outcome == "ok"
        assert simdev.counts().d2h.synchronous == 0
    assert simdev.registered_bytes() == ahead
    checkpointer.close()
    make(job="other")


def test_nothing_is_registered_for_a_state_in_host_memory(make):
    checkpointer = make()
    state = {"a": torch.arange(100_000)}
    checkpointer.prewarm(state)
    checkpointer.save(1, state)
    assert simdev.registered_bytes() == 0
    assert checkpointer.status().device_copies == {"cpu": "host only"}


def test_registered_slots_give_way_when_the_state_grows(make):
    """A slot that is registered stays mapped and can't be resized: the budget would never be enough again."""
    checkpointer = make(memory_budget_bytes=24 * M)
    for step, size in enumerate((8, 8, 11, 11, 4, 4), 1):
        state = {"a": torch.full((size * M,), step, dtype=torch.uint8).to("sim:0")}
        handle = checkpointer.save(step, state)
        assert handle.outcome == "ok", handle.reason
    fresh = {"a": torch.zeros(4 * M, dtype=torch.uint8)}
    assert checkpointer.load(fresh).step == 6
    assert fresh["a"].eq(6).all()


def test_a_registered_slot_whose_file_was_removed_gives_its_memory_back(make):
    """As an agent does when it needs the room, or when it sets a damaged shard aside."""
    checkpointer = make()
    state = {"a": torch.full((8 * M,), 1, dtype=torch.uint8).to("sim:0")}
    checkpointer.prewarm(state)
    held = simdev.registered_bytes()
    for path in (make.directory / "pool").iterdir():
        path.unlink()
    assert checkpointer.save(1, state).outcome == "ok"
    assert simdev.registered_bytes() == held // 2, "of two slots both went, and one was made anew"


# --- snapshot ---------------------------------------------------------------------------------------------


class Watcher:
    """In the place of save/deferred.py's Deferred: hears when all copies are made or queued."""

    immediate = frozenset()

    def __init__(self, queue):
        self.queue = queue

    def must_repeat(self, _):
        return False

    def took(self):
        pass


def take(state, way="registered", *, on_device_first=False, on_queued=None, change=None):
    """Plans and takes a snapshot; returns the bytes of each key."""
    flat = flatten(state)
    plan = Planner(ALONE).plan(flat)
    data = area(-(-plan.tensor_bytes // 4096) * 4096 + 4096)
    copying = copier_of(way)
    if on_device_first:
        deferrals = Deferrals(recheck=False, device_snapshot=True, threads=1, timeout=60.0)
        deferrals.split(SaveHandle(1, None, Level.SEALED), flat, plan, lambda *_: True, lambda *_: None)
    ready = when_ready(flat)
    if change is not None:
        change()
    watcher = None if on_queued is None else Watcher(on_queued)
    snapshot(data, plan, flat, b"v", chunk_bytes=4096, threads=1, copier=copying, ready=ready, deferred=watcher)
    copying.close()
    keys = list(flat.tensors)
    return {keys[one.tensor]: bytes(data[one.offset_bytes :][: one.length_bytes]) for one in plan.sources}


@pytest.mark.parametrize("way", ["registered", "ring"])
def test_once_copies_are_queued_tensors_may_change_in_the_stream(way):
    host, odd = torch.arange(5000.0), torch.arange(600.0).view(20, 30).t()
    state = {"a": torch.arange(9000.0).to("sim:0"), "host": host, "b": torch.arange(9000.0).to("sim:1"), "odd": odd}
    wanted = {key: host_bytes(value) for key, value in state.items()}
    simdev.busy(0.3)
    called = []

    def change(events):
        called.append(set(events))
        for device in ("sim:0", "sim:1"):
            if torch.device(device) in events:
                torch.accelerator.current_stream(device).wait_event(events[torch.device(device)])
        for value in state.values():
            value.fill_(-1)

    assert take(state, way, on_queued=change) == wanted
    both = {torch.device("sim:0"), torch.device("sim:1")}
    assert called == ([both] if way == "registered" else [])  # through the ring they are over with the call


def test_it_is_told_while_devices_still_copy():
    state = {"a": torch.arange(9000.0).to("sim:0"), "host": torch.arange(5000.0)}
    simdev.busy(0.5)
    began = time.perf_counter()
    at = []
    take(state, on_queued=lambda _: at.append(time.perf_counter() - began))
    assert at[0] < 0.4
    assert time.perf_counter() - began >= 0.5


def test_what_is_raised_then_leaves_nothing_writing():
    simdev.bandwidth(pinned=20e6)
    state = {"a": torch.full((4 * M,), 1, dtype=torch.uint8, device="sim:0")}
    copying = Copier(registrars=REGISTERED)
    flat = flatten(state)
    plan = Planner(ALONE).plan(flat)
    data = area(5 * M)

    def fail(events):
        raise KeyError

    with pytest.raises(KeyError):
        snapshot(data, plan, flat, b"", chunk_bytes=4096, threads=1, copier=copying, deferred=Watcher(fail))
    before = bytes(data)
    time.sleep(0.3)
    assert bytes(data) == before
    copying.close()


@pytest.mark.parametrize("room", ["enough", "too little"])
def test_a_snapshot_of_copies_on_the_device_is_not_torn(room):
    state = {f"{n}": torch.arange(20_000.0 + n).to(f"sim:{n % 2}") for n in range(8)}
    state["turned"] = torch.randn(30, 40).to("sim:0").t()
    state["host"] = torch.arange(100.0)
    wanted = {key: host_bytes(value) for key, value in state.items()}
    gc.collect()  # what earlier tests left in circles must not be freed in between
    for device in range(2):
        torch.accelerator.synchronize(device)  # what earlier tests freed goes in the order of its stream
    used = [torch.accelerator.memory_allocated(device) for device in range(2)]
    if room == "too little":
        for device in range(2):
            simdev.memory_limit(used[device] + 170_000, device)

    def change():
        if room == "enough":
            for key, value in state.items():
                if key != "host":
                    value.fill_(-1)

    try:
        assert take(state, on_device_first=True, change=change) == wanted
    finally:
        for device in range(2):
            simdev.memory_limit(None, device)
            torch.accelerator.synchronize(device)
    assert [torch.accelerator.memory_allocated(device) for device in range(2)] == used, "given back"


# --- the gate ---------------------------------------------------------------------------------------------


def test_the_step_waits_in_the_stream_and_not_on_the_host(make):
    hold, handle = gate_hold(make.directory.parent, busy_seconds=1.0)
    assert hold < 0.3
    assert handle.outcome == "ok"


def test_through_the_ring_the_step_waits_on_the_host_and_is_right(make):
    simdev.fail_registration()
    hold, handle = gate_hold(make.directory.parent, busy_seconds=0.5)
    assert hold > 0.3
    assert handle.outcome == "ok"


def test_a_device_snapshot_holds_nobody(make):
    simdev.fail_registration()
    hold, handle = gate_hold(make.directory.parent, busy_seconds=1.0, device_snapshot=True)
    assert hold < 0.3
    assert handle.outcome == "ok"


def test_a_device_snapshot_without_room_is_taken_as_without(make):
    simdev.memory_limit(torch.accelerator.memory_allocated(0) + 400_000, 0)
    try:
        _, handle = gate_hold(make.directory.parent, busy_seconds=0.2, device_snapshot=True)
        assert handle.outcome == "ok"
    finally:
        simdev.memory_limit(None, 0)


def test_the_step_is_held_for_a_small_part_of_what_pageable_copies_hold_it(make, monkeypatch):
    """Ratios of one run, each of the least of three: the machine's load makes all of them longer."""

    def hold(way):
        found = [gate_hold(make.directory.parent / f"{way}-{number}", busy_seconds=0.5) for number in range(3)]
        assert [handle.outcome for _, handle in found] == ["ok"] * 3
        return min(seconds for seconds, _ in found)

    registered = hold("registered")
    simdev.fail_registration()
    without_pinned_memory(monkeypatch)
    pageable = hold("pageable")
    assert registered <= 0.1 * pageable, f"held {registered:.4f} s by registered copies, {pageable:.4f} s by pageable"
