"""The groups of settings. Made by `python -m tests.config_groups` from fields.py and table.py: edit those."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from flashckpt.config.grouping import Given, records_given

if TYPE_CHECKING:
    from collections.abc import Mapping


@records_given
@dataclass(frozen=True, kw_only=True, slots=True)
class Memory(Given):
    """Sets how much memory of a node checkpoints take.

    `dir` is `memory_dir`, `budget_bytes` is `memory_budget_bytes`, `keep` is `keep_memory`; `slots_per_rank`,
    `prewarm`. `CheckpointConfig` describes them.
    """

    group: ClassVar[str] = "memory"
    dir: str | None = None
    budget_bytes: int | None = None
    keep: int = 1
    slots_per_rank: int | None = None
    prewarm: bool = True


@records_given
@dataclass(frozen=True, kw_only=True, slots=True)
class Replication(Given):
    """Sets how many copies of a shard there are on other nodes, and on which.

    `max_mbps` is `replicate_max_mbps`; `replicas`, `placement`, `domain`. `CheckpointConfig` describes them.
    """

    group: ClassVar[str] = "replication"
    replicas: int = 1
    placement: str = "ring"
    domain: str | None = None
    max_mbps: float | None = None


@records_given
@dataclass(frozen=True, kw_only=True, slots=True)
class Network(Given):
    """Sets how nodes reach each other and how shards are sent between them.

    `transport`, `lanes`, `fetch`, `encrypt_data`, `peer_timeout`, `advertise`, `port`, `tls_cert`, `tls_key`, `tls_ca`.
    `CheckpointConfig` describes them.
    """

    group: ClassVar[str] = "network"
    transport: str = "auto"
    lanes: int | None = None
    fetch: Literal["tensors", "memory"] = "tensors"
    encrypt_data: bool | None = None
    peer_timeout: float = 10.0
    advertise: str | None = None
    port: int | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    tls_ca: str | None = None


@records_given
@dataclass(frozen=True, kw_only=True, slots=True)
class Persist(Given):
    """Sets when and how generations are flushed to a file system or object store, and what is kept there.

    `dir` is `persist_dir`, `interval` is `persist_interval`, `interval_minutes` is `persist_interval_minutes`,
    `on_exit` is `persist_on_exit`, `max_mbps` is `persist_max_mbps`, `concurrency` is `persist_concurrency`, `timeout`
    is `persist_timeout`, `drain_timeout` is `persist_drain_timeout`, `overwrite` is `persist_overwrite`;
    `keep_latest_k`, `keep_every`, `keep_steps`. `CheckpointConfig` describes them.
    """

    group: ClassVar[str] = "persist"
    dir: str | None = None
    interval: int | None = None
    interval_minutes: float | None = None
    on_exit: bool = True
    max_mbps: float | None = None
    concurrency: int = 2
    timeout: float = 1800.0
    drain_timeout: float = 60.0
    overwrite: bool = False
    keep_latest_k: int = 0
    keep_every: int | None = None
    keep_steps: tuple[int, ...] = ()


@records_given
@dataclass(frozen=True, kw_only=True, slots=True)
class Saving(Given):
    """Sets how a save copies the state, and what happens if it fails.

    `on_error` is `on_save_error`, `timeout` is `save_timeout`, `cooldown` is `save_cooldown`; `overlap`, `async_mode`,
    `on_busy`, `fixed_steps`, `enable_first_step_checkpoint`, `same_on_ranks`, `allow_torch_save`, `device_snapshot`,
    `device_copy_bytes_per_second`. `CheckpointConfig` describes them.
    """

    group: ClassVar[str] = "saving"
    overlap: bool = True
    async_mode: str | None = None
    on_busy: Literal["wait", "skip"] = "wait"
    on_error: Literal["log", "raise"] = "log"
    timeout: float = 60.0
    cooldown: float = 0.0
    fixed_steps: tuple[int, ...] = ()
    enable_first_step_checkpoint: bool = True
    same_on_ranks: Literal["check", "ignore"] = "check"
    allow_torch_save: bool = False
    device_snapshot: bool = False
    device_copy_bytes_per_second: int | None = None


@records_given
@dataclass(frozen=True, kw_only=True, slots=True)
class InitialLoad(Given):
    """Sets what a manager starts from if the job has saved nothing yet.

    `path` is `initial_load_path`, `model_only` is `initial_load_model_only`, `in_hf` is `initial_load_in_hf`,
    `key_mapping` is `initial_load_key_mapping`. `CheckpointConfig` describes them.
    """

    group: ClassVar[str] = "initial_load"
    path: str | None = None
    model_only: bool = True
    in_hf: bool = False
    key_mapping: Mapping[str, str] | None = None
