"""Agents as the servers see them, kept in memory; credentials of a job; shards to push. For tests of rpc/."""

from __future__ import annotations

import contextlib
import hashlib
import threading
from dataclasses import dataclass, field

from flashckpt.errors import CorruptShardError
from flashckpt.protocol.line import from_fence
from flashckpt.protocol.wire import Answer, Beat, Envelope, PutHave, PutOpen, PutReady
from flashckpt.rpc.api import VERSION, Hello
from flashckpt.rpc.credentials import Authority, Bundle, make_request
from flashckpt.types import Generation, Launch, ShardId

JOB = "run1"
LAUNCH = Launch(1_700_000_000_000, 0xABCDEF)
FENCE = from_fence(-1, 1_700_000_000_000, 0xABCDEF)
GENERATION = Generation(LAUNCH.epoch, LAUNCH.nonce, 10, 1)
WAIT = 20.0  # seconds until a condition that must come true is given up


class Credentials:
    """The certificates of one launch."""

    def __init__(self, job=JOB):
        self.job = job
        self.authority = Authority.create(job)

    def bundle(self, node_id, job=None):
        job = self.job if job is None else job
        key, request = make_request(job, node_id)
        return Bundle(self.authority.sign(request, job, node_id), key, self.authority.certificate_pem)


def hello(node_id, job=JOB, version=VERSION):
    return Hello(version, job, node_id, "127.0.0.1:1", LAUNCH, None)


def beat(sender):
    return Envelope(sender, LAUNCH, None, Beat())


@dataclass
class Shard:
    """A source of a push, and what must arrive."""

    head: bytes
    data: bytes
    chunk_bytes: int
    rank: int = 0
    reads: list[int] = field(default_factory=list)

    @staticmethod
    def make(head_bytes=3_000_000, data_bytes=5_000_000, chunk_bytes=256 << 10, rank=0):
        block = bytes(range(256)) * 257
        head = (block * (head_bytes // len(block) + 1))[:head_bytes]
        data = (block[rank + 1 :] + block * (data_bytes // len(block) + 1))[:data_bytes]
        return Shard(head, data, chunk_bytes, rank)

    @property
    def head_bytes(self):
        return len(self.head)

    @property
    def chunks(self):
        return -(-len(self.data) // self.chunk_bytes)

    @property
    def digest(self):
        return hashlib.blake2b(self.head, digest_size=16).digest()

    def read_head(self, offset, limit):
        return self.head[offset : offset + limit]

    def read_chunk(self, index):
        self.reads.append(index)
        return self.data[index * self.chunk_bytes : (index + 1) * self.chunk_bytes]

    def view_of(self, chunks):
        return None  # not in a file: lanes read it

    def opening(self, sender):
        return PutOpen(
            *(sender, LAUNCH, None, ShardId(GENERATION, self.rank, 4), 7, self.digest),
            size_bytes=len(self.head) + len(self.data),
            head_bytes=len(self.head),
        )


class MemoryReceiver:
    """Takes one replica as strictly as a real one does, and notes how it ended."""

    def __init__(self, peer, opening, chunk_bytes):
        self.peer = peer
        self.opening = opening
        self.chunk_bytes = chunk_bytes
        self.head = bytearray()
        self.data = bytearray(opening.size_bytes - opening.head_bytes)
        self.have = set()
        self.lock = threading.Lock()
        self.ends = []
        self.ended = threading.Event()
        self.took = threading.Semaphore(0)  # one for each chunk
        self.gate = threading.Event()  # closed: chunks wait
        self.gate.set()

    @property
    def ready(self):
        return PutReady(len(self.head), self.next_chunk)

    @property
    def chunks(self):
        return -(-len(self.data) // self.chunk_bytes)

    @property
    def next_chunk(self):
        return min(set(range(self.chunks + 1)) - self.have)

    def put_head(self, offset, data):
        if offset != len(self.head) or offset + len(data) > self.opening.head_bytes:
            raise CorruptShardError(f"head: expected offset {len(self.head)}, found {offset}")
        self.head += data

    def receive(self, first, size_bytes, fd, scratch):
        return False

    def put_chunks(self, first, data):
        self.took.release()
        self.gate.wait(WAIT)
        start, size = first * self.chunk_bytes, self.opening.size_bytes - self.opening.head_bytes
        whole = len(data) % self.chunk_bytes == 0 or start + len(data) == size
        if not data or not whole or start + len(data) > size or len(self.head) != self.opening.head_bytes:
            raise CorruptShardError(f"chunk: expected whole ones, found {len(data)} bytes of {first}", chunk=first)
        with self.lock:
            self.data[start : start + len(data)] = data
            self.have |= set(range(first, first + -(-len(data) // self.chunk_bytes)))

    def finish(self):
        if len(self.head) != self.opening.head_bytes or len(self.have) != self.chunks:
            raise CorruptShardError(f"expected {self.opening.size_bytes} bytes, found fewer")
        self._end("finish")
        return hashlib.blake2b(self.head, digest_size=16).digest()

    def suspend(self):
        self._end("suspend")

    def fail(self, error):
        self._end(f"fail {type(error).__name__}")

    def _end(self, how):
        self.ends.append(how)
        self.ended.set()


class MemoryPeer:
    """A PeerApi."""

    def __init__(self, node_id, job=JOB, chunk_bytes=256 << 10):
        self.node_id = node_id
        self.job = job
        self.chunk_bytes = chunk_bytes
        self.calls = []
        self.answer = Answer(LAUNCH, FENCE, None, ())
        self.on_open = None  # answers in place of a receiver, or raises
        self.gate_closed = False  # of new receivers
        self.receivers = []
        self.opened = threading.Semaphore(0)
        self._suspended = {}

    def hello(self, peer, hello):
        self.calls.append(("hello", peer, hello))
        return Hello(VERSION, self.job, self.node_id, "127.0.0.1:2", LAUNCH, FENCE)

    def tell(self, peer, envelope):
        self.calls.append(("tell", peer, envelope))
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def put_open(self, peer, opening):
        self.calls.append(("put_open", peer, opening))
        if self.on_open is not None:
            return self.on_open(peer, opening)
        for old in self.receivers:
            if old.opening.shard != opening.shard or old.opening.digest != opening.digest:
                continue
            if old.ends == ["finish"]:
                return PutHave(opening.digest)
            if old.ends == ["suspend"]:
                old.ends.clear()
                old.ended.clear()
                self.opened.release()
                return old
        receiver = MemoryReceiver(peer, opening, self.chunk_bytes)
        if self.gate_closed:
            receiver.gate.clear()
        self.receivers.append(receiver)
        self.opened.release()
        return receiver


@contextlib.contextmanager
def until(condition, what):
    """Waits after the block until `condition` holds."""
    yield
    deadline = threading.Event()
    for _ in range(int(WAIT / 0.01)):
        if condition():
            return
        deadline.wait(0.01)
    raise AssertionError(f"expected within {WAIT} s: {what}")
