"""Lets the nodes that write one step together tell each other what they have and what they wrote.

They use small files in the directory they write to. So a node that does not see the others' files does not share
persist_dir with them.
"""

from __future__ import annotations

import base64
import json
import time
import zlib
from typing import TYPE_CHECKING, Any

from flashckpt.errors import CorruptShardError, DeadlineError, NotFoundError, PeerError
from flashckpt.format.layout import decode_layout, encode_layout
from flashckpt.persist.meta import FileInfo
from flashckpt.persist.plan import Contribution
from flashckpt.persist.write import Placed, WrittenFiles
from flashckpt.types import Layout

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from flashckpt.persist.storage import Stage, Storage

_MAX_BYTES = 1 << 30
_POLL_SECONDS = 0.1
_PREFIX = "__flash_"


def has_name(name: str) -> bool:
    """Return True for one of these files, which are no part of the checkpoint."""
    return name.startswith(_PREFIX)


class Exchange:
    """Writes this node's files and reads those of the others."""

    def __init__(self, storage: Storage, stage: Stage, nodes: Sequence[str], node_id: str, deadline: float) -> None:
        self._storage = storage
        self._stage = stage
        self._nodes = list(nodes)
        self._node_id = node_id
        self._deadline = deadline

    def offer(self, contributions: Sequence[Contribution]) -> None:
        self._put("layout", [_encode_contribution(one) for one in contributions])

    def offered(self) -> list[Contribution]:
        """Return what all nodes offer, by rank. The DeadlineError names the nodes whose files never came."""
        found = [_decode_contribution(one) for node in self._await("layout").values() for one in node]
        return sorted(found, key=lambda one: one.rank)

    def report(self, written: WrittenFiles, value_paths: Mapping[str, Sequence[str | int]], saved_at: float) -> None:
        self._put(
            "done",
            {
                "files": {name: [one.size_bytes, one.crc32c] for name, one in written.files.items()},
                "placed": [
                    [one.key, one.offsets, one.file, one.offset_bytes, one.length_bytes, one.crc32c]
                    for one in written.placed
                ],
                "values": {str(rank): name for rank, name in written.values.items()},
                "value_paths": dict(value_paths),
                "saved_at": saved_at,
            },
        )

    def reported(self) -> list[tuple[WrittenFiles, dict[str, tuple[str | int, ...]], float]]:
        """Return what every node wrote. Raises PeerError with the reason of a node that failed."""
        return [_decode_report(one, node) for node, one in self._await("done").items()]

    def fail(self, reason: str) -> None:
        self._put("failed", reason)

    def clean(self) -> None:
        """Remove these files before the commit."""
        for name in self._storage.list(self._stage.place) or {}:
            if has_name(name):
                self._storage.remove(f"{self._stage.place}/{name}")

    # --- files ----------------------------------------------------------------------------------------------

    def _name(self, kind: str, node_id: str) -> str:
        return f"{_PREFIX}{kind}_{self._nodes.index(node_id)}{self._stage.suffix}.json"

    def _put(self, kind: str, content: Any) -> None:
        data = json.dumps({"node": self._node_id, "content": content}).encode()
        framed = b"%08x\n" % zlib.crc32(data) + data
        self._storage.put(f"{self._stage.place}/{self._name(kind, self._node_id)}", framed)

    def _await(self, kind: str) -> dict[str, Any]:
        found: dict[str, Any] = {}
        while True:
            listed = self._storage.list(self._stage.place)
            if listed is None:
                raise NotFoundError(f"{self._where()}: it was removed while this node wrote into it")
            for node_id in self._nodes:
                if node_id not in found and self._name(kind, node_id) in listed:
                    found[node_id] = self._read(self._name(kind, node_id), node_id)
                if self._name("failed", node_id) in listed and node_id != self._node_id:
                    raise PeerError(f"{node_id}: {self._read(self._name('failed', node_id), node_id)}", peer=node_id)
            missing = [node_id for node_id in self._nodes if node_id not in found]
            if not missing:
                return {node_id: found[node_id] for node_id in self._nodes}
            if time.monotonic() > self._deadline:
                raise self._nobody(kind, missing, listed)
            time.sleep(_POLL_SECONDS)

    def _read(self, name: str, node_id: str) -> Any:
        data = self._storage.read(f"{self._stage.place}/{name}", 0, _MAX_BYTES) or b""
        checksum, _, body = data.partition(b"\n")
        try:
            if int(checksum, 16) != zlib.crc32(body):
                raise ValueError("its checksum does not fit")
            found = json.loads(body)
            if found["node"] != node_id:
                raise ValueError(f"it is of node {found['node']!r}")
            return found["content"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise CorruptShardError(f"{self._where()}/{name}: expected what node {node_id} wrote: {error}") from error

    def _nobody(self, kind: str, missing: list[str], listed: Mapping[str, object]) -> DeadlineError:
        unseen = [node for node in missing if not any(self._name(k, node) in listed for k in ("layout", "done"))]
        hint = "look at the logs of their agents: a disk may hang, or a node be gone"
        if unseen:
            hint = (
                f"no file of {unseen} is seen from {self._node_id}: persist_dir has to be the same directory on every "
                "node (NFS, Lustre, an object store), not one on each node's own disk"
            )
        return DeadlineError(
            f"{self._where()}: expected the {kind} files of {self._nodes}, found none of {missing} in time",
            hint=hint,
            missing=missing,
        )

    def _where(self) -> str:
        return f"{self._storage.root}/{self._stage.place}"


def _encode_contribution(one: Contribution) -> dict[str, Any]:
    return {
        "rank": one.rank,
        "layout": base64.b64encode(encode_layout(Layout(one.entries))).decode(),
        "values": list(one.values),
        "own_values": list(one.own_values),
        "assumed_bytes": one.assumed_bytes,
    }


def _decode_contribution(found: Any) -> Contribution:
    try:
        rank = int(found["rank"])
        layout = decode_layout(base64.b64decode(found["layout"], validate=True), f"layout of rank {rank}")
        assumed_bytes = int(found["assumed_bytes"])
        return Contribution(rank, layout.entries, tuple(found["values"]), tuple(found["own_values"]), assumed_bytes)
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptShardError(f"layout of another node: expected a contribution, found: {error!r}") from error


def _decode_report(found: Any, node_id: str) -> tuple[WrittenFiles, dict[str, tuple[str | int, ...]], float]:
    try:
        written = WrittenFiles(
            {str(name): FileInfo(int(size), int(crc)) for name, (size, crc) in found["files"].items()},
            [
                Placed(
                    str(key), None if at is None else tuple(map(int, at)), str(file), int(start), int(size), int(crc)
                )
                for key, at, file, start, size, crc in found["placed"]
            ],
            {int(rank): str(name) for rank, name in found["values"].items()},
        )
        paths = {str(key): tuple(path) for key, path in found["value_paths"].items()}
        return written, paths, float(found["saved_at"])
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptShardError(f"report of {node_id}: expected what it wrote, found: {error!r}") from error
