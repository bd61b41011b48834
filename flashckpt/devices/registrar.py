"""Registrars page-lock memory that is mapped already, so that a device can copy to and from it asynchronously.

A table has one class per device type. Copies from other accelerators go through pinned buffers (ring.py).
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Protocol

import torch

from flashckpt.devices.cuda import CudaRegistrar

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger(__name__)


class Registrar(Protocol):
    """Registers memory with an accelerator's driver. A device of its type is current when a method is called."""

    def register(self, address: int, length_bytes: int) -> bool:
        """Page-lock the range for all devices of the type. The caller keeps it mapped until `unregister`.

        False: nothing is registered. The failure must leave no error set in the driver.
        """

    def unregister(self, address: int) -> None:
        """Undo `register`. The caller makes sure that no copy to or from the range is under way. Does not raise."""


_registrars: dict[str, Callable[[], Registrar]] = {
    "cuda": CudaRegistrar,  # HIP as well: torch calls its devices "cuda"
}


def add_registrar(device_type: str, make: Callable[[], Registrar]) -> None:
    """Use what `make` returns for devices of this type, in every Copier that is made from now on."""
    _registrars[device_type] = make


def registrars() -> dict[str, Callable[[], Registrar]]:
    """Return a copy of the table."""
    return dict(_registrars)


class RegisteredMemory:
    """Holds the slots that are registered with the driver of one device type. Methods may be called in any thread."""

    def __init__(self, registrar: Registrar) -> None:
        self._registrar = registrar
        self._lock = threading.Lock()
        self._failed = False
        # SAFETY: a held view keeps the slot mapped while the driver has it registered, because the store does not
        # unmap or resize memory with views. (A tensor made by frombuffer does not: torch releases the buffer at once.)
        self._held: dict[int, memoryview] = {}

    @property
    def has_failed(self) -> bool:
        return self._failed

    def add(self, data: memoryview) -> bool:
        """Register the whole slot that `data` is a part of, unless it is already.

        After one failure it always returns False: a retry per save would cost more than copies through buffers.
        """
        whole = _whole(data)
        address = address_of(whole)
        with self._lock:
            if self._failed:
                return False
            self._let_go_other_sizes(whole.nbytes)
            if address in self._held:
                return True
            try:
                self._failed = not self._registrar.register(address, whole.nbytes)
            except Exception as error:
                log.warning("%s could not register %d bytes: %s", type(self._registrar).__name__, whole.nbytes, error)
                self._failed = True
            if self._failed:
                self._let_go(list(self._held))
                return False
            self._held[address] = whole
            return True

    def keep_only(self, size_bytes: int) -> None:
        """Unregister slots of any other size: the state has grown or shrunk, and the store resizes or removes them."""
        with self._lock:
            self._let_go_other_sizes(size_bytes)

    def remove(self, data: memoryview) -> None:
        """Unregister the slot that `data` is a part of, if it is registered."""
        address = address_of(_whole(data))
        with self._lock:
            self._let_go([address] if address in self._held else [])

    def close(self) -> None:
        with self._lock:
            self._let_go(list(self._held))

    def _let_go_other_sizes(self, size_bytes: int) -> None:
        self._let_go([address for address, held in self._held.items() if held.nbytes != size_bytes])

    def _let_go(self, addresses: list[int]) -> None:
        for address in addresses:
            try:
                self._registrar.unregister(address)
            except Exception as error:
                log.warning("unregistering a slot with %s failed: %s", type(self._registrar).__name__, error)
            finally:
                self._held.pop(address).release()


def address_of(data: memoryview) -> int:
    return torch.frombuffer(data, dtype=torch.uint8).data_ptr()


def _whole(data: memoryview) -> memoryview:
    """Return a view of the whole buffer that `data` is a part of. A slot is registered once, as a whole."""
    return memoryview(data.obj).cast("B")
