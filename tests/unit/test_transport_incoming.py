"""A push without a wire: what is acknowledged is byte for byte the shard, and nothing else is."""

from __future__ import annotations

import hashlib
import os
import random
import re
import shutil
import socket
import struct
import tempfile
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest

from flashckpt import failpoints, native
from flashckpt.errors import (
    ClosedError,
    ConfigError,
    ConflictError,
    CorruptShardError,
    FlashError,
    IncompatibleError,
    NoSpaceError,
)
from flashckpt.format.layout import encode_layout, fingerprint
from flashckpt.format.shard import encode_header, geometry, invalidate, seal_bytes
from flashckpt.move import incoming as incoming_module
from flashckpt.move.incoming import Incoming, IncomingState
from flashckpt.move.outgoing import Outgoing, digest_of, hold
from flashckpt.move.sealing import find_held
from flashckpt.store.handles import Slot
from flashckpt.store.slots import SlotStore
from flashckpt.types import Generation, Held, Layout, ShardId

CHUNK = 8192
PIECE = 1000  # of a head, not a divisor of it


def shard_id(step=1, rank=0):
    return ShardId(Generation(1000, 77, step, 1), rank, 2)


def shard_bytes(shard=None, *, job="job", pages=5, seed=0):
    """A small shard as a trainer leaves it: `pages` of random data, the last chunk shorter than the others."""
    layout = encode_layout(Layout(()))
    where = geometry(len(layout), pages * 4096, 4096, CHUNK)
    data = random.Random(seed).randbytes(where.data_length_bytes)
    crcs = b"".join(struct.pack("<I", native.crc32c(data[i : i + CHUNK])) for i in range(0, len(data), CHUNK))
    header = encode_header(
        job=job,
        shard=shard or shard_id(),
        layout_bytes=layout,
        layout_fingerprint=fingerprint(layout),
        values_offset_bytes=0,
        values_length_bytes=0,
        chunk_bytes=CHUNK,
        chunk_crcs=crcs,
        saved_at=1.0,
    )
    file = bytearray(where.file_length_bytes)
    with memoryview(file) as view:
        invalidate(view)
        view[where.data_offset_bytes :] = data
        seal_bytes(view, header, where)
    return bytes(file)


@contextmanager
def opened(content):
    """A descriptor of a file with that content."""
    with tempfile.TemporaryFile() as file:
        file.write(content)
        file.flush()
        yield file.fileno()


class Sender:
    """The pieces of one shard in the order in which they are sent."""

    def __init__(self, content, shard=None, job="job"):
        with opened(content) as fd:
            outgoing = Outgoing(fd, shard or shard_id(), job)
            self.shard, self.digest = outgoing.shard, outgoing.digest
            self.size_bytes, self.head_bytes = outgoing.size_bytes, outgoing.head_bytes
            self.head = b"".join(outgoing.read_head(at, PIECE) for at in range(0, outgoing.head_bytes, PIECE))
            self.chunks = [outgoing.read_chunk(index) for index in range(outgoing.chunks)]

    def open(self, store, tag=9, **changes):
        announced = {"size_bytes": self.size_bytes, "head_bytes": self.head_bytes, "digest": self.digest, **changes}
        return Incoming(store, "job", announced.pop("shard", self.shard), tag, **announced)

    def steps(self, incoming):
        """What is left to send, from where the receiver says, one call a piece."""
        while incoming.state in (IncomingState.OPEN, IncomingState.HEAD):
            at = incoming.next_head_offset
            yield lambda at=at: incoming.put_head(at, self.head[at : at + PIECE])
        while incoming.next_chunk < len(self.chunks):
            at = incoming.next_chunk
            yield lambda at=at: incoming.put_chunks(at, self.chunks[at])

    def send(self, incoming):
        for step in self.steps(incoming):
            step()

    def send_and_finish(self, incoming):
        self.send(incoming)
        return incoming.finish()

    def send_head(self, incoming):
        incoming.put_head(0, self.head)


