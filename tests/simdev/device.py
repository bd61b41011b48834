"""The simulated accelerator "sim" in this process: see `load`. docs/testing.md describes it."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import dataclasses
import types
from typing import TYPE_CHECKING

import torch

from tests.simdev import build

if TYPE_CHECKING:
    from collections.abc import Iterator

POISON = 0xDD
"""The byte that freed memory, and memory that was not written yet, consists of."""

DEVICE_COUNT = 2

INVALID_VALUE, OUT_OF_MEMORY, ALREADY_REGISTERED, NOT_REGISTERED = 1, 2, 712, 713
"""Codes that `host_register` and `host_unregister` return, numbered as CUDA's."""

_library: ctypes.CDLL | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Copies:
    """Copies in one direction. `asynchronous` ones returned to the host before they were done."""

    asynchronous: int
    synchronous: int
    bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class Counts:
    """Copies since the last `reset_counts`, of all devices: host to device, device to host, between devices.

    Copies within one device count as between devices.
    """

    h2d: Copies
    d2h: Copies
    d2d: Copies


def load() -> None:
    """Register the devices "sim:0" and "sim:1" with torch in this process. A second call does nothing.

    This can't be undone, and `torch.accelerator.is_available()` is true from then on: call it only in a process that
    exists for tests of accelerators (`tests.simdev.run_on_sim`).
    """
    global _library
    if _library is not None:
        return
    path = build.library()
    torch.utils.rename_privateuse1_backend("sim")
    library = ctypes.CDLL(str(path))
    _declare(library)
    torch._register_device_module("sim", _device_module())
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    atexit.register(library.simdev_shutdown)
    _library = library


def busy(seconds: float) -> None:
    """Queue work that takes `seconds` on the current stream."""
    _check(_loaded().simdev_busy(seconds))


@contextlib.contextmanager
def hold() -> Iterator[None]:
    """Stop the current stream within the block: what is queued on it there runs after the block.

    A test of what is asynchronous needs no timing then. Within the block nothing may wait for that stream.
    """
    held = _loaded().simdev_hold()
    try:
        yield
    finally:
        _loaded().simdev_release(held)


def bandwidth(*, pinned: float = 0, pageable: float = 0) -> None:
    """Set how many bytes per second a copy between host and device moves, by its host memory. 0: no limit.

    Copies in the same direction to or from one device share its link, whichever streams they are on.
    """
    _loaded().simdev_set_bandwidth(pinned, pageable)


def counts() -> Counts:
    """Return what was copied since the last `reset_counts`."""
    room = (ctypes.c_int64 * 9)()
    _loaded().simdev_counts(room)
    return Counts(Copies(*room[0:3]), Copies(*room[3:6]), Copies(*room[6:9]))


def operators_that_waited() -> dict[str, int]:
    """Return the operators that made the host wait since the last `reset_counts`, and how often. Without copies."""
    lines = _loaded().simdev_operators_that_waited().decode().splitlines()
    return {name: int(calls) for name, calls in (line.rsplit(" ", 1) for line in lines)}


def reset_counts() -> None:
    """Set `counts` and `operators_that_waited` back to nothing."""
    _loaded().simdev_reset_counts()


def host_register(address: int, size_bytes: int) -> int:
    """Make host memory known as pinned, so that copies can be asynchronous. Returns 0, or an error's code.

    After an error the code stays set as this thread's last error, see `take_last_error`.
    """
    return _loaded().simdev_host_register(address, size_bytes)


def host_unregister(address: int) -> int:
    """Undo `host_register` of the memory that starts at `address`. Returns 0, or an error's code."""
    return _loaded().simdev_host_unregister(address)


def registered_bytes() -> int:
    """Return how much host memory is registered now."""
    return _loaded().simdev_registered_bytes()


def fail_registration(code: int = OUT_OF_MEMORY, *, after: int = 0, above: int = 0) -> None:
    """Let `host_register` fail with `code`: always, or once `after` calls have succeeded, or above a size in bytes.

    With `above`, smaller registrations succeed and are not counted for `after`. `fail_registration(0)` ends it.
    """
    _loaded().simdev_fail_registration(code, after, above)


