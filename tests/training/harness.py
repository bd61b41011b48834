"""Runs one training pattern, and says of every save whether what came back is the state at the moment of `save()`."""

from __future__ import annotations

import contextlib
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from flashckpt import CheckpointConfig, Checkpointer, CheckpointManager, Level, NotFoundError, PerRank, failpoints
from flashckpt.checkpointer import internals_of
from flashckpt.state.flatten import OneValue

# Between the return of `save()` and the first byte that is copied: time for a pattern to misbehave in.
SLEEP_SECONDS = 0.03
COPY_DELAYED = f"before_copy=sleep({SLEEP_SECONDS})"
TIMEOUT_SECONDS = 60
# So many of the last saves of each row are right: by then the manager knows which tensors change.
SETTLED = 2

Verdict = Literal["right", "refused", "torn", "lost"]
BAD = ("torn", "lost")
Gather = Callable[[Any], list[Any]]
Cycle = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Saved:
    """One save of a run: what came of it."""

    step: int
    verdict: Verdict
    detail: str  # the reason of a refusal, or the keys that came back different
    named: frozenset[tuple[int, str]]  # of a refusal: rank and key
    overlapped: bool  # the copy was under way when `save()` returned
    save_seconds: float  # that `save()` held the training thread
    blocked_seconds: float  # the same with the waits at `optimizer.step()`, as the handle tells


@dataclass(frozen=True, slots=True)
class Result:
    """A whole run."""

    saves: tuple[Saved, ...]
    notes: Mapping[str, bool]  # what had to happen at least once for the pattern to show anything, and whether it did

    def problems(self, pattern: Pattern, *, delayed: bool) -> list[str]:
        """What the row's promise forbids."""
        found = [f"step {one.step}: {one.verdict}: {one.detail}" for one in self.saves if one.verdict in BAD]
        refused = [one for one in self.saves if one.verdict == "refused"]
        is_learned = delayed or not pattern.undone
        if len(refused) > pattern.refusals and is_learned:
            found += [f"step {one.step}: refused: {one.detail}" for one in refused]
        if pattern.refusals and is_learned:
            last = self.saves[-SETTLED:]
            found += [f"step {one.step}: {one.verdict}, though it is one of the last" for one in last if one in refused]
        seen: set[tuple[int, str]] = set()
        for one in refused:
            if one.named & seen:
                found.append(f"step {one.step}: still refused: {one.detail}")
            seen |= one.named
        if delayed and pattern.overlaps and not any(one.overlapped for one in self.saves[1:]):
            found.append("every copy was over when save() returned: nothing is overlapped")
        return found + [f"never: {what}" for what, happened in self.notes.items() if delayed and not happened]


@dataclass(frozen=True, slots=True)
class Pattern:
    """A way to train. `build(run)` makes everything and returns what happens between one save and the next."""

    name: str
    build: Callable[[Run], Cycle]
    refusals: int = 0  # so many saves may end as "failed", with a reason that names a tensor; never the last ones
    overlaps: bool = True  # the copy is not moved into `save()`, neither at first nor later
    devices: tuple[str, ...] = ("cpu", "sim")
    group: bool = False  # needs a process group (of one)
    slow: bool = False
    saves: int = 4
    # A change is undone before the step, by writes that no counter shows. So the manager learns of it only from a copy
    # that meets the change. If copies are not delayed, that may be the last one, and of each tensor another one; but no
    # tensor is named twice.
    undone: bool = False