def sealed_content(store, shard):
    (sealed,) = (one for one in store.scan() if one.shard == shard)
    fd = store.open_shard(sealed)
    try:
        return os.pread(fd, sealed.size_bytes + 1, 0)
    finally:
        os.close(fd)


@pytest.fixture
def store():
    path = Path(tempfile.mkdtemp(prefix="flashckpt-test-", dir="/dev/shm"))
    with SlotStore.open(path, "job") as store:
        yield store
        assert store.check() == []
    shutil.rmtree(path)


@pytest.fixture
def armed(tmp_path):
    """Arms failpoints in this process; returns what fired."""
    log = tmp_path / "fired"
    saved = os.environ.get("FLASHCKPT_FAILPOINTS_LOG")
    os.environ["FLASHCKPT_FAILPOINTS_LOG"] = str(log)

    def arm(text):
        failpoints.arm({"FLASHCKPT_TESTING": "1", "FLASHCKPT_FAILPOINTS": text})
        return lambda: log.read_text().split()[::2]

    yield arm
    failpoints.arm()
    if saved is None:
        del os.environ["FLASHCKPT_FAILPOINTS_LOG"]
    else:
        os.environ["FLASHCKPT_FAILPOINTS_LOG"] = saved


CONTENT = shard_bytes()
SENDER = Sender(CONTENT)
MAPPABLE_CONTENT = shard_bytes(pages=15)  # with its head, as long as a slot can be
MAPPABLE = Sender(MAPPABLE_CONTENT)


def test_a_whole_push(store):
    incoming = SENDER.open(store, tag=9)
    assert (incoming.state, incoming.next_head_offset, incoming.next_chunk) == (IncomingState.OPEN, 0, 0)
    SENDER.send(incoming)
    assert (incoming.state, incoming.next_head_offset, incoming.next_chunk) == (IncomingState.DATA, len(SENDER.head), 3)
    assert store.scan() == (), "nothing is a shard before the end"
    held = incoming.finish()
    assert held == Held(shard_id(), SENDER.digest, len(CONTENT), 9) == find_held(store, "job", shard_id())
    assert incoming.state is IncomingState.SEALED
    assert sealed_content(store, shard_id()) == CONTENT
    assert incoming.finish() == held, "an answer that got lost may be asked for again"
    incoming.abandon()
    assert len(store.scan()) == 1


def test_the_next_replica_finds_the_mapping_of_the_one_before(store):
    """Faulting pages in again costs as much as the copy into them."""

    def mapped():
        lines = Path("/proc/self/maps").read_text().splitlines()
        return sorted(line.split()[0] for line in lines if str(store.path) in line)

    found = []
    for _ in range(3):
        MAPPABLE.send(incoming := MAPPABLE.open(store))
        incoming.finish()
        found.append(mapped())
        assert store.release(store.scan()[0])
    assert found[0] == [], "new memory is not: each of its pages would be cleared first"
    assert len(found[1]) == 1
    assert found[1] == found[2]


def test_a_length_that_can_not_be_mapped(store):
    """The shard of a node with smaller pages."""
    SENDER.send_head(incoming := SENDER.open(store))
    assert not incoming.receive(0, CHUNK, -1, memoryview(bytearray(2 * CHUNK)))
    SENDER.send_and_finish(incoming)
    assert sealed_content(store, shard_id()) == CONTENT
    assert str(store.path) not in Path("/proc/self/maps").read_text()


def bring(incoming, first, size, data):
    """By a socket that carries `data`, and then ends."""
    here, there = socket.socketpair()
    with here, there:
        there.sendall(data)
        there.shutdown(socket.SHUT_WR)
        return incoming.receive(first, size, here.fileno(), memoryview(bytearray(2 * CHUNK)))


