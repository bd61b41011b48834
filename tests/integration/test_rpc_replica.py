"""A sealed shard of one node's store becomes a replica in another's, through the real halves and a real wire."""

from __future__ import annotations

import os
import random
import struct

import pytest

from flashckpt import native
from flashckpt.errors import CorruptShardError
from flashckpt.format.layout import encode_layout, fingerprint
from flashckpt.format.shard import DEFAULT_CHUNK_BYTES, encode_header, geometry, invalidate, seal_bytes
from flashckpt.move.incoming import Incoming
from flashckpt.move.outgoing import Outgoing
from flashckpt.move.seam import PutEnd
from flashckpt.move.transports.grpc.client import PeerClient
from flashckpt.move.transports.grpc.server import PeerServer
from flashckpt.protocol.wire import PutOpen, PutReady
from flashckpt.store.slots import SlotStore
from flashckpt.types import Layout, ShardId
from tests.integration.rpc_world import GENERATION, JOB, LAUNCH, Credentials, MemoryPeer

SHARD = ShardId(GENERATION, 1, 4)


def write_shard(store, chunks=20):
    """So many chunks, and a shorter one."""
    layout = encode_layout(Layout(()))
    where = geometry(len(layout), chunks * DEFAULT_CHUNK_BYTES + 8192, store.granule_bytes, DEFAULT_CHUNK_BYTES)
    data = random.Random(5).randbytes(where.data_length_bytes)
    pieces = (data[at : at + DEFAULT_CHUNK_BYTES] for at in range(0, len(data), DEFAULT_CHUNK_BYTES))
    header = encode_header(
        job=JOB,
        shard=SHARD,
        layout_bytes=layout,
        layout_fingerprint=fingerprint(layout),
        values_offset_bytes=0,
        values_length_bytes=0,
        chunk_bytes=DEFAULT_CHUNK_BYTES,
        chunk_crcs=b"".join(struct.pack("<I", native.crc32c(piece)) for piece in pieces),
        saved_at=1.0,
    )
    slot = store.claim(where.file_length_bytes)
    invalidate(slot.view)
    slot.view[where.data_offset_bytes :] = data
    seal_bytes(slot.view, header, where)
    return store.seal(slot, SHARD, 9)


class Receiver:
    """What an agent puts around an Incoming."""

    def __init__(self, incoming):
        self.incoming = incoming
        self.put_head = incoming.put_head
        self.put_chunks = incoming.put_chunks
        self.receive = incoming.receive
        self.ends = []

    @property
    def ready(self):
        return PutReady(self.incoming.next_head_offset, self.incoming.next_chunk)

    def finish(self):
        digest = self.incoming.finish().digest
        self.ends.append("finish")
        return digest

    def suspend(self):
        self.ends.append("suspend")

    def fail(self, error):
        self.ends.append("fail")
        self.incoming.abandon()


@pytest.fixture
def stores(memory_dir):
    paths = [os.path.join(memory_dir, name) for name in "ab"]
    for path in paths:
        os.mkdir(path, 0o700)
    with SlotStore.open(paths[0], JOB) as sender, SlotStore.open(paths[1], JOB) as receiver:
        yield sender, receiver
        assert sender.check() == []
        assert receiver.check() == []


@pytest.fixture
def wire(stores):
    job, api = Credentials(), MemoryPeer("b")
    received = []

    def on_open(peer, opening):
        if received and received[-1].ends == ["suspend"]:
            received.append(Receiver(received[-1].incoming))
        else:
            announced = (opening.shard, opening.tag, opening.size_bytes, opening.head_bytes, opening.digest)
            received.append(Receiver(Incoming(stores[1], JOB, *announced)))
        return received[-1]

    api.on_open = on_open
    with PeerServer(api, job.bundle("b"), JOB, "b") as server:
        port = server.start("127.0.0.1:0")
        with PeerClient(f"127.0.0.1:{port}", job.bundle("a"), JOB, "b") as client:
            client.received = received
            yield client


def opening_of(outgoing):
    announced = (outgoing.digest, outgoing.size_bytes, outgoing.head_bytes)
    return PutOpen("a", LAUNCH, None, SHARD, 9, *announced)


def content(store):
    (sealed,) = store.scan()
    fd = store.open_shard(sealed)
    try:
        return sealed.shard, sealed.tag, os.pread(fd, sealed.size_bytes, 0)
    finally:
        os.close(fd)


def test_a_replica_is_the_shard_byte_for_byte(stores, wire):
    sealed = write_shard(stores[0])
    fd = stores[0].open_shard(sealed)
    outgoing = Outgoing(fd, SHARD, JOB)
    result = wire.put(opening_of(outgoing), outgoing)
    os.close(fd)
    assert (result.end, result.digest) == (PutEnd.SEALED, outgoing.digest)
    assert content(stores[1]) == content(stores[0])


def test_rot_in_the_senders_memory_is_not_sent_and_the_rest_is_resumed(stores, wire):
    sealed = write_shard(stores[0])
    fd = stores[0].open_shard(sealed)
    outgoing = Outgoing(fd, SHARD, JOB)
    at = outgoing.head_bytes + 9 * DEFAULT_CHUNK_BYTES + 100
    good = os.pread(fd, 1, at)
    writable = os.open(f"/proc/self/fd/{fd}", os.O_WRONLY)
    os.pwrite(writable, bytes([good[0] ^ 1]), at)
    with pytest.raises(CorruptShardError, match="chunk 9"):
        wire.put(opening_of(outgoing), outgoing)
    assert list(stores[1].scan()) == [], "nothing was acknowledged"
    os.pwrite(writable, good, at)
    os.close(writable)
    result = wire.put(opening_of(outgoing), outgoing)
    os.close(fd)
    assert result.end is PutEnd.SEALED
    assert result.sent_bytes < outgoing.size_bytes, "it went on where it was"
    assert [one.ends for one in wire.received] == [["suspend"], ["finish"]]
    assert content(stores[1]) == content(stores[0])
