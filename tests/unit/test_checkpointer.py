"""Checkpointer as its users meet it, in one process and on a real tmpfs."""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter
from pathlib import Path

import pytest
import torch

import flashckpt
from flashckpt import CheckpointConfig, Checkpointer, PerRank, native
from flashckpt.format.dtypes import ITEMSIZE


@pytest.fixture
def make(memory_dir):
    """Makes checkpointers of one job; the store must be clean when the test ends."""
    opened = []

    def make(**settings):
        checkpointer = Checkpointer(CheckpointConfig(**{"job": "job", "memory_dir": memory_dir, **settings}))
        opened.append(checkpointer)
        return checkpointer

    yield make
    if opened and not opened[-1]._closed and not opened[-1]._settings.disabled:
        assert opened[-1].store.check() == []
    for checkpointer in opened:
        checkpointer.close()


def sealed_files(memory_dir):
    return sorted(Path(memory_dir, "job", "sealed").iterdir())


def flip(path, at):
    """Flips a bit of the byte at `at`."""
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 4]))


# --- what is saved is the value at save() -----------------------------------------------------------------


def test_mutated_after_save(make):
    state = {"a": torch.arange(100_000.0), "b": torch.ones(3, dtype=torch.int64), "n": 1}
    wanted = state["a"].clone()
    checkpointer = make()
    handle = checkpointer.save(1, state)
    assert (handle.outcome, handle.level) == ("ok", flashckpt.Level.SEALED)
    assert handle.staging_completion.done()
    assert handle.upload_completion.result() is None
    state["a"].mul_(-1)
    state["n"] = 2
    result = checkpointer.load(state)
    assert torch.equal(state["a"], wanted)
    assert state["n"] == 1
    assert (result.step, result.source, result.saved_world_size) == (1, "memory", 1)
    assert result.timings.total > 0


@pytest.mark.parametrize("name", sorted(ITEMSIZE))
def test_every_dtype(make, name):
    dtype = getattr(torch, name, None)
    if dtype is None:
        pytest.skip(f"this torch has no {name}")
    raw = torch.arange(48, dtype=torch.uint8) % 2 if name == "bool" else torch.arange(48, dtype=torch.uint8)
    tensor = raw.clone().view(dtype)
    square = raw[:36].clone().view(6, 6).t() if dtype.itemsize == 1 and name != "bool" else None
    state = {"t": tensor, "s": raw[: dtype.itemsize].clone().view(dtype).reshape(())}
    if square is not None:
        state["strided"] = square.view(dtype)
    checkpointer = make()
    assert checkpointer.save(1, state).outcome == "ok"
    empty = {
        key: torch.zeros(48, dtype=torch.uint8).view(dtype)[: value.numel()].reshape(value.shape)
        for key, value in state.items()
    }
    checkpointer.load(empty)
    assert torch.equal(empty["t"].view(torch.uint8), raw)
    assert torch.equal(empty["s"].reshape(1).view(torch.uint8), raw[: dtype.itemsize])
    if square is not None:
        assert torch.equal(empty["strided"].view(torch.uint8), square)


def test_views_conjugates_and_negatives(make):
    base = torch.randn(8, 6)
    numbers = torch.randn(5, dtype=torch.complex64)
    state = {
        "transposed": base.t(),
        "column": base[:, 2],
        "step": base[::2, 1:4],
        "conj": numbers.conj(),
        "neg": numbers.conj().imag,
        "expanded": torch.randn(1, 4).expand(3, 4),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(3, 0, 2),
        "grad": torch.nn.Parameter(torch.randn(4)),
    }
    wanted = {key: value.detach().clone() for key, value in state.items()}
    checkpointer = make()
    checkpointer.save(1, state)
    fresh = {key: torch.zeros_like(value) for key, value in wanted.items()}
    checkpointer.load(fresh)
    for key, value in wanted.items():
        assert torch.equal(fresh[key], value), key


def test_loading_into_views_leaves_their_neighbours_alone(make):
    checkpointer = make()
    checkpointer.save(1, {"t": torch.arange(6.0).reshape(2, 3)})
    base = torch.full((4, 5), -1.0)
    checkpointer.load({"t": base[1:3, 1:4]})
    assert torch.equal(base[1:3, 1:4], torch.arange(6.0).reshape(2, 3))
    base[1:3, 1:4] = -1.0
    assert torch.equal(base, torch.full((4, 5), -1.0))
    turned = torch.zeros(3, 2)
    checkpointer.load({"t": turned.t()})
    assert torch.equal(turned, torch.arange(6.0).reshape(2, 3).t())