def test_received_out_of_a_socket(store):
    MAPPABLE.send_and_finish(MAPPABLE.open(store))
    assert store.release(store.scan()[0])
    incoming, chunks = MAPPABLE.open(store), MAPPABLE.chunks
    refuses(lambda: bring(incoming, 0, CHUNK, chunks[0]), ConfigError, "rest of the head")
    MAPPABLE.send_head(incoming)
    assert not incoming.receive(0, CHUNK, -1, memoryview(bytearray(2 * CHUNK - 1))), "no room to verify in"
    assert bring(incoming, 1, CHUNK, chunks[1])
    assert not bring(incoming, 1, CHUNK, chunks[0]), "it is here, and is never written again"
    assert not bring(incoming, 0, 2 * CHUNK, chunks[0] + chunks[0]), "nor a part of it"
    with pytest.raises(CorruptShardError, match="chunk 0: expected crc32c"):
        bring(incoming, 0, CHUNK, chunks[1])
    assert incoming.next_chunk == 0
    assert bring(incoming, 0, CHUNK, chunks[0])
    for index in range(2, len(chunks)):
        with pytest.raises(ConnectionResetError):
            bring(incoming, index, len(chunks[index]), chunks[index][:10])
        assert incoming.next_chunk == index
        refuses(incoming.finish, ConfigError, f"expected chunk {index} of 8")
        assert bring(incoming, index, len(chunks[index]), chunks[index])
    for first, size in ((8, CHUNK), (-1, CHUNK), (0, 0), (0, CHUNK - 1), (7, CHUNK)):
        refuses(lambda first=first, size=size: bring(incoming, first, size, b""), ConfigError, "expected")
    incoming.finish()
    assert sealed_content(store, shard_id()) == MAPPABLE_CONTENT
    refuses(lambda: bring(incoming, 0, CHUNK, chunks[0]), ClosedError, "sealed")


def test_a_shard_without_data(store):
    content = shard_bytes(pages=0)
    sender = Sender(content)
    assert sender.chunks == []
    sender.send(incoming := sender.open(store))
    incoming.finish()
    assert sealed_content(store, shard_id()) == content


def test_a_slot_that_was_another_shard_keeps_nothing_of_it(store):
    old = Sender(shard_bytes(shard_id(step=1), seed=1, pages=9), shard_id(step=1))
    old.send(incoming := old.open(store))
    incoming.finish()
    assert store.release(store.scan()[0])
    new = shard_bytes(shard_id(step=2), seed=2)
    sender = Sender(new, shard_id(step=2))
    sender.send(incoming := sender.open(store))
    incoming.finish()
    assert sealed_content(store, shard_id(step=2)) == new
    assert store.status().pool.files == 0


# --- resuming


def test_resumed_at_every_cut(store):
    """The connection breaks after any number of pieces; another stream goes on where the receiver says."""
    total = sum(1 for _ in piece_counter(store))
    assert total == len(range(0, SENDER.head_bytes, PIECE)) + 3
    for cut in range(total + 1):
        incoming = SENDER.open(store)
        for number, step in enumerate(SENDER.steps(incoming)):
            if number == cut:
                break
            step()
        before = incoming.next_head_offset, incoming.next_chunk
        assert before == (min(cut * PIECE, SENDER.head_bytes), max(0, cut - total + 3))
        SENDER.send(incoming)
        incoming.finish()
        assert sealed_content(store, shard_id()) == CONTENT
        assert store.release(store.scan()[0])


def piece_counter(store):
    incoming = SENDER.open(store)
    for step in SENDER.steps(incoming):
        step()
        yield step
    incoming.abandon()


# --- refusals


def flipped(data, position):
    damaged = bytearray(data)
    damaged[position] ^= 1 << position % 8
    return bytes(damaged)


def test_every_flipped_byte_of_the_head_is_refused(store):
    incoming = SENDER.open(store)
    for position in range(len(SENDER.head)):
        with pytest.raises(CorruptShardError, match="digest"):
            incoming.put_head(0, flipped(SENDER.head, position))
        assert (incoming.state, incoming.next_head_offset) == (IncomingState.OPEN, 0)
    SENDER.send(incoming)  # and none of that has left a trace
    incoming.finish()
    assert sealed_content(store, shard_id()) == CONTENT


