"""Makes one state dict of the whole training state: captures its parts for a save, and lays them out for a load."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.distributed.checkpoint.stateful import Stateful

from flashckpt.errors import ConfigError
from flashckpt.state.flatten import OneValue, PerRank
from flashckpt.state.regions import address_of
from flashckpt.training.model import ModelState, model_parts
from flashckpt.training.optimizer import STATE, OptimizerState, own
from flashckpt.training.rng import capture_rng

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator

    import torch

log = logging.getLogger(__name__)

MODEL, OPTIMIZER, SCHEDULER, DATALOADER, RNG = "model", "optimizer", "lr_scheduler", "dataloader", "rng"
KNOWN = (MODEL, OPTIMIZER, SCHEDULER, DATALOADER, RNG)
_MOMENTS = f"{OPTIMIZER}.{STATE}."


class Opaque:
    """Takes the place of an owner that loads its state as one value. Passes the value to `hand_over`, or keeps it if
    there is no owner."""

    def __init__(self, hand_over: Callable[[Any], object] | None) -> None:
        self._hand_over = hand_over
        self.value: Any = None
        self.filled = False

    def state_dict(self) -> OneValue:
        return OneValue(None)

    def load_state_dict(self, state: OneValue) -> None:
        self.value, self.filled = state.value, True
        if self._hand_over is not None:
            self._hand_over(state.value)


@dataclass(frozen=True, slots=True)
class Template:
    """Holds the state dict that a load fills, and the two parts of it that the manager completes after the load."""

    state_dict: dict[str, Any]
    dataloader: Opaque
    rng: Opaque


class TrainingState:
    """Holds the objects that a manager was given. Captures their state for a save, and lays out what a load fills."""

    def __init__(
        self,
        *,
        model: Any,
        optimizer: Any = None,
        lr_scheduler: Any = None,
        dataloader: Any = None,
        states: Mapping[str, Any] | None = None,
        rng: bool = True,
    ) -> None:
        self.model = None if model is None else ModelState(model_parts(model))
        if optimizer is not None and self.model is None:
            raise ConfigError("optimizer: expected a model as well", hint="its state is saved by the model's names")
        self.optimizer = (
            OptimizerState(own(self.model.parts, optimizer)) if self.model and optimizer is not None else None
        )
        self.schedulers = _schedulers(lr_scheduler)
        self.dataloader = _capable(dataloader)
        self.states = _checked_states(states or {})
        self.rng = rng

    @property
    def optimizers(self) -> tuple[torch.optim.Optimizer, ...]:
        return () if self.optimizer is None else tuple(one.optimizer for one in self.optimizer.owned)

    @property
    def parts(self) -> tuple[str, ...]:
        """Return the names of the parts that a save contains."""
        present = {
            MODEL: self.model is not None,
            OPTIMIZER: self.optimizer is not None,
            SCHEDULER: bool(self.schedulers),
            DATALOADER: self.dataloader is not None,
            RNG: self.rng,
        }
        return (*(name for name, there in present.items() if there), *self.states)

    def capture(self, only: Collection[str] | None = None) -> dict[str, Any]:
        """Return the present state, for a save. `only` restricts it to these parts."""
        wanted = [part for part in self.parts if only is None or part in only]
        return {part: self._capture(part) for part in wanted}

    def changes_only_in_step(self) -> ChangesInStep:
        """Return an object that says whether a captured tensor may be deferred."""
        parts = () if self.model is None else self.model.parts
        return ChangesInStep(self._owned_parameters(), (p for part in parts for p in part.parameters()))

    def _owned_parameters(self) -> Iterator[torch.Tensor]:
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                yield from group["params"]

    def _capture(self, part: str) -> Any:
        if part == MODEL and self.model is not None:
            known = self.model.renamings
            captured = self.model.capture()
            if self.optimizer is not None and self.model.renamings != known:
                self.optimizer.forget_names()
            return captured
        if part == OPTIMIZER and self.optimizer is not None:
            return self.optimizer.capture()
        if part == SCHEDULER:
            return {str(number): OneValue(one.state_dict()) for number, one in enumerate(self.schedulers)}
        if part == DATALOADER:
            return PerRank(OneValue(self.dataloader.state_dict()))
        if part == RNG:
            return PerRank(OneValue(capture_rng()))
        return self.states[part]

    def template(self, parts: Collection[str]) -> Template:
        """Return what a load fills. Calls no state_dict() yet, because a load that finds nothing must change
        nothing."""
        laid: dict[str, Any] = {}
        dataloader, rng = Opaque(None if self.dataloader is None else self.dataloader.load_state_dict), Opaque(None)
        if MODEL in parts and self.model is not None:
            laid[MODEL] = self.model
        if OPTIMIZER in parts and self.optimizer is not None:
            laid[OPTIMIZER] = self.optimizer
        if SCHEDULER in parts:
            laid[SCHEDULER] = {str(n): Opaque(one.load_state_dict) for n, one in enumerate(self.schedulers)}
        # Also if the manager has no loader yet: the state is kept until it has one.
        if DATALOADER in parts:
            laid[DATALOADER] = PerRank(dataloader)
        if RNG in parts:
            laid[RNG] = PerRank(rng)
        laid.update({name: state for name, state in self.states.items() if name in parts})
        return Template(laid, dataloader, rng)


class ChangesInStep:
    """Decides whether a captured tensor may be deferred, and finds the parameter that it is an alias of."""

    def __init__(self, owned: Iterable[torch.Tensor], parameters: Iterable[torch.Tensor]) -> None:
        """Note the parameters of the model (`parameters`), and those that optimizers own (`owned`)."""
        self._parameters = {address_of(parameter): parameter for parameter in parameters}
        mine = {address_of(parameter): parameter for parameter in owned}
        self._parameters.update(mine)
        self._parameters.pop(0, None)
        self._owned = mine.keys() - {0}

    def __call__(self, key: str, tensor: torch.Tensor) -> bool | None:
        """Return True for a tensor that an optimizer owns: one of its parameters, or a part of its state.

        None for a parameter of the model that no optimizer owns: it may be frozen, or a teacher's. False for all
        others, which may change at any time: buffers change in a forward pass, learning rates are changed by a
        scheduler, and the user's own states by the user.
        """
        if key.startswith(_MOMENTS):
            return True
        if not key.startswith(f"{MODEL}."):
            return False
        address = address_of(tensor)
        if address in self._owned:
            return True
        return None if address in self._parameters else False

    def owner_of(self, key: str, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the parameter at the tensor's address, if any: the tensor in a state dict is an alias of it."""
        return None if key.startswith(_MOMENTS) else self._parameters.get(address_of(tensor))