def test_what_goes_through_host_buffers_goes_in_bounded_batches(make, monkeypatch):
    monkeypatch.setattr("flashckpt.load.read.BOUNCE_BYTES", 1000)
    checkpointer = make()
    state = {f"t{i}": torch.arange(100.0).reshape(10, 10) + i for i in range(7)}
    checkpointer.save(1, state)
    turned = {key: torch.zeros(10, 10).t() for key in state}  # 400 bytes each, none of them read in place
    turned["t3"] = torch.zeros(10, 10)
    checkpointer.load(turned)
    for key, value in state.items():
        assert torch.equal(turned[key], value), key


def test_tied_weights_are_stored_once_and_stay_tied(make):
    weight = torch.randn(300, 1000)
    checkpointer = make()
    tied = checkpointer.save(1, {"embedding": weight, "head": weight})
    untied = checkpointer.save(2, {"embedding": weight, "head": weight.clone()})
    assert tied.size_bytes < 0.6 * untied.size_bytes
    live = torch.zeros(300, 1000)
    state = {"embedding": live, "head": live}
    checkpointer.load(state, step=1)
    assert state["embedding"] is state["head"]
    assert torch.equal(live, weight)


def test_a_changed_structure_replans_by_itself(make):
    checkpointer = make()
    state = {"w": torch.zeros(4)}
    checkpointer.save(1, state)
    state["moment"] = torch.ones(4)  # the first Adam step
    checkpointer.save(2, state)
    state["w"] = state["w"].to(torch.bfloat16)
    checkpointer.save(3, state)
    del state["moment"]
    state["w"] = torch.arange(8, dtype=torch.bfloat16).reshape(2, 4)
    checkpointer.save(4, state)
    state["w"] = torch.arange(8, dtype=torch.bfloat16).reshape(4, 2)
    checkpointer.save(5, state)
    loaded = {"w": torch.zeros(4, 2, dtype=torch.bfloat16)}
    checkpointer.load(loaded)
    assert torch.equal(loaded["w"], state["w"])


def test_state_that_grows_and_shrinks_gets_slots_of_its_size(make, memory_dir):
    checkpointer = make()
    for step, size in enumerate([1000, 2_000_000, 10, 3_000_000, 5], start=1):
        assert checkpointer.save(step, {"t": torch.full((size,), float(step))}).outcome == "ok"
        assert checkpointer.store.check() == []
        total = sum(path.stat().st_size for path in sealed_files(memory_dir))
        assert total < 2 * 4 * 3_000_000 + (1 << 20)
    live = {"t": torch.zeros(5)}
    checkpointer.load(live)
    assert torch.equal(live["t"], torch.full((5,), 5.0))


def test_twenty_thousand_small_tensors(make):
    state = {f"layer.{i}.w": torch.full((4,), float(i)) for i in range(20_000)}
    checkpointer = make()
    checkpointer.save(1, state)
    for tensor in state.values():
        tensor.zero_()
    checkpointer.load(state)
    assert all(torch.equal(state[f"layer.{i}.w"], torch.full((4,), float(i))) for i in range(0, 20_000, 997))


@pytest.mark.slow
def test_a_tensor_above_four_gib(make):
    big = torch.zeros((4 << 30) + 12345, dtype=torch.uint8)
    big[-5:] = torch.arange(1, 6, dtype=torch.uint8)
    big[1 << 32] = 77
    checkpointer = make()
    assert checkpointer.save(1, {"big": big}).outcome == "ok"
    big.zero_()
    checkpointer.load({"big": big})
    assert big[1 << 32] == 77
    assert big[-5:].tolist() == [1, 2, 3, 4, 5]
    assert int(big[: 1 << 20].sum()) == 0


# --- structures ---------------------------------------------------------------------------------------------


