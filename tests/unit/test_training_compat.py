"""The compatibility guard."""

from __future__ import annotations

import logging

import pytest

from flashckpt import ConfigError, MismatchError
from flashckpt.training.compat import differences, guard


def test_only_shared_keys_count():
    assert differences({"a": 1, "old": 2}, {"a": 1, "new": 3}) == []
    assert differences({}, {"a": 1}) == []
    assert differences({"a": 1}, {}) == []


def test_below_a_shared_key_everything_counts():
    saved = {"freeze": {"vision": True, "text": False, "gone": 1}}
    expected = {"freeze": {"vision": False, "text": False, "added": 2}}
    assert differences(saved, expected) == [
        "freeze.vision: True in the checkpoint, False now",
        "freeze.gone: 1 in the checkpoint, absent now",
        "freeze.added: absent in the checkpoint, 2 now",
    ]


def test_types_that_a_checkpoint_may_change_are_equal():
    assert differences({"shape": [1, 2]}, {"shape": (1, 2)}) == []
    assert differences({"a": {"b": 1}}, {"a": 1}) == ["a: {'b': 1} in the checkpoint, 1 now"]


def test_the_guard_raises_or_warns(caplog):
    with pytest.raises(MismatchError, match=r"(?s)step 7 does not fit.*vocab: 10 in the checkpoint, 20 now") as caught:
        guard(7, {"vocab": 10}, {"vocab": 20}, "raise")
    assert isinstance(caught.value, ValueError)
    assert caught.value.differences == ["vocab: 10 in the checkpoint, 20 now"]
    with caplog.at_level(logging.WARNING):
        guard(7, {"vocab": 10}, {"vocab": 20}, "warn")
    assert "vocab: 10 in the checkpoint, 20 now" in caplog.text
    guard(7, {"vocab": 10}, None, "raise")
    with pytest.raises(ConfigError, match="on_mismatch"):
        guard(7, {}, {}, "ignore")
