"""Turns groups of settings into the flat settings."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from flashckpt.config.table import GROUPS
from flashckpt.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

T = TypeVar("T")


class Given:
    """Records which of its settings were given, also if the value was the default."""

    __slots__ = ("_given",)
    _given: frozenset[str]
    group: ClassVar[str] = ""  # the argument of CheckpointConfig that takes it


def records_given(cls: type[T]) -> type[T]:
    """Decorate a dataclass that is a Given, so that it records what it is given. Its signature stays the same."""
    init = cls.__init__

    @functools.wraps(init)
    def record(self: T, **given: Any) -> None:
        object.__setattr__(self, "_given", frozenset(given))
        init(self, **given)

    cls.__init__ = record  # type: ignore[assignment]
    return cls


def flat_values(groups: Mapping[str, Given | None], flat: Given) -> Iterable[tuple[str, Any]]:
    """Yield the flat name and the value of each setting that a group was given.

    Raises ConfigError if `flat` was given one of them too.
    """
    for argument, group in groups.items():
        if group is None:
            continue
        row = GROUPS[argument]
        if not isinstance(group, Given) or group.group != argument:
            raise ConfigError(f"{argument}: expected {row.cls}(…) or None, found {group!r}")
        for name in sorted(group._given):
            if row.names[name] in flat._given:
                raise ConfigError(
                    f"{row.names[name]} and {argument}={row.cls}({name}=…): expected one of them, found both",
                    hint="they are two names of one setting",
                )
            yield row.names[name], getattr(group, name)
