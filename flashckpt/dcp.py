"""FlashWriter and FlashReader: store `torch.distributed.checkpoint` (DCP) checkpoints in flashckpt's memory.

DCP plans and flashckpt stores. A Checkpointer can load what DCP saved and the reverse, because both write the same
shards.
"""

from __future__ import annotations

import io
import logging
import os
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, WriteItemType
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from flashckpt.checkpointer import internals_of
from flashckpt.errors import (
    ConfigError,
    CorruptShardError,
    IncompatibleError,
    InternalError,
    StructureError,
    UnusableError,
)
from flashckpt.format.layout import encode_layout, fingerprint
from flashckpt.load.agree import StepBackError, agree
from flashckpt.load.plan import Transfer, Want
from flashckpt.load.read import Target
from flashckpt.load.recover import Recovery
from flashckpt.save.own_slots import OwnSlots
from flashckpt.save.plan import SavePlan, TensorSource, aligned
from flashckpt.save.values import pack
from flashckpt.save.write import ShardWriter
from flashckpt.start.claim import refuse_beside_live_here
from flashckpt.start.launch import next_launch
from flashckpt.start.opening import default_threads
from flashckpt.state.assumed import piece_of
from flashckpt.state.flatten import Flat, path_of
from flashckpt.store.slots import SlotStore
from flashckpt.types import Box, Generation, Layout, ShardId, TensorEntry

if TYPE_CHECKING:
    from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlanner, WriteItem
    from torch.distributed.checkpoint.planner import SavePlan as DcpSavePlan

    from flashckpt.checkpointer import Checkpointer
    from flashckpt.load.attempt import Attempt
    from flashckpt.load.context import LoadContext
    from flashckpt.save.own_slots import Slots
    from flashckpt.start.internals import DcpOrigin, Internals
    from flashckpt.state.assumed import Reader
    from flashckpt.state.cover import Piece
    from flashckpt.types import Launch

log = logging.getLogger(__name__)

# Attempts of a process that DCP spawned (async_save with a process) are numbered from here. So they never have the
# number of an attempt of the trainer, whose attempts that process can't see.
_FOREIGN_SEQ = 1 << 32


# Marks bytes that the user's planner made and will parse again. A saved `bytes` value has no such mark.
_PLANNER_BYTES = "\x1fplanner bytes"


class _Foreign:
    """Holds the store as opened in a process that DCP spawned. It lives as long as that process."""

    def __init__(self, origin: DcpOrigin) -> None:
        config = origin.settings.config
        store = SlotStore.open(origin.settings.memory_dir, origin.settings.job, budget_bytes=config.memory_budget_bytes)
        threads = config.threads or default_threads(len(origin.topology.node_ranks))
        slots: Slots
        if origin.session is not None:
            from flashckpt.start.join import rejoin

            slots = rejoin(origin.settings, origin.topology, store, origin.session, origin.process)
        else:
            slots = OwnSlots(store, origin.launch, config)
        self.writer = ShardWriter(store, slots, origin.settings.job, config, threads)
        self.seq, self.step = _FOREIGN_SEQ, -1
        self._claims = False

    @staticmethod
    def of(origin: DcpOrigin) -> _Foreign:
        return _foreign.get(origin) or _foreign.setdefault(origin, _Foreign(origin))

    def claim(self, origin: DcpOrigin) -> None:
        """Do what `JobClaim.take_here` does."""
        if not self._claims:
            refuse_beside_live_here(origin.topology, self.writer.slots, origin.settings.job)
            self._claims = True

    def next_generation(self, step: int) -> Generation:
        self.seq = self.seq + 1 if step == self.step else _FOREIGN_SEQ
        self.step = step
        return Generation(self.writer.launch.epoch, self.writer.launch.nonce, step, self.seq)


_foreign: dict[DcpOrigin, _Foreign] = {}


