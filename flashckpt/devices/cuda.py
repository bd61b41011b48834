"""The registrar for CUDA and HIP. After a failure it clears the calling thread's last error."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os

import torch

log = logging.getLogger(__name__)

_PORTABLE = 1  # cudaHostRegisterPortable: for all devices, not only for the current one
# Prefix of the runtime's file name → the call that returns and clears a thread's last error.
_RUNTIMES = {"libcudart": "cudaGetLastError", "libamdhip64": "hipGetLastError"}


class CudaRegistrar:
    """Registers memory by cudaHostRegister."""

    def register(self, address: int, length_bytes: int) -> bool:
        error = torch.cuda.cudart().cudaHostRegister(address, length_bytes, _PORTABLE)  # type: ignore[no-untyped-call]
        if int(error) == 0:
            return True
        clear_last_error()
        log.warning("cudaHostRegister of %d bytes failed with CUDA error %d", length_bytes, int(error))
        return False

    def unregister(self, address: int) -> None:
        error = torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]
        if int(error) != 0:
            clear_last_error()
            log.warning("cudaHostUnregister failed with CUDA error %d", int(error))


def clear_last_error() -> None:
    """Clear the calling thread's last error. Otherwise torch raises it at the thread's next kernel launch.

    Newer versions of torch bind cudaGetLastError. With older ones it is called in every runtime library that the
    process has loaded, since each has its own last error. If none is loaded (a statically linked runtime), a kernel is
    launched: torch's check after the launch clears the error.
    """
    bound = getattr(torch.cuda.cudart(), "cudaGetLastError", None)  # type: ignore[no-untyped-call]
    if bound is not None:
        bound()
        return
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
        found = runtime_libraries(maps.read())
    cleared = False
    for path, call in found.items():
        with contextlib.suppress(OSError, AttributeError):
            getattr(ctypes.CDLL(path), call)()
            cleared = True
    if not cleared:
        with contextlib.suppress(RuntimeError):
            torch.empty(1, device="cuda").fill_(0)


def runtime_libraries(maps: str) -> dict[str, str]:
    """Return path → name of the call, for each runtime that is mapped, from the text of /proc/self/maps."""
    found: dict[str, str] = {}
    for line in maps.splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) < 6:
            continue
        path = fields[5].removesuffix(" (deleted)")
        for prefix, call in _RUNTIMES.items():
            if os.path.basename(path).startswith(prefix) and ".so" in path:
                found[path] = call
    return found
