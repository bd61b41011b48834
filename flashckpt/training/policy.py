"""Decides when to save. Pure: a step and the settings in, a decision with its reason out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from flashckpt.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from flashckpt.config import CheckpointConfig


@dataclass(frozen=True, slots=True)
class Decision:
    save: bool
    persist: bool  # flush it to persist_dir, too
    reason: str


def decide(
    step: int,
    config: CheckpointConfig,
    *,
    last_step: bool = False,
    force: bool = False,
    persist: bool | None = None,
    policy: Callable[[int], bool] | None = None,
    cooled: bool = True,
) -> Decision:
    """Decides about one step, alike on every rank: it looks neither at a clock nor at this rank's progress.

    `cooled`: enough time has passed since the last save, by rank 0's clock.
    """
    if not isinstance(step, int) or isinstance(step, bool) or step < 0:
        raise ConfigError(f"step: expected an integer from 0 on, found {step!r}")
    if config.load_only:
        return Decision(False, False, "load_only is set")
    due_on_disk = config.persist_dir is not None and _due_on_disk(step, config)
    wanted = due_on_disk or (last_step and config.persist_dir is not None) if persist is None else persist
    for applies, reason in (
        (force, "forced"),
        (last_step, "the last step"),
        (persist is True, "asked to persist"),
        (step == 1 and config.enable_first_step_checkpoint, "the first step: shows that saving works"),
        (step in config.fixed_steps, "one of fixed_steps"),
        (due_on_disk, f"a multiple of persist_interval {config.persist_interval}"),
    ):
        if applies:
            return Decision(True, wanted, reason)
    if policy is not None:
        due = policy(step)
        reason = "save_policy says so" if due else "save_policy says not now"
    else:
        due = step > 0 and step % config.interval == 0
        reason = f"{'' if due else 'not '}a multiple of interval {config.interval}"
    if due and not cooled:
        return Decision(False, False, f"{reason}, but the last save is less than {config.save_cooldown:g} s ago")
    return Decision(due, wanted and due, reason)


def _due_on_disk(step: int, config: CheckpointConfig) -> bool:
    if step in config.fixed_steps:
        return True
    return config.persist_interval is not None and step > 0 and step % config.persist_interval == 0


def power2_window(start: int, stop: int) -> Callable[[int], bool]:
    """Returns a policy that saves at `start` and `start + 2^k` up to `stop`, where loss curves change fastest."""
    if not 0 <= start < stop:
        raise ValueError(f"window: expected 0 <= start < stop, found {start} and {stop}")

    def policy(step: int) -> bool:
        ahead = step - start
        return start <= step <= stop and (ahead == 0 or ahead & (ahead - 1) == 0)

    return policy
