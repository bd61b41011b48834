"""Copies the state's bytes into a slot, and checksums them."""

from __future__ import annotations

import itertools
from array import array
from typing import TYPE_CHECKING, Any

from flashckpt import native
from flashckpt.collector import collector_paused
from flashckpt.devices import Copier, DeviceCopy, event_of, has_accelerator, native_address
from flashckpt.failpoints import failpoint
from flashckpt.save.checksums import view_of
from flashckpt.state.regions import local_parts, plain_local

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from flashckpt.save.deferred import Deferred
    from flashckpt.save.plan import SavePlan
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
    deferred: Deferred | None = None,
) -> bytes:
    """Fills the data area and returns its chunk CRCs. Once this returns, the tensors may be mutated.

    Contiguous host memory is copied and checksummed in one native pass; what torch has to copy (accelerators,
    odd strides) is copied first and checksummed afterwards. Gaps become zero. If accelerators copy asynchronously, host
    memory is copied meanwhile and checksummed with the rest.

    The immediate tensors of `deferred` are copied first, followed by `deferred.took()`. Once all other copies are
    queued on devices, `deferred.queue()` is called.
    """
    pieces: list[int] = []
    at_once: list[DeviceCopy] = []
    by_torch: list[DeviceCopy] = []
    immediate = deferred.immediate if deferred is not None else frozenset()
    keep: list[torch.Tensor] = []  # SAFETY: the native pass reads addresses; these and `flat` must outlive it
    fqns: list[str] = list(flat.tensors)
    tensors: Sequence[Any] = list(flat.tensors.values())
    with collector_paused():
        for source in plan.sources:
            tensor = plain_local(tensors[source.tensor]) if source.whole else None
            if tensor is None:
                tensor = view_of(fqns[source.tensor], tensors[source.tensor], source)
                keep.append(tensor)
            address = native_address(fqns[source.tensor], tensor)
            if source.tensor in immediate:
                at_once.append(DeviceCopy(tensor, source.offset_bytes, source.length_bytes))
                address = 0
            elif address is None:
                by_torch.append(DeviceCopy(tensor, source.offset_bytes, source.length_bytes))
                address = 0
            pieces += (address, source.offset_bytes, source.length_bytes)
    for round_number in itertools.count():
        copier.copy(data, at_once, ready)
        if deferred is None or not deferred.must_repeat(round_number):
            break
    if deferred is not None:
        deferred.took()
    failpoint("before_copy")
    with copier.queue(data, by_torch, ready) as queued:
        if queued.has_devices:
            _copy_host(data, pieces, chunk_bytes, threads)
            if deferred is not None and queued.is_queued:
                deferred.queue(queued.events)
            failpoint("after_queue")
        queued.finish()
    start = plan.tensor_bytes
    data[start : start + len(values)] = values
    pieces += (0, start, len(values))
    failpoint("mid_copy")
    crcs = native.scatter_copy(data, array("q", pieces), chunk_bytes, threads)
    failpoint("after_copy")
    return crcs


def _copy_host(data: memoryview, pieces: list[int], chunk_bytes: int, threads: int) -> None:
    """Copies tensors in host memory, adjacent ones at once, and marks them as in place."""
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


def when_ready(flat: Flat) -> dict[torch.device, torch.Event]:
    """Returns, for each accelerator that the state is on, an event behind all that the caller has queued on it."""
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
