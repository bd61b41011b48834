"""The optimizers' part of the state, by the names of their parameters: fits any sharding and any pipeline split."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel

from flashckpt.errors import ConfigError, InternalError, StructureError
from flashckpt.format.values import encode_once
from flashckpt.state.flatten import OneValue, flatten
from flashckpt.state.sole import SoleTensor
from flashckpt.training.names import Renaming
from flashckpt.training.room import make_room, rehearse
from flashckpt.training.wrappers import unwrap

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import nn

    from flashckpt.load.recover import Found
    from flashckpt.training.room import Below

log = logging.getLogger(__name__)

STATE, GROUPS, TENSORS, OWN = "state", "param_groups", "param_group_tensors", "own"
_PART, _MODEL = "optimizer", "model"  # keys of a checkpoint begin with them
# Options that schedulers add to a group; all others are the optimizer's or the user's.
_OF_SCHEDULERS = frozenset({"initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum", "swa_lr"})
_NAMES = "param_names"  # torch's own list of names in a group: of this model, not of the checkpoint


@dataclass(frozen=True, slots=True)
class Owned:
    """An optimizer and the part of the model whose parameters it changes."""

    part: nn.Module
    optimizer: torch.optim.Optimizer  # holds the state
    outer: Any  # what wraps it, or itself: asked for its state dict
    sharded: bool = False  # the optimizer has only this rank's parameters of `outer`

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The groups of all parameters, also of those whose state other ranks have."""
        found: list[dict[str, Any]] = self.outer.param_groups if self.sharded else self.optimizer.param_groups
        return found

    @property
    def is_flat(self) -> bool:
        """Whether FSDP1 shards the part: a flat parameter has many names, which only torch's helper knows."""
        return any(isinstance(module, FullyShardedDataParallel) for module in self.part.modules())


@dataclass(frozen=True, slots=True)
class _Told:
    """An optimizer's state by name."""

    state: dict[str, dict[str, Any]]
    groups: list[dict[str, Any]]  # options, and the names under "params"
    own: dict[str, Any] = field(default_factory=dict)  # what else its state dict has


@dataclass(frozen=True, slots=True)
class _Template:
    """What a load fills for one optimizer."""

    owned: Owned
    told: _Told  # before the load
    kept: frozenset[str]  # names that the checkpoint does not know: their state stays
    own: bool  # whether the checkpoint has the wrapper's own state


@dataclass(frozen=True, slots=True)
class _Names:
    """The names of an optimizer's parameters, group by group."""

    names: list[list[str]]
    parameters: list[list[torch.Tensor]]

    def pairs(self) -> Iterator[tuple[str, torch.Tensor]]:
        for names, parameters in zip(self.names, self.parameters, strict=True):
            yield from zip(names, parameters, strict=True)

    def fit(self, groups: Sequence[Mapping[str, Any]]) -> bool:
        theirs = [group["params"] for group in groups]
        return list(map(len, self.parameters)) == list(map(len, theirs)) and all(
            a is b
            for mine, others in zip(self.parameters, theirs, strict=True)
            for a, b in zip(mine, others, strict=True)
        )