def test_containers_and_stateful_objects(make):
    class Counter:
        def __init__(self, count):
            self.count, self.buffer = count, torch.full((3,), float(count))

        def state_dict(self):
            return {"count": self.count, "buffer": self.buffer}

        def load_state_dict(self, state):
            self.count, self.buffer = state["count"], state["buffer"].clone()

    def state(n):
        torch.manual_seed(n)
        return {
            "model": torch.nn.Linear(3, 2),
            "counter": Counter(n),
            "list": [torch.full((2,), float(n)), "text", {"deep": n}],
            "tuple": (torch.full((2,), float(n)), n),
            0: {"int key": n},
            "empty": {},
            "none": None,
        }

    checkpointer = make()
    saved = state(7)
    checkpointer.save(1, saved)
    live = state(8)
    model, counter, in_list = live["model"], live["counter"], live["list"][0]
    checkpointer.load(live)
    assert live["model"] is model
    assert torch.equal(model.weight, saved["model"].weight)
    assert (counter.count, counter.buffer.tolist()) == (7, [7.0, 7.0, 7.0])
    assert live["list"][0] is in_list
    assert (in_list.tolist(), live["list"][1:]) == ([7.0, 7.0], ["text", {"deep": 7}])
    assert (live["tuple"][0].tolist(), live["tuple"][1]) == ([7.0, 7.0], 7)
    assert (live[0], live["empty"], live["none"]) == ({"int key": 7}, {}, None)


def test_a_fresh_optimizer_is_not_silently_left_empty(make):
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    checkpointer = make()
    checkpointer.save(1, {"optimizer": optimizer})
    with pytest.raises(flashckpt.MissingKeyError, match=r"in no rank's state dict") as caught:
        checkpointer.load({"optimizer": torch.optim.Adam(model.parameters())})
    assert "get_optimizer_state_dict" in caught.value.hint


def test_tensor_subclasses_made_of_tensors(make):
    from torch.testing._internal.two_tensor import TwoTensor

    saved = TwoTensor(torch.arange(4.0), torch.arange(4.0) * 2)
    checkpointer = make()
    checkpointer.save(1, {"w": saved})
    live = TwoTensor(torch.zeros(4), torch.zeros(4))
    checkpointer.load({"w": live})
    assert torch.equal(live.a, saved.a)
    assert torch.equal(live.b, saved.b)


@pytest.mark.parametrize(
    ("value", "names"),
    [
        (torch.sparse_coo_tensor([[0]], [1.0], (2,), check_invariants=True), "sparse_coo"),
        (torch.empty(2, device="meta"), "meta"),
        (object(), "object"),
        (lambda: 0, "function"),
    ],
)
def test_what_cannot_be_saved_is_refused_by_name(make, value, names):
    checkpointer = make()
    with pytest.raises(flashckpt.UnsupportedValueError, match=names) as caught:
        checkpointer.save(1, {"outer": {"inner": value}})
    assert "outer.inner" in str(caught.value)
    assert checkpointer.load({"x": torch.zeros(1)}) is None


def test_keys_that_flatten_alike_are_refused(make):
    with pytest.raises(flashckpt.StructureError, match=r"'a\.b'"):
        make().save(1, {"a": {"b": 1}, "a.b": 2})


def test_torch_save_is_an_opt_in(make):
    state = {"size": torch.Size([1, 2]), "layout": torch.strided}
    with pytest.raises(flashckpt.UnsupportedValueError, match="layout"):
        make().save(1, state)
    checkpointer = make(allow_torch_save=True)
    checkpointer.save(1, state)
    live = {"size": None, "layout": None}
    checkpointer.load(live)
    assert live == state


def test_torch_save_blobs_never_run_code(make, memory_dir):
    class Evil:
        def __reduce__(self):
            return os.mkdir, (f"{memory_dir}/ran",)

    checkpointer = make(allow_torch_save=True)
    # What could not be loaded again must not be saved, let alone set an older generation free.
    with pytest.raises(flashckpt.UnsupportedValueError, match=r"'evil'.*weights_only"):
        checkpointer.save(1, {"evil": Evil()})
    assert not os.path.exists(f"{memory_dir}/ran")
    assert checkpointer.load({"evil": None}) is None


# --- load: what fits and what does not ------------------------------------------------------------------------


def test_mismatches_are_named_and_touch_nothing(make):
    checkpointer = make()
    checkpointer.save(1, {"a": torch.ones(3), "b": torch.ones(2)})
    live = {"a": torch.zeros(3), "b": torch.zeros(5)}
    with pytest.raises(flashckpt.StructureError, match=r"'b': expected shape \(5,\), found \(2,\)"):
        checkpointer.load(live)
    with pytest.raises(flashckpt.StructureError, match="'b': expected dtype float64, found float32"):
        checkpointer.load({"a": live["a"], "b": torch.zeros(2, dtype=torch.float64)})
    with pytest.raises(flashckpt.MissingKeyError, match="'c'"):
        checkpointer.load({"a": live["a"], "b": torch.zeros(2), "c": torch.zeros(1)})
    with pytest.raises(flashckpt.MissingKeyError, match="'b'"):
        checkpointer.load({"a": live["a"]})
    assert torch.equal(live["a"], torch.zeros(3))


