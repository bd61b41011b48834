"""Lists which settings form a group, and their names in it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Grouping:
    """Describes one group: its class, the class's docstring, and the names of its settings."""

    cls: str
    about: str
    names: dict[str, str]  # name in the group → flat name, in the order of the signature


def _same(names: str) -> dict[str, str]:
    return {name: name for name in names.split()}


# Argument of CheckpointConfig → the group. groups.py is generated from this table and from the flat fields.
# A setting that is not listed here has a flat name only.
GROUPS = {
    "memory": Grouping(
        "Memory",
        "Sets how much memory of a node checkpoints take.",
        {"dir": "memory_dir", "budget_bytes": "memory_budget_bytes", "keep": "keep_memory"}
        | _same("slots_per_rank prewarm"),
    ),
    "replication": Grouping(
        "Replication",
        "Sets how many copies of a shard there are on other nodes, and on which.",
        _same("replicas placement domain") | {"max_mbps": "replicate_max_mbps"},
    ),
    "network": Grouping(
        "Network",
        "Sets how nodes reach each other and how shards are sent between them.",
        _same("transport lanes fetch encrypt_data peer_timeout advertise port tls_cert tls_key tls_ca"),
    ),
    "persist": Grouping(
        "Persist",
        "Sets when and how generations are flushed to a file system or object store, and what is kept there.",
        {
            name: f"persist_{name}"
            for name in (
                *("dir", "interval", "interval_minutes", "on_exit", "max_mbps", "concurrency", "timeout"),
                *("drain_timeout", "overwrite"),
            )
        }
        | _same("keep_latest_k keep_every keep_steps"),
    ),
    "saving": Grouping(
        "Saving",
        "Sets how a save copies the state, and what happens if it fails.",
        {
            **_same("overlap async_mode on_busy"),
            "on_error": "on_save_error",
            "timeout": "save_timeout",
            "cooldown": "save_cooldown",
            **_same("fixed_steps enable_first_step_checkpoint same_on_ranks allow_torch_save"),
            **_same("device_snapshot device_copy_bytes_per_second"),
        },
    ),
    "initial_load": Grouping(
        "InitialLoad",
        "Sets what a manager starts from if the job has saved nothing yet.",
        {name: f"initial_load_{name}" for name in ("path", "model_only", "in_hf", "key_mapping")},
    ),
}
