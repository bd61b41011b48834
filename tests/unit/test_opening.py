"""How a Checkpointer is opened: what is refused before anything is touched."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

import flashckpt


@pytest.fixture
def make(memory_dir):
    def make(**settings):
        return flashckpt.Checkpointer(flashckpt.CheckpointConfig(job="run1", memory_dir=memory_dir, **settings))

    return make


@pytest.fixture
def rank_of_two(monkeypatch):
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "1")):
        monkeypatch.setenv(name, value)


def test_a_rank_without_a_process_group_is_refused(make, memory_dir, rank_of_two):
    with pytest.raises(flashckpt.ConfigError, match="WORLD_SIZE") as refused:
        make()
    assert "init_process_group" in refused.value.hint
    assert "process_group=" in refused.value.hint
    assert "single_process=True" in refused.value.hint
    assert os.listdir(memory_dir) == []
    model = torch.nn.Linear(2, 2)
    with pytest.raises(flashckpt.ConfigError, match="WORLD_SIZE"):
        flashckpt.CheckpointManager(flashckpt.CheckpointConfig(job="run1", memory_dir=memory_dir), model=model)
    assert os.listdir(memory_dir) == []


@pytest.mark.parametrize("by", ["argument", "environment"])
def test_a_tool_that_works_alone_says_so(make, rank_of_two, monkeypatch, by):
    if by == "environment":
        monkeypatch.setenv("FLASHCKPT_SINGLE_PROCESS", "1")
    with make(**({"single_process": True} if by == "argument" else {})) as checkpointer:
        assert checkpointer.save(1, {"x": torch.ones(3)}).outcome == "ok"


def test_the_argument_beats_the_environment(make, rank_of_two, monkeypatch):
    monkeypatch.setenv("FLASHCKPT_SINGLE_PROCESS", "1")
    with pytest.raises(flashckpt.ConfigError, match="WORLD_SIZE"):
        make(single_process=False)
    monkeypatch.setenv("FLASHCKPT_SINGLE_PROCESS", "maybe")
    with pytest.raises(flashckpt.ConfigError, match="FLASHCKPT_SINGLE_PROCESS"):
        make()


@pytest.mark.parametrize("value", ["1", "", "many"])
def test_one_rank_needs_no_process_group(make, monkeypatch, value):
    monkeypatch.setenv("WORLD_SIZE", value)
    make().close()


def test_a_group_of_this_process_is_a_group(make, rank_of_two):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        make().close()
    finally:
        dist.destroy_process_group()


def test_disabled_opens_nothing(make, rank_of_two, monkeypatch):
    monkeypatch.setenv("FLASHCKPT_DISABLE", "1")
    make().close()