def test_not_strict_keeps_what_is_missing(make):
    checkpointer = make()
    checkpointer.save(1, {"a": torch.ones(3), "b": 5})
    live = {"a": torch.zeros(3), "c": torch.full((2,), 9.0), "d": "kept"}
    result = checkpointer.load(live, strict=False)
    assert (result.missing, result.unexpected) == (("c", "d"), ("b",))
    assert (live["a"].tolist(), live["c"].tolist(), live["d"]) == ([1.0] * 3, [9.0] * 2, "kept")


def test_a_part_by_prefix(make):
    checkpointer = make()
    checkpointer.save(
        1, {"model": {"w": torch.ones(2)}, "model2": {"w": torch.ones(2)}, "optimizer": {"m": torch.ones(2)}, "n": 1}
    )
    live = {"model": {"w": torch.zeros(2)}, "model2": {"w": torch.zeros(2)}, "n": 0}
    checkpointer.load(live, keys=["model"])
    assert (live["model"]["w"].tolist(), live["model2"]["w"].tolist(), live["n"]) == ([1.0, 1.0], [0.0, 0.0], 0)
    with pytest.raises(flashckpt.MissingKeyError, match=r"'model\.x'"):
        checkpointer.load({"model": {"x": torch.zeros(2)}}, keys=["model"])


def test_cast(make):
    checkpointer = make()
    checkpointer.save(1, {"a": torch.arange(5, dtype=torch.float32)})
    live = {"a": torch.zeros(5, dtype=torch.float64)}
    checkpointer.load(live, cast=True)
    assert live["a"].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_extra_and_per_rank(make):
    checkpointer = make()
    checkpointer.save(1, {"rng": PerRank({"state": torch.ones(3), "n": 4})}, extra={"tokens": 12, "deep": [1, (2,)]})
    live = {"rng": PerRank({"state": torch.zeros(3), "n": 0})}
    result = checkpointer.load(live)
    assert result.extra == {"tokens": 12, "deep": [1, (2,)]}
    assert (live["rng"].value["state"].tolist(), live["rng"].value["n"]) == ([1.0] * 3, 4)


def test_a_tensor_does_not_fit_a_value(make):
    checkpointer = make()
    checkpointer.save(1, {"step": torch.tensor(5.0), "n": 3})
    with pytest.raises(flashckpt.StructureError, match=r"'step'.*found a tensor"):
        checkpointer.load({"step": 0, "n": 0})
    with pytest.raises(flashckpt.MissingKeyError):
        checkpointer.load({"step": torch.zeros(()), "n": torch.zeros(())})


@pytest.mark.parametrize("keys", [["modle"], [], ["model", "x"]])
def test_prefixes_that_select_nothing_are_refused(make, keys):
    checkpointer = make()
    checkpointer.save(1, {"model": {"w": torch.ones(2)}})
    with pytest.raises(flashckpt.MissingKeyError, match="no key of the state dict or the checkpoint"):
        checkpointer.load({"model": {"w": torch.zeros(2)}}, keys=keys)
    with pytest.raises(flashckpt.ConfigError, match="found the string"):
        checkpointer.load({"model": {"w": torch.zeros(2)}}, keys="model")


def test_numbers_do_not_lose_a_part_by_casting(make):
    checkpointer = make()
    checkpointer.save(1, {"c": torch.ones(2, dtype=torch.complex64)})
    with pytest.raises(flashckpt.StructureError, match="complex64 does not fit"):
        checkpointer.load({"c": torch.zeros(2)}, cast=True)


def test_counters_are_not_added_up(make):
    checkpointer = make()
    checkpointer.save(1, {"seen": Counter(a=2)})
    live = {"seen": Counter(a=5)}
    checkpointer.load(live)
    assert live == {"seen": Counter(a=2)}


