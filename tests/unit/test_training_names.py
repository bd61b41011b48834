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


def test_one_part_of_a_name_may_be_any():
    renaming = Renaming({"layers.{}.wq": "model.layers.{}.q_proj", "layers.0.wq": "first", "a.{}.{}": "{}.b.{}"})
    assert renaming.saved_name("layers.12.wq.weight") == "model.layers.12.q_proj.weight"
    assert renaming.saved_name("layers.0.wq.weight") == "first.weight"  # the plain rule wins
    assert renaming.saved_name("layers.12.wk.weight") == "layers.12.wk.weight"
    assert renaming.saved_name("a.x.y") == "x.b.y"
    back = Renaming({"layers.{}.wq": "model.layers.{}.q_proj"}).reversed()
    assert back.saved_name("model.layers.3.q_proj.bias") == "layers.3.wq.bias"
    renaming.check(["layers.0.wq.weight", "layers.1.wq.weight", "a.b.c"])
    with pytest.raises(ConfigError, match=r"begins with 'h\.\{\}'"):
        Renaming({"h.{}": "g.{}"}).check(["x.y", "h"])
    with pytest.raises(ConfigError, match="as often on both sides"):
        Renaming({"h.{}": "g"})
    with pytest.raises(ConfigError, match="would both be"):
        Renaming({"a": "x", "b": "x"}).reversed()
