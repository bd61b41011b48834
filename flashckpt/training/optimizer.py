"""The optimizers' part of the state, by the names of their parameters: fits any sharding and any pipeline split."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from flashckpt.errors import ConfigError, StructureError
from flashckpt.format.values import encode_once
from flashckpt.state.flatten import Whole
from flashckpt.training.names import Renaming

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from torch import nn

STATE, GROUPS, TENSORS = "state", "param_groups", "param_group_tensors"


@dataclass(frozen=True, slots=True)
class Owned:
    """An optimizer and the part of the model whose parameters it changes."""

    part: nn.Module
    optimizer: torch.optim.Optimizer


@dataclass(slots=True)
class _Template:
    """What a load filled, and where each parameter stands in its optimizer."""

    owned: Owned
    was_fresh: bool
    options: list[dict[str, Any]]  # of each group, as they were
    groups: list[list[str]]  # names, in the order of the optimizer's groups


@dataclass(frozen=True, slots=True)
class _Names:
    """The names of an optimizer's parameters, group by group."""

    names: list[list[str]]
    parameters: list[list[torch.Tensor]]

    def pairs(self) -> Iterator[tuple[str, torch.Tensor]]:
        for names, parameters in zip(self.names, self.parameters, strict=True):
            yield from zip(names, parameters, strict=True)

    def fit(self, optimizer: torch.optim.Optimizer) -> bool:
        groups = [group["params"] for group in optimizer.param_groups]
        return [len(names) for names in self.names] == list(map(len, groups)) == list(
            map(len, self.parameters)
        ) and all(
            a is b
            for mine, theirs in zip(self.parameters, groups, strict=True)
            for a, b in zip(mine, theirs, strict=True)
        )

    def agree(self, optimizer: torch.optim.Optimizer, told: dict[str, Any]) -> bool:
        """Whether torch's helper told the optimizer's own tensors (it makes others for FSDP1's flat parameters)."""
        return all(
            value is optimizer.state.get(parameter, {}).get(key)
            for name, parameter in self.pairs()
            for key, value in told.get(name, {}).items()
        )


class OptimizerState:
    """A Stateful: `state.<parameter>.<name>`, and `param_groups.<parameter>` with the options of its group.

    Options are by parameter, because a group is not the same in another pipeline split; those of one group are encoded
    once. Options that are tensors (a learning rate under torch.compile) are `param_group_tensors.<parameter>.<name>`.
    """

    def __init__(self, owned: Sequence[Owned]) -> None:
        self.owned = tuple(owned)
        self.renaming = Renaming()  # of the load that is under way
        self.saved_parameters: Collection[str] | None = None  # with state in the checkpoint; None: not known
        self._templates: list[_Template] = []
        self._names: dict[int, _Names] = {}

    def capture(self, overlap: bool) -> dict[str, Any]:
        """For a save. An optimizer that has not taken a step yet is not made to take one: it has options only."""
        merged: dict[str, Any] = {STATE: {}, GROUPS: {}, TENSORS: {}}
        for owned in self.owned:
            state = self._told(owned) or self._ask(owned)
            _merge(merged, state, Renaming(), lambda options: encode_once(options) or options)
        if overlap:
            # A scheduler changes a learning rate that is a tensor outside of optimizer.step().
            merged[TENSORS] = {
                name: {key: value.clone() for key, value in tensors.items()}
                for name, tensors in merged[TENSORS].items()
            }
        return _without_empty(merged)

    def _ask(self, owned: Owned) -> dict[str, Any]:
        """torch's helper finds every name anew, which takes longer than the copy of a small state. Remembers them."""
        with _no_first_step(owned.optimizer):
            state = cast("dict[str, Any]", get_optimizer_state_dict(owned.part, owned.optimizer))
        names = [group["params"] for group in state[GROUPS]]
        parameters = [list(group["params"]) for group in owned.optimizer.param_groups]
        known = _Names(names, parameters)
        if (
            _tells_as_it_is(owned.optimizer)
            and known.fit(owned.optimizer)
            and known.agree(owned.optimizer, state[STATE])
        ):
            self._names[id(owned.optimizer)] = known
        return state

    def _told(self, owned: Owned) -> dict[str, Any] | None:
        """The same from the optimizer itself, as long as its parameters are those whose names are known."""
        known = self._names.get(id(owned.optimizer))
        if known is None or not known.fit(owned.optimizer):
            return None
        state = owned.optimizer.state
        named = {name: state[p] for name, p in known.pairs() if p in state}
        groups = [
            {**group, "params": names} for group, names in zip(owned.optimizer.param_groups, known.names, strict=True)
        ]
        return {STATE: {name: values for name, values in named.items() if values}, GROUPS: groups}

    def state_dict(self) -> dict[str, Any]:
        """For a load: room for all that the checkpoint may hold, also in an optimizer that never took a step."""
        merged: dict[str, Any] = {STATE: {}, GROUPS: {}, TENSORS: {}}
        self._templates = []
        for owned in self.owned:
            fresh = not owned.optimizer.state
            # Before torch makes the room: an exception may come meanwhile, when it has set learning rates to zero.
            template = _Template(owned, fresh, [_options(group) for group in owned.optimizer.param_groups], [])
            self._templates.append(template)
            with _gradients_aside(owned.optimizer) if fresh else contextlib.nullcontext():
                state = get_optimizer_state_dict(owned.part, owned.optimizer)
            template.groups = [list(group["params"]) for group in cast("list[dict[str, Any]]", state[GROUPS])]
            _merge(merged, state, self.renaming, lambda options: options)
        return _without_empty(merged)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        moments, tensors = state.get(STATE, {}), state.get(TENSORS, {})
        options = {name: {**one.value, **tensors.get(name, {})} for name, one in state[GROUPS].items()}
        for template in self._templates:
            names = [name for group in template.groups for name in group]
            unfilled = {name for name in names if not self._was_saved(name)}
            saved = {name: self.renaming.saved_name(name) for name in names}
            set_optimizer_state_dict(
                template.owned.part,
                template.owned.optimizer,
                {
                    STATE: {name: moments[saved[name]] for name in names if saved[name] in moments},
                    GROUPS: [_group(group, options, saved) for group in template.groups],
                },
            )
            _forget(template, unfilled)
        self._templates = []

    def unfilled(self) -> set[str]:
        """Names, as the checkpoint has them, of parameters that it holds no state of."""
        names = (name for template in self._templates for group in template.groups for name in group)
        return {self.renaming.saved_name(name) for name in names if not self._was_saved(name)}

    def undo(self) -> None:
        """Nothing was loaded: an optimizer that was fresh is so again. May be repeated."""
        for template in self._templates:
            if template.was_fresh:
                template.owned.optimizer.state.clear()
                for group, options in zip(template.owned.optimizer.param_groups, template.options, strict=True):
                    group.update(options)
        self._templates = []

    def _was_saved(self, name: str) -> bool:
        return self.saved_parameters is None or self.renaming.saved_name(name) in self.saved_parameters


