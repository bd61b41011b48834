"""Bytes per element of each torch dtype, by torch's name without the "torch." prefix.

A shard has no tensors of quantized dtypes: their bytes mean nothing without scale and zero point.
"""

from __future__ import annotations

from types import MappingProxyType

_ONE_BYTE = (
    "bool",
    "int8",
    "uint8",
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
    "float4_e2m1fn_x2",  # a pair of values is one element, as torch counts it
    "bits8",
    "bits1x8",
    "bits2x4",
    "bits4x2",
    # torch stores each integer of less than a byte in one byte
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)),
)

ITEMSIZE = MappingProxyType(
    dict.fromkeys(_ONE_BYTE, 1)
    | dict.fromkeys(("int16", "uint16", "float16", "bfloat16", "bits16"), 2)
    | dict.fromkeys(("int32", "uint32", "float32", "complex32"), 4)
    | dict.fromkeys(("int64", "uint64", "float64", "complex64"), 8)
    | {"complex128": 16}
)

QUANTIZED = frozenset({"qint8", "qint32", "quint8", "quint4x2", "quint2x4"})
