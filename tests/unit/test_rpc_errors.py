"""Errors as bytes: the same class, message, hint and fields at the other end, within bounds, whoever wrote them."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashckpt import errors
from flashckpt.errors import AgentError, BusyError, DeadlineError, FencedError, FlashError, NoSpaceError, PeerError
from flashckpt.rpc.errors import decode_error, encode_error
from flashckpt.v1 import common_pb2

CLASSES = [
    cls
    for cls in vars(errors).values()
    if isinstance(cls, type) and issubclass(cls, FlashError) and cls is not FlashError
]


@pytest.mark.parametrize("cls", CLASSES)
def test_every_class_comes_back(cls):
    error = cls("expected a, found b", hint="do c", step=7, rank=0, where="x", ratio=0.5, known=True, missing=[1, 2])
    found = decode_error(encode_error(error), PeerError)
    assert type(found) is cls
    assert (found.message, found.hint, found.code) == (error.message, error.hint, error.code)
    assert found.fields == {"step": 7, "rank": 0, "where": "x", "ratio": 0.5, "known": True, "missing": (1, 2)}


def test_all_classes_are_there():
    assert {cls.__name__ for cls in (NoSpaceError, BusyError, FencedError, DeadlineError)} < {
        cls.__name__ for cls in CLASSES
    }
    assert len(CLASSES) > 20


def test_a_class_of_a_part_of_flashckpt_comes_back_as_its_public_base():
    class Inner(BusyError):
        pass

    assert type(decode_error(encode_error(Inner("text")), PeerError)) is BusyError


@pytest.mark.parametrize("unknown", [PeerError, AgentError])
def test_an_unknown_code_is_the_other_ends_error(unknown):
    data = common_pb2.ErrorDetail(code="FC-NEW-001", message="from the future").SerializeToString()
    found = decode_error(data, unknown)
    assert type(found) is unknown
    assert "from the future" in found.message
    assert "FC-NEW-001" in found.message


def test_details_are_bounded():
    fields = {f"field_{n}": "v" * 200 for n in range(100)} | {"huge": "x" * 100_000}
    error = NoSpaceError("é" * 100_000, hint="h" * 100_000, needed_bytes=5, **fields)
    data = encode_error(error)
    assert len(data) * 4 / 3 < 6500  # base64, below what metadata may have
    found = decode_error(data, PeerError)
    assert found.needed_bytes == 5, "the first field is kept"
    assert found.message.startswith("éé")
    assert found.message.endswith("…")


def test_values_that_json_does_not_know_become_text():
    found = decode_error(encode_error(BusyError("x", shard=object)), PeerError)
    assert found.shard == str(object)


@given(st.binary(max_size=200))
def test_any_bytes_are_an_error_or_none(data):
    found = decode_error(data, PeerError)
    assert found is None or isinstance(found, FlashError)


@pytest.mark.parametrize("name", ["message", "hint", "self", "__class__", "a b", "", "_x"])
def test_fields_can_not_take_over(name):
    fields = [common_pb2.ErrorField(name=name, value_json='"evil"'), common_pb2.ErrorField(name="ok", value_json="1")]
    detail = common_pb2.ErrorDetail(code="FC-MEM-002", message="m", hint="h", fields=fields)
    found = decode_error(detail.SerializeToString(), PeerError)
    assert (found.message, found.hint, found.fields) == ("m", "h", {"ok": 1})


@pytest.mark.parametrize("value", ["{", "", "[" * 100_000, "1e999999x"])
def test_values_that_are_no_json_are_left_out(value):
    detail = common_pb2.ErrorDetail(code="FC-MEM-002", fields=[common_pb2.ErrorField(name="a", value_json=value)])
    data = detail.SerializeToString()
    found = decode_error(data, PeerError)
    assert found is None if len(data) > 8192 else found.fields == {}


def test_deep_values_are_left_out():
    deep = "[" * 4000 + "]" * 4000
    with pytest.raises(RecursionError):
        json.loads(deep)
    detail = common_pb2.ErrorDetail(code="FC-MEM-002", fields=[common_pb2.ErrorField(name="a", value_json=deep)])
    assert decode_error(detail.SerializeToString(), PeerError).fields == {}


def test_escape_codes_do_not_reach_the_terminal():
    found = decode_error(encode_error(BusyError("a\x1b]0;title\x07b", hint="\x9b31m")), PeerError)
    assert "\x1b" not in str(found)
    assert "\x07" not in str(found)
    assert "\x9b" not in str(found)