class OptimizerState:
    """A Stateful: `state.<parameter>.<name>`, and `param_groups.<parameter>` with the options of its group.

    Options are by parameter, because a group is not the same in another pipeline split; those of one group are encoded
    once. Options that are tensors (a learning rate under torch.compile) are `param_group_tensors.<parameter>.<name>`.
    What a wrapper's state dict has beside these is `own.<number of the optimizer>`.

    IMPORTANT: nothing here calls the user's step() or a helper that does: hooks and schedulers would count it.
    """

    def __init__(self, owned: Sequence[Owned]) -> None:
        self.owned = tuple(owned)
        self.renaming = Renaming()  # of the load that is under way
        self._found: Found | None = None  # what it is loading; None: no optimizer's state
        self._below: dict[str, Below] = {}  # by the names of parameters in the checkpoint
        self._templates: list[_Template] = []
        self._names: dict[int, _Names] = {}  # by the identity of an optimizer
        self._parts: dict[int, dict[torch.Tensor, str]] = {}  # by that of a part
        self._layouts: dict[int, list[str | int]] = {}  # of the parts when the names were found

    # --- save -----------------------------------------------------------------------------------------------

    def capture(self) -> dict[str, Any]:
        """For a save. An optimizer that has not taken a step yet is not made to take one: it has options only."""
        self._forget_moved_names()
        merged: dict[str, Any] = {STATE: {}, GROUPS: {}, TENSORS: {}, OWN: {}}
        for number, owned in enumerate(self.owned):
            told = self._tell(owned)
            state = _alone(told.state) if owned.sharded else told.state
            _merge(merged, state, told.groups, Renaming(), lambda options: encode_once(options) or options)
            if told.own:
                merged[OWN][str(number)] = OneValue(told.own)
        return _without_empty(merged)

    def _tell(self, owned: Owned) -> _Told:
        """The live state by name, without a copy. Parameters without state are left out."""
        if owned.is_flat:
            return _tell_flat(owned)
        names = self._names_of(owned)
        state, groups, own = _read(owned)
        named = {name: state[parameter] for name, parameter in names.pairs() if parameter in state}
        return _Told(
            {name: values for name, values in named.items() if values},
            [{**group, "params": mine} for group, mine in zip(groups, names.names, strict=True)],
            own,
        )

    def forget_names(self) -> None:
        """Forget the names, because pruning or a parametrization has renamed parameters."""
        self._names.clear()
        self._parts.clear()

    def _forget_moved_names(self) -> None:
        """Forget the names if a module or a parameter has taken another place in the model since they were found.

        The same parameters may then have each other's names: layers that were put in another order.
        """
        parts = {id(owned.part): owned.part for owned in self.owned if not owned.is_flat}
        if self._layouts == {number: _layout(part) for number, part in parts.items()}:
            return
        for part in parts.values():
            part.state_dict()  # FSDP2 may have left gathered parameters in their place: its hook puts them back
        layouts = {number: _layout(part) for number, part in parts.items()}
        if layouts != self._layouts:
            self.forget_names()
            self._layouts = layouts

    def _names_of(self, owned: Owned) -> _Names:
        """Return the names and remember them: torch's helper takes longer to find them than a small copy takes."""
        mine = self._names.get(id(owned.outer))
        if mine is not None and mine.fit(owned.groups):
            return mine
        parameters = [list(group["params"]) for group in owned.groups]
        names = self._parts.get(id(owned.part), {})
        if any(p not in names for group in parameters for p in group):
            names = self._parts[id(owned.part)] = _names_in(owned.part)
        _refuse_strangers(owned.outer, owned.groups, names)
        mine = _Names([[names[p] for p in group] for group in parameters], parameters)
        self._names[id(owned.outer)] = mine
        return mine

    # --- load -----------------------------------------------------------------------------------------------

    def lay_out(self, found: Found | None) -> frozenset[str]:
        """Prepares to load `found`; None: no optimizer state is wanted. Returns keys to leave out.

        Raises StructureError if it is the state of another kind of optimizer.
        """
        self._found, self._below = found, {}
        self._forget_moved_names()
        if found is None:
            return frozenset()
        told = [self._tell(owned) for owned in self.owned]
        ours = {self.renaming.saved_name(name) for one in told for group in one.groups for name in group["params"]}
        prefix = f"{_PART}.{STATE}."
        # IMPORTANT: in the same order on all ranks, because FSDP1 gathers one moment after the other.
        for key in sorted(key for key in found.keys if key.startswith(prefix)):
            tail = key[len(prefix) :]
            name = tail.rpartition(".")[0]
            while name and name not in ours:
                name = name.rpartition(".")[0]
            if name:
                self._below.setdefault(name, {})[tail[len(name) + 1 :]] = found.entry(key)
        for owned, one in zip(self.owned, told, strict=True):
            self._refuse_another_kind(owned, one, found)
        return self._without_owner(told, found)

    def _refuse_another_kind(self, owned: Owned, told: _Told, found: Found) -> None:
        """Raise StructureError if the checkpoint has the options, and so the moments, of another kind of optimizer."""
        for group in told.groups:
            for name in group["params"][:1]:
                there, options = found.value(f"{_PART}.{GROUPS}.{self.renaming.saved_name(name)}")
                if not there or not isinstance(options, dict):
                    continue
                defaults = getattr(owned.optimizer, "defaults", {})
                # An option that is off by default may be newer than the checkpoint.
                lacking = [k for k, v in defaults.items() if k not in options and v is not None and v is not False]
                lacking = [key for key in lacking if not isinstance(group.get(key), torch.Tensor)]
                surplus = [key for key in options if key not in {*group, _NAMES} and key not in _OF_SCHEDULERS]
                if lacking and surplus:
                    raise StructureError(
                        f"optimizer: expected the options of {type(owned.optimizer).__name__} for {name!r} (among them "
                        f"{', '.join(map(repr, lacking))}), found those of another optimizer (among them "
                        f"{', '.join(map(repr, surplus))})",
                        hint="make the optimizer that was saved, or exclude_from_loading=['optimizer', 'lr_scheduler']",
                        key=name,
                    )

    def _without_owner(self, told: Sequence[_Told], found: Found) -> frozenset[str]:
        prefix = f"{_PART}.{OWN}."
        saved = {key[len(prefix) :] for key in found.keys if key.startswith(prefix)}
        live = {str(number) for number, one in enumerate(told) if one.own}
        if saved - live:
            log.warning(
                "step %d: the own state of the wrapper of optimizer %s is not loaded: there is no such wrapper now",
                found.step,
                ", ".join(sorted(saved - live)),
            )
        if live - saved:
            log.warning(
                "step %d: the own state of the wrapper of optimizer %s stays as it is: the step does not have it",
                found.step,
                ", ".join(sorted(live - saved)),
            )
        return frozenset(prefix + number for number in saved - live)

    def state_dict(self) -> dict[str, Any]:
        """For a load: tensors to fill for all that the checkpoint has of these parameters. Changes no optimizer."""
        merged: dict[str, Any] = {STATE: {}, GROUPS: {}, TENSORS: {}, OWN: {}}
        self._templates = []
        for number, owned in enumerate(self.owned):
            told = self._tell(owned)
            names = [name for group in told.groups for name in group["params"]]
            if self._found is None:
                _merge(merged, told.state, told.groups, self.renaming, lambda options: options)
                self._templates.append(_Template(owned, told, frozenset(), own=False))
                continue
            found = self._found
            kept = frozenset(name for name in names if not self._is_known(name))
            own = f"{_PART}.{OWN}.{number}" in found.keys and bool(told.own)
            room = self._room(owned, told)
            _merge(merged, room, told.groups, self.renaming, lambda options: options)
            merged[TENSORS].update(self._room_for_options(told, found))
            if own:
                merged[OWN][str(number)] = OneValue(None)
            self._templates.append(_Template(owned, told, kept, own))
        return _without_empty(merged)

    def _is_known(self, name: str) -> bool:
        saved = self.renaming.saved_name(name)
        return self._found is None or saved in self._below or f"{_PART}.{GROUPS}.{saved}" in self._found.keys

    def _room(self, owned: Owned, told: _Told) -> dict[str, Any]:
        """Return state to fill, by name, for every parameter of this rank that has state in the checkpoint."""
        references = self._references(owned)
        room: dict[str, Any] = {}
        rehearsed: dict[str, Any] | None = None
        for name, reference in references.items():
            saved = self.renaming.saved_name(name)
            below = self._below.get(saved)
            if not below:
                continue
            made = told.state.get(name)  # filled in place if it has the same structure
            if made is None or not _fits(made, below):
                model = None if self._found is None else self._found.entry(f"{_MODEL}.{saved}")
                made = make_room(below, reference, None if model is None else model.dtype)
            if made is None:
                if rehearsed is None:
                    rehearsed = {} if owned.is_flat else self._rehearse(owned)
                made = rehearsed.get(name)
            if made is None or not _fits(made, below):
                raise StructureError(
                    f"optimizer: expected state of {type(owned.optimizer).__name__} for {name!r}, found "
                    f"{', '.join(map(repr, sorted(below)[:6]))} in the checkpoint, whose structure this optimizer does "
                    "not have yet",
                    hint="load once it has taken a step, or exclude_from_loading=['optimizer', 'lr_scheduler']",
                    key=name,
                )
            room[name] = made
        return room

    def _references(self, owned: Owned) -> dict[str, torch.Tensor]:
        """Return, by name, the tensors whose form the moments take: the parameters whose state this rank has."""
        if owned.is_flat:
            return cast("dict[str, torch.Tensor]", get_model_state_dict(owned.part))
        held = {id(p) for group in owned.optimizer.param_groups for p in group["params"]}
        return {name: parameter for name, parameter in self._names_of(owned).pairs() if id(parameter) in held}

    def _rehearse(self, owned: Owned) -> dict[str, Any]:
        log.info("%s: a copy of it takes a step, which shows how its state is nested", type(owned.optimizer).__name__)
        state = rehearse(owned.optimizer)
        return {name: state[parameter] for name, parameter in self._names_of(owned).pairs() if parameter in state}

    def _room_for_options(self, told: _Told, found: Found) -> dict[str, Any]:
        rooms: dict[str, Any] = {}
        prefix = f"{_PART}.{TENSORS}."
        saved: dict[str, list[str]] = {}
        for key in sorted(key for key in found.keys if key.startswith(prefix)):
            name, _, option = key[len(prefix) :].rpartition(".")
            saved.setdefault(name, []).append(option)
        for group in told.groups:
            for name in group["params"]:
                theirs = self.renaming.saved_name(name)
                rooms[theirs] = {}
                for option in saved.get(theirs, ()):
                    entry, live = found.entry(f"{prefix}{theirs}.{option}"), group.get(option)
                    if entry is not None:
                        device = live.device if isinstance(live, torch.Tensor) else None
                        dtype = getattr(torch, entry.dtype)
                        rooms[theirs][option] = torch.empty(entry.global_shape, dtype=dtype, device=device)
        return {name: room for name, room in rooms.items() if room}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        moments, tensors = state.get(STATE, {}), state.get(TENSORS, {})
        options = {name: {**one.value, **tensors.get(name, {})} for name, one in state[GROUPS].items()}
        for number, template in enumerate(self._templates):
            told = template.told
            names = [name for group in told.groups for name in group["params"]]
            saved = {name: self.renaming.saved_name(name) for name in names}
            filled = {name: moments[saved[name]] for name in names if saved[name] in moments}
            filled.update({name: told.state[name] for name in template.kept if name in told.state})
            groups = [_group(group, options, saved) for group in told.groups]
            own = state[OWN][str(number)].value if template.own else told.own
            self._hand_over(template.owned, _Told(filled, groups, own))
        self._templates = []

    def _hand_over(self, owned: Owned, told: _Told) -> None:
        if owned.is_flat:
            _hand_over_flat(owned, told)
            return
        names = self._names_of(owned)
        of = {parameter: told.state[name] for name, parameter in names.pairs() if name in told.state}
        if owned.sharded:
            # load_state_dict() of the outer optimizer needs the state of all ranks.
            _hand_over_sharded(owned, of, told)
            return
        payload = _payload(owned.optimizer.param_groups, of, told.groups)
        payload[STATE].update(told.own.get(STATE, {}))
        payload.update({key: value for key, value in told.own.items() if key != STATE})
        _load_keeping_rates(owned, payload)
        _put_back(owned.optimizer, of)

    def end_load(self) -> None:
        """Forget what `lay_out` and `state_dict` have prepared."""
        self._found, self._below, self._templates = None, {}, []