def test_statefuls_that_were_not_asked_for_are_left_alone(make):
    class Thing:
        loads = 0

        def state_dict(self):
            return {"t": torch.ones(2)}

        def load_state_dict(self, state):
            self.loads += 1

    checkpointer = make()
    a, b = Thing(), Thing()
    checkpointer.save(1, {"a": a, "b": b})
    checkpointer.load({"a": a, "b": b}, keys=["a"])
    assert (a.loads, b.loads) == (1, 0)


def test_autograd_notices_a_load(make):
    checkpointer = make()
    weight = torch.ones(3, requires_grad=True)
    checkpointer.save(1, {"w": weight})
    loss = (weight * weight).sum()
    checkpointer.load({"w": weight})
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_freed_tensor_is_refused_and_no_old_bytes_pass_for_it(make):
    checkpointer = make()
    for step in (1, 2):
        checkpointer.save(step, {"t": torch.full((1000,), float(step))})
    freed = torch.full((1000,), 3.0)
    freed.untyped_storage().resize_(0)
    with pytest.raises(flashckpt.UnsupportedValueError, match=r"'t'.*without storage"):
        checkpointer.save(3, {"t": freed})
    live = {"t": torch.zeros(1000)}
    assert checkpointer.load(live).step == 2
    assert torch.equal(live["t"], torch.full((1000,), 2.0))


def test_what_is_no_mapping_is_refused(make):
    with pytest.raises(flashckpt.ConfigError, match="state dict: expected a mapping"):
        make().save(1, [1, 2])
    with pytest.raises(flashckpt.ConfigError, match="extra: expected a mapping"):
        make().save(1, {"n": 1}, extra=[1])


# --- which generation ----------------------------------------------------------------------------------------


def test_nothing_saved_is_none(make):
    assert make().load({"a": torch.zeros(1)}) is None


def test_explicit_step_and_what_it_buries(make):
    checkpointer = make(slots_per_rank=4)
    for step in (1, 2, 3):
        checkpointer.save(step, {"n": step})
    with pytest.raises(flashckpt.NotFoundError, match=r"step 9: .*\[1, 2, 3\]"):
        checkpointer.load({"n": 0}, step=9)
    live = {"n": 0}
    assert checkpointer.load(live, step=2).step == 2
    assert live == {"n": 2}
    # Step 3 belongs to an abandoned past now, also for later launches.
    assert make(slots_per_rank=4).load(live).step == 2
    other = make(slots_per_rank=4)
    other.load(live)
    other.save(3, {"n": 33})
    assert make().load(live).step == 3
    assert live == {"n": 33}


def test_a_second_history_is_not_begun_by_accident(make):
    first = make()
    first.save(10, {"n": 10})
    first.close()
    second = make()
    with pytest.raises(flashckpt.AmbiguousHistoryError, match="step 3, but an earlier launch left step 10"):
        second.save(3, {"n": 3})
    second.start_fresh()
    second.save(3, {"n": 3})
    live = {"n": 0}
    assert make().load(live).step == 3


def test_steps_do_not_go_down(make):
    checkpointer = make()
    checkpointer.save(5, {"n": 1})
    checkpointer.save(5, {"n": 2})
    with pytest.raises(flashckpt.ConfigError, match="step 4 after step 5"):
        checkpointer.save(4, {"n": 3})
    for bad in (-1, 1.5, "7", True):
        with pytest.raises(flashckpt.ConfigError, match="expected an integer"):
            checkpointer.save(bad, {"n": 3})
    live = {"n": 0}
    checkpointer.load(live)
    assert live == {"n": 2}


def test_steps_do_not_go_down_below_what_was_loaded(make):
    """A loop that counts from the beginning after a load: each save was ok, and the next load took none of them."""
    state = {"a": torch.zeros(10), "n": 0}
    with make() as first:
        assert first.save(6, state).outcome == "ok"
    second = make()
    assert second.load(state).step == 6
    with pytest.raises(flashckpt.ConfigError, match="step 2 after step 6 was loaded"):
        second.save(2, state)
    assert second.save(6, {**state, "n": 1}).outcome == "ok"
    assert second.load(state).step == 6
    assert state["n"] == 1
    # Whoever says that the job begins anew may count from the beginning.
    second.start_fresh()
    assert second.save(2, {**state, "n": 2}).outcome == "ok"
    second.close()
    third = make()
    assert third.load(state).step == 2
    assert state["n"] == 2


