"""Builds the command that starts torchrun on one node of a launch."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flashckpt.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

# After how long torchrun counts a silent node as lost (5 beats of 2 s), and how long it waits for more nodes once
# there are enough.
_ELASTIC = {"keep_alive_interval": 2, "keep_alive_max_attempt": 5, "last_call_timeout": 5}


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Holds what all torchruns of a launch have in common."""

    run_id: str
    endpoint: str  # host:port
    fewest_nodes: int
    most_nodes: int
    max_restarts: int

    def __post_init__(self) -> None:
        if not 1 <= self.fewest_nodes <= self.most_nodes:
            raise ConfigError(
                f"elastic: expected the fewest and the most nodes, found {self.fewest_nodes} and {self.most_nodes}"
            )
        if not self.endpoint:
            raise ConfigError("join: expected a launch that torchrun started, found another", hint="Cluster.torchrun")

    @property
    def is_elastic(self) -> bool:
        return self.fewest_nodes != self.most_nodes

    @property
    def environment(self) -> dict[str, str]:
        # Else restarted workers find the addresses of their dead predecessors in a store that torchrun keeps.
        return {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"} if self.max_restarts else {}

    def command(self, address: str, ranks: int, script: Sequence[str], *, is_host: bool) -> list[str]:
        """Build the command. `address` is the node's, by which torchrun numbers nodes; `is_host`: the rendezvous is
        here.
        """
        options = {"is_host": int(is_host), **(_ELASTIC if self.is_elastic else {})}
        nodes = f"{self.fewest_nodes}:{self.most_nodes}" if self.is_elastic else str(self.most_nodes)
        return [
            *(sys.executable, "-m", "torch.distributed.run"),
            f"--nnodes={nodes}",
            f"--nproc-per-node={ranks}",
            f"--max-restarts={self.max_restarts}",
            "--rdzv-backend=c10d",
            f"--rdzv-id={self.run_id}",
            f"--rdzv-endpoint={self.endpoint}",
            f"--rdzv-conf={','.join(f'{name}={value}' for name, value in options.items())}",
            f"--local-addr={address}",
            *script,
        ]