def test_every_flipped_byte_of_the_head_is_refused_even_with_a_digest_that_fits(store):
    """A sender whose memory rots before it computes the digest: the header's own rules still hold."""
    for position in range(len(SENDER.head)):
        head = flipped(SENDER.head, position)
        digest = hashlib.blake2b(head, digest_size=16).digest()
        incoming = SENDER.open(store, digest=digest)
        with pytest.raises((CorruptShardError, IncompatibleError)) as caught:
            incoming.put_head(0, head)
        assert caught.value.message.startswith("replica of shard 0/2 of step 1")
        assert incoming.state is IncomingState.OPEN
        with pytest.raises(ConfigError, match="expected the rest of the head"):
            incoming.finish()
        incoming.abandon()
    assert store.scan() == ()


def test_every_flipped_byte_of_the_data_is_refused(store):
    incoming = SENDER.open(store)
    SENDER.send_head(incoming)
    for index, chunk in enumerate(SENDER.chunks):
        for position in range(len(chunk)):
            with pytest.raises(CorruptShardError, match=f"chunk {index}"):
                incoming.put_chunks(index, flipped(chunk, position))
            assert incoming.next_chunk == index
        with pytest.raises(ConfigError, match=f"expected chunk {index} of 3, found the end"):
            incoming.finish()
        incoming.put_chunks(index, chunk)
    incoming.finish()
    assert sealed_content(store, shard_id()) == CONTENT


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"digest": b"short"}, "digest of 16 bytes"),
        ({"digest": bytes(17)}, "digest of 16 bytes"),
        ({"head_bytes": 0}, "head of 4096"),
        ({"head_bytes": -4096}, "head of 4096"),
        ({"head_bytes": 4097}, "whole pages"),
        ({"head_bytes": (64 << 20) + 8192, "size_bytes": 1 << 30}, "head of 4096"),
        ({"size_bytes": 4095}, "at least its head"),
        ({"size_bytes": -1}, "at least its head"),
        ({"max_shard_bytes": 24575}, "at most 24575 bytes, found 24576"),
    ],
)
def test_announcements_that_are_refused(store, changes, problem):
    with pytest.raises(ConfigError, match=problem):
        SENDER.open(store, **changes)
    assert store.status().total_bytes == 0


def test_no_room_is_said_before_anything_is_sent():
    path = Path(tempfile.mkdtemp(prefix="flashckpt-test-", dir="/dev/shm"))
    with SlotStore.open(path, "job", budget_bytes=10_000) as store:
        with pytest.raises(NoSpaceError):
            SENDER.open(store)
        assert store.check() == []
    shutil.rmtree(path)


@pytest.mark.parametrize(
    ("changes", "error", "problem"),
    [
        ({"size_bytes": 24576 + 4096}, CorruptShardError, "expected a file of"),
        ({"size_bytes": 24576 - 4096}, CorruptShardError, "expected a file of"),
        ({"head_bytes": 8192}, CorruptShardError, "digest"),
        ({"shard": shard_id(rank=1)}, IncompatibleError, "expected shard 1/2"),
        ({"shard": shard_id(step=2)}, IncompatibleError, "of step 2"),
        ({"digest": bytes(16)}, CorruptShardError, "expected digest 00000000000000000000000000000000"),
    ],
)
def test_head_that_is_not_what_was_announced(store, changes, error, problem):
    incoming = SENDER.open(store, **changes)
    with pytest.raises(error, match=problem):
        incoming.put_head(0, CONTENT[: changes.get("head_bytes", SENDER.head_bytes)])
    assert (incoming.state, incoming.next_head_offset) == (IncomingState.OPEN, 0)
    incoming.abandon()
    assert store.scan() == ()


