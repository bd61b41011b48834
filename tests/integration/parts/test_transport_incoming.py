"""A receiver that is killed while it takes a replica."""

from __future__ import annotations

import signal

import pytest

from flashckpt.move.sealing import find_held
from tests.unit.test_transport_incoming import CONTENT, FAILPOINTS, SENDER, sealed_content, shard_id, store

__all__ = ["store"]  # the fixture

RECEIVER = """
import sys
from flashckpt.store.slots import SlotStore
from tests.unit.test_transport_incoming import SENDER
incoming = SENDER.open(SlotStore.open(sys.argv[1], "job"))
SENDER.send(incoming)
incoming.finish()
print("acknowledged", flush=True)
"""


@pytest.mark.parametrize("name", FAILPOINTS)
def test_receiver_is_killed(store, tmp_path, run_python, name):
    log = tmp_path / "log"
    settings = {"FLASHCKPT_TESTING": "1", "FLASHCKPT_FAILPOINTS": f"{name}=kill", "FLASHCKPT_FAILPOINTS_LOG": str(log)}
    result = run_python(RECEIVER, store.path.parent, **settings)
    assert (result.returncode, result.stdout) == (-signal.SIGKILL, ""), result.stderr
    assert log.read_text().split()[0] == name
    left = list((store.path / "writing").iterdir())
    if name == "after_replica_seal":  # whole, and found by the sender that asks again
        assert left == []
        assert find_held(store, "job", shard_id()).digest == SENDER.digest
        assert sealed_content(store, shard_id()) == CONTENT
    else:
        assert store.scan() == ()
        assert [path.read_bytes()[:64] for path in left] == [bytes(64)]
        assert store.reclaim().files == 1
