"""Copies a state into a slot. Uses, for each device type, the best of three ways that works:

`registered`: the slot's memory is registered with the driver; copies are queued on a side stream.
`ring`: the device copies into two pinned buffers, from which the host copies each chunk into the slot.
`plain`: one synchronous copy after the other.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Literal, Self

import torch

from flashckpt.devices.bits import bits_of, pieces, place
from flashckpt.devices.registrar import RegisteredMemory, address_of
from flashckpt.devices.registrar import registrars as all_registrars
from flashckpt.devices.ring import CHUNK_BYTES, Ring
from flashckpt.devices.streams import event_of, side_stream, synchronize
from flashckpt.move.throttle import Throttle

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from types import TracebackType

    from flashckpt.devices.bits import DeviceCopy
    from flashckpt.devices.registrar import Registrar

log = logging.getLogger(__name__)

Way = Literal["registered", "ring", "plain"]

# With a budget, a chunk takes at most this long. Between two chunks collectives have the link to themselves.
_CHUNK_SECONDS = 0.05
_LEAST_CHUNK_BYTES = 64 << 10


class QueuedCopy:
    """A copy under way. A context manager: after its exit nothing writes to the slot any more."""

    def __init__(self, copier: Copier, data: memoryview, copies: Sequence[DeviceCopy]) -> None:
        self.events: dict[torch.device, torch.Event] = {}
        """For each device an event after its last queued copy. A caller whose current stream waits for it may change
        the device's tensors. A device whose copies are made by `finish` has no event."""
        self._copier = copier
        self._data = data
        # SAFETY: the side streams read these tensors until they are synchronized. If a tensor were freed before, torch
        # would reuse its memory in the order of the stream that made it.
        self._copies: Sequence[DeviceCopy] = copies
        self._streams: dict[torch.device, torch.Stream] = {}
        self._left: list[tuple[Way, torch.device, list[DeviceCopy]]] = []

    @property
    def has_devices(self) -> bool:
        """Return True if a device copies by itself, or `finish` will copy from one."""
        return bool(self._streams)

    @property
    def is_queued(self) -> bool:
        """Return True if all copies are queued, so that `finish` only waits."""
        return not self._left

    def finish(self) -> None:
        """Block until all bytes are in `data`. If it raises, nothing writes to `data` any more either."""
        try:
            while self._left:
                way, device, copies = self._left.pop(0)
                self._copier._make_copies(way, self._data, self._streams[device], device, copies)
        finally:
            self.close()

    def close(self) -> None:
        """Wait until no copy is under way. Copies that are not queued yet are dropped."""
        self._left.clear()
        try:
            synchronize(self._streams.values())
        finally:
            self._copies = ()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Copier:
    """Owns the side streams, the registration of slots with device drivers, and the pinned buffers.

    Makes one copy at a time. `pin`, `keep_only` and `forget` may be called in any thread.
    """

    def __init__(
        self,
        *,
        registrars: Mapping[str, Callable[[], Registrar]] | None = None,
        bytes_per_second: int | None = None,
        threads: int = 1,
    ) -> None:
        """`registrars`: by device type; None: the common table. `bytes_per_second`: a budget for all devices together.
        `threads`: number of threads that copy from pinned buffers into the slot."""
        self._registrars = all_registrars() if registrars is None else dict(registrars)
        self._throttle = Throttle(bytes_per_second)
        self._has_budget = bytes_per_second is not None
        self._chunk_bytes = CHUNK_BYTES
        if bytes_per_second is not None:
            self._chunk_bytes = min(CHUNK_BYTES, max(_LEAST_CHUNK_BYTES, int(bytes_per_second * _CHUNK_SECONDS)))
        self._threads = threads
        self._lock = threading.RLock()  # protects what follows
        self._streams: dict[torch.device, torch.Stream] = {}
        self._expected: dict[str, torch.device] = {}  # one device per type that states lie on
        self._memory: dict[str, RegisteredMemory | None] = {}
        self._rings: dict[str, Ring | None] = {}
        self._ways: dict[str, Way] = {}

    @property
    def ways(self) -> dict[str, str]:
        """Device type → way, of all types that were copied from or prepared for. If there are none: `cpu: host
        only`."""
        with self._lock:
            return {**self._ways} if self._ways else {"cpu": "host only"}

    def copy(
        self, data: memoryview, copies: Sequence[DeviceCopy], ready: Mapping[torch.device, torch.Event] | None = None
    ) -> None:
        """Copy into `data`; once this returns the tensors may be mutated. See `queue`."""
        with self.queue(data, copies, ready) as queued:
            queued.finish()

    def queue(
        self, data: memoryview, copies: Sequence[DeviceCopy], ready: Mapping[torch.device, torch.Event] | None = None
    ) -> QueuedCopy:
        """Start copying into `data`: queue what devices can do by themselves, and make the host's copies.

        `ready`: for each device an event that the copies wait for. A thread passes it, since its current stream is not
        the caller's.
        With a byte budget this blocks until the last chunk may be queued. If it raises, nothing writes to `data`.
        """
        queued = QueuedCopy(self, data, copies)
        by_device: dict[torch.device, list[DeviceCopy]] = {}
        for one in copies:
            by_device.setdefault(one.source.device, []).append(one)
        on_host = by_device.pop(torch.device("cpu"), [])
        try:
            for device, some in by_device.items():
                stream = self._stream(device)
                queued._streams[device] = stream
                self._wait_until_ready(stream, device, ready)
                way = self._way(device, data)
                if way == "registered":
                    self._make_copies(way, data, stream, device, some)
                    queued.events[device] = stream.record_event()
                else:
                    queued._left.append((way, device, some))
            if on_host:
                area = torch.frombuffer(data, dtype=torch.uint8)
                for one in on_host:
                    bits = bits_of(one)
                    place(area, one.offset_bytes, bits).copy_(bits)
        except BaseException:
            queued.close()
            raise
        return queued

    # --- memory that devices copy to ------------------------------------------------------------------------

    def expect(self, devices: Iterable[torch.device]) -> None:
        """Say which devices states lie on, so that `pin` registers memory for them."""
        with self._lock:
            for device in devices:
                if device.type != "cpu":
                    self._expected.setdefault(device.type, device)

    def pin(self, data: memoryview) -> None:
        """Register a slot for the expected devices, ahead of the first copy into it.

        Does not raise. If a registration fails, the copy takes another way.
        """
        with self._lock:
            expected = list(self._expected.values())
        for device in expected:
            try:
                self._way(device, data)
            except RuntimeError as error:
                log.warning("a slot could not be prepared for copies from %s; the save tries again: %s", device, error)

    def keep_only(self, size_bytes: int) -> None:
        """Unregister slots of any other size, so that the store can resize or remove them."""
        for memory in self._all_memory():
            memory.keep_only(size_bytes)

    def forget(self, data: memoryview) -> None:
        """Unregister a slot whose file was removed. Otherwise it stays mapped and its memory stays allocated."""
        for memory in self._all_memory():
            memory.remove(data)

    def close(self) -> None:
        """Unregister all memory and give the buffers back. No copy is under way."""
        with self._lock:
            for memory in self._all_memory():
                memory.close()
            self._memory.clear()
            self._rings.clear()
            self._streams.clear()

    # --- inside ---------------------------------------------------------------------------------------------

    def _way(self, device: torch.device, data: memoryview) -> Way:
        kind = device.type
        with self._lock:
            self._expected.setdefault(kind, device)
            way: Way
            with self._stream(device):  # makes the device the current one
                if kind not in self._memory:
                    make = self._registrars.get(kind)
                    self._memory[kind] = None if make is None else RegisteredMemory(make())
                memory = self._memory[kind]
                if memory is not None and memory.add(data):
                    way = "registered"
                else:
                    if kind not in self._rings:
                        self._rings[kind] = Ring.make(device)
                    way = "ring" if self._rings[kind] is not None else "plain"
            if self._ways.get(kind) != way:
                self._ways[kind] = way
                _tell(kind, way, memory)
            return way

    def _make_copies(
        self, way: Way, data: memoryview, stream: torch.Stream, device: torch.device, copies: Sequence[DeviceCopy]
    ) -> None:
        ring = self._rings.get(device.type)
        with stream:
            if way == "ring" and ring is not None:
                address = address_of(data)
                limit = min(ring.chunk_bytes, self._chunk_bytes)
                at_addresses = ((bits, address + offset) for bits, offset in _cut(copies, limit))
                ring.download(stream, at_addresses, limit, self._throttle, self._threads)
                return
            area = torch.frombuffer(data, dtype=torch.uint8)
            registered = way == "registered"
            for bits, offset in _cut(copies, self._chunk_bytes, whole=registered and not self._has_budget):
                self._throttle.take(bits.numel() * bits.itemsize)
                place(area, offset, bits).copy_(bits, non_blocking=registered)

    def _all_memory(self) -> list[RegisteredMemory]:
        with self._lock:
            return [memory for memory in self._memory.values() if memory is not None]

    def _stream(self, device: torch.device) -> torch.Stream:
        with self._lock:
            if device not in self._streams:
                self._streams[device] = side_stream(device)
            return self._streams[device]

    @staticmethod
    def _wait_until_ready(
        stream: torch.Stream, device: torch.device, ready: Mapping[torch.device, torch.Event] | None
    ) -> None:
        if ready is None:
            stream.wait_event(event_of(device))
        elif device in ready:
            stream.wait_event(ready[device])
        else:
            # No event was taken, because the backend was registered later: wait for all that is queued there.
            torch.accelerator.synchronize(device)


def _cut(copies: Sequence[DeviceCopy], limit_bytes: int, *, whole: bool = False) -> Iterator[tuple[torch.Tensor, int]]:
    """Yield pieces with their offset in the slot. `whole`: contiguous tensors are not cut."""
    for one in copies:
        bits = bits_of(one)
        if whole and bits.is_contiguous():
            yield bits, one.offset_bytes
        else:
            for piece, offset in pieces(bits, limit_bytes):
                yield piece, one.offset_bytes + offset


def _tell(kind: str, way: Way, memory: RegisteredMemory | None) -> None:
    if way == "registered":
        log.info("saves from %s: devices copy directly into the slots, which are registered with the driver", kind)
    elif way == "ring" and memory is None:
        log.info("saves from %s: through pinned buffers, because flashckpt can't register memory with its driver", kind)
    elif way == "ring":
        log.warning("saves from %s: registering memory failed; they go through pinned buffers from now on", kind)
    else:
        log.warning("saves from %s: no registered and no pinned memory is available; copies are slow", kind)
