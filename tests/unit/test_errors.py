from __future__ import annotations

import copy
import pickle
import re

import flashckpt
from flashckpt import errors


def tree(cls=errors.FlashError):
    """Yield the error classes of flashckpt, without those that other tests in this process have defined."""
    for child in cls.__subclasses__():
        if child.__module__.startswith("flashckpt."):
            yield child
        yield from tree(child)


def test_every_error_survives_the_way_between_processes():
    for cls in tree():
        error = cls("expected a, found b", hint="do c", step=7)
        for other in (pickle.loads(pickle.dumps(error)), copy.deepcopy(error)):
            assert type(other) is cls
            assert str(other) == str(error)
            assert (other.step, other.hint, other.message) == (7, "do c", "expected a, found b")


def test_codes_are_unique_and_shown():
    codes = [cls.code for cls in tree() if not cls.__name__.startswith("_")]  # a private one has its base's
    assert len(set(codes)) == len(codes)
    for cls in tree():
        assert str(cls("text")).startswith(f"[{cls.code}] text")
        assert issubclass(cls, Exception)
        assert cls.__doc__


def test_every_error_a_user_can_meet_is_public():
    # Classes elsewhere are internal to a stage or a tool, which catches them.
    assert {cls.__name__ for cls in tree() if cls.__module__ == "flashckpt.errors"} < set(flashckpt.__all__)


def test_an_unknown_field_is_an_attribute_error():
    assert not hasattr(errors.NoSpaceError("x"), "step")


def test_the_tree_at_the_top_of_the_file_is_the_classes():
    """With each class below its base."""
    path, found = [], {}
    for indent, name in re.findall(r"^    ((?:[│├└] ?[─ ]*)*)(\w+Error)\b", errors.__doc__, re.M):
        depth = len(indent) // 4
        path = [*path[:depth], name]
        found[name] = path[-2] if depth else ""
    classes = [cls for cls in (errors.FlashError, *tree()) if cls.__module__ == "flashckpt.errors"]
    assert found == {cls.__name__: "" if cls is errors.FlashError else cls.__bases__[0].__name__ for cls in classes}
