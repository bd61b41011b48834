"""Renames keys between a model and a checkpoint. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flashckpt.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

ANY = "{}"  # stands for one part of a name, e.g. the number of a layer


class Renaming:
    """Maps names of the model to names in the checkpoint, whole or by their leading parts; the longest match wins.

    `{}` stands for one part of a name, and for the same part on the other side:
    `layers.{}.attention.wq` → `model.layers.{}.self_attn.q_proj`. A rule without it wins over one with it.
    """

    def __init__(self, mapping: Mapping[str, str] | None = None) -> None:
        self._mapping: dict[str, str] = {}
        self._patterns: dict[tuple[str, ...], tuple[str, ...]] = {}
        for ours, theirs in dict(mapping or {}).items():
            if not isinstance(ours, str) or not isinstance(theirs, str) or not ours or not theirs:
                raise ConfigError(f"key_mapping: expected names, found {ours!r}: {theirs!r}")
            one, other = tuple(ours.split(".")), tuple(theirs.split("."))
            if one.count(ANY) != other.count(ANY):
                raise ConfigError(
                    f"key_mapping: expected {ANY} as often on both sides, found {ours!r}: {theirs!r}", key=ours
                )
            if ANY in one:
                self._patterns[one] = other
            else:
                self._mapping[ours] = theirs

    def __bool__(self) -> bool:
        return bool(self._mapping or self._patterns)

    def reversed(self) -> Renaming:
        """Returns the reverse: names in the checkpoint → names of the model. Raises ConfigError if two rules lead to
        one name."""
        back: dict[str, str] = {}
        for ours, theirs in (*self._mapping.items(), *((".".join(a), ".".join(b)) for a, b in self._patterns.items())):
            if theirs in back:
                raise ConfigError(f"key_mapping: {back[theirs]!r} and {ours!r} would both be {theirs!r}", key=ours)
            back[theirs] = ours
        return Renaming(back)

    def saved_name(self, fqn: str) -> str:
        head = fqn
        while head and self:
            renamed = self._mapping.get(head) or self._by_pattern(head)
            if renamed is not None:
                return renamed + fqn[len(head) :]
            head = head.rpartition(".")[0]
        return fqn

    def _by_pattern(self, head: str) -> str | None:
        parts = tuple(head.split("."))
        for pattern, template in self._patterns.items():
            if len(pattern) == len(parts) and all(p in (ANY, part) for p, part in zip(pattern, parts, strict=True)):
                stands = iter([part for p, part in zip(pattern, parts, strict=True) if p == ANY])
                return ".".join(next(stands) if part == ANY else part for part in template)
        return None

    def check(self, fqns: Iterable[str]) -> None:
        """Refuses a rule that renames nothing (a typo), and rules that make two names one."""
        known = list(fqns)
        heads = {".".join(parts[: n + 1]) for fqn in known for parts in [fqn.split(".")] for n in range(len(parts))}
        for ours in self._mapping:
            if ours not in heads:
                raise ConfigError(f"key_mapping: no name of the model begins with {ours!r}", key=ours)
        for pattern in self._patterns:
            alone = Renaming({".".join(pattern): ".".join(self._patterns[pattern])})
            if not any(alone._by_pattern(head) for head in heads):
                ours = ".".join(pattern)
                raise ConfigError(f"key_mapping: no name of the model begins with {ours!r}", key=ours)
        renamed: dict[str, str] = {}
        for fqn in known:
            other = renamed.setdefault(self.saved_name(fqn), fqn)
            if other != fqn:
                raise ConfigError(f"key_mapping: {other!r} and {fqn!r} would both be {self.saved_name(fqn)!r}", key=fqn)
