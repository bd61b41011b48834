"""Packs non-tensor values: typed, without pickle, the same bytes for the same values."""

from __future__ import annotations

from flashckpt.format.value_decode import decode_values
from flashckpt.format.value_encode import Encoded, encode_once, encode_values
from flashckpt.format.value_tags import Blob

__all__ = ["Blob", "Encoded", "decode_values", "encode_once", "encode_values"]
