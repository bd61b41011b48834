"""Settings: finds each value in the arguments, the environment or the defaults."""

from flashckpt.config.fields import CheckpointConfig
from flashckpt.config.groups import InitialLoad, Memory, Network, Persist, Replication, Saving
from flashckpt.config.resolve import DEFAULT_MEMORY_DIR, ENVIRONMENT, Settings, resolve

__all__ = [
    "DEFAULT_MEMORY_DIR",
    "ENVIRONMENT",
    "CheckpointConfig",
    "InitialLoad",
    "Memory",
    "Network",
    "Persist",
    "Replication",
    "Saving",
    "Settings",
    "resolve",
]
