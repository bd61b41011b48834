"""What is whole of a generation whose shards are not all there, and how a load takes that. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flashckpt.save.retention import some_ranks

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

_SHOWN = 8


def whole_prefixes(whole: Iterable[str], broken: Collection[str]) -> list[str]:
    """The shortest prefixes of `whole` keys that no `broken` key begins with, sorted."""
    bad = {prefix for key in broken for prefix in _prefixes(key)}
    found = set()
    for key in whole:
        prefix = next((one for one in _prefixes(key) if one not in bad), None)
        if prefix is not None:
            found.add(prefix)
    return sorted(found)


def told(
    step: int, lacking: Sequence[int], whole: Collection[str], broken: Collection[str], rank_keys: Collection[str]
) -> str:
    """For people. `whole` and `broken` are keys of what ranks share, `rank_keys` those of PerRank parts, of which the
    ranks without a shard have lost theirs."""
    prefixes = whole_prefixes(whole, {*broken, *rank_keys})
    if not prefixes:
        return f"no part of it is whole without them: {_some(broken or rank_keys)} lack elements"
    everything = "all that the ranks share is whole" if not broken else f"whole: {_some(prefixes)}"
    lost = [f"incomplete: {_some(broken)}"] if broken else []
    if rank_keys:
        lost.append(
            f"PerRank parts of ranks {some_ranks(lacking)} are missing: {_some(whole_prefixes(rank_keys, whole))}"
        )
    keys = ", ".join(map(repr, prefixes[:_SHOWN])) + (", …" if len(prefixes) > _SHOWN else "")
    return (
        f"{everything}{''.join(f'; {one}' for one in lost)}; load(step={step}, keys=[{keys}]) takes what is whole, "
        f"load(step={step}, strict=False) too, and leaves everything else as it is"
    )


def _prefixes(key: str) -> Iterable[str]:
    """From the first component to the whole key."""
    parts = key.split(".")
    return (".".join(parts[:count]) for count in range(1, len(parts) + 1))


def _some(keys: Collection[str]) -> str:
    listed = sorted(keys)
    more = f" and {len(listed) - _SHOWN} more" if len(listed) > _SHOWN else ""
    return ", ".join(map(repr, listed[:_SHOWN])) + more