def own(parts: Sequence[nn.Module], optimizer: Any) -> tuple[Owned, ...]:
    """Which part of the model each optimizer works on. Raises ConfigError where that is not one part."""
    optimizers = tuple(optimizer) if isinstance(optimizer, (list, tuple)) else (optimizer,)
    homes = {id(parameter): part for part in parts for parameter in part.parameters()}
    owned: list[Owned] = []
    seen: set[int] = set()
    for one in optimizers:
        if not isinstance(one, torch.optim.Optimizer):
            raise ConfigError(f"optimizer: expected a torch optimizer or a list of them, found a {type(one).__name__}")
        parameters = [parameter for group in one.param_groups for parameter in group["params"]]
        found = {id(homes[id(p)]): homes[id(p)] for p in parameters if id(p) in homes}
        strangers = sum(id(p) not in homes for p in parameters)
        if strangers or not found:
            raise ConfigError(
                f"optimizer: {strangers} of {len(parameters)} parameters of {type(one).__name__} are not the model's",
                hint="make the optimizer after the model is sharded and wrapped, from model.parameters()",
            )
        if len(found) > 1:
            raise ConfigError(
                f"optimizer: {type(one).__name__} has parameters of {len(found)} parts of the model",
                hint="make one optimizer for each pipeline part",
            )
        if any(id(p) in seen for p in parameters):
            raise ConfigError("optimizer: two optimizers have the same parameter")
        seen.update(map(id, parameters))
        owned.append(Owned(next(iter(found.values())), one))
    return tuple(owned)


def _tells_as_it_is(optimizer: torch.optim.Optimizer) -> bool:
    """Whether state_dict() is torch's own and nobody hooked into it."""
    hooks = [getattr(optimizer, f"_optimizer_state_dict_{when}_hooks", None) for when in ("pre", "post")]
    return type(optimizer).state_dict is torch.optim.Optimizer.state_dict and not any(hooks)


def _merge(
    merged: dict[str, Any], state: dict[str, Any], renaming: Renaming, form: Callable[[dict[str, Any]], Any]
) -> None:
    for name, values in state[STATE].items():
        merged[STATE][renaming.saved_name(name)] = values
    for group in state[GROUPS]:
        tensors = {key: value for key, value in group.items() if isinstance(value, torch.Tensor)}
        formed = form({key: value for key, value in group.items() if key != "params" and key not in tensors})
        for name in group["params"]:
            merged[GROUPS][renaming.saved_name(name)] = Whole(formed)
            if tensors:
                merged[TENSORS][renaming.saved_name(name)] = dict(tensors)


def _without_empty(merged: dict[str, Any]) -> dict[str, Any]:
    """Nothing is not a key: an optimizer without moments has none under that name."""
    return {key: value for key, value in merged.items() if value}


def _group(names: list[str], saved_options: dict[str, Any], saved: dict[str, str]) -> dict[str, Any]:
    options = [saved_options[saved[name]] for name in names]
    for name, one in zip(names, options, strict=True):
        for key, value in one.items():
            if not _equal(options[0][key], value):
                raise StructureError(
                    f"optimizer: {names[0]!r} and {name!r} are in one group now, but were saved with "
                    f"{key} {options[0][key]!r} and {value!r}",
                    hint="group the parameters as when they were saved, or exclude_from_loading=['optimizer']",
                    key=name,
                )
    return {**(options[0] if options else {}), "params": list(names)}


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return torch.equal(a, b)
    return bool(a == b)


def _forget(template: _Template, unfilled: set[str]) -> None:
    """A parameter that had no state when it was saved (no gradient ever reached it) has none now."""
    for names, group in zip(template.groups, template.owned.optimizer.param_groups, strict=True):
        for name, parameter in zip(names, group["params"], strict=True):
            if name in unfilled:
                template.owned.optimizer.state.pop(parameter, None)


@contextlib.contextmanager
def _no_first_step(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """torch makes a fresh optimizer take a step before it tells its state, unless there is a gradient already."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if optimizer.state or any(p.grad is not None for p in parameters):
        yield
        return
    marked = parameters[0]
    try:
        marked.grad = torch.zeros_like(marked)
        yield
    finally:
        marked.grad = None


@contextlib.contextmanager
def _gradients_aside(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """…and where there is one it would make no room for the moments, and they would be lost without a word."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    gradients = [p.grad for p in parameters]
    try:
        for parameter in parameters:
            parameter.grad = None
        yield
    finally:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