def test_shard_of_another_job(store):
    foreign = Sender(shard_bytes(job="other job"), job="other job")
    incoming = foreign.open(store)
    with pytest.raises(IncompatibleError, match="other job"):
        foreign.send_head(incoming)
    incoming.abandon()


def refuses(call, error, problem):
    with pytest.raises(error, match=problem) as caught:
        call()
    assert isinstance(caught.value, FlashError)


def test_every_refusal_by_order_and_length(store):
    incoming = SENDER.open(store)
    head, chunks = SENDER.head, SENDER.chunks
    refuses(lambda: incoming.put_chunks(0, chunks[0]), ConfigError, "expected the rest of the head, found chunk 0")
    refuses(incoming.finish, ConfigError, "expected the rest of the head")
    refuses(lambda: incoming.put_head(1, head[1:9]), ConfigError, "the piece of the head at 0, found one at 1")
    refuses(lambda: incoming.put_head(0, b""), ConfigError, "1 to 4096 bytes")
    refuses(lambda: incoming.put_head(0, head + b"x"), ConfigError, "1 to 4096 bytes of the head, found 4097")
    assert incoming.state is IncomingState.OPEN
    incoming.put_head(0, head[:100])
    refuses(lambda: incoming.put_head(0, head[:100]), ConfigError, "at 100, found one at 0")  # twice
    refuses(lambda: incoming.put_head(99, head[99:200]), ConfigError, "at 100, found one at 99")  # overlapping
    refuses(lambda: incoming.put_head(101, head[101:]), ConfigError, "at 100, found one at 101")  # a gap
    refuses(lambda: incoming.put_head(-1, head[:5]), ConfigError, "found one at -1")
    refuses(lambda: incoming.put_chunks(0, chunks[0]), ConfigError, "rest of the head")
    incoming.put_head(100, memoryview(head)[100:])
    assert incoming.state is IncomingState.DATA
    refuses(lambda: incoming.put_head(4096, b"x"), ConfigError, "expected chunks, found a piece of the head")
    refuses(lambda: incoming.put_head(0, head), ConfigError, "expected chunks")
    refuses(lambda: incoming.put_chunks(-1, chunks[2]), ConfigError, "a chunk from 0 to 2, found chunk -1")
    refuses(lambda: incoming.put_chunks(0, chunks[0][:-1]), ConfigError, "8192 bytes of chunk 0, found 8191")
    refuses(lambda: incoming.put_chunks(0, chunks[0] + b"x"), ConfigError, "16384 bytes of chunks from 0, found 8193")
    refuses(lambda: incoming.put_chunks(0, b""), ConfigError, "found 0")
    refuses(lambda: incoming.put_chunks(0, chunks[1]), CorruptShardError, "crc32c")  # another one's bytes
    incoming.put_chunks(0, chunks[0])
    incoming.put_chunks(0, chunks[0])  # twice changes nothing
    refuses(incoming.finish, ConfigError, "expected chunk 1 of 3, found the end")
    incoming.put_chunks(1, chunks[1])
    refuses(lambda: incoming.put_chunks(2, chunks[2] + bytes(4096)), ConfigError, "4096 bytes of chunk 2")
    incoming.put_chunks(2, bytearray(chunks[2]))
    refuses(lambda: incoming.put_chunks(3, chunks[0]), ConfigError, "a chunk from 0 to 2")  # beyond the end
    incoming.finish()
    for late in (
        lambda: incoming.put_head(4096, b"x"),
        lambda: incoming.put_chunks(2, chunks[2]),
        lambda: incoming.put_chunks(3, chunks[2]),
    ):
        refuses(late, ClosedError, "nothing after it was sealed")
    assert sealed_content(store, shard_id()) == CONTENT