@dataclass
class Run:
    """What a pattern works with. `manage` comes last, when model and optimizers are made."""

    device: str
    memory_dir: str
    delayed: bool  # whether the copy starts SLEEP_SECONDS after `save()`
    gather: Gather
    manager: CheckpointManager = field(init=False)
    handle: Any = None  # of the newest save
    saves: int = 0
    notes: dict[str, bool] = field(default_factory=dict)
    besides: dict[int, dict[str, Any]] = field(default_factory=dict)  # saves of the pattern's own, to be read
    cleanup: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    _parts: list[nn.Module] = field(default_factory=list)
    _optimizers: list[Any] = field(default_factory=list)
    _schedulers: list[Any] = field(default_factory=list)
    _states: Mapping[str, Any] = field(default_factory=dict)

    def manage(
        self,
        model: Any,
        optimizer: Any = None,
        *,
        lr_scheduler: Any = None,
        states: Mapping[str, Any] | None = None,
        members: list[Any] | None = None,
        **settings: Any,
    ) -> CheckpointManager:
        """Makes the manager, with these parts and settings.

        `members`: the optimizers in `optimizer`, where it is a container of them.
        """
        self._parts, self._optimizers = _listed(model), _listed(optimizer) if members is None else members
        self._schedulers, self._states = _listed(lr_scheduler), states or {}
        config = {"job": "table", "memory_dir": self.memory_dir, "enable_first_step_checkpoint": False, **settings}
        config.setdefault("verify", True)  # the default, which other tests raise to "recheck" by the environment
        self.manager = CheckpointManager(
            CheckpointConfig(interval=1, agent="off", **config),
            model=model,
            optimizer=optimizer,
            lr_scheduler=lr_scheduler,
            states=states,
        )
        self.cleanup.callback(self.manager.close)
        return self.manager

    def note(self, what: str, happened: bool) -> None:
        """The pattern shows something only if `what` happens at least once of the times it is noted."""
        self.notes[what] = self.notes.get(what, False) or happened

    def copy_is_under_way(self) -> bool:
        """Whether nothing of the newest save has been copied yet."""
        return self.handle is not None and self.handle.outcome is None and self.handle.level < Level.STAGED

    def save_besides(self) -> None:
        """A save of the pattern's own, at the step after the newest one. What of it can be read has to be right."""
        step = self.handle.step + 1
        self.besides[step] = self.reference()
        self.manager.save(step)

    def wait_until_copied(self) -> None:
        if self.handle is not None:
            self.handle.wait("sealed", timeout=TIMEOUT_SECONDS)

    def reference(self) -> dict[str, Any]:
        """The state as it is now, bit for bit, in the layout of a manager's checkpoint."""
        state: dict[str, Any] = {"model": {}}
        if any(isinstance(module, FullyShardedDataParallel) for part in self._parts for module in part.modules()):
            return self._reference_by_torch()
        for part in self._parts:
            state["model"].update({_clean(name): _cloned(value) for name, value in part.state_dict().items()})
        names = {id(p): _clean(name) for part in self._parts for name, p in part.named_parameters()}
        moments: dict[str, Any] = {}
        options: dict[str, Any] = {}
        option_tensors: dict[str, Any] = {}
        own: dict[str, Any] = {}
        for number, optimizer in enumerate(self._optimizers):
            is_zero = hasattr(optimizer, "consolidate_state_dict")  # each rank has the state of its own parameters
            values = optimizer.optim.state if is_zero else optimizer.state
            mine: dict[str, Any] = {}
            for group in optimizer.param_groups:
                plain = {k: v for k, v in group.items() if k != "params" and not isinstance(v, torch.Tensor)}
                tensors = {k: _cloned(v) for k, v in group.items() if isinstance(v, torch.Tensor)}
                for parameter in group["params"]:
                    name = names[id(parameter)]
                    options[name] = OneValue(_cloned(plain))
                    if tensors:
                        option_tensors[name] = tensors
                    if values.get(parameter):
                        mine[name] = _cloned(dict(values[parameter]))
            for some in self.gather(mine) if is_zero else [mine]:
                moments.update(some)
            if hasattr(optimizer, "averager"):  # PostLocalSGDOptimizer
                own[str(number)] = OneValue({"step": optimizer.averager.step})
        parts = {"state": moments, "param_groups": options, "param_group_tensors": option_tensors, "own": own}
        if self._optimizers:
            state["optimizer"] = {name: part for name, part in parts.items() if part}
        if self._schedulers:
            state["lr_scheduler"] = {str(n): OneValue(_cloned(s.state_dict())) for n, s in enumerate(self._schedulers)}
        state.update({name: _cloned(_stateful(value)) for name, value in self._states.items()})
        return state

    def _reference_by_torch(self) -> dict[str, Any]:
        """FSDP1 keeps flat parameters: only torch's helper knows what belongs to which name."""
        (model,), (optimizer,) = self._parts, self._optimizers
        told = get_optimizer_state_dict(model, optimizer)
        options = {
            name: OneValue({key: value for key, value in group.items() if key != "params"})
            for group in told["param_groups"]
            for name in group["params"]
        }
        moments = {name: _cloned(values) for name, values in told["state"].items()}
        return {
            "model": _cloned(get_model_state_dict(model)),
            "optimizer": {"state": moments, "param_groups": options},
        }


