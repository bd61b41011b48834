"""What one rank computes before the first byte of a recovery moves, for clusters larger than any at hand.

    python -m bench.bench_scale [--rounds 3] [--json FILE]

The inventories and layouts are made up (bench/synthetic.py: every node shards the model over its 8 ranks, one buddy
a node, node 0 lost); what runs on them is the code that a load runs.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from bench.synthetic import RANKS_PER_NODE, Cluster, decide, description, inventories, needs_of_a_blank_node

NODES = (10, 100, 1_000, 10_000)
ITEMS = 2_000


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    rows = []
    print(f"{'nodes':>7} {'ranks':>7} {'items a rank':>12} {'bytes a node':>12} {'CPU s (best)':>12}")
    for nodes in NODES:
        cluster = Cluster(nodes, ITEMS)
        encoded, described = inventories(cluster, frozenset([0])), description(cluster)
        needs = needs_of_a_blank_node(cluster, described)
        seconds = []
        for _ in range(given.rounds):
            began = time.process_time()
            decide(cluster, encoded, described, needs, rank=RANKS_PER_NODE)
            seconds.append(time.process_time() - began)
        size = max(map(len, encoded))
        rows.append({"nodes": nodes, "ranks": cluster.world, "bytes_a_node": size, "cpu_seconds": seconds})
        print(f"{nodes:>7,} {cluster.world:>7,} {ITEMS:>12,} {size:>12,} {min(seconds):>12.3f}")
    if given.json is not None:
        given.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
