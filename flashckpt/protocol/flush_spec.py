"""Encodes an agent's order to its flusher as one line of JSON. Pure, no torch: the agent imports it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from flashckpt.errors import ConfigError
from flashckpt.types import Generation, PersistSettings


@dataclass(frozen=True, slots=True)
class FlushSpec:
    """One node's part in writing one generation to persist_dir."""

    job: str
    memory_dir: str
    node_id: str
    generation: Generation
    world: int
    writers: tuple[tuple[str, tuple[int, ...]], ...]  # node → ranks whose shards it writes; each rank once
    coordinates: bool  # writes the index and commits
    attempt: str  # 16 hexadecimal digits that all nodes of this attempt share
    reason: str
    settings: PersistSettings
    urgent: bool = False  # somebody waits for it: it does not yield to the training
    known: int | None = None  # the newest step in persist_dir that this node knows of; None: it knows of none

    @property
    def ranks(self) -> tuple[int, ...]:
        return next((ranks for node, ranks in self.writers if node == self.node_id), ())


def encode_spec(spec: FlushSpec) -> bytes:
    return json.dumps(asdict(spec) | {"generation": list(spec.generation)}).encode()


def decode_spec(data: bytes) -> FlushSpec:
    try:
        found: dict[str, Any] = json.loads(data)
        found["generation"] = Generation(*found["generation"])
        found["writers"] = tuple((str(node), tuple(map(int, ranks))) for node, ranks in found["writers"])
        settings = found["settings"]
        found["settings"] = PersistSettings(**settings | {"keep_steps": tuple(settings["keep_steps"])})
        return FlushSpec(**found)
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"flusher: expected an order as encode_spec() writes it, found: {error!r}") from error