def own(parts: Sequence[nn.Module], optimizer: Any) -> tuple[Owned, ...]:
    """Find the part of the model that each optimizer works on. Raises ConfigError if it is not one part."""
    homes: dict[torch.Tensor, nn.Module] = {parameter: part for part in parts for parameter in part.parameters()}
    owned: list[Owned] = []
    seen: set[int] = set()
    for one in unwrap(optimizer):
        groups = one.outer.param_groups if one.sharded else one.optimizer.param_groups
        parameters = [parameter for group in groups for parameter in group["params"]]
        found = {id(homes[p]): homes[p] for p in parameters if p in homes}
        _refuse_strangers(one.outer, groups, homes)
        if len(found) > 1:
            raise ConfigError(
                f"optimizer: {type(one.outer).__name__} has parameters of {len(found)} parts of the model",
                hint="make one optimizer for each pipeline part",
            )
        if any(id(p) in seen for p in parameters):
            raise ConfigError("optimizer: two optimizers have the same parameter")
        seen.update(map(id, parameters))
        owned.append(Owned(next(iter(found.values())), one.optimizer, one.outer, one.sharded))
    return tuple(owned)


def _refuse_strangers(optimizer: Any, groups: Sequence[Mapping[str, Any]], known: Mapping[Any, Any]) -> None:
    parameters = [parameter for group in groups for parameter in group["params"]]
    strangers = sum(p not in known for p in parameters)
    if strangers or not parameters:
        raise ConfigError(
            f"optimizer: {strangers} of {len(parameters)} parameters of {type(optimizer).__name__} are not the model's",
            hint="make the optimizer after the model is sharded and wrapped, from model.parameters()",
        )