@pytest.mark.parametrize("where", ["preamble", "header", "data"])
def test_a_damaged_generation_is_stepped_over(make, memory_dir, where):
    checkpointer = make()
    for step in (1, 2):
        checkpointer.save(step, {"t": torch.full((100_000,), float(step))})
    (newest,) = [path for path in sealed_files(memory_dir) if "-2-" in path.name.split(".")[0]]
    flip(newest, {"preamble": 9, "header": 90, "data": 8192 + 4000}[where])
    live = {"t": torch.zeros(100_000)}
    result = checkpointer.load(live)
    assert result.step == 1
    assert torch.equal(live["t"], torch.full((100_000,), 1.0))
    assert "step 2" in result.stepped_over[0]
    assert checkpointer.status().store.quarantine.files == 1


def test_only_damage_left_is_never_a_fresh_start(make, memory_dir):
    checkpointer = make()
    checkpointer.save(1, {"t": torch.ones(100_000)})
    flip(sealed_files(memory_dir)[0], 8192 + 4000)
    with pytest.raises(flashckpt.UnusableError, match="step 1") as caught:
        checkpointer.load({"t": torch.zeros(100_000)})
    assert "allow_fresh=True" in caught.value.hint
    assert caught.value.touched
    with pytest.raises(flashckpt.UnusableError):  # in quarantine by now, but still not nothing
        make().load({"t": torch.zeros(100_000)})
    fresh = make()
    assert fresh.load({"t": torch.zeros(100_000)}, allow_fresh=True) is None
    assert fresh.save(1, {"t": torch.ones(100_000)}).outcome == "ok"


def test_no_fresh_start_with_tensors_that_were_written_to(make, memory_dir):
    checkpointer = make()
    checkpointer.save(1, {"t": torch.ones(200_000)})
    flip(sealed_files(memory_dir)[0], 8192 + 4000)
    live = {"t": torch.zeros(200_000)}
    with pytest.raises(flashckpt.UnusableError, match=r"step 1[\s\S]*ranks \[0\] were written to") as caught:
        checkpointer.load(live, allow_fresh=True)
    assert caught.value.touched
    # Started again: what was bad is set aside, so that nothing is written to.
    live = {"t": torch.zeros(200_000)}
    assert make().load(live, allow_fresh=True) is None
    assert not live["t"].any()


def test_truncated_under_the_reader(make, memory_dir):
    checkpointer = make()
    for step in (1, 2):
        checkpointer.save(step, {"t": torch.full((100_000,), float(step))})
    os.truncate(sealed_files(memory_dir)[-1], 64 << 10)
    live = {"t": torch.zeros(100_000)}
    assert checkpointer.load(live).step == 1


def test_shards_under_another_name_are_refused(make, memory_dir):
    checkpointer = make()
    for step in (1, 2):
        checkpointer.save(step, {"t": torch.full((10,), float(step))})
    old, new = sealed_files(memory_dir)
    data = old.read_bytes()
    with open(new, "r+b") as file:  # an old shard restored under the name of a newer one
        file.write(data)
    live = {"t": torch.zeros(10)}
    result = checkpointer.load(live)
    assert (result.step, live["t"][0].item()) == (1, 1.0)


# --- outcomes and misuse -------------------------------------------------------------------------------------


def test_budget_is_checked_with_figures(make):
    checkpointer = make(memory_budget_bytes=1 << 20)
    with pytest.raises(flashckpt.NoSpaceError, match="MiB"):
        checkpointer.prewarm({"t": torch.zeros(1 << 20)})
    handle = make(memory_budget_bytes=1 << 20).save(1, {"t": torch.zeros(1 << 20)})
    assert handle.outcome == "failed"
    assert "FC-MEM-001" in handle.reason
    assert handle.wait("sealed", timeout=1) == "failed"
    with pytest.raises(flashckpt.NoSpaceError):
        handle.upload_completion.result()


def test_no_room_keeps_the_earlier_generation(make):
    small = {"t": torch.ones(1000)}
    checkpointer = make(memory_budget_bytes=1 << 20)
    assert checkpointer.save(1, small).outcome == "ok"
    assert checkpointer.save(2, {"t": torch.ones(1 << 20)}).outcome == "failed"
    assert checkpointer.save(3, small).outcome == "ok"
    assert checkpointer.save(4, {"t": torch.ones(1 << 20)}).outcome == "failed"
    live = {"t": torch.zeros(1000)}
    assert checkpointer.load(live).step == 3
    assert checkpointer.status().saves == {"ok": 2, "skipped": 0, "failed": 2}


