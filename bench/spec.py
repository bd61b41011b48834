"""What a state looks like: sizes only, so that parent and workers agree on it without torch."""

from __future__ import annotations

from dataclasses import dataclass

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class StateSpec:
    """So many float32 tensors of so many bytes each; two specs that are equal give equal bytes."""

    tensors: int
    tensor_bytes: int

    @property
    def size_bytes(self) -> int:
        return self.tensors * self.tensor_bytes

    @classmethod
    def of_size(cls, size_bytes: int, tensors: int) -> StateSpec:
        """As near to that size as equal tensors, in whole cache lines, come."""
        return cls(tensors, max(64, size_bytes // tensors // 64 * 64))

    def __str__(self) -> str:
        return f"{self.tensors:,} tensors of {format_size(self.tensor_bytes)}"


def format_size(size_bytes: float) -> str:
    value, unit = float(size_bytes), "B"
    for bigger in ("KiB", "MiB", "GiB"):
        if value < 1024:
            break
        value, unit = value / 1024, bigger
    return f"{value:.4g} {unit}"


def parse_size(text: str) -> int:
    """ "512M", "1GiB", "4096" -> bytes. Raises ValueError."""
    number, unit = text.strip(), ""
    while number and not number[-1].isdigit():
        number, unit = number[:-1], number[-1] + unit
    factors = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
    unit = unit.strip().lower().removesuffix("b").removesuffix("i")
    if unit not in factors or not number:
        raise ValueError(f"size: expected a number with K, M or G, found {text!r}")
    size_bytes = int(float(number) * factors[unit])
    if size_bytes < MIB:
        raise ValueError(f"size: expected at least 1 MiB, found {text!r}")
    return size_bytes