class _Probe(torch.optim.Optimizer):
    """Passes parameters and options to torch's helper, which would make an optimizer without state take a step."""

    def __init__(self, groups: Sequence[Mapping[str, Any]]) -> None:
        super().__init__([dict(group) for group in groups], {})
        self.state.update({parameter: {} for group in groups for parameter in group["params"]})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        raise InternalError("an optimizer that only passes parameters to torch was made to take a step")


def _layout(part: nn.Module) -> list[str | int]:
    """Return names and identities of all modules' parameters: equal as long as each parameter keeps its place."""
    found: list[str | int] = []
    pending: list[tuple[str, nn.Module]] = [("", part)]
    while pending:
        name, module = pending.pop()
        found.append(name)
        for key, parameter in module._parameters.items():
            found += (key, id(parameter))
        found.append(len(module._modules))
        pending += [(key, child) for key, child in module._modules.items() if child is not None]
    return found


def _names_in(part: nn.Module) -> dict[torch.Tensor, str]:
    """Return the names of all parameters as torch's helper gives them: without wrappers."""
    parameters = list(part.parameters())
    told = cast("dict[str, Any]", get_optimizer_state_dict(part, _Probe([{"params": parameters}])))
    return dict(zip(parameters, told[GROUPS][0]["params"], strict=True))


