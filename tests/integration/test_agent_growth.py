"""What two agents keep does not grow with the number of saves and replicas. Both run in this process, to be counted."""

from __future__ import annotations

import collections
import contextlib
import threading
import time

import pytest

from flashckpt import native
from flashckpt.agent.process import Options
from flashckpt.agent.shell import Shell
from flashckpt.format.layout import encode_layout, fingerprint
from flashckpt.format.shard import DEFAULT_CHUNK_BYTES, encode_header, geometry, seal_bytes
from flashckpt.rpc.api import VERSION
from flashckpt.rpc.credentials import Authority, Bundle, make_request
from flashckpt.store.owner import Owner
from flashckpt.store.slots import SlotStore
from flashckpt.types import Generation, Launch, Layout, Level, Member, Session, ShardId
from tests.conftest import count_objects

JOB = "growth"
LAYOUT = encode_layout(Layout(()))
SIZE_BYTES = 8 << 10
WARM_SAVES, SAVES = 30, 150
MOST_MORE = SAVES // 3  # of one type; what grows with saves grows by SAVES at least


class Node:
    """One agent's shell, driven by its main loop, with one trainer that calls it without gRPC."""

    def __init__(self, name, directory):
        self.name = name
        self.store = SlotStore.open(str(directory), JOB)
        options = Options(
            job=JOB, memory_dir=str(directory), node_id=name, beat_interval=0.2, scrub_interval=0.5, linger=0
        )
        self.shell = Shell(self.store, options)
        self.shell.start()
        self.stop = threading.Event()
        self.loop = threading.Thread(target=self.shell.serve_until, args=(self.stop,))
        self.loop.start()

    def join(self, rank, bundle):
        self.rank = rank
        self.ticket = self.shell.trainers.hello(Owner.current(), rank, VERSION, JOB).ticket
        return self.shell.trainers.listen(bundle, "127.0.0.1", 0)

    def save(self, generation):
        shard = ShardId(generation, self.rank, 2)
        place = geometry(len(LAYOUT), SIZE_BYTES, self.store.granule_bytes, DEFAULT_CHUNK_BYTES)
        slot_id = self.shell.trainers.acquire(self.ticket, shard, place.file_length_bytes, "wait", 30.0)
        slot = self.store.attach(slot_id, place.file_length_bytes)
        data = bytes(place.data_length_bytes)
        slot.view[place.data_offset_bytes :] = data
        header = encode_header(
            job=JOB,
            shard=shard,
            layout_bytes=LAYOUT,
            layout_fingerprint=fingerprint(LAYOUT),
            values_offset_bytes=0,
            values_length_bytes=0,
            chunk_bytes=DEFAULT_CHUNK_BYTES,
            chunk_crcs=native.crc32c(data).to_bytes(4, "little"),
            saved_at=time.time(),
        )
        seal_bytes(slot.view, header, place)
        sealed = self.store.seal(slot, shard, 0)
        self.shell.trainers.sealed(self.ticket, shard, 0, sealed.slot_id)

    def close(self):
        self.stop.set()
        self.loop.join(10.0)
        self.shell.close()
        self.store.close()


@pytest.fixture
def nodes(memory_dir):
    with contextlib.ExitStack() as stack:
        found = []
        for name in ("a", "b"):
            found.append(Node(name, f"{memory_dir}/{name}"))
            stack.callback(found[-1].close)
        yield found


def begin(nodes):
    """Both nodes as one launch of two ranks."""
    authority = Authority.create(JOB)
    bundles = []
    for node in nodes:
        key, request = make_request(JOB, node.name)
        bundles.append(Bundle(authority.sign(request, JOB, node.name), key, authority.certificate_pem))
    members = []
    for rank, (node, bundle) in enumerate(zip(nodes, bundles, strict=True)):
        members.append(Member(node.name, node.join(rank, bundle), "", (rank,)))
    launch = Launch(int(time.time() * 1000), 7)
    session = Session(launch, 2, tuple(members), 1, "ring", 2, None, 1)
    for node, bundle in zip(nodes, bundles, strict=True):
        node.shell.trainers.begin(node.ticket, session, bundle)
    return launch


def test_objects_do_not_grow_with_saves_and_replicas(nodes):
    launch = begin(nodes)
    before = collections.Counter()
    for step in range(1, WARM_SAVES + SAVES + 1):
        generation = Generation(launch.epoch, launch.nonce, step, 1)
        for node in nodes:
            node.save(generation)
        if step == WARM_SAVES:
            before = count_objects()
    deadline = time.monotonic() + 30
    while not all((generation, Level.REPLICATED) in known(node) for node in nodes):
        assert time.monotonic() < deadline, "the last generation is committed"
        time.sleep(0.02)
    after = count_objects()
    assert {kind: more for kind, more in (after - before).items() if more > MOST_MORE} == {}


def known(node):
    return [(one.generation, one.level) for one in node.shell.known_progress()]
