"""Defines the one configuration object. Every setting has a flat name. Most can also be given in a group
(groups.py)."""

from __future__ import annotations

import functools
import os
from collections.abc import Collection, Mapping
from dataclasses import InitVar, dataclass, fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

from flashckpt.config import groups
from flashckpt.config.grouping import Given, flat_values, records_given

# Imported at run time too: get_type_hints() looks the names up.
from flashckpt.config.groups import InitialLoad, Memory, Network, Persist, Replication, Saving  # noqa: TC001
from flashckpt.config.table import GROUPS
from flashckpt.errors import ConfigError
from flashckpt.protocol.placement import STRATEGIES
from flashckpt.types import MAX_KEEPS, MAX_LANES, TRANSPORTS

_ASYNC_MODES = ("disabled", "async", "async_with_pinned_mem")


@records_given
@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig(Given):
    """Says what to keep, where, and how often.

    A setting may be given by its flat name or in a group: `persist_interval=500` is `persist=Persist(interval=500)`. To
    give it in both ways is an error. Settings are read by their flat names only.
    """

    job: str | None = None
    """Name of the run that stays the same when the run is restarted. Default: FLASHCKPT_JOB, a launcher id that
    survives restarts, or a hash of persist_dir."""

    memory_dir: str | None = None
    """Directory on a tmpfs. Default: FLASHCKPT_MEMORY_DIR, else /dev/shm/flashckpt-<uid>, one directory per user."""

    persist_dir: str | None = None
    """Directory that generations are flushed to: an absolute path that all nodes share, or an fsspec URL. None:
    checkpoints stay in memory only. It also names the job if nothing else does."""

    interval: int = 1
    """Steps between the saves of a manager."""

    persist_interval: int | None = None
    """Steps between flushes to persist_dir. The first committed generation at or after each multiple is flushed."""

    persist_interval_minutes: float | None = None
    """Minutes between flushes to persist_dir, instead of persist_interval."""

    persist_on_exit: bool = True
    """Whether the newest committed generation is flushed when the trainers end, for whatever reason, and when the agent
    is told to stop."""

    persist_max_mbps: float | None = None
    """Limit in megabits per second for what a node writes to persist_dir. None: no limit."""

    persist_concurrency: int = 2
    """Number of files that a node writes to persist_dir at once."""

    persist_timeout: float = 1800.0
    """Seconds that a flush may take. After that it counts as failed and is tried again."""

    persist_drain_timeout: float = 60.0
    """Seconds that an agent waits for a flush when it is told to stop."""

    persist_overwrite: bool = False
    """Whether this job may write to a persist_dir that belongs to another job, or replace a step that another job or
    program wrote there. True: the job takes the directory over, replaces steps of the same number and moves `latest`.
    Other steps stay as they are. False: such a flush fails and names what it found there."""

    keep_latest_k: int = 0
    """Number of steps that are kept in persist_dir, the newest ones. 0: all. 1 is refused, because the newest step may
    be about to be replaced. The newest valid step and the step that `latest` names always stay."""

    keep_every: int | None = None
    """Steps in persist_dir that are a multiple of this are permanent: they do not count for keep_latest_k and are never
    removed."""

    keep_steps: tuple[int, ...] = ()
    """Milestones: steps in persist_dir that are permanent too."""

    replicas: int = 1
    """Number of copies of each shard on other nodes. The job survives the loss of as many nodes. If there are fewer
    nodes, there are fewer copies."""

    placement: str = "ring"
    """Rule that says which nodes keep whose replicas. "ring" spreads them over the nodes. "group" makes closed groups
    of nodes, so that the fewest pairs of nodes are fatal if both are lost."""

    agent: Literal["auto", "off"] | None = None
    """Whether each node has an agent. "auto" (default, or FLASHCKPT_AGENT): one agent process per node owns the slots,
    replicates the shards and outlives the trainers. A trainer starts it if none runs. "off": one node only, and this
    process manages its slots itself."""

    agent_linger: float = 3600.0
    """Seconds that an agent stays after its trainers have ended. 0: for ever. The shards stay in memory in both
    cases."""

    replicate_max_mbps: float | None = None
    """Limit in megabits per second for what a node's agent sends to other nodes. None: no limit."""

    transport: str = "auto"
    """How shards are sent from node to node. "tcp": on plain connections (lanes) beside the gRPC calls. "grpc": in the
    calls. "auto": on lanes if they can be opened, else in the calls."""

    lanes: int | None = None
    """Number of connections per transfer, if lanes are used. Several connections fill a link that one can't. None: 2,
    or 1 on a machine with fewer than four cores, where a second connection slows down the first."""

    fetch: Literal["tensors", "memory"] = "tensors"
    """Where a load puts the bytes that it fetches from other nodes. "tensors": each rank writes them straight into its
    tensors, if these are in host memory and the ranks of the node need different bytes. A replaced node then needs no
    more memory for the load, and its replicas are made again in the background. "memory": the agent fetches whole
    shards into the node's memory, where they stay as replicas, and the ranks copy from there."""

    encrypt_data: bool | None = None
    """Whether lanes use TLS. gRPC calls always do. None: only if tls_cert is given. Without TLS, shards cross the
    network unencrypted, as gradients do, and only a one-time ticket protects them."""

    peer_timeout: float = 10.0
    """Seconds without an answer after which a node counts as down."""

    node_id: str | None = None
    """Name of this machine. Default: FLASHCKPT_NODE_ID, else the host name."""

    domain: str | None = None
    """Failure domain of this machine, such as its rack. Replicas are placed in other domains. Default:
    FLASHCKPT_DOMAIN, else none."""

    advertise: str | None = None
    """Host, address or interface at which other nodes reach this one. Default: FLASHCKPT_ADVERTISE, else the interface
    that reaches the other nodes."""

    port: int | None = None
    """Port of this node's agent. Default: FLASHCKPT_PORT, else any free port (0)."""

    tls_cert: str | None = None
    """File with this node's certificate, if the operator provides one. Needs tls_key and tls_ca. Default:
    FLASHCKPT_TLS_CERT, else each launch makes its own certificates."""

    tls_key: str | None = None
    """File with the private key of tls_cert, mode 0600. Default: FLASHCKPT_TLS_KEY."""

    tls_ca: str | None = None
    """File with the certificate that signed all nodes' certificates. Default: FLASHCKPT_TLS_CA."""

    memory_budget_bytes: int | None = None
    """Limit in bytes for this job's slots on this node. None: what tmpfs and the cgroup allow."""

    keep_memory: int = 1
    """Number of committed generations that stay in memory, the newest ones. The generation that is being written does
    not count, and the newest complete one always stays. Each takes one slot per rank, on the rank's node and on every
    node with its replicas."""

    slots_per_rank: int | None = None
    """Number of slots that a rank writes into in turn. Default: keep_memory + 1, so that keep_memory generations stay
    while the next one is written."""

    threads: int | None = None
    """Number of threads that copy and verify. Default: the usable cores divided by the ranks of this node, at most
    8."""

    verify: bool | Literal["recheck"] | None = None
    """Which checksums are compared. True: the CRC32C of every chunk while loading. False: none. "recheck": as True, and
    every overlapped save takes checksums of the deferred tensors in save() and compares them with the copy before it
    seals the shard. That finds changes that torch's version counters do not show (through `.data` or NumPy, or by a
    graph replay), but reads the deferred tensors once more on the training thread. The first two overlapped saves of
    each launch are always checked this way. None: FLASHCKPT_VERIFY (recheck, on or off), else True."""

    on_busy: Literal["wait", "skip"] = "wait"
    """What a save does when all slots hold generations that are still needed, because the previous one is not
    replicated yet. "wait": wait up to save_timeout. "skip": skip this save."""

    on_save_error: Literal["log", "raise"] = "log"
    """What happens to an error that the caller did not cause, such as too little memory. "log": it is logged. "raise":
    it is also raised."""

    save_timeout: float = 60.0
    """Seconds that a save waits for other ranks, that `optimizer.step()` waits for a copy, and that `close()` takes, at
    most."""

    start_timeout: float = 300.0
    """Seconds that start, load and the first save wait for other ranks, at most."""

    same_on_ranks: Literal["check", "ignore"] = "check"
    """Whether tensors that count as the same on all ranks (all but DTensors and what is in PerRank) are compared.
    "check": compare their checksums, and warn once if they differ between ranks. The first save compares all of them,
    reading at most 64 KiB of each and 64 MiB of all. Some of the later saves compare a few of them among the ranks of a
    node. A load compares the copies of the nodes. "ignore": do not compare. In both cases a load gives all ranks the
    tensor of one rank, the lowest that stored it."""

    allow_torch_save: bool = False
    """Whether values of other types are stored as `torch.save` blobs. These are loaded with weights_only=True."""

    overlap: bool = True
    """Whether a manager copies during the next forward and backward pass. `optimizer.step()` then waits only for what
    is not copied yet. False: it copies in `save()`, for hosts without a core to spare."""

    device_copy_bytes_per_second: int | None = None
    """Limit in bytes per second for what a rank copies from all its accelerators to host memory. None: no limit. With a
    limit, copies are made in chunks with pauses between them, so that collectives keep their share of the link. A save
    then takes longer, and without `overlap` so does `save()`. Loads are not limited."""

    device_snapshot: bool = False
    """Whether tensors on accelerators are first cloned in device memory, in the order of the caller's stream. The
    clones are then copied to the host. Work that is queued after `save()`, such as a replay of a CUDA graph, can't
    change what is saved. The clones take device memory until they are copied. Tensors that the device has no room for
    are not cloned."""

    prewarm: bool = True
    """Whether a manager makes the memory for its saves in the background, at the first step that it does not save. The
    first save is then as quick as the others. False: the first saves make the memory."""

    async_mode: str | None = None
    """TorchTitan's name for the overlap: "disabled", "async" or "async_with_pinned_mem". None: `overlap` decides."""

    fixed_steps: tuple[int, ...] = ()
    """Steps that a manager saves in any case, and flushes to persist_dir."""

    enable_first_step_checkpoint: bool = True
    """Whether a manager saves step 1 to memory and reads it back, so that a job that can't save shows it at once."""

    load_only: bool = False
    """Whether this job only loads, as an evaluation beside the training does. Loads are then read-only, saves are
    skipped, and nothing is written anywhere."""

    single_process: bool | None = None
    """Whether this process saves and loads alone although its environment is that of a launcher's rank (WORLD_SIZE is
    above 1). This is for a tool that a rank starts. Default: FLASHCKPT_SINGLE_PROCESS, else False. False: a process
    without a process group in such an environment is refused, because each rank would be a job of its own."""

    exclude_from_loading: tuple[str, ...] = ()
    """Parts that a manager leaves as they are when it loads, e.g. ("optimizer", "lr_scheduler")."""

    initial_load_path: str | None = None
    """Checkpoint directory to start from if the job has saved nothing yet. It is ignored once the job has saved, so
    that the arguments of a job can stay the same when it is restarted."""

    initial_load_model_only: bool = True
    """Whether only the model is taken from initial_load_path."""

    initial_load_in_hf: bool = False
    """Whether initial_load_path has to be a Hugging Face model (safetensors). False: such a model is recognised, and
    other checkpoints are loaded too. True: anything else is refused."""

    initial_load_key_mapping: Mapping[str, str] | None = None
    """Names of the model → names in initial_load_path. As `load(key_mapping=…)`, but for that checkpoint only."""

    save_cooldown: float = 0.0
    """Seconds that must pass between saves that are due by `interval` or by a save_policy. Rank 0's clock decides for
    all ranks. A step that is forced, fixed, the first, the last or to be persisted is saved in any case."""

    memory: InitVar[Memory | None] = None
    """memory_dir and other settings of this node's memory, as a group."""

    replication: InitVar[Replication | None] = None
    """replicas, placement and other settings of the copies on other nodes, as a group."""

    network: InitVar[Network | None] = None
    """transport, port and other settings of the network, as a group."""

    persist: InitVar[Persist | None] = None
    """persist_dir, persist_interval and other settings of the flushes, as a group."""

    saving: InitVar[Saving | None] = None
    """overlap, on_save_error and other settings of a save, as a group."""

    initial_load: InitVar[InitialLoad | None] = None
    """initial_load_path and its settings, as a group."""

    def __post_init__(
        self,
        memory: Memory | None,
        replication: Replication | None,
        network: Network | None,
        persist: Persist | None,
        saving: Saving | None,
        initial_load: InitialLoad | None,
    ) -> None:
        given = {
            "memory": memory,
            "replication": replication,
            "network": network,
            "persist": persist,
            "saving": saving,
            "initial_load": initial_load,
        }
        for name, value in flat_values(given, self):
            object.__setattr__(self, name, value)
        self._check_manager()
        for name, minimum in (("interval", 1), ("replicas", 0), ("keep_memory", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
                raise ConfigError(f"{name}: expected an integer of at least {minimum}, found {value!r}")
        for name in (
            "persist_interval",
            "threads",
            "memory_budget_bytes",
            "keep_every",
            "slots_per_rank",
            "device_copy_bytes_per_second",
        ):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise ConfigError(f"{name}: expected a positive integer or None, found {value!r}")
        if self.keep_memory > MAX_KEEPS:
            raise ConfigError(f"keep_memory: expected at most {MAX_KEEPS}, found {self.keep_memory}")
        if self.slots <= self.keep_memory:
            raise ConfigError(
                f"slots_per_rank: expected at least {self.keep_memory + 1}, found {self.slots_per_rank}",
                hint=f"keep_memory={self.keep_memory} generations stay while the next one is written; "
                "leave slots_per_rank out",
            )
        for name in ("save_timeout", "start_timeout", "peer_timeout", "persist_timeout"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}: expected seconds above 0, found {getattr(self, name)!r}")
        if not self.agent_linger >= 0:
            raise ConfigError(f"agent_linger: expected seconds of at least 0, found {self.agent_linger!r}")
        if self.replicate_max_mbps is not None and not self.replicate_max_mbps > 0:
            raise ConfigError(f"replicate_max_mbps: expected more than 0 or None, found {self.replicate_max_mbps!r}")
        if self.lanes is not None and (not isinstance(self.lanes, int) or not 1 <= self.lanes <= MAX_LANES):
            raise ConfigError(f"lanes: expected 1 to {MAX_LANES} or None, found {self.lanes!r}")
        if self.port is not None and not 0 <= self.port < 1 << 16:
            raise ConfigError(f"port: expected 0 to 65535, found {self.port!r}")
        for name, allowed in _allowed().items():
            if getattr(self, name) not in allowed:
                raise ConfigError(f"{name}: expected one of {allowed}, found {getattr(self, name)!r}")
        if self.persist_interval is not None and self.persist_interval_minutes is not None:
            raise ConfigError(
                "persist_interval and persist_interval_minutes: expected one of them, found both",
                hint="keep the one that fits how your job counts",
            )
        self._check_persist()
        if self.job is not None and not 1 <= len(self.job.encode()) <= 256:
            raise ConfigError(f"job: expected 1 to 256 bytes, found {len(self.job.encode())}")

    @property
    def slots(self) -> int:
        """Return the number of slots per rank."""
        return self.keep_memory + 1 if self.slots_per_rank is None else self.slots_per_rank

    @property
    def overlaps(self) -> bool:
        """Return True if a manager's saves are overlapped, as `async_mode` or `overlap` says."""
        return self.overlap if self.async_mode is None else self.async_mode.lower() != "disabled"

    def _check_manager(self) -> None:
        if self.async_mode is not None and (
            not isinstance(self.async_mode, str) or self.async_mode.lower() not in _ASYNC_MODES
        ):
            raise ConfigError(f"async_mode: expected one of {_ASYNC_MODES}, found {self.async_mode!r}")
        for name in (
            "overlap",
            "device_snapshot",
            "enable_first_step_checkpoint",
            "load_only",
            "persist_overwrite",
            "initial_load_model_only",
            "initial_load_in_hf",
        ):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name}: expected True or False, found {getattr(self, name)!r}")
        for name in ("exclude_from_loading", "fixed_steps"):
            if not isinstance(getattr(self, name), (tuple, list, set, frozenset)):
                raise ConfigError(f"{name}: expected a tuple, found {getattr(self, name)!r}")
        if any(not isinstance(step, int) or step < 0 for step in self.fixed_steps):
            raise ConfigError(f"fixed_steps: expected steps from 0 on, found {self.fixed_steps!r}")
        if "model" in self.exclude_from_loading:
            raise ConfigError(
                "exclude_from_loading: the model can't be left out",
                hint="leave load() out, or load a part with Checkpointer.load(keys=…)",
            )
        if "optimizer" in self.exclude_from_loading and "lr_scheduler" not in self.exclude_from_loading:
            raise ConfigError(
                "exclude_from_loading: 'optimizer' without 'lr_scheduler': the schedule would go on for an optimizer "
                "that starts anew",
                hint="exclude both, or none",
            )
        if self.initial_load_path is not None:
            path = self.initial_load_path
            if not path or not (os.path.isabs(path) or "://" in path):
                raise ConfigError(f"initial_load_path: expected an absolute path or a URL, found {path!r}")
        if self.initial_load_in_hf and (self.initial_load_path is None or not self.initial_load_model_only):
            missing = "initial_load_path" if self.initial_load_path is None else "initial_load_model_only=True"
            raise ConfigError(
                f"initial_load_in_hf: expected {missing} as well",
                hint="a Hugging Face model is a model and nothing else",
            )
        if self.initial_load_key_mapping is not None and self.initial_load_path is None:
            raise ConfigError("initial_load_key_mapping: expected initial_load_path as well")
        if not isinstance(self.save_cooldown, (int, float)) or not 0 <= self.save_cooldown < float("inf"):
            raise ConfigError(f"save_cooldown: expected seconds from 0 on, found {self.save_cooldown!r}")

    def _check_persist(self) -> None:
        if self.persist_dir is not None and not (os.path.isabs(self.persist_dir) or "://" in self.persist_dir):
            raise ConfigError(
                f"persist_dir: expected an absolute path or a URL, found {self.persist_dir!r}",
                hint="agents do not know the working directory of the trainers",
            )
        for name in _NEED_PERSIST_DIR:
            if self.persist_dir is None and getattr(self, name) != _DEFAULTS[name]:
                raise ConfigError(f"{name}: expected persist_dir too, found none", hint="say where to flush to")
        for name in ("persist_max_mbps", "persist_interval_minutes"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ConfigError(f"{name}: expected more than 0 or None, found {value!r}")
        if not 0 <= self.persist_drain_timeout < float("inf"):
            raise ConfigError(
                f"persist_drain_timeout: expected seconds from 0 on, found {self.persist_drain_timeout!r}"
            )
        if not isinstance(self.persist_concurrency, int) or not 1 <= self.persist_concurrency <= 256:
            raise ConfigError(f"persist_concurrency: expected 1 to 256, found {self.persist_concurrency!r}")
        if not isinstance(self.keep_latest_k, int) or self.keep_latest_k < 0:
            raise ConfigError(f"keep_latest_k: expected 0 (all) or at least 2, found {self.keep_latest_k!r}")
        if self.keep_latest_k == 1:
            raise ConfigError(
                "keep_latest_k: expected 0 (all) or at least 2, found 1",
                hint="at least 2 have to be kept, as the last one may be in the process of being saved",
            )
        if not all(isinstance(step, int) and step >= 0 for step in self.keep_steps):
            raise ConfigError(f"keep_steps: expected steps, found {self.keep_steps!r}")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> CheckpointConfig:
        """Make a configuration of the settings in a dict, such as a parsed file. A group is a dict too."""
        _refuse_unknown("", values, {field.name for field in fields(cls)} | GROUPS.keys())
        made = dict(values)
        for argument, row in GROUPS.items():
            group = made.get(argument)
            if isinstance(group, Mapping):
                _refuse_unknown(f"{argument}.", group, row.names.keys())
                made[argument] = getattr(groups, row.cls)(**group)
        return cls(**made)


def _refuse_unknown(within: str, values: Mapping[str, Any], known: Collection[str]) -> None:
    unknown = sorted(set(values) - set(known))
    if unknown:
        raise ConfigError(
            f"unknown setting {within + unknown[0]!r}", hint=f"known settings: {', '.join(sorted(known))}"
        )


@functools.cache
def _allowed() -> dict[str, tuple[Any, ...]]:
    """Return the values of each setting that has only a few. They come from its type, or from the module that uses
    it."""
    found: dict[str, tuple[Any, ...]] = {
        "transport": TRANSPORTS,
        "placement": tuple(STRATEGIES),
        "encrypt_data": (None, True, False),
    }
    hints = get_type_hints(CheckpointConfig)
    for name in (field.name for field in fields(CheckpointConfig)):
        kinds = (hints[name],) if get_origin(hints[name]) is Literal else get_args(hints[name])
        words = [word for kind in kinds if get_origin(kind) is Literal for word in get_args(kind)]
        if words:
            absent = (None,) if type(None) in kinds else ()
            found[name] = (*absent, *((True, False) if bool in kinds else ()), *words)
    return found


# Settings that have no effect without persist_dir.
_NEED_PERSIST_DIR = (
    "persist_interval",
    "persist_interval_minutes",
    "persist_max_mbps",
    "persist_concurrency",
    "persist_timeout",
    "persist_drain_timeout",
    "persist_overwrite",
    "keep_latest_k",
    "keep_every",
    "keep_steps",
)
_DEFAULTS = {field.name: field.default for field in fields(CheckpointConfig)}