def _tell_flat(owned: Owned) -> _Told:
    asked = owned.optimizer if owned.optimizer.state else _Probe(owned.optimizer.param_groups)
    told = cast("dict[str, Any]", get_optimizer_state_dict(owned.part, asked))
    return _Told({name: values for name, values in told[STATE].items() if values}, told[GROUPS], _read(owned)[2])


def _read(owned: Owned) -> tuple[dict[torch.Tensor, Any], list[dict[str, Any]], dict[str, Any]]:
    """Return state by parameter, options by group, and the rest of the optimizer's own state dict."""
    if owned.sharded or _tells_as_it_is(owned.outer):
        state = owned.optimizer.state
        loose = {key: value for key, value in state.items() if not isinstance(key, torch.Tensor)}
        return cast("dict[torch.Tensor, Any]", state), owned.groups, {STATE: loose} if loose else {}
    told = type(owned.outer).state_dict(owned.outer)
    parameters = [p for group in owned.groups for p in group["params"]]
    numbers = [n for group in told.get(GROUPS, ()) for n in group.get("params", ())] if isinstance(told, dict) else []
    if len(numbers) != len(parameters) or not isinstance(told.get(STATE), dict):
        raise ConfigError(
            f"optimizer: expected state_dict() of {type(owned.outer).__name__} to have 'state' and 'param_groups' with "
            f"{len(parameters)} parameters, found {sorted(told) if isinstance(told, dict) else type(told).__name__} "
            f"with {len(numbers)}",
            hint="pass the torch optimizers that it uses as a list",
        )
    by_number = dict(zip(numbers, parameters, strict=True))
    own = {key: value for key, value in told.items() if key not in (STATE, GROUPS)}
    loose = {number: value for number, value in told[STATE].items() if number not in by_number}
    return (
        {by_number[number]: value for number, value in told[STATE].items() if number in by_number},
        [{key: value for key, value in group.items() if key != "params"} for group in told[GROUPS]],
        {**own, STATE: loose} if loose else own,
    )


