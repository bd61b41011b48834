"""Renaming of keys between a model and a checkpoint. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flashckpt.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


class Renaming:
    """Names of the model → names in the checkpoint, whole or by their leading parts; the longest match wins."""

    def __init__(self, mapping: Mapping[str, str] | None = None) -> None:
        self._mapping = dict(mapping or {})
        for ours, theirs in self._mapping.items():
            if not isinstance(ours, str) or not isinstance(theirs, str) or not ours or not theirs:
                raise ConfigError(f"key_mapping: expected names, found {ours!r}: {theirs!r}")

    def __bool__(self) -> bool:
        return bool(self._mapping)

    def saved_name(self, fqn: str) -> str:
        if not self._mapping:
            return fqn
        head = fqn
        while head:
            if head in self._mapping:
                return self._mapping[head] + fqn[len(head) :]
            head = head.rpartition(".")[0]
        return fqn

    def check(self, fqns: Iterable[str]) -> None:
        """Refuses a rule that renames nothing (a typo), and rules that make two names one."""
        known = list(fqns)
        for ours in self._mapping:
            if not any(fqn == ours or fqn.startswith(ours + ".") for fqn in known):
                raise ConfigError(f"key_mapping: no name of the model begins with {ours!r}", key=ours)
        renamed: dict[str, str] = {}
        for fqn in known:
            other = renamed.setdefault(self.saved_name(fqn), fqn)
            if other != fqn:
                raise ConfigError(f"key_mapping: {other!r} and {fqn!r} would both be {self.saved_name(fqn)!r}", key=fqn)