def test_errors_can_be_raised_instead(make):
    with pytest.raises(flashckpt.NoSpaceError):
        make(memory_budget_bytes=1 << 20, on_save_error="raise").save(1, {"t": torch.zeros(1 << 20)})


def test_levels_beyond_this_launch_are_refused(make):
    handle = make().save(1, {"n": 1})
    assert handle.wait("staged") == "ok"
    with pytest.raises(flashckpt.ConfigError, match="sealed at most"):
        handle.wait("replicated", timeout=1)
    with pytest.raises(flashckpt.ConfigError, match="'molten'"):
        handle.wait("molten")


def test_overlapping_calls_are_refused(make):
    checkpointer = make()
    problems = []

    class Slow:
        def state_dict(self):
            try:
                checkpointer.save(1, {"n": 1})
            except flashckpt.ConflictError as error:
                problems.append(error)
            return {"n": 1}

        def load_state_dict(self, state):
            pass

    checkpointer.save(1, {"slow": Slow()})
    assert len(problems) == 2  # the first save asks twice


def test_use_after_close(make):
    checkpointer = make()
    checkpointer.close()
    checkpointer.close()
    with pytest.raises(flashckpt.ClosedError):
        checkpointer.save(1, {"n": 1})


def test_disabled(make, monkeypatch, memory_dir, caplog):
    monkeypatch.setenv("FLASHCKPT_DISABLE", "1")
    with caplog.at_level(logging.WARNING):
        checkpointer = make()
    assert "FLASHCKPT_DISABLE" in caplog.text
    assert checkpointer.save(1, {"n": 1}).outcome == "skipped"
    assert checkpointer.load({"n": 1}) is None
    assert os.listdir(memory_dir) == []


def test_a_replaced_launch_no_longer_writes(make):
    zombie = make()
    zombie.save(1, {"n": 1})
    new = make()
    live = {"n": 0}
    new.load(live)
    handle = zombie.save(2, {"n": 2})
    assert handle.outcome == "failed"
    assert "FC-JOB-001" in handle.reason
    assert new.save(2, {"n": 22}).outcome == "ok"
    assert make().load(live).step == 2
    assert live == {"n": 22}


def test_a_fork_can_use_the_state_but_not_the_store(make):
    checkpointer = make()
    checkpointer.save(1, {"n": 1})
    pid = os.fork()
    if pid == 0:
        try:
            checkpointer.save(2, {"n": 2})
            os._exit(1)
        except flashckpt.ConflictError:
            os._exit(0)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert checkpointer.save(3, {"n": 3}).outcome == "ok"


def test_saves_from_another_thread_are_fine_one_at_a_time(make):
    checkpointer = make()
    outcomes = []
    thread = threading.Thread(target=lambda: outcomes.append(checkpointer.save(1, {"t": torch.ones(9)}).outcome))
    thread.start()
    thread.join()
    assert outcomes == ["ok"]


def test_prewarm_then_save_allocates_nothing(make, memory_dir):
    state = {"t": torch.ones(1 << 20)}
    checkpointer = make()
    checkpointer.prewarm(state)
    pool = {path.stat().st_ino for path in Path(memory_dir, "job", "pool").iterdir()}
    assert len(pool) == 2
    for step in range(1, 6):
        checkpointer.save(step, state)
    assert {path.stat().st_ino for path in sealed_files(memory_dir)} == pool


def test_prewarm_in_the_background_is_done_before_the_save_writes(make, memory_dir):
    state = {"t": torch.ones(1 << 20)}
    checkpointer = make()
    checkpointer.prewarm(state, background=True)
    assert checkpointer.save(1, state).outcome == "ok"
    pool = {path.stat().st_ino for path in Path(memory_dir, "job", "pool").iterdir()}
    assert len(pool) == 1  # of the two that were made
    inodes = pool | {path.stat().st_ino for path in sealed_files(memory_dir)}
    for step in range(2, 6):
        checkpointer.save(step, state)
    assert {path.stat().st_ino for path in sealed_files(memory_dir)} == inodes


def test_a_prewarm_that_fails_in_the_background_is_logged_and_saves_go_on(make, caplog, monkeypatch):
    checkpointer = make()

    def refuse(*_: object) -> None:
        raise OSError("no memory today")

    monkeypatch.setattr(checkpointer._slots, "prepare", refuse)
    checkpointer.prewarm({"t": torch.ones(9)}, background=True)
    assert checkpointer.save(1, {"t": torch.ones(9)}).outcome == "ok"
    assert "no memory today" in caplog.text


