"""What an agent keeps of its session: it comes back as it was, and what is none is refused."""

from __future__ import annotations

import json
from dataclasses import fields, replace

import pytest

from flashckpt.errors import CorruptShardError
from flashckpt.protocol.session import decode_base, decode_session, encode_session
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


def test_a_session_of_an_earlier_version_has_loaded_nothing_that_is_known():
    found = json.loads(encode_session(SESSION))
    del found["base"]
    assert decode_base(json.dumps(found).encode()) is None


@pytest.mark.parametrize("base", [[1, 2, 3], [1, 2, 3, -4], "1234", 7, [1, 2, 3, True]])
def test_what_is_no_generation_is_refused(base):
    found = {**json.loads(encode_session(SESSION)), "base": base}
    with pytest.raises(CorruptShardError, match="expected a generation as base"):
        decode_base(json.dumps(found).encode())


@pytest.mark.parametrize("data", [b"", b"{}", b"[]", b'{"version": 2}', b"\xff"])
def test_what_is_no_session_is_refused(data):
    with pytest.raises(CorruptShardError, match="session"):
        decode_session(data)
