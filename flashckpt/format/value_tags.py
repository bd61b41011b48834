"""The one-byte tags of packed values, and a type for bytes in another encoding."""

from __future__ import annotations

import re
from typing import Final

NONE: Final = ord("N")
TRUE: Final = ord("T")
FALSE: Final = ord("F")
INT: Final = ord("i")
FLOAT: Final = ord("f")
COMPLEX: Final = ord("c")
STR: Final = ord("s")
BYTES: Final = ord("b")
BYTEARRAY: Final = ord("B")
BLOB: Final = ord("X")
LIST: Final = ord("l")
TUPLE: Final = ord("t")
DICT: Final = ord("d")
ORDERED_DICT: Final = ord("O")
SET: Final = ord("S")
FROZENSET: Final = ord("Z")
SLICE: Final = ord(":")
RANGE: Final = ord("r")
TORCH_SIZE: Final = ord("z")
TORCH_DTYPE: Final = ord("D")
TORCH_DEVICE: Final = ord("V")
NUMPY_SCALAR: Final = ord("n")
NUMPY_ARRAY: Final = ord("a")


class Blob(bytes):
    """Opaque bytes in another encoding; distinguished from plain `bytes`."""

    __slots__ = ()


# "cpu", "cuda:3". torch refuses devices that it does not know.
DEVICE = re.compile(r"[a-z]{1,32}(:(0|[1-9][0-9]{0,2}))?")

_UNIT = r"\[(?:[1-9][0-9]{0,8})?(?:Y|M|W|D|h|m|s|ms|us|ns|ps|fs|as)\]"
# numpy's dtype strings of fixed meaning: no objects, no strings (their bytes may be no text), no records, no
# long double (its size is the platform's).
NUMPY_DTYPE = re.compile(rf"\|[biu]1|[<>](?:[iu][248]|f[248]|c8|c16|[mM]8(?:{_UNIT})?)")
