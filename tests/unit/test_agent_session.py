"""What an agent keeps of its session: it comes back as it was, and what is none is refused."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import fields, replace

import pytest

from flashckpt.errors import CorruptShardError, IncompatibleError
from flashckpt.rpc.session import decode_base, decode_session, encode_session, from_session, to_session
from flashckpt.types import Generation, Launch, Member, PersistSettings, Session

SESSION = Session(Launch(100, 7), 2, (Member("a", "10.0.0.1:1", "east", (0, 1)),), 1, "ring", 2)
BASE = Generation(90, 6, 12, 1)
# No field has its default, so that none can be lost unnoticed.
PERSIST = PersistSettings("/data", 3, 4.0, 5.0, 6, 7.0, 8, 9, (10, 20), False, 11.0, True)
FULL = replace(SESSION, persist=PERSIST, keep_memory=3)


@pytest.mark.parametrize("base", [None, BASE])
def test_a_session_comes_back_with_what_it_has_loaded(base):
    data = encode_session(SESSION, base)
    assert (decode_session(data), decode_base(data)) == (SESSION, base)


@pytest.mark.parametrize("part", [FULL, PERSIST, *FULL.members], ids=lambda part: type(part).__name__)
def test_the_example_has_no_default(part):
    assert [one.name for one in fields(part) if getattr(part, one.name) == one.default] == []


def test_every_field_of_a_session_comes_back():
    assert decode_session(encode_session(FULL)) == FULL


def test_what_an_earlier_version_kept_is_refused():
    with pytest.raises(CorruptShardError, match="session"):
        decode_session(json.dumps({"version": 1, "epoch": 100, "nonce": 7, "world": 1}).encode())


def test_what_is_no_generation_is_refused():
    with pytest.raises(CorruptShardError, match="session"):
        decode_base(encode_session(SESSION) + b"\xff")
    assert decode_session(encode_session(SESSION) + b"\xff") == SESSION  # the session itself is good


@pytest.mark.parametrize("data", [b"", b"{}", b"[]", b'{"version": 2}', b"\xff", b"\0\0\0\0"])
def test_what_is_no_session_is_refused(data):
    with pytest.raises(CorruptShardError, match="session"):
        decode_session(data)


def test_a_session_that_is_cut_short_is_refused():
    data = encode_session(SESSION)
    for size in range(len(data)):
        with pytest.raises(CorruptShardError, match="session"):
            decode_session(data[:size])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("interval", 0),
        ("interval_seconds", 0.0),
        ("interval_seconds", float("inf")),
        ("max_mbps", -1.0),
        ("concurrency", 0),
        ("concurrency", 1025),
        ("timeout", 0.0),
        ("timeout", float("nan")),
        ("keep_every", 0),
        ("keep_steps", (1 << 63,)),
        ("drain_timeout", -1.0),
        ("drain_timeout", float("inf")),
        ("directory", ""),
        ("directory", "a\0b"),
        ("directory", "x" * 4097),
    ],
)
def test_a_setting_beyond_its_limits_is_refused_by_name(field, value):
    """Peers and files are anybody's."""
    message = to_session(dataclasses.replace(SESSION, persist=PersistSettings("/data")))
    if field == "keep_steps":
        message.persist.keep_steps.extend(value)
    else:
        setattr(message.persist, field, value)
    with pytest.raises(IncompatibleError, match=field):
        from_session(message)


@pytest.mark.parametrize(("field", "value"), [("keep_memory", 0), ("keep_memory", 65), ("strategy", ""), ("world", 0)])
def test_a_bad_session_is_refused_by_name(field, value):
    message = to_session(SESSION)
    setattr(message, field, value)
    with pytest.raises(IncompatibleError, match=field):
        from_session(message)
