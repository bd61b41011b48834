"""The values that stages pass to each other: frozen, with no behaviour except their own invariants."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import NamedTuple

MAX_KEEPS = 64  # generations that a commit record may name beside its own
MAX_LANES = 8  # connections of one transfer
TRANSPORTS = ("auto", "tcp", "grpc")  # ways for shards from node to node: lanes, or the calls themselves


class Level(enum.IntEnum):
    """How much a generation survives; each level includes the ones before it."""

    NONE = 0
    STAGED = 1  # the caller may mutate its tensors
    SEALED = 2  # survives a trainer crash
    REPLICATED = 3  # survives the loss of k nodes
    PERSISTED = 4  # survives the cluster


class Outcome(enum.StrEnum):
    """How a save ended."""

    OK = "ok"
    SKIPPED = "skipped"
    FAILED = "failed"


class Generation(NamedTuple):
    """One attempt of the whole job to save one step. Two attempts at the same step never mix.

    `epoch` and `nonce` identify the launch, `seq` numbers its attempts at the step.
    A tuple, because directory scans make thousands of them.
    """

    epoch: int
    nonce: int
    step: int
    seq: int

    def __str__(self) -> str:
        return f"step {self.step} (epoch {self.epoch}, launch {self.nonce:016x}, attempt {self.seq})"


def age_order(generation: Generation) -> tuple[int, int, int, int]:
    """Returns a key that sorts the generations of one line by age, newest last.

    Steps never go down within a launch, nor from a launch to the one that continues it.
    """
    return (generation.step, generation.epoch, generation.nonce, generation.seq)


@dataclass(frozen=True, slots=True)
class Launch:
    """One start of the job's trainers: its epoch and a random nonce, which tells it apart from all others."""

    epoch: int
    nonce: int

    def is_older_than(self, other: Launch) -> bool:
        """Returns True if this launch has the lower epoch. For equal epochs the answer is arbitrary, but the same
        everywhere."""
        return (self.epoch, self.nonce) < (other.epoch, other.nonce)


@dataclass(frozen=True, slots=True)
class Claimant:
    """A live trainer of the launch that a node's agent works for."""

    process: str  # identifies the process among those of all machines
    pid: int
    rank: int
    launch: Launch
    claimed_at: float  # when it began that launch, in seconds since 1970
    is_ending: bool  # a signal is about to end it, or it is exiting


@dataclass(frozen=True, slots=True)
class ShardId:
    """The typed name of one rank's file in one generation; peers use this, never a path."""

    generation: Generation
    rank: int
    world: int

    def __str__(self) -> str:
        return f"shard {self.rank}/{self.world} of {self.generation}"


@dataclass(frozen=True, slots=True)
class Held:
    """A sealed shard that an agent holds: one of its own trainers, or a replica."""

    shard: ShardId
    digest: bytes  # 16 bytes: BLAKE2b of everything before the data area, with its checksums; identifies the content
    size_bytes: int
    tag: int


@dataclass(frozen=True, slots=True)
class Member:
    """One node of a launch."""

    node_id: str
    address: str  # host:port of its agent, the host numeric; "" if the launch has one node
    domain: str  # failure domain, e.g. the rack; "" if none was given
    ranks: tuple[int, ...]  # sorted


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a setting that arrives in a message may be. Of a text: how many bytes at most."""

    least: float = 0
    most: float | None = None
    above: bool = False  # `least` itself is refused, too


def _bounds(least: float = 0, most: float | None = None, *, above: bool = False) -> dict[str, Bounds]:
    return {"bounds": Bounds(least, most, above)}


@dataclass(frozen=True, slots=True)
class PersistSettings:
    """The settings of a launch's persistent tier. CheckpointConfig documents each of them."""

    directory: str  # an absolute path or a URL
    interval: int | None = field(default=None, metadata=_bounds(1))  # steps
    interval_seconds: float | None = field(default=None, metadata=_bounds(above=True))
    max_mbps: float | None = field(default=None, metadata=_bounds(above=True))
    concurrency: int = field(default=2, metadata=_bounds(1, 1 << 10))
    timeout: float = field(default=1800.0, metadata=_bounds(above=True))
    keep_latest_k: int = 0
    keep_every: int | None = field(default=None, metadata=_bounds(1))
    keep_steps: tuple[int, ...] = ()
    on_exit: bool = True
    drain_timeout: float = 60.0
    overwrite: bool = False


