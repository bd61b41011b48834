"""A warm process without torch that forks agents and light ranks, so that a case takes a second and not twenty.

An agent from here runs the same `main` as `python -I -m flashckpt.agent run --daemon`; only the interpreter's start
and the imports are saved. A light rank does to its agent what a trainer does, with the trainer's own parts (SlotStore,
AgentLink, AgentSlots, SaveHandle); only the bytes come from a random generator instead of tensors.

Requests come as JSON over a socket, each with a descriptor: what the child is told and answers goes over that one.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import os
import random
import signal
import socket
import struct
import sys
import time
import traceback

from flashckpt.rpc.settings import prepare

prepare()  # before grpc is imported

from flashckpt import failpoints, native  # noqa: E402
from flashckpt.agent import process  # noqa: E402
from flashckpt.agent import shell as _warm_shell  # noqa: E402, F401
from flashckpt.agent.link import AgentLink  # noqa: E402
from flashckpt.agent.process import SOCKET_NAME  # noqa: E402
from flashckpt.agent.start import ensure_agent  # noqa: E402
from flashckpt.config import CheckpointConfig  # noqa: E402
from flashckpt.errors import BusyError, DeadlineError, FencedError, FlashError  # noqa: E402
from flashckpt.failpoints import failpoint  # noqa: E402
from flashckpt.format.layout import encode_layout, fingerprint  # noqa: E402
from flashckpt.format.shard import (  # noqa: E402
    DEFAULT_CHUNK_BYTES,
    encode_header,
    geometry,
    read_header,
    seal_bytes,
)
from flashckpt.load.fetch_by_agent import AgentMemory  # noqa: E402
from flashckpt.protocol.line import begun, from_fence, name_of  # noqa: E402
from flashckpt.rpc.credentials import Bundle  # noqa: E402
from flashckpt.rpc.session import decode_session  # noqa: E402
from flashckpt.save.agent_slots import AgentSlots  # noqa: E402
from flashckpt.save.handle import SaveHandle  # noqa: E402
from flashckpt.store.slots import SlotStore  # noqa: E402
from flashckpt.types import (  # noqa: E402
    ChunkRange,
    Generation,
    Layout,
    Level,
    Outcome,
    Portion,
    Retrieval,
    ShardId,
)

_CLONE_NEWNET = 0x40000000
_PR_SET_PDEATHSIG = 1
_LAYOUT = encode_layout(Layout(()))
# As the trainer's: what a save ends in through no fault of the caller's.
_OUTCOMES = (OSError, BusyError, FencedError, DeadlineError)


class LightRank:
    """One rank. Each `do_*` is a command; what it returns is the answer."""

    def __init__(self):
        self.handles = {}
        self.store = self.link = self.slots = self.config = None

    def do_open(self, job, memory_dir, rank, agent, config):
        """`agent`: options of the one to start where none runs; None for a rank that does not act for its node."""
        self.job, self.rank = job, rank
        self.config = CheckpointConfig(job=job, memory_dir=memory_dir, **config)
        self.store = SlotStore.open(memory_dir, job)
        options = None if agent is None else process.Options(**agent)
        start = None if options is None else lambda left: ensure_agent(options, left)
        self.link = AgentLink(self.store.socket_path(SOCKET_NAME), job, rank, start)
        self.link.open(20.0)
        return {"agent": self.link.lease.agent_pid, "epoch": self.store.highest_epoch()}

    def do_listen(self, bundle, host):
        credentials = _bundle(bundle)
        return self.link.call(lambda client, ticket, _: client.listen(ticket, credentials, host, 0), 10.0, "listening")

    def do_enter(self, session, bundle):
        self.session = decode_session(bytes.fromhex(session))
        self.slots = AgentSlots(self.store, self.link, self.session, bundle and _bundle(bundle), self.config)

    def do_begin(self):
        self.slots.begin()

    def do_save(self, step, size_bytes, seq=1):
        """Checkpointer.save() and ShardWriter.write() without what is about tensors."""
        launch = self.slots.launch
        generation = Generation(launch.epoch, launch.nonce, step, seq)
        shard = ShardId(generation, self.rank, self.session.world)
        handle = self.handles[step] = SaveHandle(step, generation, Level.REPLICATED)
        began = time.monotonic()
        answer = {"generation": list(generation), "rank": self.rank, "code": "", "data": ""}
        try:
            answer["data"] = self._write(shard, size_bytes)
        except BaseException as error:
            self.slots.void(generation)
            if not isinstance(error, _OUTCOMES):
                raise
            skipped = isinstance(error, BusyError) and self.config.on_busy == "skip"
            handle.finish(Outcome.SKIPPED if skipped else Outcome.FAILED, str(error))
            answer["code"] = getattr(error, "code", type(error).__name__)
        else:
            handle.advance(Level.SEALED)
            self.slots.follow(handle)
            handle.finish(Outcome.OK, "")
        return {**answer, "outcome": handle.outcome, "reason": handle.reason, "seconds": time.monotonic() - began}

    def do_wait(self, step, level, timeout):
        handle = self.handles[step]
        began = time.monotonic()
        try:
            outcome = handle.wait(level, timeout)
        except DeadlineError:
            outcome = "late"
        return {
            "outcome": outcome,
            "level": handle.level.name.lower(),
            "reason": handle.reason,
            "generation": list(handle.generation),
            "seconds": time.monotonic() - began,
        }

    def do_prepare(self, size_bytes):
        self.slots.prepare(self._place(size_bytes).file_length_bytes, self.rank)

    def do_environ(self, **variables):
        """For agents that this rank starts from now on."""
        os.environ.update(variables)

    def do_line(self, step, base):
        launch = self.slots.launch
        self.slots.put_line(from_fence(step, launch.epoch, launch.nonce), base and Generation(*base))

    def do_inventory(self, timeout=10.0):
        found = AgentMemory(self.link, self.store).inventory(timeout)
        return {
            "node": found.node_id,
            "holdings": [
                {
                    "shard": _shard_text(one.held.shard),
                    "digest": one.held.digest.hex(),
                    "size_bytes": one.held.size_bytes,
                    "tag": one.held.tag,
                    "level": one.level.name.lower(),
                    "verified": one.verified,
                }
                for one in found.holdings
            ],
            "lines": [name_of(line.head) for line in found.lines],
            "quarantined": found.quarantined,
            "past": [[one.launch.epoch, one.launch.nonce, len(one.members)] for one in found.past],
        }

    def do_retrieve(self, wanted, timeout=20.0):
        """Keeps what was fetched until `let_go`; the answer says what its bytes are like."""
        progress = []
        self.retrieved = AgentMemory(self.link, self.store).retrieve(
            [_retrieval(one) for one in wanted], timeout, lambda *seen: progress.append(seen)
        )
        places = self.retrieved.__enter__()
        found = {}
        for one in wanted:
            shard = _shard(one["shard"])
            name = places[shard]
            fd = self.store.open_fetched(name) if name else self.store.open_shard(self.store.find(shard))
            found[one["shard"]] = {"name": name, **self._examine(fd, shard, one)}
        return {"places": found, "progress": progress}

    def _examine(self, fd, shard, one):
        try:
            header = read_header(fd, expect=shard, job=self.job)
            right = content(shard, header.data_length_bytes)
            size, at = header.chunk_bytes, header.data_offset_bytes
            chunks = -(-header.data_length_bytes // size)
            asked = {i for ranges, _ in one["portions"] for first, n in ranges for i in range(first, first + n)}
            good = [
                index
                for index in range(chunks)
                if os.pread(fd, size, at + index * size) == right[index * size : (index + 1) * size]
            ]
            taken = os.fstat(fd).st_blocks * 512
            return {"chunks": chunks, "good": good, "asked": sorted(asked), "taken_bytes": taken, "head_bytes": at}
        finally:
            os.close(fd)

    def do_let_go(self):
        self.retrieved.__exit__(None, None, None)

    def do_exit(self):
        self.slots.close(20.0)
        self.store.close()
        raise SystemExit

    def _write(self, shard, size_bytes):
        self._claim_line()
        place = self._place(size_bytes)
        data = content(shard, place.data_length_bytes)
        slot = self.slots.acquire(shard, place.file_length_bytes)
        try:
            failpoint("before_copy")
            slot.view[place.data_offset_bytes :] = data
            failpoint("after_copy")
            pieces = (data[at : at + DEFAULT_CHUNK_BYTES] for at in range(0, len(data), DEFAULT_CHUNK_BYTES))
            header = encode_header(
                job=self.job,
                shard=shard,
                layout_bytes=_LAYOUT,
                layout_fingerprint=fingerprint(_LAYOUT),
                values_offset_bytes=0,
                values_length_bytes=0,
                chunk_bytes=DEFAULT_CHUNK_BYTES,
                chunk_crcs=b"".join(struct.pack("<I", native.crc32c(piece)) for piece in pieces),
                saved_at=time.time(),
            )
            failpoint("before_header")
            self._refuse_if_fenced()
            seal_bytes(slot.view, header, place)
            failpoint("before_seal")
            sealed = self.store.seal(slot, shard, 0)
            failpoint("after_seal")
            self.slots.sealed(sealed)
        except BaseException:
            with contextlib.suppress(Exception):
                self.store.abandon(slot)
            raise
        return digest(data)

    def _place(self, size_bytes):
        return geometry(len(_LAYOUT), size_bytes, self.store.granule_bytes, DEFAULT_CHUNK_BYTES)

    def _claim_line(self):
        """ShardWriter._claim_line() of a launch that has loaded nothing."""
        line = self._refuse_if_fenced()
        if line is None or line.head != self.slots.launch:
            known = [one.shard.generation for one in self.store.scan()]
            known += [record.generation for record in self.store.read_records()]
            self.slots.put_line(begun(self.slots.launch).including(line, known), None)

    def _refuse_if_fenced(self):
        line = self.store.read_line()
        if line is not None and self.slots.launch.is_older_than(line.head):
            raise FencedError(f"a launch of epoch {line.head.epoch} has taken over")
        return line

    def serve(self, channel):
        with channel.makefile("rw") as lines:
            for line in lines:
                request = json.loads(line)
                try:
                    answer = {"answer": getattr(self, f"do_{request.pop('do')}")(**request)}
                except SystemExit:
                    lines.write(json.dumps({"answer": None}) + "\n")
                    return
                except FlashError as error:
                    answer = {"error": type(error).__name__, "code": error.code, "message": str(error)}
                except Exception as error:
                    traceback.print_exc()
                    answer = {"error": type(error).__name__, "code": "", "message": str(error)}
                lines.write(json.dumps(answer) + "\n")
                lines.flush()


def content(shard, length):
    """What a rank saves: bytes that are a function of the shard's name."""
    return random.Random(str(shard)).randbytes(length)