def test_slots_are_reused_after_a_restart(make, memory_dir, run_python):
    """A new process takes over the memory of the one that died; nothing new is allocated."""
    code = (
        "import sys, torch, flashckpt\n"
        "c = flashckpt.Checkpointer(flashckpt.CheckpointConfig(job='job', memory_dir=sys.argv[1]))\n"
        "state = {'t': torch.ones(100_000), 'n': 0}\n"
        "first = (c.load(state) or type('none', (), {'step': 0})).step + 1\n"
        "for step in range(first, first + 3):\n"
        "    assert c.save(step, state).outcome == 'ok'\n"
        "import os; os._exit(9)\n"
    )
    inodes = []
    for _ in range(3):
        assert run_python(code, memory_dir).returncode == 9
        inodes.append(
            {
                path.stat().st_ino
                for path in Path(memory_dir, "job").rglob("*")
                if path.is_file() and path.stat().st_size > 4096
            }
        )
    assert inodes[0] == inodes[1] == inodes[2]
    live = {"t": torch.zeros(100_000), "n": 1}
    assert make().load(live).step == 9


def test_a_reader_beside_the_training_takes_nothing_over(make):
    trainer, reader = make(slots_per_rank=4), make(slots_per_rank=4)
    for step in (1, 2):
        trainer.save(step, {"n": step})
    live = {"n": 0}
    assert reader.load(live, step=1, read_only=True).step == 1
    assert live == {"n": 1}
    assert trainer.save(3, {"n": 3}).outcome == "ok"
    assert reader.load(live, read_only=True).step == 3


def test_a_newer_format_is_left_where_it_is(make, memory_dir):
    """Going back to an older version of flashckpt must not cost the checkpoints of the newer one."""
    checkpointer = make()
    checkpointer.save(1, {"n": 1})
    (path,) = sealed_files(memory_dir)
    with open(path, "r+b") as file:
        head = bytearray(file.read(64))
        head[8:12] = (2).to_bytes(4, "little")
        head[60:64] = native.crc32c(bytes(head[:60])).to_bytes(4, "little")
        file.seek(0)
        file.write(head)
    with pytest.raises(flashckpt.UnusableError, match="version"):
        checkpointer.load({"n": 0})
    assert sealed_files(memory_dir) == [path]


def test_status(make):
    checkpointer = make()
    for step in (1, 2, 3):
        checkpointer.save(step, {"n": step})
    status = checkpointer.status()
    assert (status.step, status.saves["ok"], status.store.sealed.files) == (3, 3, 2)
    assert [(g.step, state) for g, state, _ in status.generations] == [(3, "complete"), (2, "complete")]


def test_a_clock_that_is_centuries_ahead_is_refused_before_anything_is_written(memory_dir, run_python):
    code = (
        "import sys, time\n"
        "real = time.time\n"
        "time.time = lambda: real() + 174 * 366 * 86400\n"
        "import flashckpt\n"
        "config = flashckpt.CheckpointConfig(job='run1', memory_dir=sys.argv[1], node_id='a', agent='off')\n"
        "try:\n"
        "    flashckpt.Checkpointer(config)\n"
        "except flashckpt.ConfigError as error:\n"
        "    print(error.code, error.message, error.hint)\n"
    )
    told = run_python(code, memory_dir)
    assert told.stdout.startswith("FC-CFG-001 clocks of the nodes: expected them within 24 h"), told.stderr
    assert "on node 'a'" in told.stdout
    assert "set the clock" in told.stdout


def test_arguments_that_are_easily_mistaken_are_named(make):
    checkpointer = make()
    with pytest.raises(flashckpt.ConfigError, match=r"step: expected an integer from 0 on, found a dict"):
        checkpointer.save({"n": 1}, 3)
    with pytest.raises(flashckpt.ConfigError, match="state dict: expected a mapping, found a int"):
        checkpointer.load(3)
    with pytest.raises(flashckpt.ConfigError, match="found '/data/run1'") as caught:
        checkpointer.load({"n": 1}, "/data/run1")
    assert "path='/data/run1'" in caught.value.hint
    with pytest.raises(flashckpt.ConfigError, match="level: expected"):
        checkpointer.save(1, {"n": 1}).wait(30)