def _schedulers(lr_scheduler: Any) -> tuple[Any, ...]:
    if lr_scheduler is None:
        return ()
    schedulers = tuple(lr_scheduler) if isinstance(lr_scheduler, (list, tuple)) else (lr_scheduler,)
    for one in schedulers:
        if not isinstance(one, Stateful):
            raise ConfigError(
                f"lr_scheduler: expected state_dict() and load_state_dict(), found a {type(one).__name__} without"
            )
    return schedulers


def _capable(dataloader: Any) -> Any:
    # accelerate's loaders have the methods, but call those of the loader inside, which usually has none.
    inside = getattr(dataloader, "base_dataloader", dataloader)
    if dataloader is None or (isinstance(dataloader, Stateful) and isinstance(inside, Stateful)):
        return dataloader
    advice = "torchdata's StatefulDataLoader has one"
    if inside is not dataloader:
        advice += "; accelerate uses it with DataLoaderConfiguration(use_stateful_dataloader=True)"
    log.warning(
        "dataloader: a %s has no state_dict(): its position is not saved, and a resumed run starts it anew. %s",
        type(dataloader).__name__,
        advice,
    )
    return None


def _checked_states(states: Mapping[str, Any]) -> dict[str, Any]:
    for name, state in states.items():
        if not isinstance(name, str) or not name or "." in name or name.startswith("\x1f"):
            raise ConfigError(f"states: expected names without dots, found {name!r}")
        if name in KNOWN:
            raise ConfigError(f"states: {name!r} is the name of a separate argument", hint=f"pass it as {name}=")
        inner = state.value if isinstance(state, PerRank) else state
        if isinstance(inner, OneValue):
            continue
        if not isinstance(inner, (Stateful, Mapping)):
            raise ConfigError(
                f"states[{name!r}]: expected a mapping, or an object with state_dict() and load_state_dict(), "
                f"found a {type(inner).__name__}",
                hint=f"states={{{name!r}: flashckpt.Whole(…)}} saves a list, or anything else, as one value",
            )
    return dict(states)
