"""Checksums of tensors that count as the same on all ranks: what they see, and how little they read."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch

from flashckpt import CheckpointConfig, ConfigError
from flashckpt.ranks.topology import Node, Topology
from flashckpt.save import same
from flashckpt.save.same import NOTHING, Comparer, checksums, is_sampled
from flashckpt.state.flatten import flatten
from flashckpt.types import Generation

WINDOW = 1024
DTYPES = [torch.float32, torch.bfloat16, torch.bool, torch.float8_e4m3fn, torch.complex128, torch.int64]


def sums(tensor, window=WINDOW):
    return checksums(flatten({"t": tensor}), [0], window)


def of_shape(shape, dtype):
    return torch.arange(torch.Size(shape).numel()).reshape(shape).to(torch.float32).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (4096,), (2, 3000), (3000, 2)])
def test_a_changed_middle_is_seen(dtype, shape):
    tensor = of_shape(shape, dtype)
    other = tensor.clone()
    assert sums(tensor) == sums(other)
    middle = other.view(-1).view(torch.uint8)
    middle[len(middle) // 2] ^= 1
    assert sums(tensor) != sums(other)


def test_oddly_laid_out_tensors_are_read_too():
    tensor = torch.arange(6000.0).reshape(60, 100).t()
    other = tensor.clone()
    assert not tensor.is_contiguous()
    other[50, 30] += 1
    assert sums(tensor, 10 << 20) != sums(other, 10 << 20)
    assert sums(torch.tensor([1 + 2j]).conj()) != sums(torch.tensor([1 + 3j]).conj())


def test_on_an_accelerator_a_sum_sees_the_same():
    """The sum is the device's own work: here it is made where the tensors are, in this process's memory."""
    for dtype in DTYPES:
        tensor = of_shape((40, 40), dtype)
        window = same._window(tensor, WINDOW)
        assert 0 < window.numel() * window.itemsize <= WINDOW
        assert window.data_ptr() != tensor.data_ptr()
        assert same._weighted_sum(window) == same._weighted_sum(window.clone())
    a, b = torch.tensor([1.0, 2.0]), torch.tensor([2.0, 1.0])
    assert same._weighted_sum(a) != same._weighted_sum(b)
    assert same._window(torch.zeros(4, 1000), 100).numel() == 25
    assert same._window(torch.zeros(1, dtype=torch.complex128), 1).numel() == 1


def test_a_later_sample_waits_for_no_device():
    """Meta tensors stand for those of a device: whoever asks them for a number hears of it."""
    flat = flatten({"away": torch.empty(3, device="meta"), "here": torch.ones(3)})
    with pytest.raises(RuntimeError):
        checksums(flat, [0, 1], WINDOW)
    step = next(step for step in range(100) if is_sampled(step))
    sample = comparer().sample(flat, SimpleNamespace(assumed=(0, 1)), Generation(1, 1, step, 1))
    assert sample[1:] == tuple(sums(torch.ones(3)))
    away = flatten({"away": torch.empty(3, device="meta")})
    assert comparer().sample(away, SimpleNamespace(assumed=(0,)), Generation(1, 1, step, 1)) == ()


def test_a_window_bounds_what_is_read():
    tensor = torch.zeros(1 << 20)
    other = tensor.clone()
    other[:1000] = 1
    assert sums(tensor) == sums(other)


def test_every_sampling_is_spread_over_the_steps_of_any_interval():
    for interval in (1, 2, 8, 10, 16, 100, 1000):
        sampled = sum(is_sampled(step * interval) for step in range(800))
        assert 50 <= sampled <= 150, interval


class Group:
    """Answers of other ranks that are known beforehand."""

    def __init__(self, others):
        self.others = others
        self.asked = 0

    def gather(self, payload, doing):
        self.asked += 1
        return [payload, *(other(self.asked, payload) for other in self.others)]


def comparer(world=2, enabled=True):
    topology = Topology(0, world, (Node("n", "", tuple(range(world))),), tuple(range(world)))
    return Comparer(topology, SimpleNamespace(), "job", enabled=enabled)


def summaries_of(states, enabled=True):
    made = []
    for state in states:
        one = comparer(len(states), enabled)
        flat = flatten(state)
        plan = SimpleNamespace(assumed=tuple(range(len(flat.tensors))))
        made.append((one, flat, plan, one.summary(flat, plan)))
    return made


def test_differences_are_named_once(caplog):
    states = [{f"t{i}": torch.full((4,), float(i + (rank == 2 and i == 5))) for i in range(9)} for rank in range(3)]
    made = summaries_of(states)
    one, flat, plan, _ = made[0]
    group = Group([lambda _, __, other=other: other._sums.tobytes() for other, *_ in made[1:]])
    with caplog.at_level(logging.WARNING, "flashckpt"):
        one.compare(group, [summary for *_, summary in made], flat, plan)
    (message,) = caplog.messages
    assert "'t5'" in message
    assert "ranks [0, 1] against [2]" in message
    assert "PerRank" in message
    assert "dist.broadcast" in message
    assert "same_on_ranks='ignore'" in message
    assert not one.is_due
    assert group.asked == 1


def test_equal_ranks_and_ranks_with_other_keys_exchange_nothing_more(caplog):
    for states in ([{"a": torch.ones(3)}] * 2, [{"a": torch.ones(3)}, {"b": torch.zeros(3)}]):
        made = summaries_of(states)
        one, flat, plan, _ = made[0]
        group = Group([])
        one.compare(group, [summary for *_, summary in made], flat, plan)
        assert group.asked == 0
    assert caplog.messages == []


def test_very_many_tensors_are_compared_in_runs(caplog, monkeypatch):
    monkeypatch.setattr(same, "_GATHER_BYTES", 0)
    monkeypatch.setattr(same, "_FEWEST_SUMS", 10)
    states = [{f"t{i:03}": torch.full((2,), float(i + (rank and i == 57))) for i in range(100)} for rank in range(2)]
    made = summaries_of(states)
    one, flat, plan, _ = made[0]

    def told(_, payload):
        assert len(payload) == 10 * 8
        runs = same._runs(100, 10)
        return b"".join(same._run_sum(made[1][0]._sums, run).to_bytes(8, "little") for run in runs)

    one.compare(Group([told]), [summary for *_, summary in made], flat, plan)
    (message,) = caplog.messages
    assert "some of 10 from 't050' to 't059'" in message


def test_ignore_takes_no_checksums():
    assert [summary for *_, summary in summaries_of([{"a": torch.ones(3)}] * 2, enabled=False)] == [NOTHING] * 2
    with pytest.raises(ConfigError, match="same_on_ranks: expected one of"):
        CheckpointConfig(job="x", same_on_ranks="never")
