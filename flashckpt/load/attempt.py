"""Tries to load one generation: describes its shards, proves that they cover, fetches what other nodes hold, reads."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import struct
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from flashckpt.collector import collector_paused
from flashckpt.errors import CorruptShardError, FlashError, IncompatibleError, InternalError, NotFoundError
from flashckpt.failpoints import failpoint
from flashckpt.format.shard import read_envelope
from flashckpt.load import catalogue as catalogues
from flashckpt.load.agree import StepBackError, agree
from flashckpt.load.catalogue import Catalogue
from flashckpt.load.fetch_into_tensors import fetch_into_tensors
from flashckpt.load.progress import Progress
from flashckpt.load.read import OpenShard, count_writes, pieces_for, read
from flashckpt.load.sources import Fetcher, deal_out, decode_needs, encode_needs, needs_of, plan_retrievals
from flashckpt.save.same import WAYS_ON
from flashckpt.state.assumed import Reader
from flashckpt.state.cover import Index, index, uncovered_keys

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from flashckpt.load.context import LoadContext
    from flashckpt.load.inventory import Copies, Copy
    from flashckpt.load.plan import Transfer
    from flashckpt.load.read import Target
    from flashckpt.load.result import SourceName
    from flashckpt.state.runs import Int64s
    from flashckpt.types import Retrieval

log = logging.getLogger(__name__)

_TABLE = struct.Struct("<II")  # rank, bytes of the checksum table that follows


class Attempt:
    """One attempt. A context manager: leaving it closes descriptors and drops fetched files. Stages are collective."""

    def __init__(self, context: LoadContext, copies: Copies, *, into_tensors: bool = True) -> None:
        """`into_tensors`: ranks may fetch from other nodes into their tensors, without a copy in their node's
        memory."""
        self._context = context
        self._holders = context.memory.holders if into_tensors else None
        self.generation = copies.generation
        self.world = copies.world
        self._copies = copies
        self.near = frozenset(copies.on(context.node))  # ranks whose shards lie on this node
        self.catalogue: Catalogue
        self.stored: Index = {}
        self.broken: set[str] = set()  # keys of tensors that lack elements, if shards are missing
        self._references: dict[int, bytes] = {}  # rank → checksum table, if other ranks' assumed tensors differ
        self.shards: dict[int, OpenShard] = {}  # rank → shard; those that this rank reads
        self.fetched: frozenset[int] = frozenset()  # ranks whose shards were fetched from other nodes, for this rank
        self.touched = False  # tensors may have been written to
        self._pieces: Mapping[int, Int64s] | None = None  # as pieces_for() returns them; None: fetch by the agent
        self._in_tensors: frozenset[int] = frozenset()  # ranks whose shards are fetched into the tensors
        self._has_read = False
        self._open = contextlib.ExitStack()

    def __enter__(self) -> Attempt:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._open.close()
        self.shards.clear()

    @property
    def reader(self) -> Reader:
        rank = self._context.rank
        return Reader(
            rank, self.catalogue.layout_of(rank) if self.catalogue.has(rank) else None, tuple(sorted(self.near))
        )

    # --- describe -------------------------------------------------------------------------------------------

    def describe(self) -> None:
        """Reads each shard's head on one node that holds it, and tells all ranks. Collective.

        Proves coverage by volume. Raises StepBackError, on all ranks alike, if the generation can't be used.
        """
        context = self._context
        tellers = self._copies.tellers()

        def tell() -> bytes:
            if not context.is_leader:
                return b""
            asked = [self._copies[rank] for rank in np.flatnonzero(tellers == context.node).tolist()]
            return catalogues.encode(catalogues.describe(context.store, context.job, asked, context.verify))

        answers = agree(context.group, context.node, f"describing {self.generation}", tell)
        failpoint("after_describe")
        described = [catalogues.decode(answer) for answer in answers if answer]
        problems = {rank: problem for one in described for rank, problem in one.problems.items()}
        if problems:
            nodes = [place.node_id for place in context.places]
            told = [f"rank {rank}'s on {nodes[tellers[rank]]}: {problem}" for rank, problem in problems.items()]
            raise StepBackError(
                f"copies are damaged: {'; '.join(told[:4])}",
                bad=frozenset((int(tellers[rank]), rank) for rank in problems),
            )
        with collector_paused():
            try:
                lacking = frozenset(range(self.world)).difference(self._copies.ranks)
                self.catalogue = Catalogue(self.generation, self.world, described, lacking)
            except (CorruptShardError, IncompatibleError) as error:
                raise StepBackError(error.message) from error
            self.stored = index(self.catalogue.layouts, self.catalogue.ranks)
            uncovered = uncovered_keys(self.stored)
        if uncovered and lacking:
            self.broken = {fqn for fqn, _ in uncovered}
            self.stored = {key: pieces for key, pieces in self.stored.items() if key not in uncovered}
        elif uncovered:
            raise StepBackError("; ".join(list(uncovered.values())[:4]))
        self._compare()

    def _compare(self) -> None:
        """Gathers the checksum tables of the lowest ranks for assumed tensors whose copies differ, and warns.

        Collective. If all copies are equal, there is no exchange.
        """
        context, differing = self._context, self.catalogue.assumed.differing()
        if not differing:
            return
        tellers = self._copies.tellers()

        def tell() -> bytes:
            mine = [group.ranks[0] for group in differing if tellers[group.ranks[0]] == context.node]
            tables = {rank: self._table(rank) for rank in mine} if context.is_leader else {}
            return b"".join(_TABLE.pack(rank, len(table)) + table for rank, table in tables.items())

        for answer in agree(context.group, context.node, f"comparing what ranks hold of {self.generation}", tell):
            at = 0
            while at < len(answer):
                rank, length = _TABLE.unpack_from(answer, at)
                at += _TABLE.size + length
                self._references[rank] = answer[at - length : at]
        if context.rank == 0 and context.warns:
            for group in differing:
                log.warning(
                    "%s: %d tensors that count as the same on all ranks, e.g. %r, were stored by ranks %s with other "
                    "values than by rank %d: all ranks load those of rank %d. %s",
                    self.generation,
                    len(group.entries),
                    next(iter(group.entries)),
                    sorted(set(group.ranks).difference(self.catalogue.assumed.equals(group)))[:8],
                    group.ranks[0],
                    group.ranks[0],
                    WAYS_ON,
                )

    def _table(self, rank: int) -> bytes:
        return catalogues.table_of(self._context.store, self._context.job, self._copies[rank], self._context.verify)

    def _near_table(self, rank: int) -> bytes | None:
        """Returns the checksum table of a shard on this node. None: it can't be read."""
        try:
            return self._table(rank)
        except (FlashError, OSError):
            return None

    def sources(self, keys: Iterable[str]) -> dict[str, int]:
        """Returns, for each key of an assumed tensor, the rank whose shard it is read from. Local."""
        return self.catalogue.assumed.sources(keys, self.reader, self._references, self._near_table)

    # --- fetch ----------------------------------------------------------------------------------------------

    def needs(self, transfers: Sequence[Transfer], targets: Sequence[Target]) -> bytes:
        """Encodes, for the other ranks, the chunks that this rank reads and its node lacks, and whether this rank can
        fetch them into its tensors."""
        if self._holders is not None:
            self._pieces = pieces_for((one for one in transfers if one.shard not in self.near), targets)
        return bytes([self._pieces is not None]) + encode_needs(needs_of(transfers, self.catalogue, self.near))

    def fetch(self, transfers: Sequence[Transfer], targets: Sequence[Target], needs: Sequence[bytes]) -> None:
        """Fetches and verifies what this node lacks, and opens the shards that this rank reads. Collective.

        `needs` are those of all ranks. Raises StepBackError if no holder gives a needed chunk. Ranks that do not wait
        for their agent read what their node has in the meantime.
        """
        context = self._context
        retrievals = self._plan(needs)
        names: dict[int, str] = {}
        place = context.group.rank
        mine = retrievals.get(Fetcher(context.node, place, into_tensors=True), ())
        waits = any(one.node == context.node and not one.into_tensors for one in retrievals)

        def fetch() -> bytes:
            if mine:
                count_writes([targets[one.want.target].tensor for one in transfers if one.shard not in self.near])
                self._fetch_into_tensors(mine)
            elif asked := retrievals.get(Fetcher(context.node, place, into_tensors=False), ()):
                return json.dumps(self._fetch_by_agent(asked)).encode()
            if not waits:
                self._open_all(transfers, {})
                self.read(transfers, targets)
            return b"{}"

        if retrievals:
            failpoint("before_fetch")
            answers = agree(context.group, context.node, f"fetching {self.generation}", fetch)
            failpoint("after_fetch")
            told = json.loads(answers[context.members[context.node][0]])
            names = {int(rank): name for rank, name in told.items()}
        self.fetched = frozenset({transfer.shard for transfer in transfers} - self.near)
        # If a shard was freed in the meantime, another copy is tried: all ranks have to know.
        agree(context.group, context.node, f"opening {self.generation}", lambda: self._open_all(transfers, names))

    def _plan(self, needs: Sequence[bytes]) -> dict[Fetcher, tuple[Retrieval, ...]]:
        decoded = [decode_needs(one[1:]) for one in needs]
        if not any(decoded):
            return {}
        chunks = {rank: self.catalogue.chunks(rank) for one in decoded for rank in one}
        dealt = deal_out(decoded, [bool(one[0]) for one in needs], self._context.members, chunks)
        return plan_retrievals(dealt, self._copies, self.catalogue, self._context.places)

    def _fetch_into_tensors(self, retrievals: Sequence[Retrieval]) -> None:
        """Fetches into this rank's tensors."""
        context = self._context
        if self._holders is None or self._pieces is None:
            raise InternalError(
                f"{self.generation}: rank {context.rank} can't fetch into its tensors, but was asked to"
            )
        self.touched = True
        self._in_tensors = frozenset(one.shard.rank for one in retrievals)
        with Progress(f"fetching {self.generation}") as progress:
            fetch_into_tensors(self._holders(), context.job, retrievals, self._pieces, context.timeout, progress.update)

    def _fetch_by_agent(self, retrievals: Sequence[Retrieval]) -> dict[int, str]:
        """Asks the node's agent to fetch. Called on the node's leader only.

        Returns rank → name of the fetched file; "" if the shard is sealed on this node now.
        """
        context = self._context
        with Progress(f"fetching {self.generation}") as progress:
            files = self._open.enter_context(context.memory.retrieve(retrievals, context.timeout, progress.update))
        return {shard.rank: name for shard, name in files.items()}

    def _open_all(self, transfers: Sequence[Transfer], names: Mapping[int, str]) -> bytes:
        if self._has_read:
            return b""
        present = {one.shard: one for one in self._context.store.scan()}
        for rank in sorted({transfer.shard for transfer in transfers} - self._in_tensors):
            copy = self._copies[rank]
            mapped = None
            if names.get(rank):
                fd = self._context.store.open_fetched(names[rank])
            elif copy.shard in present:
                fd = self._context.store.open_shard(present[copy.shard])
                mapped = self._context.store.mapped_shard(present[copy.shard], fd)
            else:
                raise NotFoundError(f"{copy.shard}: no longer in this node's memory", shard_index=rank)
            self._open.callback(os.close, fd)
            if mapped is not None:
                self._open.callback(mapped.release)
            self.shards[rank] = replace(self._checked(fd, copy), mapped=mapped)
        return b""

    def _checked(self, fd: int, copy: Copy) -> OpenShard:
        rank = copy.shard.rank
        number = self.catalogue.layout_of(rank)
        try:
            head = read_envelope(fd, expect=copy.shard, job=self._context.job)
            if head.layout_fingerprint != self.catalogue.fingerprints[number]:
                raise CorruptShardError(
                    f"{copy.shard}: expected the layout that its holder described, found another one"
                )
        except (CorruptShardError, IncompatibleError) as error:
            error.fields["shard_index"] = rank
            self.quarantine(rank, error.message)
            raise
        return OpenShard(fd, head, self.catalogue.layouts[number])

    @property
    def source(self) -> SourceName:
        return "peer" if self.fetched else "memory"

    def read(self, transfers: Sequence[Transfer], targets: Sequence[Target]) -> bytes:
        if self._has_read:
            return b""
        self.touched = True
        left = [transfer for transfer in transfers if transfer.shard not in self._in_tensors]
        try:
            read(left, self.shards, targets, threads=self._context.threads, verify=self._context.verify)
        except CorruptShardError as error:
            self.quarantine(error.shard_index, error.message)
            raise
        self._has_read = True
        return b""

    def quarantine(self, rank: int, reason: str) -> None:
        """Quarantines this node's copy of a shard, if it has one."""
        sealed = self._context.store.find(self._copies[rank].shard)
        if sealed is not None:
            self._context.store.quarantine(sealed, reason)
