"""A receiver against senders that send anything in any order: it seals exactly the shard, or nothing."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from flashckpt.errors import ClosedError, ConfigError, CorruptShardError, FlashError
from flashckpt.move.incoming import IncomingState
from flashckpt.move.sealing import find_held
from flashckpt.move.throttle import Throttle
from flashckpt.store.slots import SlotStore
from tests.unit.test_transport_incoming import CONTENT, SENDER, flipped, sealed_content, shard_id

HEAD = len(SENDER.head)
CHUNKS = len(SENDER.chunks)


class PushMachine(RuleBasedStateMachine):
    """The model: how much of the head was accepted, and which chunks."""

    def __init__(self):
        super().__init__()
        self.memory_dir = Path(tempfile.mkdtemp(prefix="flashckpt-test-", dir="/dev/shm"))
        self.store = SlotStore.open(self.memory_dir, "job")
        self.renew()

    def renew(self):
        self.incoming = SENDER.open(self.store)
        self.head = 0
        self.chunks = set()
        self.damaged = False  # an accepted piece of the head, not found out before the digest is
        self.over = False

    def teardown(self):
        self.incoming.abandon()
        assert self.store.check() == []
        self.store.close()
        shutil.rmtree(self.memory_dir)

    @rule(slip=st.sampled_from([0, 0, 0, 0, 1, -1, 64]), length=st.integers(0, HEAD + 1), damage=st.booleans())
    def put_head(self, slip, length, damage):
        offset = self.head + slip
        piece = SENDER.head[max(offset, 0) : max(offset, 0) + length]
        damage = damage and piece != b""
        if damage:
            piece = flipped(piece, len(piece) // 2)
        allowed = not self.over and self.head < HEAD and slip == 0 and len(piece) > 0
        complete = allowed and self.head + len(piece) == HEAD
        try:
            self.incoming.put_head(offset, piece)
        except CorruptShardError:
            assert complete
            assert self.damaged or damage
            self.head, self.damaged = 0, False
        except (ConfigError, ClosedError):
            assert not allowed
        else:
            assert allowed
            self.head += len(piece)
            self.damaged |= damage
            assert not (complete and self.damaged)

    @rule(
        first=st.integers(-1, CHUNKS),
        count=st.integers(1, 3),
        cut=st.sampled_from([0, 0, 0, 1]),
        damage=st.booleans(),
    )
    def put_chunks(self, first, count, cut, damage):
        data = b"".join(SENDER.chunks[max(first, 0) : max(first, 0) + count])
        data = data[: len(data) - cut]
        if damage and data:
            data = flipped(data, len(data) // 3)
        fits = not self.over and self.head == HEAD and 0 <= first < CHUNKS and not cut
        try:
            self.incoming.put_chunks(first, data)
        except CorruptShardError:
            assert fits
            assert damage
        except (ConfigError, ClosedError):
            assert not fits
        else:
            assert fits
            assert not damage
            self.chunks |= set(range(first, min(first + count, CHUNKS)))

    @rule()
    def finish(self):
        ready = self.head == HEAD and len(self.chunks) == CHUNKS
        try:
            held = self.incoming.finish()
        except FlashError:
            assert self.over or not ready
        else:
            assert ready
            assert held == find_held(self.store, "job", shard_id())
            assert sealed_content(self.store, shard_id()) == CONTENT
            self.over = True
            assert self.store.release(self.store.scan()[0])
            self.renew()

    @rule()
    def give_up(self):
        self.incoming.abandon()
        self.over = True
        assert self.incoming.state is IncomingState.ABANDONED

    @rule()
    def begin_again(self):
        self.incoming.abandon()
        self.renew()

    @rule()
    def resume(self):
        """A sender that only believes what the receiver says gets everything across, unless the head was bad."""
        if not self.over and not self.damaged:
            SENDER.send(self.incoming)
            self.head, self.chunks = HEAD, set(range(CHUNKS))

    @invariant()
    def nothing_is_a_shard_before_the_end(self):
        assert self.store.scan() == ()

    @invariant()
    def where_to_go_on(self):
        assert self.incoming.next_head_offset == self.head
        assert self.incoming.next_chunk == min(set(range(CHUNKS + 1)) - self.chunks)


PushMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestPush = PushMachine.TestCase


@given(
    rate=st.integers(1, 10**9),
    takes=st.lists(st.tuples(st.floats(0, 10), st.integers(0, 10**8)), min_size=1, max_size=30),
)
def test_no_window_gets_more_than_the_rate_and_one_burst(rate, takes):
    now = 0.0

    def sleep(seconds):
        nonlocal now
        now += seconds

    throttle = Throttle(rate, lambda: now, sleep)
    sent = []  # when, and how much until then
    total = 0
    for pause, size in takes:
        now += pause
        throttle.take(size)
        total += size
        sent.append((now, total, size))
    for i, (start, before, size) in enumerate(sent):
        for end, until, _ in sent[i:]:
            # The first of a window was paid for before it.
            assert until - before <= (end - start) * rate + 0.05 * rate + size + 1e-6 * until + 1