def run_pattern(
    pattern: Pattern, device: str, *, delayed: bool, memory_dir: str | None = None, gather: Gather | None = None
) -> Result:
    """Trains, saves, misbehaves, and reads every save back.

    Of several ranks, each calls it with the same `memory_dir`; `gather` gives what all of them told.
    """
    own_dir = tempfile.mkdtemp(prefix="flashckpt-test-", dir="/dev/shm") if memory_dir is None else None
    memory_dir = memory_dir or own_dir
    torch.manual_seed(0)
    run = Run(device, memory_dir, delayed, gather or (lambda told: [told]))
    try:
        with run.cleanup:
            if pattern.group:
                run.cleanup.enter_context(_group_of_one())
            failpoints.arm({})
            cycle = pattern.build(run)
            config = CheckpointConfig(job="table", memory_dir=memory_dir, agent="off")
            reader = run.cleanup.enter_context(Checkpointer(config))
            if delayed:
                failpoints.arm({"FLASHCKPT_TESTING": "1", "FLASHCKPT_FAILPOINTS": COPY_DELAYED})
            cycle()
            steps = range(10, 10 * pattern.saves + 1, 10)
            saves = tuple(_save_and_check(run, reader, cycle, step) for step in steps)
            return Result(saves, run.notes)
    finally:
        failpoints.arm()
        if own_dir is not None:
            shutil.rmtree(own_dir, ignore_errors=True)


def _save_and_check(run: Run, reader: Checkpointer, cycle: Cycle, step: int) -> Saved:
    reference = run.reference()
    began = time.perf_counter()
    run.handle = handle = run.manager.save(step)
    seconds = time.perf_counter() - began
    overlapped = run.copy_is_under_way()
    run.saves += 1
    cycle()
    run.manager.maybe_wait_for_staging()  # as the next save() does, which finds late changes
    outcome = handle.wait("sealed", timeout=TIMEOUT_SECONDS)
    told = run.gather((str(outcome), handle.reason))
    bad = [(one, reason) for one, reason in told if one != "ok"]
    torn = _read_besides(run, reader)

    def saved(verdict: Verdict, detail: str, named: frozenset[tuple[int, str]] = frozenset()) -> Saved:
        return Saved(step, verdict, detail, named, overlapped, seconds, handle.blocked_seconds)

    if torn:
        return saved("torn", torn)
    if not bad:
        different = _read_back(reader, step, reference)
        return saved("torn" if different else "right", ", ".join(different))
    keys = _leaves(reference)
    named = [_named(reason, keys) for _, reason in told]
    if all(one == "ok" or (one == "failed" and keys_named) for (one, _), keys_named in zip(told, named, strict=True)):
        who = frozenset((rank, key) for rank, some in enumerate(named) for key in some)
        return saved("refused", "; ".join(reason for _, reason in bad), who)
    return saved("lost", "; ".join(f"{one}: {reason}" for one, reason in bad))  # not a refusal that names a tensor