class FlashWriter(StorageWriter):
    """Stores what `dcp.save` and `dcp.async_save` (thread and process) save. A storage writer of DCP.

    Args:
        checkpointer: the Checkpointer of this rank.
        step: the number of the step. Default: the number at the end of `checkpoint_id` ("step-10",
            "run/checkpoint-10").
    """

    def __init__(self, checkpointer: Checkpointer, step: int | None = None) -> None:
        self._internals: Internals | None = internals_of(checkpointer)
        self._origin = self._internals.origin()
        self._given_step = step
        self._checkpoint_id: str | None = None
        self._rank = 0
        self._world: int | None = None
        self.generation: Generation | None = None

    # A copy that is sent to another process has no mappings and sockets. That process opens its own.
    def __getstate__(self) -> dict[str, Any]:
        origin = self._internals.origin() if self._internals is not None else self._origin
        return {**self.__dict__, "_internals": None, "_origin": origin}

    @property
    def checkpoint_id(self) -> str | None:
        return self._checkpoint_id

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        self._checkpoint_id = None if checkpoint_id is None else os.fspath(checkpoint_id)
        self._world = None
        self.generation = None

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._rank = kwargs.get("rank", self._origin.topology.rank)
        if not is_coordinator or not kwargs.get("use_collectives", True):
            self._world = self._origin.topology.world

    def prepare_local_plan(self, plan: DcpSavePlan) -> DcpSavePlan:
        # Claimed here, where DCP still stops all ranks if one raises. Writing takes the agents over.
        if self._internals is not None:
            self._internals.check_enabled()
            self._internals.refuse_to_write("save")
            self._internals.claim.take_here()
        else:
            _Foreign.of(self._origin).claim(self._origin)
        # The coordinator's planner gives each plain tensor to one rank. Its plan does not say who else has it.
        return replace(plan, storage_data=tuple(item.index.fqn for item in plan.items if _is_assumed(item)))

    def prepare_global_plan(self, plans: list[DcpSavePlan]) -> list[DcpSavePlan]:
        # Only the coordinator sees how many ranks take part: one with no_dist, else all.
        if self._world is None:
            self._world = len(plans)
        return _assumed_to_lowest(plans)

    def write_data(self, plan: DcpSavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes and seals this rank's shard. An error is raised to DCP, which raises it on all ranks."""
        step, world = self._step(), self._world
        if world is None:
            raise InternalError("write_data before the global plan")
        if world != self._origin.topology.world:
            # It would count as newer than what all ranks saved together, and would free it.
            raise ConfigError(
                f"DCP saves with {world} ranks, this Checkpointer has {self._origin.topology.world}",
                hint="make a Checkpointer with that process_group and a job name of its own",
            )
        tensors = [item for item in plan.items if item.type != WriteItemType.BYTE_IO]
        tensors.sort(key=lambda item: not _is_assumed(item))  # in the order of save/plan.py
        flat, ours = _plan_tensors(tensors, planner)
        for item in plan.items:
            if item.type == WriteItemType.BYTE_IO:
                flat.values[item.index.fqn] = _value(item, planner)
        paths = getattr(planner, "mappings", {})
        flat.paths.update({fqn: paths[fqn] for fqn in flat.values if fqn in paths})
        allow_torch_save = self._origin.settings.config.allow_torch_save
        values = pack(flat, None, allow_torch_save, assumed_bytes=ours.assumed_bytes)
        if self._internals is not None:
            with self._internals.turn("write_data"):
                self.generation = self._internals.saver.write_planned(step, self._rank, world, ours, flat, values)
        else:
            foreign = _Foreign.of(self._origin)
            self.generation = foreign.next_generation(step)
            try:
                foreign.writer.write(ShardId(self.generation, self._rank, world), ours, flat, values)
            except BaseException:
                foreign.writer.slots.void(self.generation)
                raise
        sizes = {id(item): source.length_bytes for item, source in zip(tensors, ours.sources, strict=True)}
        done: Future[list[WriteResult]] = Future()
        done.set_result([WriteResult(item.index, sizes.get(id(item), 0), None) for item in plan.items])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        # No metadata file is written: each shard has its own description, and all shards are sealed.
        log.info("%s: saved through DCP by %d ranks", self.generation, len(results))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return _step_of(os.fspath(checkpoint_id)) is not None

    def _step(self) -> int:
        if self._given_step is not None:
            return self._given_step
        step = _step_of(self._checkpoint_id or "")
        if step is None:
            raise _no_step(self._checkpoint_id, "FlashWriter")
        return step


def _no_step(checkpoint_id: str | None, who: str) -> ConfigError:
    return ConfigError(
        f"checkpoint_id: expected a name that ends in the step, as in 'step-10', found {checkpoint_id!r}",
        hint=f"or pass {who}(checkpointer, step=10)",
    )


def _step_of(checkpoint_id: str) -> int | None:
    match = re.search(r"(\d+)/*$", checkpoint_id)
    return int(match.group(1)) if match else None


def _plan_tensors(items: list[WriteItem], planner: SavePlanner) -> tuple[Flat, SavePlan]:
    """Return DCP's write items as a save plan, with one entry and one source per item."""
    paths = getattr(planner, "mappings", {})
    flat = Flat()
    entries, sources = [], []
    offset = assumed_bytes = 0
    for number, item in enumerate(items):
        tensor, data = planner.resolve_data(item), item.tensor_data
        if data is None or not isinstance(tensor, torch.Tensor):
            raise InternalError(f"key {item.index.fqn!r}: a tensor item without a tensor")
        tensor = tensor.detach()
        flat.tensors[str(number)] = tensor
        box = Box(tuple(data.chunk.offsets), tuple(data.chunk.sizes))
        length = box.volume * tensor.itemsize
        if tuple(tensor.shape) != box.sizes:
            raise StructureError(f"key {item.index.fqn!r}: planned {box.sizes}, the planner gave {tuple(tensor.shape)}")
        offset = aligned(offset)
        sources.append(TensorSource(number, 0, True, (0,) * len(box.sizes), box.sizes, offset, length))
        entries.append(
            TensorEntry(
                fqn=item.index.fqn,
                path=path_of(item.index.fqn, paths),
                dtype=str(tensor.dtype).removeprefix("torch."),
                global_shape=tuple(data.size),
                box=box,
                offset_bytes=offset,
                length_bytes=length,
            )
        )
        offset += length
        if _is_assumed(item):
            assumed_bytes = offset
    layout_bytes = encode_layout(Layout(tuple(entries)))
    digest = fingerprint(layout_bytes)
    plan = SavePlan(tuple(sources), layout_bytes, digest, aligned(offset), tag=0, assumed_bytes=assumed_bytes)
    return flat, plan


def _is_assumed(item: WriteItem) -> bool:
    """Return True for an assumed tensor (state/regions.py). DCP gives the type TENSOR to a complete tensor that is no
    DTensor."""
    return item.type == WriteItemType.TENSOR


def _assumed_to_lowest(plans: list[DcpSavePlan]) -> list[DcpSavePlan]:
    """Make the lowest rank that has a plain tensor write it. DCP would spread such tensors over all ranks."""
    lowest: dict[str, int] = {}
    for rank, plan in enumerate(plans):
        for fqn in plan.storage_data or ():
            lowest.setdefault(fqn, rank)
    # With DCP's cached plans some plans are empty: their ranks write the same tensors as at the last save.
    if not all(getattr(plan, "usable", True) for plan in plans):
        return plans
    items: list[list[WriteItem]] = [[] for _ in plans]
    for rank, plan in enumerate(plans):
        for item in plan.items:
            items[lowest.get(item.index.fqn, rank) if _is_assumed(item) else rank].append(item)
    return [replace(plan, items=its, storage_data=None) for plan, its in zip(plans, items, strict=True)]


def _value(item: WriteItem, planner: SavePlanner) -> Any:
    """Return the object itself if the planner gives it, so that no pickle reaches the memory format. Else return the
    planner's bytes."""
    if (
        isinstance(planner, DefaultSavePlanner)
        and type(planner).transform_object is DefaultSavePlanner.transform_object
    ):
        return planner.lookup_object(item.index)
    data = planner.resolve_data(item)
    if not isinstance(data, io.BytesIO):
        raise ConfigError(f"key {item.index.fqn!r}: expected the planner to give bytes, found {type(data).__name__}")
    return {_PLANNER_BYTES: data.getvalue()}


def _to_stream(value: Any) -> io.BytesIO:
    """Return what `planner.load_bytes` gets: the planner's own bytes, or the value as DCP would have saved it."""
    if isinstance(value, dict) and list(value) == [_PLANNER_BYTES]:
        return io.BytesIO(value[_PLANNER_BYTES])
    stream = io.BytesIO()
    torch.save(value, stream)
    stream.seek(0)
    return stream


class FlashReader(StorageReader):
    """Reads the newest usable generation, or that of `step`, for `dcp.load`. A storage reader of DCP.

    Args:
        checkpointer: the Checkpointer of this rank.
        step: the step to load. Default: the number at the end of `checkpoint_id`, else the newest step.
        read_only: change nothing, in memory or on disk. Default: `config.load_only`.
        take_over: take the job over even if trainers of another launch are alive. Without it, `dcp.load` raises
            LiveJobError.

    Like `Checkpointer.load`, a load of all ranks takes the job over, unless it is read-only.
    """

    def __init__(
        self,
        checkpointer: Checkpointer,
        step: int | None = None,
        *,
        read_only: bool | None = None,
        take_over: bool = False,
    ) -> None:
        self._internals = internals_of(checkpointer)
        self._read_only = self._internals.reads_only(read_only, take_over)
        self._take_over = take_over
        self._given_step = step
        self._step = step
        self._checkpoint_id: str | None = None
        self._attempt: Attempt | None = None
        self._context: LoadContext
        self._recovery: Recovery
        self._launch: Launch | None = None  # the launch that was begun before anything was read
        self._rank = 0

    @property
    def checkpoint_id(self) -> str | None:
        return self._checkpoint_id

    @property
    def generation(self) -> Generation | None:
        """Returns the generation that the last `dcp.load` read."""
        return self._attempt.generation if self._attempt is not None else None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        self._checkpoint_id = None if checkpoint_id is None else os.fspath(checkpoint_id)
        self._step = self._given_step
        if self._step is None and self._checkpoint_id is not None:
            self._step = _step_of(self._checkpoint_id)
            if self._step is None:
                raise _no_step(self._checkpoint_id, "FlashReader")

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Chooses a generation and returns its metadata in the form that DCP needs.

        On one node each rank chooses by itself, from the same directory, and the coordinator raises IncompatibleError
        if the choices differ. On several nodes no rank sees everything. The ranks choose together, so all of them have
        to load.
        """
        self._close()
        internals = self._internals
        internals.check_enabled()
        # A fast rank would not see shards that slower ranks of its node are still sealing.
        internals.saver.writer.wait_until_settled(internals.topology.node_ranks)
        alone = len(internals.topology.nodes) == 1
        self._launch = None if alone or self._read_only else self._begin_launch()
        self._context = internals.context(alone=alone)
        self._recovery = Recovery(self._context)
        self._attempt = self._recovery.find(self._step)
        return _metadata(self._attempt)

    def _begin_launch(self) -> Launch:
        """Do what `Checkpointer.load` does before it looks at anything. Collective."""
        self._internals.claim.take(take_over=self._take_over)
        self._internals.claim.renew_launch()
        return self._internals.slots.launch

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._rank = kwargs.get("rank", self._internals.topology.rank)

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return replace(plan, storage_data=tuple(self._opened().generation))

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        chosen = {tuple(plan.storage_data) for plan in plans}
        if len(chosen) > 1:
            raise IncompatibleError(
                f"ranks chose different generations: {sorted(map(str, (Generation(*one) for one in chosen)))}",
                hint="a save was under way; load again, or name the step",
            )
        launch = self._launch
        if launch is None and len(plans) == self._internals.topology.world and not self._read_only:
            # All ranks load, so their next saves follow this generation.
            if not self._take_over:
                self._internals.refuse_to_write("save")
                self._internals.claim.take_here(again=True)
            launch = next_launch(self._internals.store.highest_epoch())
        return [replace(plan, storage_data=launch) for plan in plans]

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        attempt, context = self._opened(), self._context
        tensors = [item for item in plan.items if item.type == LoadItemType.TENSOR]
        resolved: list[torch.Tensor] = []
        transfers: list[Transfer] = []
        targets: list[Target] = []

        def prepare() -> bytes:
            for item in plan.items:
                if item.type == LoadItemType.BYTE_IO:
                    _, value = attempt.catalogue.value(item.storage_index.fqn, self._rank)
                    planner.load_bytes(item, _to_stream(value))
            stored = _pieces(attempt, [item.storage_index.fqn for item in tensors])
            for item in tensors:
                resolved.append(planner.resolve_tensor(item))
                transfer, target = _transfer(item, resolved[-1], stored, attempt.reader, len(targets))
                transfers.append(transfer)
                targets.append(target)
            return attempt.needs(transfers, targets)

        def fill() -> bytes:
            return attempt.read(transfers, targets)

        try:
            needs = agree(context.group, context.node, "preparing to load", prepare)
            attempt.fetch(transfers, targets, needs)
            agree(context.group, context.node, "reading", fill)
        except StepBackError as error:
            # DCP has planned for this generation and can't change to another one.
            cause = error.__cause__
            raise cause if isinstance(cause, CorruptShardError) else UnusableError(error.message) from error
        for item, tensor in zip(tensors, resolved, strict=True):
            planner.commit_tensor(item, tensor)
        self._internals.saver.deferrals.forget_frozen()
        if plan.storage_data is not None:  # all ranks agreed to continue from here; None: only some load
            self._internals.claim.go_on_with(plan.storage_data, self._recovery, attempt.generation)
        attempt.close()
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True

    def _opened(self) -> Attempt:
        if self._attempt is None:
            raise InternalError("the reader was used before read_metadata")
        return self._attempt

    def _close(self) -> None:
        if self._attempt is not None:
            self._attempt.close()
            self._attempt = None


def _metadata(attempt: Attempt) -> Metadata:
    described: dict[str, Any] = {}
    paths: dict[str, tuple[str | int, ...]] = {}
    rank = attempt.reader.rank
    for (fqn, layout), pieces in attempt.stored.items():
        if layout not in (None, attempt.reader.layout):
            continue
        entry = pieces[0].entry
        boxes = {piece.entry.box: None for piece in pieces}
        described[fqn] = TensorStorageMetadata(
            properties=TensorProperties(dtype=getattr(torch, entry.dtype)),
            size=torch.Size(entry.global_shape),
            chunks=[ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)) for box in boxes],
        )
        paths[fqn] = entry.path
    saved = attempt.catalogue.distinct_values()
    own = attempt.catalogue.values(rank) if rank < attempt.world else None
    for values in (*(values for _, values in saved), *((own,) if own else ())):
        for fqn in values.values:
            if values is own or fqn not in values.per_rank:
                described.setdefault(fqn, BytesStorageMetadata())
                paths.setdefault(fqn, values.path(fqn))
    storage = {MetadataIndex(fqn): None for fqn in described}
    return Metadata(state_dict_metadata=described, planner_data=paths, storage_data=storage)


def _pieces(attempt: Attempt, keys: list[str]) -> dict[tuple[str, tuple[int, ...]], Piece]:
    """Return the piece that each storage index of DCP names: the nearest stored region of that key at those offsets.

    `keys` are the tensors to be read. Of an assumed tensor among them, the piece is the one of the rank that all have
    to read.
    """
    reader = attempt.reader
    sources = attempt.sources(dict.fromkeys(keys))
    found: dict[tuple[str, tuple[int, ...]], Piece] = {}
    for (fqn, layout), pieces in attempt.stored.items():
        if layout not in (None, reader.layout):
            continue
        if layout is None and fqn in sources:
            piece = piece_of(pieces, sources[fqn])
            found[(fqn, piece.entry.box.offsets)] = piece._replace(ranks=(sources[fqn],))
            continue
        for piece in pieces:
            key = (fqn, piece.entry.box.offsets)
            if key not in found or reader.pick(piece.ranks)[0] < reader.pick(found[key].ranks)[0]:
                found[key] = piece
    return found


def _transfer(
    item: ReadItem,
    tensor: torch.Tensor,
    stored: dict[tuple[str, tuple[int, ...]], Piece],
    reader: Reader,
    number: int,
) -> tuple[Transfer, Target]:
    fqn, chunk = item.storage_index.fqn, tuple(item.storage_index.offset or ())
    piece = stored[(fqn, chunk)]
    overlap = Box(tuple(a + b for a, b in zip(chunk, item.storage_offsets, strict=True)), tuple(item.lengths))
    dtype = str(tensor.dtype).removeprefix("torch.")
    want = Want(fqn, False, dtype, piece.entry.global_shape, overlap, number)
    _, rank = reader.pick(piece.ranks)
    return Transfer(rank, piece.entry, want, overlap), Target(tensor.detach(), overlap)