@pytest.mark.parametrize("order", [(2, 1, 0), (1, 2, 0), (0, 2, 1)])
def test_chunks_in_any_order(store, order):
    incoming = SENDER.open(store)
    SENDER.send_head(incoming)
    for number, index in enumerate(order):
        expected = min(set(range(3)) - set(order[:number]))
        assert incoming.next_chunk == expected
        incoming.put_chunks(index, SENDER.chunks[index])
    incoming.finish()
    assert sealed_content(store, shard_id()) == CONTENT


def test_several_chunks_at_once_and_one_of_them_is_bad(store):
    incoming = SENDER.open(store)
    SENDER.send_head(incoming)
    incoming.put_chunks(1, SENDER.chunks[1])
    damaged = SENDER.chunks[0] + flipped(SENDER.chunks[1], 5) + SENDER.chunks[2]
    refuses(lambda: incoming.put_chunks(0, damaged), CorruptShardError, "chunk 1: expected crc32c")
    assert incoming.next_chunk == 0
    incoming.put_chunks(0, b"".join(SENDER.chunks))
    incoming.finish()
    assert sealed_content(store, shard_id()) == CONTENT


def test_whoever_writes_is_waited_for_before_the_slot_is_given_back(store, monkeypatch):
    """Another shard may be written into it the next moment."""
    MAPPABLE.open(store).abandon()
    incoming = MAPPABLE.open(store)
    MAPPABLE.send_head(incoming)
    writing, go_on, given_back = threading.Event(), threading.Event(), threading.Event()
    write_at = Slot.write_at

    def slow(file, offset, data):
        writing.set()
        assert go_on.wait(60)
        assert not given_back.is_set()
        write_at(file, offset, data)

    monkeypatch.setattr(Slot, "write_at", slow)
    writer = threading.Thread(target=incoming.put_chunks, args=(0, MAPPABLE.chunks[0]))
    writer.start()
    assert writing.wait(60)
    ender = threading.Thread(target=lambda: (incoming.abandon(), given_back.set()))
    ender.start()
    assert not given_back.wait(0.2)
    go_on.set()
    writer.join()
    ender.join()
    assert given_back.is_set()
    refuses(lambda: incoming.put_chunks(1, MAPPABLE.chunks[1]), ClosedError, "abandoned")


def test_abandoned_at_any_time(store):
    for pieces in range(9):
        incoming = SENDER.open(store)
        for _, step in zip(range(pieces), SENDER.steps(incoming), strict=False):
            step()
        incoming.abandon()
        incoming.abandon()
        assert incoming.state is IncomingState.ABANDONED
        refuses(lambda one=incoming: one.put_head(0, SENDER.head), ClosedError, "after it was abandoned")
        refuses(lambda one=incoming: one.put_chunks(0, SENDER.chunks[0]), ClosedError, "after it was abandoned")
        refuses(incoming.finish, ClosedError, "after it was abandoned")
    assert store.scan() == ()
    assert (store.status().pool.files, store.status().writing.files) == (1, 0)


def test_store_that_was_closed_meanwhile():
    path = Path(tempfile.mkdtemp(prefix="flashckpt-test-", dir="/dev/shm"))
    store = SlotStore.open(path, "job")
    incoming = SENDER.open(store)
    SENDER.send(incoming)
    store.close()
    with pytest.raises(ClosedError):
        incoming.finish()
    incoming.abandon()
    shutil.rmtree(path)


# --- the shard is there already


def test_second_push_of_the_same_shard_is_a_success(store):
    first, second = SENDER.open(store, tag=9), SENDER.open(store, tag=9)
    SENDER.send(first)
    SENDER.send(second)
    assert second.finish() == first.finish()
    assert second.finish() == first.finish()
    assert len(store.scan()) == 1
    assert (store.status().pool.files, store.status().writing.files) == (1, 0)


def test_second_push_with_other_content_is_a_conflict(store):
    SENDER.send(first := SENDER.open(store))
    first.finish()
    other = Sender(shard_bytes(seed=5))
    other.send(second := other.open(store))
    with pytest.raises(ConflictError, match="expected none yet"):
        second.finish()
    second.abandon()
    assert sealed_content(store, shard_id()) == CONTENT
    (pooled,) = (store.path / "pool").iterdir()
    assert pooled.read_bytes()[:64] == bytes(64)


