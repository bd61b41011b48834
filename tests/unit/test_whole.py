"""States whose structure changes: refused when they are saved, and saved and loaded as one value in `Whole`."""

from __future__ import annotations

import shutil
import tempfile
from collections import OrderedDict, deque

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import flashckpt
from flashckpt import CheckpointConfig, Checkpointer, CheckpointManager, PerRank, Whole


class History:
    """A metric, or Lightning's fit loop: its state dict grows."""

    def __init__(self):
        self.seen = []
        self.totals = {}

    def update(self, step):
        self.seen.append(torch.full((step,), float(step)))
        self.totals[f"epoch{step}"] = step

    def state_dict(self):
        return {"seen": list(self.seen), "totals": dict(self.totals)}

    def load_state_dict(self, state):
        self.seen, self.totals = list(state["seen"]), dict(state["totals"])


@pytest.fixture
def make(memory_dir):
    opened = []

    def make(**states):
        config = CheckpointConfig(job="job", memory_dir=memory_dir)
        opened.append(CheckpointManager(config, model=torch.nn.Linear(2, 2), states=states))
        return opened[-1]

    yield make
    for manager in opened:
        manager.close()


def lbfgs():
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    return model, torch.optim.LBFGS(model.parameters(), max_iter=3, history_size=5)


def descend(model, optimizer):
    points = torch.linspace(-1, 1, 12).reshape(4, 3)

    def closure():
        optimizer.zero_grad()
        loss = (model(points) - points[:, :2]).square().mean()
        loss.backward()
        return loss

    return optimizer.step(closure).item()


GROWING = {
    "an object's lists and mappings": (History, lambda one, step: one.update(step)),
    "a list of tensors": (lambda: {"replay": []}, lambda one, step: one["replay"].append(torch.ones(step))),
    "a tensor": (lambda: {"t": torch.zeros(0)}, lambda one, step: one.update(t=torch.ones(step))),
    "a mapping": (lambda: {"seen": {}}, lambda one, step: one["seen"].update({str(step): 1})),
}


@pytest.mark.parametrize("kind", GROWING)
@pytest.mark.parametrize("loads", [True, False])
def test_a_state_that_grows_is_refused_when_it_is_saved_and_not_when_it_is_loaded(make, kind, loads):
    """At the first save where load() was called before, which shows how a new process looks; else at the second."""
    new, grow = GROWING[kind]
    state = new()
    manager = make(grows=state)
    if loads:
        assert manager.load() is None
    grow(state, 1)
    if not loads:
        assert manager.save(1).outcome == "ok"
        grow(state, 2)
    with pytest.raises(flashckpt.UnsupportedValueError, match=r"states\['grows'\]: expected the structure") as caught:
        manager.save(2)
    assert "Whole" in caught.value.hint
    assert caught.value.key == "grows"


def test_whole_brings_it_back_into_any_structure(make):
    history, replay, own = History(), [], OrderedDict(a=1)
    manager = make(metric=Whole(history), replay=Whole(replay), own=PerRank(Whole(own)))
    assert manager.load() is None
    for step in (1, 2, 3):
        history.update(step)
        replay.append((torch.full((step,), step), {"reward": step}))
        own[f"k{step}"] = torch.ones(2, step, dtype=torch.bfloat16)
        assert manager.save(step).outcome == "ok"
    wanted = [(tensor.clone(), info) for tensor, info in replay]
    replay[0][0].zero_()  # after save(): does not matter
    manager.maybe_wait_for_staging()
    fresh, found, mine = History(), [torch.zeros(7)], OrderedDict(other=1)
    assert make(metric=Whole(fresh), replay=Whole(found), own=PerRank(Whole(mine))).load().step == 3
    assert [one.tolist() for one in fresh.seen] == [[1.0], [2.0, 2.0], [3.0, 3.0, 3.0]]
    assert fresh.totals == history.totals
    assert [(t.tolist(), info) for t, info in found] == [(t.tolist(), info) for t, info in wanted]
    assert mine.keys() == own.keys()
    assert torch.equal(mine["k3"], own["k3"])


def test_what_whole_cannot_hold_is_named(make):
    with pytest.raises(flashckpt.UnsupportedValueError, match=r"odd\.[\s\S]*deque|odd[\s\S]*deque"):
        make(odd=Whole({"x": deque([1])})).save(1)


@pytest.mark.parametrize("way", ["optimizer", "whole"])
@pytest.mark.parametrize("steps", [1, 4])
def test_lbfgs_goes_on_where_it_was(memory_dir, way, steps):
    config = CheckpointConfig(job="job", memory_dir=memory_dir)

    def manager(model, optimizer):
        given = {"optimizer": optimizer} if way == "optimizer" else {"states": {"lbfgs": Whole(optimizer)}}
        return CheckpointManager(config, model=model, **given)

    first = lbfgs()
    with manager(*first) as one:
        one.load()
        for step in range(1, steps + 1):
            descend(*first)
            assert one.save(step).outcome in (None, "ok")
    second = lbfgs()
    with manager(*second) as two:
        assert two.load().step == steps
    assert [descend(*first) for _ in range(3)] == [descend(*second) for _ in range(3)]


def test_lbfgs_as_a_plain_state_is_refused_at_the_first_save(make):
    model, optimizer = lbfgs()
    manager = make(lbfgs=optimizer)
    manager.load()
    descend(model, optimizer)
    with pytest.raises(flashckpt.UnsupportedValueError, match=r"states\['lbfgs'\][\s\S]*more"):
        manager.save(1)


def test_states_of_one_structure_are_not_refused(make):
    state = {"list": [1], "t": torch.zeros(3), "nested": {"a": 1}}
    manager = make(one=state)
    manager.load()
    for step in (1, 2, 3):
        state["list"].append(step)  # one value
        state["t"] += 1
        assert manager.save(step).outcome == "ok"


values = st.recursive(
    st.none() | st.integers(-5, 5) | st.text(max_size=3) | st.lists(st.floats(-1, 1), max_size=3).map(torch.tensor),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.integers(0, 9) | st.text(max_size=2), inner, max_size=3)
        | st.dictionaries(st.text(max_size=2), inner, max_size=2).map(OrderedDict)
    ),
    max_leaves=8,
)


def equal(a, b):
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(equal, a, b))
    return a == b


@given(saved=values, target=values)
def test_any_value_comes_back_into_any_target(saved, target):
    memory_dir = tempfile.mkdtemp(prefix="flashckpt-test-", dir="/dev/shm")
    try:
        with Checkpointer(CheckpointConfig(job="job", memory_dir=memory_dir)) as checkpointer:
            checkpointer.save(1, {"x": Whole(saved), "y": {"z": PerRank(Whole([saved]))}})
            live = {"x": Whole(target), "y": {"z": PerRank(Whole([]))}}
            assert checkpointer.load(live).step == 1
    finally:
        shutil.rmtree(memory_dir)
    assert equal(live["x"].value, saved)
    assert equal(live["y"]["z"].value.value, [saved])
