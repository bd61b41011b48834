"""Three honest nodes with real agents, and everything that an attacker needs to attack them.

Who attacks: a stranger (no credentials of the job), a guest (a certificate of the job's authority, but no node of the
launch), or a traitor (a compromised member: it has the certificate of the node whose replicas the victim keeps).
The victim is node 0, which coordinates.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import os
import queue
import struct
import time
from pathlib import Path

import grpc
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from flashckpt import native
from flashckpt.errors import FlashError
from flashckpt.format.layout import encode_layout, fingerprint
from flashckpt.format.shard import DEFAULT_CHUNK_BYTES, encode_header, geometry, seal_bytes
from flashckpt.move.transports.grpc.frames import encode_chunks
from flashckpt.protocol.placement import place
from flashckpt.rpc.agent_client import AgentClient
from flashckpt.rpc.credentials import DNS_NAME, Authority, Bundle, make_request
from flashckpt.types import Generation, Layout, ShardId
from flashckpt.v1 import common_pb2, peer_pb2
from tests.fault import agents
from tests.fault.agent_ranks import content
from tests.fault.agents import JOB, MIB, World, wait_until

DAY = datetime.timedelta(days=1)
VICTIM = 0
GROWTH_BYTES = 64 * MIB  # what all attacks together may leave in the victim's heap
CREDENTIALS = "credentials"  # under tls/: an agent's own, for its successor
FD_SLACK = 12  # connections between honest agents come and go
ATTEMPT = 5.0  # seconds that a refused call may take
FINISH = peer_pb2.PutRequest(finish=peer_pb2.PutFinish()).SerializeToString()


class Arena:
    """The cluster under attack. `check()` says whether it is still what it was."""

    def __init__(self, **options):
        self.world = World(3, replicas=1, size_bytes=MIB, **options)
        self.step = 0

    def __enter__(self):
        self.world.__enter__()
        try:
            with _noting_authorities() as noted:
                self.launch = self.world.launch()
            self.authority = noted[-1]
            session = self.launch.session
            (self.rank,) = place(session.members, 1, session.strategy).held_by(self.node(VICTIM))
            self.honest_bundle = self._bundle_of(VICTIM)
            for _ in range(3):  # every pool of threads and slots is as large as an honest job makes it
                self.save()
            self.pids = [self.world.agent_pid(index) for index in range(3)]
            self.baseline = self.usage()
        except BaseException:
            self.world.__exit__()
            raise
        return self

    def __exit__(self, *_):
        self.world.__exit__()

    # --- what honest ranks do

    def save(self, timeout=15.0):
        self.step += 1
        return self.launch.save(self.step, timeout=timeout)

    def check(self, what=""):
        """The agents live, hold what they should and nothing else, have not grown, and work."""
        assert [self.world.agent_pid(index) for index in range(3)] == self.pids, f"{what}: an agent died"
        # Twice: a forged attempt at the next step outlives the honest one at it, and goes with the step after. Two of
        # them would fill what a node keeps of one rank, and stop the next test's saves.
        for _ in range(2):
            self.save()
        self.world.check()
        wait_until(lambda: not self.leftovers(), f"{what}: nothing half-received, found {self.leftovers()}")
        wait_until(lambda: self.usage().fds <= self.baseline.fds + FD_SLACK, f"{what}: descriptors closed")
        grown = self.usage().heap_bytes - self.baseline.heap_bytes
        assert grown < GROWTH_BYTES, f"{what}: the agent has grown by {grown >> 20} MiB since the first attack"

    def leftovers(self):
        """Files of the victim that are neither a sealed shard nor free, and not known to be its own."""
        return [path.name for path in self.world.paths(VICTIM, "writing")] + [
            path.name for path in self.world.paths(VICTIM, "quarantine")
        ]

    def usage(self):
        return Usage.of(self.world.agent_pid(VICTIM))

    def log(self):
        return self.world.log(VICTIM)

    # --- what an attacker has

    @property
    def address(self):
        return self.launch.session.members[VICTIM].address

    @property
    def endpoint(self):
        host, port = self.address.rsplit(":", 1)
        return host, int(port)

    def node(self, index):
        return self.world.nodes[index].name

    def traitor(self):
        return self._bundle_of(self.rank)

    def guest(self, name="guest"):
        return self.certified(name)

    def certified(self, node_id, job=JOB):
        key, request = make_request(job, node_id)
        authority = self.authority if job == JOB else Authority(self.authority._certificate, self.authority._key, job)
        return Bundle(authority.sign(request, job, node_id), key, self.authority.certificate_pem)

    def expired(self, node_id):
        """As the authority would sign it, but for the dates."""
        sample = x509.load_pem_x509_certificate(self.certified(node_id).certificate_pem)
        key, now = ec.generate_private_key(ec.SECP256R1()), datetime.datetime.now(datetime.UTC)
        builder = x509.CertificateBuilder(
            sample.issuer, sample.subject, key.public_key(), x509.random_serial_number(), now - 3 * DAY, now - DAY
        )
        for extension in sample.extensions:
            if extension.oid != x509.SubjectKeyIdentifier.oid:
                builder = builder.add_extension(extension.value, extension.critical)
        certificate = builder.sign(self.authority._key, hashes.SHA256())
        return Bundle(_pem(certificate), _key_pem(key), self.authority.certificate_pem)

    def self_signed(self, node_id):
        authority = Authority.create(JOB)
        key, request = make_request(JOB, node_id)
        return Bundle(authority.sign(request, JOB, node_id), key, self.authority.certificate_pem)

    def channel(self, bundle, *options, index=VICTIM):
        given = (None,) * 2 if bundle is None else (bundle.key_pem, bundle.certificate_pem)
        credentials = grpc.ssl_channel_credentials(self.authority.certificate_pem, *given)
        override = ("grpc.ssl_target_name_override", DNS_NAME)
        # A connection of its own each: gRPC shares them otherwise.
        local = ("grpc.use_local_subchannel_pool", 1)
        address = self.launch.session.members[index].address
        return grpc.secure_channel(address, credentials, options=[override, local, *options])

    def socket_path(self, index=VICTIM):
        return str(next(Path(self.world.nodes[index].memory_dir).glob("*/agent.sock")))

    def client(self, index=VICTIM):
        return AgentClient(self.socket_path(index), timeout=ATTEMPT)

    def status(self):
        return self.world.status(VICTIM)

    # --- messages by hand

    def generation(self, step=None, **changes):
        launch = self.launch.launch
        step = self.step + 1 if step is None else step
        values = {"epoch": launch.epoch, "nonce": launch.nonce, "step": step, "seq": 7, **changes}
        return common_pb2.Generation(**values)

    def shard_id(self, rank=None, world=3, **generation):
        """Of the traitor's rank, which has its node's number."""
        rank = self.rank if rank is None else rank
        return common_pb2.ShardId(generation=self.generation(**generation), rank=rank, world=world)

    def tell_request(self, sender=None, receiver=None, launch=None, **body):
        ours = self.launch.launch
        return peer_pb2.TellRequest(
            sender=self.node(self.rank) if sender is None else sender,
            receiver=self.node(VICTIM) if receiver is None else receiver,
            launch=launch or common_pb2.Launch(epoch=ours.epoch, nonce=ours.nonce),
            **(body or {"beat": peer_pb2.Beat()}),
        )

    def opening(self, forged=None, **changes):
        forged = forged or self.forged()
        launch = self.launch.launch
        values = {
            "sender": self.node(self.rank),
            "receiver": self.node(VICTIM),
            "launch": common_pb2.Launch(epoch=launch.epoch, nonce=launch.nonce),
            "shard": forged.message,
            "digest": forged.digest,
            "size_bytes": len(forged.head) + len(forged.data),
            "head_bytes": len(forged.head),
            **changes,
        }
        return peer_pb2.PutRequest(open=peer_pb2.PutOpen(**values)).SerializeToString()

    def forged(self, size_bytes=4 * DEFAULT_CHUNK_BYTES, rank=None, world=3, seed="", **generation):
        return Forged(self.shard_id(rank, world, **generation), size_bytes, seed)

    def _bundle_of(self, index):
        with self.world._store(index) as store:
            certificate, key, ca, _ = json.loads(store.read_secret(CREDENTIALS))
        return Bundle(certificate.encode(), key.encode(), ca.encode())


class Usage:
    """What a process takes of its node, without slots that it has mapped."""

    def __init__(self, fds, heap_bytes):
        self.fds, self.heap_bytes = fds, heap_bytes

    @staticmethod
    def of(pid):
        fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        try:
            fds = len(os.listdir(f"/proc/{pid}/fd"))
        except PermissionError:  # an agent shows its descriptors to root alone
            fds = 0
        return Usage(fds, int(fields["RssAnon"].split()[0]) * 1024)


class Forged:
    """A shard as a member could have made it, valid in itself."""

    def __init__(self, message, size_bytes, seed=""):
        self.message = message
        generation = message.generation
        shard = ShardId(
            Generation(generation.epoch, generation.nonce, generation.step, generation.seq), message.rank, message.world
        )
        layout = encode_layout(Layout(()))
        place = geometry(len(layout), size_bytes, 1 << 16, DEFAULT_CHUNK_BYTES)
        data = content(seed or shard, place.data_length_bytes)
        chunks = [data[at : at + DEFAULT_CHUNK_BYTES] for at in range(0, len(data), DEFAULT_CHUNK_BYTES)]
        header = encode_header(
            job=JOB,
            shard=shard,
            layout_bytes=layout,
            layout_fingerprint=fingerprint(layout),
            values_offset_bytes=0,
            values_length_bytes=0,
            chunk_bytes=DEFAULT_CHUNK_BYTES,
            chunk_crcs=b"".join(struct.pack("<I", native.crc32c(one)) for one in chunks),
            saved_at=time.time(),
        )
        file = bytearray(place.file_length_bytes)
        seal_bytes(memoryview(file), header, place)
        self.head = bytes(file[: place.data_offset_bytes])
        self.data = data
        self.chunks = chunks
        self.digest = hashlib.blake2b(self.head, digest_size=16).digest()

    def head_message(self, offset=0, size=None):
        end = len(self.head) if size is None else offset + size
        return peer_pb2.PutRequest(head=peer_pb2.PutHead(offset=offset, data=self.head[offset:end])).SerializeToString()

    def chunk_message(self, *indexes):
        return encode_chunks(indexes[0], [self.chunks[index] for index in indexes])

    def messages(self):
        """All that follows an opening."""
        heads = [self.head_message(at, MIB) for at in range(0, len(self.head), MIB)]
        return [*heads, *(self.chunk_message(index) for index in range(len(self.chunks))), FINISH]


class Push:
    """A stream of a push whose messages are what somebody else sends."""

    def __init__(self, channel, *messages):
        self._messages = queue.SimpleQueue()
        make = channel.stream_stream("/flashckpt.v1.Peer/Put")
        self.call = make(iter(self._messages.get, None), timeout=60)
        self.send(*messages)

    def send(self, *messages):
        for message in messages:
            self._messages.put(message)

    def answer(self):
        return peer_pb2.PutResponse.FromString(next(self.call))

    def half_close(self):
        self._messages.put(None)

    def end(self):
        """Reads to the end; the last answer's part and the status."""
        part = ""
        try:
            for data in self.call:
                part = peer_pb2.PutResponse.FromString(data).WhichOneof("part")
        except grpc.RpcError as error:
            return part, error.code()
        return part, grpc.StatusCode.OK

    def close(self):
        self.half_close()
        self.call.cancel()


def code_of(call):
    """How a call ended."""
    try:
        call()
    except grpc.RpcError as error:
        return error.code()
    except FlashError as error:
        return type(error)
    return grpc.StatusCode.OK


def tell(channel, request, timeout=ATTEMPT, **options):
    data = request if isinstance(request, bytes) else request.SerializeToString()
    answer = channel.unary_unary("/flashckpt.v1.Peer/Tell")(data, timeout=timeout, **options)
    return peer_pb2.TellResponse.FromString(answer)


@contextlib.contextmanager
def _noting_authorities():
    """A launch's authority forgets its key; an attack needs certificates that it would never have signed."""
    noted = []

    class Noting:
        @staticmethod
        def create(*arguments):
            noted.append(Authority.create(*arguments))
            return noted[-1]

    before, agents.Authority = agents.Authority, Noting
    try:
        yield noted
    finally:
        agents.Authority = before


def _pem(certificate):
    return certificate.public_bytes(serialization.Encoding.PEM)


def _key_pem(key):
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