def test_bad_copy_that_is_in_the_way_is_quarantined(store):
    SENDER.send(incoming := SENDER.open(store))
    slot = store.claim_file(len(CONTENT))
    slot.write_at(0, flipped(CONTENT, 70))
    store.seal(slot, shard_id())
    with pytest.raises(CorruptShardError):
        find_held(store, "job", shard_id())
    assert incoming.finish().digest == SENDER.digest
    assert sealed_content(store, shard_id()) == CONTENT
    assert store.status().quarantined_files == 1


# --- faults


@pytest.mark.parametrize("name", ["mid_put", "before_replica_seal", "before_rename_sealed"])
def test_error_before_the_seal_leaves_no_shard_and_can_be_repeated(store, armed, name):
    fired = armed(f"{name}=error(EIO)*1")
    incoming = SENDER.open(store)
    with pytest.raises(OSError, match=name):
        SENDER.send_and_finish(incoming)
    assert fired() == [name]
    assert store.scan() == ()
    SENDER.send(incoming)
    incoming.finish()
    assert sealed_content(store, shard_id()) == CONTENT


def test_error_after_the_seal_is_a_shard_that_was_not_acknowledged(store, armed):
    fired = armed("after_replica_seal=error(EIO)*1")
    SENDER.send(incoming := SENDER.open(store))
    with pytest.raises(OSError, match="after_replica_seal"):
        incoming.finish()
    assert fired() == ["after_replica_seal"]
    assert find_held(store, "job", shard_id()) == incoming.finish()


def test_the_preamble_comes_last(store):
    """Until the very end the slot is no shard, wherever the receiver dies."""

    def preamble():
        (path,) = (store.path / "writing").iterdir()
        return path.read_bytes()[:64]

    incoming = SENDER.open(store)
    for step in SENDER.steps(incoming):
        assert preamble() == bytes(64)
        step()
    assert preamble() == bytes(64)
    incoming.finish()
    assert sealed_content(store, shard_id())[:64] == CONTENT[:64] != bytes(64)


FAILPOINTS = re.findall(r"`([a-z_]+)`", incoming_module.__doc__.partition("Failpoints")[2])


def test_failpoints_are_the_ones_that_are_named():
    assert FAILPOINTS == ["mid_put", "before_replica_seal", "after_replica_seal"]


# --- the sender


def test_outgoing_says_what_it_has():
    assert (SENDER.size_bytes, SENDER.head_bytes, len(SENDER.chunks)) == (24576, 4096, 3)
    assert SENDER.head + b"".join(SENDER.chunks) == CONTENT
    assert SENDER.digest == hashlib.blake2b(CONTENT[:4096], digest_size=16).digest()
    with opened(CONTENT) as fd:
        assert digest_of(fd) == SENDER.digest
        outgoing = Outgoing(fd, shard_id(), "job")
        assert (outgoing.chunk_bytes, outgoing.chunks) == (CHUNK, 3)
        assert outgoing.read_head(4096, 10) == b""
        assert outgoing.read_head(4090, 10) == CONTENT[4090:4096], "never a byte of the data"
        for bad in (lambda: outgoing.read_head(4097, 1), lambda: outgoing.read_head(-1, 1)):
            refuses(bad, ConfigError, "offset from 0 to 4096")
        refuses(lambda: outgoing.read_head(0, 0), ConfigError, "limit above 0")
        for index in (-1, 3):
            refuses(lambda index=index: outgoing.read_chunk(index), ConfigError, "chunk from 0 to 2")


