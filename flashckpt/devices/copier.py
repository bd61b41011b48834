"""Copies a state into a slot. One way per device type, the best that works:

`registered`: the driver knows the slot's memory; copies are queued on a side stream and run by themselves.
`ring`: through two pinned buffers; the host brings each chunk from there into the slot.
`plain`: one copy after the other, each waited for.
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
from flashckpt.transport.throttle import Throttle

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from types import TracebackType

    from flashckpt.devices.bits import DeviceCopy
    from flashckpt.devices.registrar import Registrar

log = logging.getLogger(__name__)

Way = Literal["registered", "ring", "plain"]

# With a budget, chunks are this short in time: between two of them a collective gets the link for itself.
_CHUNK_SECONDS = 0.05
_LEAST_CHUNK_BYTES = 64 << 10


class Queued:
    """A copy under way. A context manager: when it is left, nothing writes to the slot any more."""

    def __init__(self, copier: Copier, data: memoryview, copies: Sequence[DeviceCopy]) -> None:
        self.events: dict[torch.device, torch.Event] = {}
        """Per device an event behind its last queued copy: whoever makes his current stream wait for it may change the
        device's tensors. A device is missing as long as `finish` has to make its copies."""
        self._copier = copier
        self._data = data
        # SAFETY: the side streams read these tensors until they are synchronized; freed before, their memory would be
        # given to somebody else in the order of the stream that they were made on.
        self._copies: Sequence[DeviceCopy] = copies
        self._streams: dict[torch.device, torch.Stream] = {}
        self._left: list[tuple[Way, torch.device, list[DeviceCopy]]] = []

    @property
    def has_devices(self) -> bool:
        """Return True if a device copies by itself, or `finish` will copy from one."""
        return bool(self._streams)

    @property
    def is_queued(self) -> bool:
        """Return True if `finish` has nothing to do but to wait."""
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
        """Wait until no copy is under way; what is not queued yet is left out."""
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
    """Owns the side streams, the registration of slots with device drivers, and the pinned buffers. One copy at a time;
    `pin`, `keep_only` and `forget` in any thread."""

    def __init__(
        self,
        *,
        registrars: Mapping[str, Callable[[], Registrar]] | None = None,
        bytes_per_second: int | None = None,
        threads: int = 1,
    ) -> None:
        """`registrars`: by device type, instead of the table of all. `bytes_per_second`: a budget for all devices
        together. `threads` move bytes from pinned buffers into the slot."""
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
        """Device type → way, of all types that were copied from or prepared for; `cpu: host only` before any was."""
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
    ) -> Queued:
        """Start copying into `data`: queue what devices can do by themselves, and make the host's copies.

        `ready`: events to start behind, by device. Needed in a thread, whose current stream is not the caller's.
        With a byte budget this blocks until the last chunk may be queued. If it raises, nothing writes to `data`.
        """
        queued = Queued(self, data, copies)
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
        """Register a slot ahead of the first copy into it, for the devices that are expected. Nothing for the host's.

        Does not raise: the copy finds out for itself what works.
        """
        with self._lock:
            expected = list(self._expected.values())
        for device in expected:
            try:
                self._way(device, data)
            except RuntimeError as error:
                log.warning("no memory was prepared for %s: %s", device, error)

    def keep_only(self, size_bytes: int) -> None:
        """Let registered slots of any other size go, so that the store can resize or remove them."""
        for memory in self._all_memory():
            memory.keep_only(size_bytes)

    def forget(self, data: memoryview) -> None:
        """Let a registered slot go whose file was removed: registered it stays mapped, and keeps its memory."""
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
            # Nobody told what the caller had queued there (its backend was registered later): all of it counts.
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
        log.info("saves from %s: devices copy straight into the slots, which are registered with the driver", kind)
    elif way == "ring" and memory is None:
        log.info("saves from %s: through pinned buffers; no way is known to register memory with its driver", kind)
    elif way == "ring":
        log.warning("saves from %s: registering memory failed; they go through pinned buffers from now on", kind)
    else:
        log.warning("saves from %s: neither registered nor pinned memory can be had; copies are plain and slow", kind)
