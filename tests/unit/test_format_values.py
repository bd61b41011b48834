from __future__ import annotations

import enum
import struct
import time
from collections import Counter, OrderedDict, defaultdict, namedtuple
from dataclasses import dataclass
from pathlib import PurePosixPath

import numpy as np
import pytest
import torch

from flashckpt.errors import IncompatibleError, UnsupportedValueError
from flashckpt.format.values import Blob, decode_values, encode_once, encode_values
from tests.compat.make_golden import samples
from tests.compat.sameness import plain

EVERY_VALUE = samples()["v1-kinds"].values


@pytest.mark.parametrize("key", EVERY_VALUE)
def test_round_trip_keeps_type_bits_and_order(key):
    values = {key: EVERY_VALUE[key]}
    assert plain(decode_values(encode_values(values))) == plain(values)


def test_no_values_are_no_bytes():
    assert encode_values({}) == b""
    assert decode_values(b"") == {}


def test_exact_bytes():
    """The table of docs/format.md, spelled out."""
    assert encode_values({"k": {"a": (1, -2.0)}}) == b"\x01\x01kd\x01s\x01at\x02i\x01\x01f" + struct.pack("<d", -2.0)
    assert encode_values({"k": frozenset({300, "z", None})}) == b"\x01\x01kZ\x03Ni\x02\x2c\x01s\x01z"
    assert encode_values({"k": np.array([[1, 2]], "<u2")}) == b"\x01\x01ka\x03<u2\x02\x01\x02\x01\x00\x02\x00"
    assert encode_values({"k": torch.device("cuda:1")}) == b"\x01\x01kV\x06cuda:1"


@pytest.mark.parametrize("bits", [0x7FF8000000000001, 0x7FF0000000000001, 0xFFF8DEADBEEF0000, 0x8000000000000000])
def test_float_bits_survive(bits):
    (number,) = struct.unpack("<d", struct.pack("<Q", bits))
    back = decode_values(encode_values({"k": [number, complex(number, number), np.float64(number)]}))["k"]
    assert struct.pack("<d", back[0]) == struct.pack("<Q", bits)
    assert struct.pack("<dd", back[1].real, back[1].imag) == struct.pack("<QQ", bits, bits)
    assert back[2].tobytes() == struct.pack("<Q", bits)


def test_arrays_come_back_writable_and_on_their_own():
    raw = bytearray(encode_values({"k": np.arange(4.0)}))
    array = decode_values(memoryview(raw))["k"]
    raw[-8:] = bytes(8)
    array[0] = 7
    assert array.tolist() == [7, 1, 2, 3]


def test_same_bytes_whatever_the_order_of_a_set():
    one, other = set(), set()
    numbers = [number * 1_000_003 for number in range(500)]
    for number in numbers:
        one.add(number)
    for number in reversed(numbers):
        other.add(number)
    assert list(one) != sorted(one)
    assert encode_values({"k": one}) == encode_values({"k": other})


class Colour(enum.Enum):
    RED = 1


class Number(enum.IntEnum):
    ONE = 1


class Word(enum.StrEnum):
    A = "a"


class Text(str):
    __slots__ = ()


class Integer(int):
    pass


@dataclass
class Record:
    x: int = 1


class RaisingRepr:
    def __repr__(self):
        raise ValueError("no repr")


Point = namedtuple("Point", "x y")

REFUSED = [
    Colour.RED,
    Number.ONE,
    Word.A,
    Text("x"),
    Integer(3),
    Record(),
    Point(1, 2),
    Counter("aab"),
    defaultdict(list),
    type("Flags", (set,), {})(),
    PurePosixPath("/x"),
    object(),
    RaisingRepr(),
    len,
    int,
    np.str_("x"),
    np.longdouble(1),
    np.array([object()]),
    np.array(["text"]),
    np.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")]),
    np.ma.masked_array([1, 2]),
    np.void(b"abc"),
    torch.zeros(2),
    torch.strided,
    type("Blobby", (Blob,), {})(b""),
    "lone surrogate \udc80",
]


@pytest.mark.parametrize("value", REFUSED, ids=[f"{i}-{type(v).__name__}" for i, v in enumerate(REFUSED)])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_refused_with_its_key_and_type(value):
    with pytest.raises(UnsupportedValueError) as caught:
        encode_values({"fine": 1, "optimizer.param_groups": [{"lr": 1.0, "betas": value}]})
    assert caught.value.key == "optimizer.param_groups[0].betas"
    assert "optimizer.param_groups[0].betas" in str(caught.value)
    assert caught.value.hint


def test_the_message_says_what_to_do():
    with pytest.raises(UnsupportedValueError) as caught:
        encode_values({"scheduler": {"mode": Number.ONE, "other": 1}})
    assert caught.value.message.startswith("scheduler.mode: expected a value that can be saved, found type ")
    assert "Number" in caught.value.message
    assert caught.value.hint == "save its plain value, or pass allow_torch_save=True"


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"a": {"b c": {3: object()}}}, "a['b c'][3]"),
        ({"a": {Number.ONE: 1}}, "a[<Number.ONE: 1>]"),
        ({"a": {(1, 2): object()}}, "a[(1, 2)]"),
        ({"a": {Text("x")}}, "a{'x'}"),
        ({"a": OrderedDict(b=(1, object()))}, "a.b[1]"),
        ({Text("sub"): 1}, "'sub'"),
        ({"lone \ud800": 1}, "lone \ud800"),
    ],
)
def test_where_the_refused_value_is(values, key):
    with pytest.raises(UnsupportedValueError) as caught:
        encode_values(values)
    assert caught.value.key == key


def test_a_value_that_contains_itself_is_refused():
    loop: list = []
    loop.append(loop)
    with pytest.raises(UnsupportedValueError, match="nesting"):
        encode_values({"loop": loop})


def test_what_the_installed_torch_lacks_is_incompatible(monkeypatch):
    raw = encode_values({"k": torch.float8_e8m0fnu})
    monkeypatch.delattr(torch, "float8_e8m0fnu")
    with pytest.raises(IncompatibleError, match="float8_e8m0fnu"):
        decode_values(raw)
    with pytest.raises(IncompatibleError, match="quantum"):
        decode_values(b"\x01\x01kV\x07quantum")


def test_bool_is_no_int():
    back = decode_values(encode_values({"k": [True, 1, False, 0, {True: 0}, {1: 0}]}))["k"]
    assert [type(item) for item in back[:4]] == [bool, int, bool, int]
    assert type(next(iter(back[4]))) is bool
    assert type(next(iter(back[5]))) is int


@pytest.mark.alone
def test_sixty_thousand_scalars_are_quick():
    """Processor time, because the machine may be busy; ten times what it takes."""
    values = {f"optimizer.state.{i}.step": (float(i), i, f"x{i}")[i % 3] for i in range(60_000)}
    start = time.process_time()
    raw = encode_values(values)
    took = time.process_time() - start
    assert decode_values(raw) == values
    assert took < 0.5


def test_a_value_that_many_keys_have_is_encoded_once():
    value = {"lr": 0.1, "betas": (0.9, 0.95), "fused": None}
    once = encode_once(value)
    assert encode_values({"a": once, "b": once}) == encode_values({"a": value, "b": value})
    assert encode_once({"x": object()}) is None
    with pytest.raises(UnsupportedValueError, match="inside of another"):
        encode_values({"a": [once]})
