"""One attempt at one generation: its shards opened, compared with their names and proved to cover; its values."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from flashckpt.errors import CorruptShardError, FlashError
from flashckpt.format.shard import read_header
from flashckpt.load.cover import Index, index, uncovered
from flashckpt.load.read import OpenShard, read_range
from flashckpt.save.values import Values, unpack

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flashckpt.store.slots import Sealed, SlotStore
    from flashckpt.types import Generation


class UncoveredError(FlashError):
    """The shards of a generation do not hold every element. Internal: leads to the next generation."""

    code = "FC-LOAD-004"


class Attempt:
    """The shards of one complete generation, open and parsed. A context manager: closes descriptors."""

    def __init__(self, store: SlotStore, generation: Generation, sealed: Sequence[Sealed], job: str) -> None:
        self._store = store
        self.generation = generation
        self._sealed = sorted(sealed, key=lambda one: one.shard.rank)
        self._job = job
        self.shards: list[OpenShard] = []
        self.stored: Index = {}
        self._values: dict[int, Values] = {}

    def __enter__(self) -> Attempt:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for shard in self.shards:
            os.close(shard.fd)
        self.shards.clear()

    @property
    def world(self) -> int:
        return self._sealed[0].shard.world

    def open(self) -> None:
        """Opens every shard, checks its header against its name, and proves coverage by volume."""
        here = {sealed.shard.rank for sealed in self._sealed}
        elsewhere = [rank for rank in range(self.world) if rank not in here] if here else []
        if elsewhere or not here:
            raise UncoveredError(
                f"{self.generation}: this node has no shard of ranks {elsewhere or 'of the generation'}; "
                "fetching them from other nodes is planned"
            )
        for number, sealed in enumerate(self._sealed):
            fd = self._store.open_shard(sealed)
            try:
                header = read_header(fd, expect=sealed.shard, job=self._job)
            except FlashError as error:
                os.close(fd)
                error.fields["shard_index"] = number
                raise
            self.shards.append(OpenShard(fd, header))
        self.stored = index([shard.header for shard in self.shards])
        problems = uncovered(self.stored)
        if problems:
            raise UncoveredError(f"{self.generation}: {'; '.join(problems[:4])}")

    def quarantine(self, number: int, reason: str) -> None:
        self._store.quarantine(self._sealed[number], reason)

    def values(self, number: int, verify: bool) -> Values:
        """The non-tensor values that one rank saved."""
        if number not in self._values:
            shard = self.shards[number]
            header = shard.header
            blob = read_range(shard, number, header.values_offset_bytes, header.values_length_bytes, verify)
            try:
                self._values[number] = unpack(blob)
            except CorruptShardError as error:
                error.fields["shard_index"] = number
                raise
        return self._values[number]

    def saved_keys(self, rank: int, verify: bool) -> set[str]:
        """Every key that this rank could ask for."""
        keys = {fqn for fqn, owner in self.stored if owner in (None, rank)}
        for number in range(len(self.shards)):
            saved = self.values(number, verify)
            keys.update(fqn for fqn in saved.values if number == rank or fqn not in saved.per_rank)
        return keys

    def value(self, fqn: str, rank: int, verify: bool) -> tuple[bool, Any]:
        """(found, value): what this rank saved under the key, else what the lowest rank that has it saved."""
        order = [rank] if rank < len(self.shards) else []
        order += [number for number in range(len(self.shards)) if number != rank]
        for number in order:
            saved = self.values(number, verify)
            if fqn in saved.values and (number == rank or fqn not in saved.per_rank):
                return True, saved.values[fqn]
        return False, None