def _tells_as_it_is(optimizer: Any) -> bool:
    """Whether state_dict() is torch's own and has no hooks."""
    hooks = [getattr(optimizer, f"_optimizer_state_dict_{when}_hooks", None) for when in ("pre", "post")]
    return type(optimizer).state_dict is torch.optim.Optimizer.state_dict and not any(hooks)


def _payload(
    groups: Sequence[Mapping[str, Any]], state: Mapping[torch.Tensor, Any], options: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """Make a state dict with the parameters numbered as Optimizer.state_dict() numbers them."""
    numbers: dict[torch.Tensor, int] = {}
    for group in groups:
        for parameter in group["params"]:
            numbers.setdefault(parameter, len(numbers))
    return {
        STATE: {number: state[parameter] for parameter, number in numbers.items() if parameter in state},
        GROUPS: [
            {**mine, "params": [numbers[parameter] for parameter in group["params"]]}
            for group, mine in zip(groups, options, strict=True)
        ],
    }


def _load_keeping_rates(owned: Owned, payload: dict[str, Any]) -> None:
    """Load, but fill options that are tensors in place: a compiled or captured step reads these very objects."""
    live = [
        {key: value for key, value in group.items() if isinstance(value, torch.Tensor)}
        for group in owned.optimizer.param_groups
    ]
    type(owned.outer).load_state_dict(owned.outer, payload)
    for group, tensors in zip(owned.optimizer.param_groups, live, strict=True):
        for key, tensor in tensors.items():
            value = group.get(key)
            if isinstance(value, (int, float)) or (isinstance(value, torch.Tensor) and value.shape == tensor.shape):
                with torch.no_grad():
                    tensor.copy_(torch.as_tensor(value))
                group[key] = tensor


def _put_back(optimizer: torch.optim.Optimizer, state: Mapping[torch.Tensor, Any]) -> None:
    """Undo what Optimizer.load_state_dict does: it casts moments to their parameter's dtype and spoils strings."""
    hooks = [getattr(optimizer, f"_optimizer_load_state_dict_{when}_hooks", None) for when in ("pre", "post")]
    if type(optimizer).load_state_dict is not torch.optim.Optimizer.load_state_dict or any(hooks):
        return
    for parameter, values in state.items():
        loaded = optimizer.state.get(parameter, {})
        for key, value in values.items():
            now = loaded.get(key)
            if isinstance(value, torch.Tensor) and isinstance(now, torch.Tensor):
                if now.dtype != value.dtype and key != "step":
                    loaded[key] = value
            elif not isinstance(value, (torch.Tensor, int, float)) and _holds_text_or_mappings(value):
                loaded[key] = value


def _holds_text_or_mappings(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(map(_holds_text_or_mappings, value))
    return isinstance(value, (str, dict))


def _hand_over_sharded(owned: Owned, state: Mapping[torch.Tensor, Any], told: _Told) -> None:
    """Give the local optimizer the state of this rank's parameters, and all groups their options."""
    options = [{key: value for key, value in group.items() if key != "params"} for group in told.groups]
    by_parameter = {id(p): mine for group, mine in zip(owned.groups, options, strict=True) for p in group["params"]}
    local = owned.optimizer.param_groups
    theirs = [
        by_parameter[id(group["params"][0])] if group["params"] else {k: v for k, v in group.items() if k != "params"}
        for group in local
    ]
    owned.optimizer.load_state_dict(_payload(local, state, theirs))
    _put_back(owned.optimizer, state)
    for group, mine in zip(owned.groups, options, strict=True):
        group.update(mine)


def _hand_over_flat(owned: Owned, told: _Told) -> None:
    marker = owned.optimizer.param_groups[0]["params"][0]
    fresh = not owned.optimizer.state
    if fresh:
        owned.optimizer.state[marker] = {}  # else torch's helper makes it take a step
    try:
        set_optimizer_state_dict(
            owned.part,
            owned.optimizer,
            cast("dict[str, Any]", {STATE: told.state, GROUPS: told.groups}),
            options=StateDictOptions(strict=False),
        )
    finally:
        if fresh and owned.optimizer.state.get(marker) == {}:
            del owned.optimizer.state[marker]
    if told.own:
        payload = {**owned.optimizer.state_dict(), **{key: value for key, value in told.own.items() if key != STATE}}
        type(owned.outer).load_state_dict(owned.outer, payload)


def _alone(value: Any) -> Any:
    """Mark each tensor as one that only this rank holds."""
    if isinstance(value, torch.Tensor):
        return SoleTensor(value)
    if isinstance(value, dict):
        return {key: _alone(item) for key, item in value.items()}
    return type(value)(map(_alone, value)) if type(value) in (list, tuple) else value


def _fits(made: Any, below: Below) -> bool:
    flat = flatten(made)
    return (
        flat.tensors.keys() | flat.values.keys() == below.keys()
        and all(below[tail] is not None for tail in flat.tensors)
        and all(below[tail] is None for tail in flat.values)
    )


def _merge(
    merged: dict[str, Any],
    state: Mapping[str, Any],
    groups: Sequence[Mapping[str, Any]],
    renaming: Renaming,
    form: Callable[[dict[str, Any]], Any],
) -> None:
    for name, values in state.items():
        merged[STATE][renaming.saved_name(name)] = values
    for group in groups:
        tensors = {key: value for key, value in group.items() if isinstance(value, torch.Tensor)}
        formed = form({key: value for key, value in group.items() if key != "params" and key not in tensors})
        for name in group["params"]:
            merged[GROUPS][renaming.saved_name(name)] = OneValue(formed)
            if tensors:
                merged[TENSORS][renaming.saved_name(name)] = dict(tensors)


def _without_empty(merged: dict[str, Any]) -> dict[str, Any]:
    """Drop empty parts: an optimizer without moments has no key for them."""
    return {key: value for key, value in merged.items() if value}


def _group(live: Mapping[str, Any], saved_options: dict[str, Any], saved: dict[str, str]) -> dict[str, Any]:
    """Return a group's saved options, which its parameters must share; live options where none were saved."""
    names = live["params"]
    options = [saved_options[saved[name]] for name in names]
    for name, one in zip(names, options, strict=True):
        for key, value in one.items():
            if key != _NAMES and (key not in options[0] or not _equal(options[0][key], value)):
                raise StructureError(
                    f"optimizer: {names[0]!r} and {name!r} are in one group now, but were saved with "
                    f"{key} {options[0].get(key)!r} and {value!r}",
                    hint="group the parameters as when they were saved, or exclude_from_loading=['optimizer']",
                    key=name,
                )
    first = options[0] if options else {}
    found = {**live, **{key: value for key, value in first.items() if key != _NAMES}, "params": list(names)}
    if _NAMES in first and _NAMES not in live:
        found.pop(_NAMES, None)
    return found


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return torch.equal(a, b)
    return bool(a == b)
