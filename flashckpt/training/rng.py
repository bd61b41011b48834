"""Saves and restores the random number generators of one rank: Python, NumPy, torch on the CPU and CUDA devices."""

from __future__ import annotations

import logging
import random
import sys
from array import array
from typing import Any

import torch

log = logging.getLogger(__name__)


def capture_rng() -> dict[str, Any]:
    """Returns the state of all generators as plain values of a few kilobytes. Reads devices only for their own."""
    version, words, gauss = random.getstate()
    # As bytes: encoding 625 integers at every save takes longer than everything else here.
    state: dict[str, Any] = {
        "python": (version, array("I", words).tobytes(), gauss),
        "torch": _to_bytes(torch.get_rng_state()),
    }
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        name, keys, position, has_gauss, cached = numpy.random.get_state(legacy=True)
        state["numpy"] = (str(name), keys.tobytes(), int(position), int(has_gauss), float(cached))
    if _cuda_in_use():
        state["cuda"] = [_to_bytes(one) for one in torch.cuda.get_rng_state_all()]
    return state


def restore_rng(state: dict[str, Any]) -> None:
    """Sets the saved state. A generator that was not saved keeps its own; logs a warning if CUDA devices differ."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(array("I", words)) if isinstance(words, bytes) else words, gauss))
    torch.set_rng_state(_to_tensor(state["torch"]))
    if "numpy" in state:
        import numpy as np

        name, keys, position, has_gauss, cached = state["numpy"]
        np.random.set_state((name, np.frombuffer(keys, dtype=np.uint32), position, has_gauss, cached))
    saved = state.get("cuda", [])
    here = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if len(saved) != here and (saved or _cuda_in_use()):
        log.warning(
            "random state: expected that of this process's %d CUDA devices, found that of %d; the others keep theirs",
            here,
            len(saved),
        )
    for device, one in enumerate(saved[:here]):
        torch.cuda.set_rng_state(_to_tensor(one), device)


def _cuda_in_use() -> bool:
    return torch.cuda.is_available() and bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def _to_bytes(state: torch.Tensor) -> bytes:
    return state.numpy().tobytes()


def _to_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
