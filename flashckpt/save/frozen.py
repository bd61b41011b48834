"""Proves copies of tensors that do not change from save to save by the chunk checksums of earlier shards."""

from __future__ import annotations

from typing import NamedTuple

from flashckpt.format.caps import CRC_BYTES, DEFAULT_CHUNK_BYTES


class Entry(NamedTuple):
    """A byte range of the data area that holds a tensor, or one box of it."""

    key: str
    offset_bytes: int
    length_bytes: int


class FrozenChunks:
    """Remembers the chunk checksums of tensors that were proved once and have kept their mark since.

    Their chunks must have the same checksums in all later shards. So no save has to read the tensors once more, and a
    change is found that was undone before anybody looked: adapters merged into a frozen base through .data, and out of
    it again.
    """

    def __init__(self) -> None:
        self._known: dict[str, dict[Entry, bytes]] = {}

    def knows(self, entry: Entry) -> bool:
        return entry in self._known.get(entry.key, ())

    def learn(self, entries: list[Entry], crcs: bytes) -> None:
        """Remember the chunks of entries whose copy is proved. `crcs` are those of the whole data area."""
        for entry in entries:
            self._known.setdefault(entry.key, {})[entry] = _inner(entry, crcs)

    def forget(self, key: str) -> None:
        self._known.pop(key, None)

    def differing(self, entries: list[Entry], crcs: bytes) -> list[str]:
        """Return the keys of known entries whose chunks have other checksums than they had."""
        known = ((entry, self._known.get(entry.key, {}).get(entry)) for entry in entries)
        return list(dict.fromkeys(entry.key for entry, was in known if was not in (None, _inner(entry, crcs))))


def _inner(entry: Entry, crcs: bytes) -> bytes:
    """Return the checksums of the chunks that hold nothing but this entry."""
    first = -(-entry.offset_bytes // DEFAULT_CHUNK_BYTES)
    end = (entry.offset_bytes + entry.length_bytes) // DEFAULT_CHUNK_BYTES
    return crcs[CRC_BYTES * first : CRC_BYTES * end]
