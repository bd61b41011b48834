"""Messages between ranks, over a real group."""

from __future__ import annotations

import multiprocessing

import pytest
import torch.distributed as dist

from flashckpt.errors import ConflictError
from flashckpt.ranks.group import _AT_ONCE_BYTES, PrivateGroup

WORLD = 3
PURPOSE = "x"
IN_FRONT = 4 + len(PURPOSE)  # of the payload, in a message
LENGTHS = [0, 1, _AT_ONCE_BYTES - IN_FRONT, _AT_ONCE_BYTES - IN_FRONT + 1, 5 * _AT_ONCE_BYTES, 100_000]


def _payload(rank: int, length: int) -> bytes:
    # Ends in zeros, which are no padding.
    return bytes((rank + i) % 251 for i in range(length - min(length, 3))) + bytes(min(length, 3))


def _rank(rank: int, store: str, told: multiprocessing.Queue) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    group = PrivateGroup(None, 30.0)
    for shift in range(WORLD):
        for first in range(len(LENGTHS)):
            lengths = [LENGTHS[(first + shift * other) % len(LENGTHS)] for other in range(WORLD)]
            found = group.gather(_payload(rank, lengths[rank]), PURPOSE)
            assert found == [_payload(other, length) for other, length in enumerate(lengths)]
    # Somewhere else, with a name that does not fit into the first round.
    doing = "y" * (2 * _AT_ONCE_BYTES) if rank == 1 else PURPOSE
    with pytest.raises(ConflictError, match="elsewhere"):
        group.gather(b"", doing)
    group.close()
    dist.destroy_process_group()
    told.put(rank)


def test_messages_of_every_length_arrive_whole(tmp_path):
    context = multiprocessing.get_context("spawn")
    told = context.Queue()
    ranks = [context.Process(target=_rank, args=(rank, str(tmp_path / "store"), told)) for rank in range(WORLD)]
    for one in ranks:
        one.start()
    for one in ranks:
        one.join(60)
    assert [one.exitcode for one in ranks] == [0] * WORLD
    assert sorted(told.get(timeout=5) for _ in ranks) == list(range(WORLD))