def _named(reason: str, keys: Iterable[str]) -> set[str]:
    """The keys in the reason of a refusal."""
    words = set(re.split(r"[\s,:]+", reason))
    return {key for key in keys if key in words}


def _read_besides(run: Run, reader: Checkpointer) -> str:
    """What is torn among the pattern's own saves; one that was interrupted may be gone."""
    internals_of(run.manager.checkpointer).settle()
    torn = []
    for step, reference in run.besides.items():
        with contextlib.suppress(NotFoundError):
            if different := _read_back(reader, step, reference):
                torn.append(f"step {step}, saved besides: {', '.join(different)}")
    run.besides.clear()
    return "; ".join(torn)


def _read_back(reader: Checkpointer, step: int, reference: dict[str, Any]) -> list[str]:
    """Keys under which the checkpoint holds something else, or that only one side has."""
    found = _blank(reference)
    result = reader.load(found, step, strict=False, read_only=True)
    if result is None or result.step != step:
        return [f"nothing: expected step {step}, found {result}"]
    different = [f"{key}: not saved" for key in result.missing]
    different += [f"{key}: not expected" for key in result.unexpected if not key.startswith(("rng", "\x1f"))]
    loaded = _leaves(found)
    for key, value in _leaves(reference).items():
        if key not in result.missing and not same(value, loaded[key]):
            different.append(key)
    return different


def same(a: Any, b: Any) -> bool:
    """Equal to the last bit, also where both are NaN."""
    if isinstance(a, torch.Tensor):
        return (
            isinstance(b, torch.Tensor) and a.shape == b.shape and a.dtype == b.dtype and torch.equal(bits(a), bits(b))
        )
    if isinstance(a, Mapping):
        return isinstance(b, Mapping) and a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype == b.dtype and np.array_equal(a, b)
    return type(a) is type(b) and bool(a == b)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def _cloned(value: Any) -> Any:
    """Clones where the tensor is, behind what is queued there: to wait for a device here would hide a race."""
    if is_traceable_wrapper_subclass(value) and not isinstance(value, DTensor):
        return {name: _cloned(getattr(value, name)) for name in value.__tensor_flatten__()[0]}
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, (PerRank, OneValue)):
        return type(value)(_cloned(value.value))
    if isinstance(value, Mapping):
        return {key: _cloned(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_cloned, value))
    return value


def _blank(value: Any) -> Any:
    """The same structure to load into, in host memory, with other contents."""
    if isinstance(value, DTensor):
        blank = torch.empty_like(value)
        bits(blank).fill_(0x5A)
        return blank
    if isinstance(value, torch.Tensor):
        blank = torch.empty(value.shape, dtype=value.dtype)
        blank.reshape(-1).view(torch.uint8).fill_(0x5A)
        return blank
    if isinstance(value, PerRank):
        return PerRank(_blank(value.value))
    if isinstance(value, OneValue):
        return OneValue(None)
    if isinstance(value, Mapping):
        return {key: _blank(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_blank, value))
    return None


def _leaves(value: Any, key: str = "") -> dict[str, Any]:
    if isinstance(value, (PerRank, OneValue)):
        return _leaves(value.value, key) if isinstance(value, PerRank) else {key: value.value}
    if isinstance(value, Mapping) and value:
        items: Iterable[tuple[Any, Any]] = value.items()
    elif isinstance(value, (list, tuple)) and any(isinstance(one, torch.Tensor) for one in value):
        items = enumerate(value)
    else:
        return {key: value}
    found: dict[str, Any] = {}
    for name, item in items:
        found.update(_leaves(item, f"{key}.{name}" if key else str(name)))
    return found


def _stateful(value: Any) -> Any:
    if isinstance(value, PerRank):
        return PerRank(_stateful(value.value))
    return value.state_dict() if hasattr(value, "state_dict") else value


def _clean(name: str) -> str:
    return name.removeprefix("module.").replace("_orig_mod.", "")


def _listed(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


@contextlib.contextmanager
def _group_of_one():
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