@dataclass(frozen=True, slots=True)
class Session:
    """What the agents of a launch need to know to replicate and commit without the trainers."""

    launch: Launch
    world: int
    members: tuple[Member, ...]  # in the order of their lowest rank; the first one coordinates
    replicas: int  # number of copies on other nodes that the config asks for
    strategy: str = field(metadata=_bounds(most=256))  # of placement
    slots_per_rank: int
    persist: PersistSettings | None = None  # None: memory only
    keep_memory: int = field(default=1, metadata=_bounds(1, MAX_KEEPS))  # committed generations that stay in memory

    @property
    def coordinator(self) -> str:
        return self.members[0].node_id


@dataclass(frozen=True, slots=True)
class Record:
    """The commit record: every rank's shard of this generation lay sealed on its node and on `replicas` others."""

    generation: Generation
    world: int
    replicas: int  # number of copies of every shard on other nodes; a small cluster may have fewer than the config says
    committed_at: float  # seconds since 1970, for people
    keeps: tuple[Generation, ...] = ()  # older generations that the coordinator keeps too, newest first


@dataclass(frozen=True, slots=True)
class Loss:
    """A generation of which no node had some shards, at the last look. Only nodes that answered count."""

    generation: Generation
    ranks: tuple[int, ...]  # those without a shard, or the first of them
    reason: str


class Box(NamedTuple):
    """A rectangular region of a global tensor. A tuple, like TensorEntry, because every load makes one per tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def volume(self) -> int:
        product = 1
        for size in self.sizes:
            product *= size
        return product

    def intersect(self, other: Box) -> Box | None:
        """Returns the common region; None if there is none. Two 0-dim boxes have one element in common."""
        if self == other and 0 not in self.sizes:
            return self
        offsets, sizes = [], []
        for a, n, b, m in zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True):
            start, end = max(a, b), min(a + n, b + m)
            if start >= end:
                return None
            offsets.append(start)
            sizes.append(end - start)
        return Box(tuple(offsets), tuple(sizes))


class TensorEntry(NamedTuple):
    """One region of one tensor, and its byte range in a shard's data area.

    Two entries may share a byte range only if it is exactly the same one (tied weights).
    """

    fqn: str  # the flattened, dotted key
    path: tuple[str | int, ...]  # the nested key it was flattened from
    dtype: str  # torch's name without the "torch." prefix; see format.dtypes
    global_shape: tuple[int, ...]
    box: Box  # row-major within the byte range
    offset_bytes: int  # from the start of the data area
    length_bytes: int
    per_rank: bool = False  # belongs to this shard's rank alone; (fqn, rank) is its name then


@dataclass(frozen=True, slots=True)
class Layout:
    """The entries of a shard. They stay the same from save to save while the state's structure does."""

    entries: tuple[TensorEntry, ...]


@dataclass(frozen=True, slots=True)
class ShardHeader:
    """Everything a shard says about itself."""

    job: str
    shard: ShardId
    layout: Layout
    layout_fingerprint: bytes  # 16 bytes: BLAKE2b of the encoded layout
    values_offset_bytes: int  # packed non-tensor values, in the data area
    values_length_bytes: int
    chunk_bytes: int
    chunk_crcs: bytes  # one little-endian uint32 CRC32C per chunk of the data area
    data_offset_bytes: int  # from the start of the file
    data_length_bytes: int
    saved_at: float  # seconds since 1970, for people; never decides anything


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds spent in each stage of a load."""

    inventory: float = 0.0
    plan: float = 0.0
    retrieve: float = 0.0
    verify: float = 0.0
    read: float = 0.0

    @property
    def total(self) -> float:
        return self.inventory + self.plan + self.retrieve + self.verify + self.read


@dataclass(frozen=True, slots=True)
class ChunkRange:
    first: int
    count: int


@dataclass(frozen=True, slots=True)
class Portion:
    """Chunks of a shard to fetch from one holder, or from the next one if that fails."""

    ranges: tuple[ChunkRange, ...]  # ascending, with a gap between any two
    sources: tuple[str, ...]  # node ids, in the order to ask them


@dataclass(frozen=True, slots=True)
class Retrieval:
    """The chunks that a node lacks of one shard. Portions do not overlap. If `whole`, they contain every chunk."""

    shard: ShardId
    digest: bytes
    tag: int
    size_bytes: int  # of the whole file
    whole: bool  # True: the result is sealed and stays as a replica; False: it is removed after the load
    portions: tuple[Portion, ...]
