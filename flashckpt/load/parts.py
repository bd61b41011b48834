"""Says which keys of a generation with missing shards are complete, and how to load these. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flashckpt.save.retention import some_ranks

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

_SHOWN = 8


def complete_prefixes(complete: Iterable[str], broken: Collection[str]) -> list[str]:
    """Returns the shortest prefixes of `complete` keys that no `broken` key begins with, sorted."""
    bad = {prefix for key in broken for prefix in _prefixes(key)}
    found = set()
    for key in complete:
        prefix = next((one for one in _prefixes(key) if one not in bad), None)
        if prefix is not None:
            found.add(prefix)
    return sorted(found)


def describe_parts(
    step: int, lacking: Sequence[int], complete: Collection[str], broken: Collection[str], rank_keys: Collection[str]
) -> str:
    """Describes for people what can be loaded. `complete` and `broken` are keys that the ranks share; `rank_keys` are
    those of PerRank parts, of which the ranks in `lacking` have lost theirs."""
    prefixes = complete_prefixes(complete, {*broken, *rank_keys})
    if not prefixes:
        return f"no part of it is complete without them: {_some(broken or rank_keys)} lack elements"
    everything = "all that the ranks share is complete" if not broken else f"complete: {_some(prefixes)}"
    lost = [f"incomplete: {_some(broken)}"] if broken else []
    if rank_keys:
        lost.append(
            f"PerRank parts of ranks {some_ranks(lacking)} are missing: {_some(complete_prefixes(rank_keys, complete))}"
        )
    keys = ", ".join(map(repr, prefixes[:_SHOWN])) + (", …" if len(prefixes) > _SHOWN else "")
    return (
        f"{everything}{''.join(f'; {one}' for one in lost)}; load(step={step}, keys=[{keys}]) or "
        f"load(step={step}, strict=False) loads what is complete, and leaves everything else as it is"
    )


def _prefixes(key: str) -> Iterable[str]:
    """Returns the key's prefixes, from its first component to the whole key."""
    parts = key.split(".")
    return (".".join(parts[:count]) for count in range(1, len(parts) + 1))


def _some(keys: Collection[str]) -> str:
    listed = sorted(keys)
    more = f" and {len(listed) - _SHOWN} more" if len(listed) > _SHOWN else ""
    return ", ".join(map(repr, listed[:_SHOWN])) + more
