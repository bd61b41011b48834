"""Snapshot: the state's bytes into a slot, checksummed on the way."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any

from flashckpt import native
from flashckpt.collector import collector_paused
from flashckpt.devices import Copier, DeviceCopy, clone_on_device, event_of, has_accelerator, native_address
from flashckpt.failpoints import failpoint
from flashckpt.state.regions import local_parts, narrow, plain_local

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch

    from flashckpt.save.plan import SavePlan, Source
    from flashckpt.state.flatten import Flat


def snapshot(
    data: memoryview,
    plan: SavePlan,
    flat: Flat,
    values: bytes,
    *,
    chunk_bytes: int,
    threads: int,
    copier: Copier,
    ready: Mapping[torch.device, torch.Event] | None = None,
    taken: Sequence[torch.Tensor | None] | None = None,
    on_queued: Callable[[Mapping[torch.device, torch.Event]], None] | None = None,
) -> bytes:
    """Fills the data area and returns its chunk CRCs. Once this returns the tensors may be mutated.

    Contiguous host memory is copied and checksummed in one native pass; what torch has to copy (accelerators,
    odd strides) is put in place first and only checksummed there. Gaps become zero. Where an accelerator copies by
    itself, host memory is copied meanwhile, and checksummed with the rest.

    `taken`: copies in device memory, as `take_on_device` gives them, to read instead of the tensors. `on_queued` is
    called once, as soon as host tensors may be mutated, with an event per device: who makes a stream wait for it may
    mutate that device's tensors on that stream. A device without an event needs no waiting.
    """
    pieces: list[int] = []
    by_torch: list[DeviceCopy] = []
    keep: list[torch.Tensor] = []  # SAFETY: the native pass reads addresses; these and `flat` must outlive it
    fqns: list[str] = list(flat.tensors)
    tensors: Sequence[Any] = list(flat.tensors.values())
    with collector_paused():
        for number, source in enumerate(plan.sources):
            copy = taken[number] if taken is not None else None
            if copy is not None:
                by_torch.append(DeviceCopy(copy, source.offset_bytes, source.length_bytes))
                pieces += (0, source.offset_bytes, source.length_bytes)
                continue
            tensor = plain_local(tensors[source.tensor]) if source.whole else None
            if tensor is None:
                tensor = _view(fqns[source.tensor], tensors[source.tensor], source)
                keep.append(tensor)
            address = native_address(fqns[source.tensor], tensor)
            if address is None:
                by_torch.append(DeviceCopy(tensor, source.offset_bytes, source.length_bytes))
                address = 0
            pieces += (address, source.offset_bytes, source.length_bytes)
    failpoint("before_copy")
    told = on_queued is None
    with copier.queue(data, by_torch, ready) as queued:
        if queued.has_devices:
            _copy_host(data, pieces, chunk_bytes, threads)
            if on_queued is not None and queued.is_queued:
                told = True
                on_queued(queued.events)
            failpoint("after_queue")
        queued.finish()
        if on_queued is not None and not told and queued.has_devices:
            told = True
            on_queued(queued.events)
    start = plan.tensor_bytes
    data[start : start + len(values)] = values
    pieces += (0, start, len(values))
    failpoint("mid_copy")
    crcs = native.scatter_copy(data, array("q", pieces), chunk_bytes, threads)
    if on_queued is not None and not told:
        on_queued({})
    failpoint("after_copy")
    return crcs


def _copy_host(data: memoryview, pieces: list[int], chunk_bytes: int, threads: int) -> None:
    """Copies what lies in host memory, each run of neighbours at once, and marks it as in place."""
    at = 0
    while at < len(pieces):
        end = at
        while end < len(pieces) and pieces[end]:
            end += 3
        if end == at:
            at += 3
            continue
        first, last = pieces[at + 1], pieces[end - 2] + pieces[end - 1]
        run = array("q", pieces[at:end])
        for one in range(0, len(run), 3):
            run[one + 1] -= first
            pieces[at + one] = 0
        with data[first:last] as part:
            native.scatter_copy(part, run, chunk_bytes, threads)
        at = end


def take_on_device(flat: Flat, plan: SavePlan) -> list[torch.Tensor | None]:
    """Queues copies, in device memory, of what the plan reads from accelerators: see clone_on_device. Called by who
    changes the tensors, on the stream he changes them on; the result is `snapshot`'s `taken`, for this plan alone.

    Afterwards events of `when_ready` are behind these copies.
    """
    fqns: list[str] = list(flat.tensors)
    tensors: Sequence[Any] = list(flat.tensors.values())
    return clone_on_device(_view(fqns[one.tensor], tensors[one.tensor], one) for one in plan.sources)


def when_ready(flat: Flat) -> dict[torch.device, torch.Event]:
    """For each accelerator that the state is on: an event behind what the caller has queued on it so far."""
    return {device: event_of(device) for device in devices_of(flat)}


def devices_of(flat: Flat) -> set[torch.device]:
    """Returns the accelerators that the state is on."""
    devices: set[torch.device] = set()
    if not has_accelerator():
        return devices
    for fqn, tensor in flat.tensors.items():
        local = plain_local(tensor)
        devices.update(part.device for part in ([local] if local is not None else local_parts(fqn, tensor)))
    return {device for device in devices if device.type != "cpu"}


def _view(fqn: str, tensor: Any, source: Source) -> torch.Tensor:
    """The bytes of one entry as a tensor: a view of the user's memory, any stride, any device."""
    part = local_parts(fqn, tensor)[source.part]
    return part if source.whole else narrow(part, source.local_offsets, source.sizes)