def test_outgoing_refuses_what_is_not_the_shard():
    with opened(CONTENT) as fd:
        refuses(lambda: Outgoing(fd, shard_id(rank=1), "job"), IncompatibleError, "expected shard 1/2")
        refuses(lambda: Outgoing(fd, shard_id(), "another"), IncompatibleError, "another")
    for position in range(0, 4096, 7):
        with opened(flipped(CONTENT, position)) as fd, pytest.raises((CorruptShardError, IncompatibleError)):
            Outgoing(fd, shard_id(), "job")


def test_rot_is_never_sent():
    for position in range(4096, len(CONTENT), 61):
        with opened(flipped(CONTENT, position)) as fd:
            outgoing = Outgoing(fd, shard_id(), "job")
            bad = (position - 4096) // CHUNK
            for index in range(3):
                if index == bad:
                    with pytest.raises(CorruptShardError, match=rf"chunk {bad}: expected crc32c") as caught:
                        outgoing.read_chunk(index)
                    assert os.readlink(f"/proc/self/fd/{fd}") in caught.value.message
                else:
                    assert outgoing.read_chunk(index) == SENDER.chunks[index]


def test_file_that_is_cut_short_meanwhile_is_an_error_and_no_signal():
    with opened(CONTENT) as fd:
        outgoing = Outgoing(fd, shard_id(), "job")
        os.ftruncate(fd, 4096 + CHUNK + 5)
        assert outgoing.read_chunk(0) == SENDER.chunks[0]
        refuses(lambda: outgoing.read_chunk(1), CorruptShardError, "cut short")
        refuses(lambda: outgoing.read_chunk(2), CorruptShardError, "cut short")
        os.ftruncate(fd, 100)
        refuses(lambda: outgoing.read_head(0, 4096), CorruptShardError, "cut short")
        refuses(lambda: digest_of(fd), CorruptShardError, "expected a file of")
        os.ftruncate(fd, 10)
        refuses(lambda: digest_of(fd), CorruptShardError, "preamble")


def test_slot_that_is_recycled_while_it_is_sent(store):
    slot = store.claim_file(len(CONTENT))
    slot.write_at(0, CONTENT)
    sealed = store.seal(slot, shard_id())
    fd = store.open_shard(sealed)
    try:
        assert hold(fd, sealed, job="job") == Held(shard_id(), SENDER.digest, len(CONTENT), 0)
        outgoing = Outgoing(fd, shard_id(), "job")
        assert store.release(sealed)
        again = store.claim_file(len(CONTENT))
        assert again.slot_id == sealed.slot_id
        again.write_at(0, shard_bytes(shard_id(step=2), seed=8))
        for index in range(3):
            refuses(lambda index=index: outgoing.read_chunk(index), CorruptShardError, "crc32c")
        refuses(lambda: hold(fd, sealed, job="job"), IncompatibleError, "expected shard 0/2 of step 1")
        store.abandon(again)
    finally:
        os.close(fd)


def test_large_head_in_small_pieces(store):
    """Tens of thousands of tensors: the head is larger than a piece of any kind."""
    names = os.urandom(3 << 20)
    layout = encode_layout(Layout(())) or b""
    where = geometry(len(layout) + (3 << 20), 4096, 4096, 4096)
    data = random.Random(1).randbytes(where.data_length_bytes)
    crcs = b"".join(struct.pack("<I", native.crc32c(data[i : i + 4096])) for i in range(0, len(data), 4096))
    header = encode_header(
        job="job",
        shard=shard_id(),
        layout_bytes=names,  # who only keeps shards does not decode it
        layout_fingerprint=fingerprint(names),
        values_offset_bytes=0,
        values_length_bytes=0,
        chunk_bytes=4096,
        chunk_crcs=crcs,
        saved_at=1.0,
    )
    file = bytearray(where.file_length_bytes)
    with memoryview(file) as view:
        view[where.data_offset_bytes :] = data
        seal_bytes(view, header, where)
    sender = Sender(bytes(file))
    assert sender.head_bytes > 3 << 20
    sender.send(incoming := sender.open(store))
    incoming.finish()
    assert sealed_content(store, shard_id()) == bytes(file)