def take_last_error() -> int:
    """Return the last error of this thread and clear it; 0 if there is none.

    Whatever is queued or copied while an error is set raises RuntimeError and clears it.
    """
    return _loaded().simdev_take_last_error()


def memory_limit(size_bytes: int | None, device: int = 0) -> None:
    """Let allocations on the device raise `torch.OutOfMemoryError` beyond `size_bytes`. None: no limit."""
    _check(_loaded().simdev_set_memory_limit(device, 0 if size_bytes is None else size_bytes))


def reset() -> None:
    """Wait for all devices, then undo what tests set: bandwidth, limits, faults, counts and this thread's last error.

    Raises RuntimeError if work that was queued has failed.
    """
    take_last_error()
    fail_registration(0)
    bandwidth()
    for device in range(DEVICE_COUNT):
        memory_limit(None, device)
        torch.accelerator.synchronize(device)
    reset_counts()


def _loaded() -> ctypes.CDLL:
    if _library is None:
        raise RuntimeError("expected the simulated accelerator in this process: call simdev.load() first")
    return _library


def _check(failed: int) -> None:
    if failed:
        raise RuntimeError(_loaded().simdev_message().decode())


def _declare(library: ctypes.CDLL) -> None:
    """Tell ctypes the functions' types; without them it would pass addresses as 32-bit integers."""
    number, size, address = ctypes.c_int, ctypes.c_size_t, ctypes.c_void_p
    for name, result, arguments in (
        ("busy", number, [ctypes.c_double]),
        ("hold", address, []),
        ("release", None, [address]),
        ("message", ctypes.c_char_p, []),
        ("set_bandwidth", None, [ctypes.c_double, ctypes.c_double]),
        ("counts", None, [ctypes.POINTER(ctypes.c_int64)]),
        ("reset_counts", None, []),
        ("operators_that_waited", ctypes.c_char_p, []),
        ("host_register", number, [address, size]),
        ("host_unregister", number, [address]),
        ("registered_bytes", size, []),
        ("fail_registration", None, [number, ctypes.c_int64, size]),
        ("take_last_error", number, []),
        ("set_memory_limit", number, [number, size]),
        ("shutdown", None, []),
    ):
        function = getattr(library, f"simdev_{name}")
        function.restype, function.argtypes = result, arguments


def _device_module() -> types.ModuleType:
    """Make `torch.sim`: what torch and libraries look for in `torch.cuda`, by `torch.get_device_module`."""

    class Stream(torch.Stream):
        def __new__(cls, device=None, priority=0, **given):
            return torch.Stream.__new__(cls, device=_with_index(device), priority=priority, **given)

    class Event(torch.Event):
        def __new__(cls, *, enable_timing=False, blocking=False, interprocess=False):
            return torch.Event.__new__(
                cls, device="sim", enable_timing=enable_timing, blocking=blocking, interprocess=interprocess
            )

    module = types.ModuleType("torch.sim")
    module.Stream, module.Event = Stream, Event
    module.is_available = lambda: True
    module.is_initialized = lambda: True
    module.init = lambda: None
    module._is_in_bad_fork = lambda: False
    module.device_count = lambda: DEVICE_COUNT
    module.current_device = torch.accelerator.current_device_index
    module.set_device = torch.accelerator.set_device_index
    module.device = lambda device: torch.accelerator.device_index(_with_index(device).index)
    module.current_stream = torch.accelerator.current_stream
    module.set_stream = torch.accelerator.set_stream
    module.stream = lambda stream: stream
    module.synchronize = torch.accelerator.synchronize
    module.memory_allocated = torch.accelerator.memory_allocated
    module.max_memory_allocated = torch.accelerator.max_memory_allocated
    module.empty_cache = torch.accelerator.empty_cache
    module.mem_get_info = torch.accelerator.get_memory_info
    module.manual_seed = lambda seed: None  # random numbers come from the CPU's generator
    module.manual_seed_all = lambda seed: None
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    return module


def _with_index(device: object) -> torch.device:
    if device is None:
        return torch.device("sim", torch.accelerator.current_device_index())
    return torch.device("sim", device) if isinstance(device, int) else torch.device(device)