def digest(data):
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _shard_text(shard):
    return " ".join(map(str, (*shard.generation, shard.rank, shard.world)))


def _shard(text):
    *generation, rank, world = map(int, text.split())
    return ShardId(Generation(*generation), rank, world)


def _retrieval(one):
    portions = tuple(
        Portion(tuple(ChunkRange(*r) for r in ranges), tuple(sources)) for ranges, sources in one["portions"]
    )
    digest = bytes.fromhex(one["digest"])
    return Retrieval(_shard(one["shard"]), digest, one["tag"], one["size_bytes"], one["whole"], portions)


def _bundle(pems):
    return Bundle(*(pem.encode() for pem in pems))


def _child(channel, request):
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setpgid(0, 0)
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(request["environment"])
    failpoints.arm()
    libc = ctypes.CDLL(None, use_errno=True)
    if request["network"]:
        with open(request["network"], "rb") as namespace:
            if libc.setns(namespace.fileno(), _CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), "setns")
    if "agent" in request:
        # As stdin, because that is what stays open in a process that detaches an agent, and not in the agent.
        os.dup2(channel.fileno(), 0)
        code = process.main(request["agent"])
        os.write(0, f"{code}\n".encode())
        return code
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    LightRank().serve(channel)
    return 0


def main():
    control = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody is left as a zombie
    while True:
        data, descriptors, _, _ = socket.recv_fds(control, 1 << 16, 1)
        if not data:
            return
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                control.close()
                channel = socket.socket(fileno=descriptors[0])
                code = _child(channel, json.loads(data))
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        os.close(descriptors[0])
        control.send(str(pid).encode())


if __name__ == "__main__":
    main()
