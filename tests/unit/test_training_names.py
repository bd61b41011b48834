"""Renaming between a model's names and a checkpoint's."""

from __future__ import annotations

import pytest

from flashckpt import ConfigError
from flashckpt.training.names import Renaming


def test_the_longest_leading_part_wins():
    renaming = Renaming({"layers": "blocks", "layers.0": "first", "head.weight": "out.w"})
    assert renaming.saved_name("layers.1.weight") == "blocks.1.weight"
    assert renaming.saved_name("layers.0.weight") == "first.weight"
    assert renaming.saved_name("head.weight") == "out.w"
    assert renaming.saved_name("layersx.weight") == "layersx.weight"
    assert Renaming().saved_name("a.b") == "a.b"


def test_typos_and_collisions_are_refused():
    with pytest.raises(ConfigError, match="no name of the model begins with 'layer'"):
        Renaming({"layer": "x"}).check(["layers.0"])
    with pytest.raises(ConfigError, match="would both be 'b'"):
        Renaming({"a": "b"}).check(["a", "b"])
    with pytest.raises(ConfigError, match="expected names"):
        Renaming({"a": ""})
