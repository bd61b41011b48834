"""The service between agents: real servers on TCP with mutual TLS; who gets in, who does not."""

from __future__ import annotations

import datetime
import socket
import threading

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from flashckpt.errors import (
    ConfigError,
    DeniedError,
    FencedError,
    IncompatibleError,
    NoSpaceError,
    PeerError,
)
from flashckpt.move.transports.grpc.client import PeerClient
from flashckpt.move.transports.grpc.server import PeerServer
from flashckpt.protocol.wire import Announce, Answer, Beat, Envelope, GiveUp, Lost, Report, WantBack
from flashckpt.rpc.api import VERSION, Hello
from flashckpt.rpc.credentials import DNS_NAME, Bundle, Identity
from flashckpt.rpc.settings import Keepalive
from flashckpt.types import Record, ShardId
from flashckpt.v1 import peer_pb2
from tests.integration.rpc_world import (
    FENCE,
    GENERATION,
    JOB,
    LAUNCH,
    WAIT,
    Credentials,
    MemoryPeer,
    Shard,
    beat,
    hello,
)

SHARD = ShardId(GENERATION, 1, 4)
RECORD = Record(GENERATION, 4, 1, 1_700_000_000.5)


@pytest.fixture(scope="module")
def job():
    return Credentials()


@pytest.fixture(scope="module")
def bundles(job):
    return {name: job.bundle(name) for name in ("a", "b", "c")}


@pytest.fixture
def api():
    return MemoryPeer("b")


@pytest.fixture
def server(api, bundles):
    with PeerServer(api, bundles["b"], JOB, "b") as server:
        server.address = f"127.0.0.1:{server.start('127.0.0.1:0')}"
        yield server


@pytest.fixture
def client(server, bundles):
    with PeerClient(server.address, bundles["a"], JOB, "b") as client:
        yield client


def test_hello(client, api):
    answer = client.hello(hello("a"), WAIT)
    assert answer == Hello(VERSION, JOB, "b", "127.0.0.1:2", LAUNCH, FENCE)
    assert api.calls == [("hello", "a", hello("a"))]


@pytest.mark.parametrize(
    "body",
    [
        Beat(),
        Report(SHARD, bytes(range(16)), ("b", "c")),
        GiveUp(GENERATION),
        Announce(RECORD, (GENERATION,)),
        Announce(None, ()),
        Lost(SHARD),
        WantBack(SHARD, bytes(16)),
    ],
    ids=["beat", "report", "give up", "announce", "announce nothing", "lost", "want"],
)
@pytest.mark.parametrize("line", [None, FENCE])
def test_every_message_arrives_and_is_answered(client, api, body, line):
    api.answer = Answer(LAUNCH, line, RECORD, (GENERATION,), "")
    assert client.tell(Envelope("a", LAUNCH, line, body), WAIT) == api.answer
    assert api.calls == [("tell", "a", Envelope("a", LAUNCH, line, body))]


def test_a_refusal_is_an_answer(client, api):
    api.answer = Answer(None, None, None, (), "a newer launch is here")
    assert client.tell(beat("a"), WAIT) == api.answer


def test_errors_come_back_as_what_they_are(client, api):
    api.answer = NoSpaceError("tmpfs is full", needed_bytes=5)
    with pytest.raises(NoSpaceError) as caught:
        client.tell(beat("a"), WAIT)
    assert caught.value.needed_bytes == 5
    api.answer = FencedError("a newer launch", epoch=7)
    with pytest.raises(FencedError) as caught:
        client.tell(beat("a"), WAIT)
    assert caught.value.epoch == 7


def test_a_sender_is_who_its_certificate_says(client, api):
    for call in (
        lambda: client.tell(beat("c"), WAIT),
        lambda: client.hello(hello("c"), WAIT),
        lambda: client.put(Shard.make().opening("c"), Shard.make()),
    ):
        with pytest.raises(DeniedError, match="'a', as its certificate says, found sender 'c'"):
            call()
    assert api.calls == []


def test_a_message_for_another_node_does_not_get_through_tls(server, bundles, api):
    """An address that changed hands."""
    with PeerClient(server.address, bundles["a"], JOB, "c") as client:
        for call in (
            lambda: client.tell(beat("a"), WAIT),
            lambda: client.hello(hello("a"), WAIT),
            lambda: client.put(Shard.make().opening("a"), Shard.make()),
        ):
            with pytest.raises(DeniedError, match=r"node 'c' at .* expected to be accepted"):
                call()
    assert api.calls == []


def test_a_message_for_another_node_is_refused(client, api, monkeypatch):
    """A client that means another node than its connection does."""
    monkeypatch.setattr(client, "node_id", "c")
    with pytest.raises(DeniedError, match="expected messages for this node 'b', found one for 'c'"):
        client.tell(beat("a"), WAIT)
    assert api.calls == []


def test_an_answer_of_another_node_is_refused(client, api):
    api.node_id = "c"
    with pytest.raises(DeniedError, match=r"expected an answer of .*'b'.*found .*'c'"):
        client.hello(hello("a"), WAIT)
    api.node_id, api.job = "b", "run2"
    with pytest.raises(DeniedError, match="run2"):
        client.hello(hello("a"), WAIT)


def test_another_version_is_refused(client, api):
    with pytest.raises(IncompatibleError, match=f"version {VERSION}, found {VERSION + 1}"):
        client.hello(hello("a", version=VERSION + 1), WAIT)
    assert api.calls == []


def test_another_job_in_hello_is_refused(client, api):
    with pytest.raises(DeniedError, match="run2"):
        client.hello(hello("a", job="run2"), WAIT)
    assert api.calls == []


def attempts(client):
    """Everything that a stranger could try."""
    shard = Shard.make()
    return (
        lambda: client.hello(hello("a"), 5.0),
        lambda: client.tell(beat("a"), 5.0),
        lambda: client.put(shard.opening("a"), shard, timeout=5.0),
    )


def test_a_certificate_of_another_authority(server, job, api):
    """Its own chain is not ours, whatever names it has."""
    foreign = Credentials()
    own = foreign.bundle("a")
    for bundle in (own, Bundle(own.certificate_pem, own.key_pem, job.authority.certificate_pem)):
        with PeerClient(server.address, bundle, JOB, "b") as client:
            for attempt in attempts(client):
                with pytest.raises((DeniedError, PeerError)):
                    attempt()
    assert api.calls == []


def test_a_certificate_of_the_same_authority_for_another_job(server, job, api):
    with PeerClient(server.address, _signed(job, "a", job_name="run2"), JOB, "b") as client:
        for attempt in attempts(client):
            with pytest.raises(DeniedError):
                attempt()
    assert api.calls == []


def test_no_certificate(server, job, api):
    credentials = grpc.ssl_channel_credentials(job.authority.certificate_pem)
    options = [("grpc.ssl_target_name_override", DNS_NAME)]
    with grpc.secure_channel(server.address, credentials, options=options) as channel:
        refused(channel)
    assert api.calls == []


def test_no_tls(server, api):
    with grpc.insecure_channel(server.address) as channel:
        refused(channel)
    assert api.calls == []


def refused(channel):
    request = peer_pb2.TellRequest(sender="a", receiver="b", beat=peer_pb2.Beat())
    request.launch.epoch = 1
    with pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary("/flashckpt.v1.Peer/Tell")(request.SerializeToString(), timeout=5)
    assert caught.value.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


DAY = datetime.timedelta(days=1)


def _signed(job, node_id, job_name=JOB, *, ends=DAY, starts=-DAY):
    """A certificate as the authority would sign it, but for dates and names that it refuses to."""
    key = ec.generate_private_key(ec.SECP256R1())
    now = datetime.datetime.now(datetime.UTC)
    sample = x509.load_pem_x509_certificate(job.bundle(node_id).certificate_pem)
    names = [
        x509.DNSName(DNS_NAME),
        x509.DNSName(Identity(job_name, node_id).dns_name),
        x509.UniformResourceIdentifier(f"flashckpt://{job_name}/{node_id}"),
    ]
    builder = (
        x509.CertificateBuilder()
        .subject_name(sample.subject)
        .issuer_name(sample.issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now + starts)
        .not_valid_after(now + ends)
    )
    for extension in sample.extensions:
        if extension.oid not in (
            x509.SubjectAlternativeName.oid,
            x509.SubjectKeyIdentifier.oid,
        ):
            builder = builder.add_extension(extension.value, extension.critical)
    builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=True)
    certificate = builder.sign(_authority_key(job), hashes.SHA256())
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return Bundle(certificate.public_bytes(serialization.Encoding.PEM), pem, job.authority.certificate_pem)


def _authority_key(job):
    """The one secret that a test may take out of an authority."""
    held = (
        vars(job.authority)
        if hasattr(job.authority, "__dict__")
        else {name: getattr(job.authority, name) for name in job.authority.__slots__}
    )
    return next(value for value in held.values() if isinstance(value, ec.EllipticCurvePrivateKey))


@pytest.mark.parametrize("dates", [{"ends": -DAY / 2}, {"starts": DAY / 2}], ids=["expired", "not yet"])
def test_a_clients_certificate_out_of_its_time(server, job, api, dates):
    with PeerClient(server.address, _signed(job, "a", **dates), JOB, "b") as client:
        for attempt in attempts(client):
            with pytest.raises((DeniedError, PeerError)):
                attempt()
    assert api.calls == []


def test_a_servers_certificate_out_of_its_time(job, bundles, api):
    with PeerServer(api, _signed(job, "b", ends=-DAY / 2), JOB, "b") as server:
        port = server.start("127.0.0.1:0")
        with PeerClient(f"127.0.0.1:{port}", bundles["a"], JOB, "b") as client, pytest.raises(DeniedError):
            client.tell(beat("a"), 5.0)
    assert api.calls == []


def test_a_server_of_another_authority(server, api):
    stranger = PeerClient(server.address, Credentials().bundle("a"), JOB, "b")
    with stranger, pytest.raises(DeniedError, match=r"node 'b' at 127\.0\.0\.1"):
        stranger.tell(beat("a"), 5.0)
    assert api.calls == []


def channel_of(server, bundle):
    credentials = grpc.ssl_channel_credentials(bundle.ca_pem, bundle.key_pem, bundle.certificate_pem)
    return grpc.secure_channel(server.address, credentials, options=[("grpc.ssl_target_name_override", DNS_NAME)])


def test_a_members_strange_calls_are_refused(server, bundles, api):
    with channel_of(server, bundles["a"]) as channel:

        def code(method, data, **options):
            with pytest.raises(grpc.RpcError) as caught:
                channel.unary_unary(method)(data, timeout=WAIT, **options)
            return caught.value.code()

        for method in ("/flashckpt.v1.Peer/Delete", "/x/y"):
            assert code(method, b"") is grpc.StatusCode.PERMISSION_DENIED
        assert code("/flashckpt.v1.Agent/Stop", b"") is grpc.StatusCode.UNIMPLEMENTED
        assert code("/flashckpt.v1.Peer/Tell", b"\xff\xff") is grpc.StatusCode.FAILED_PRECONDITION
        assert code("/flashckpt.v1.Peer/Tell", b"") is grpc.StatusCode.FAILED_PRECONDITION
        assert code("/flashckpt.v1.Peer/Tell", bytes(5 << 20)) is grpc.StatusCode.RESOURCE_EXHAUSTED
        gzip = {"compression": grpc.Compression.Gzip}
        assert code("/flashckpt.v1.Peer/Tell", bytes(1000), **gzip) is grpc.StatusCode.UNIMPLEMENTED
    assert api.calls == []


def test_a_second_server_on_the_port_is_refused(server, bundles, api):
    second = PeerServer(api, bundles["b"], JOB, "b")
    with pytest.raises(ConfigError, match=f"listen on {server.address}, found: the port is in use") as caught:
        second.start(server.address)
    assert "FLASHCKPT_PORT" in caught.value.hint
    second.close()


def test_an_address_of_another_machine_is_refused(bundles, api):
    server = PeerServer(api, bundles["b"], JOB, "b")
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1:0, found: Cannot assign") as caught:
        server.start("192.0.2.1:0")
    assert "FLASHCKPT_ADVERTISE" in caught.value.hint
    server.close()


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6 in this Python")
def test_ipv6(bundles, api):
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError as error:
        pytest.skip(f"no IPv6 on this machine: {error}")
    with PeerServer(api, bundles["b"], JOB, "b") as server:
        port = server.start("[::1]:0")
        with PeerClient(f"[::1]:{port}", bundles["a"], JOB, "b") as client:
            assert client.hello(hello("a"), WAIT).node_id == "b"


def test_a_restarted_server_is_simply_reconnected(bundles, api):
    server = PeerServer(api, bundles["b"], JOB, "b")
    address = f"127.0.0.1:{server.start('127.0.0.1:0')}"
    with PeerClient(address, bundles["a"], JOB, "b") as client:
        client.tell(beat("a"), WAIT)
        server.close()
        with pytest.raises(PeerError, match=f"Tell of node 'b' at {address}") as caught:
            client.tell(beat("a"), 5.0)
        assert (caught.value.peer, caught.value.address) == ("b", address)
        with PeerServer(api, bundles["b"], JOB, "b") as again:
            again.start(address)
            until_told(client)
        assert len(api.calls) >= 2


def until_told(client):
    """As an agent does: again and again until it works."""
    clock = threading.Event()
    for _ in range(200):
        try:
            return client.tell(beat("a"), WAIT)
        except PeerError:
            clock.wait(0.1)
    raise AssertionError("the restarted server was not reconnected within 20 s")


def test_nobody_at_the_address(bundles):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with PeerClient(f"127.0.0.1:{port}", bundles["a"], JOB, "b") as client:
        with pytest.raises(PeerError, match=f"node 'b' at 127.0.0.1:{port}"):
            client.tell(beat("a"), 5.0)
        client.close()
        with pytest.raises(PeerError, match="after close"):
            client.tell(beat("a"), 5.0)
        with pytest.raises(PeerError, match="after close"):
            client.put(Shard.make().opening("a"), Shard.make())


def test_a_port_that_accepts_and_says_nothing(bundles):
    with socket.create_server(("127.0.0.1", 0)) as mute:
        port = mute.getsockname()[1]
        with PeerClient(f"127.0.0.1:{port}", bundles["a"], JOB, "b") as client, pytest.raises(PeerError, match="'b'"):
            client.tell(beat("a"), 1.0)


def test_a_connection_that_never_shakes_hands_is_dropped(server):
    with socket.create_connection(("127.0.0.1", int(server.address.rpartition(":")[2]))) as knock:
        knock.settimeout(WAIT)
        assert knock.recv(1) == b"", "closed by the server after its handshake timeout"


def test_idle_clients_pings_are_accepted(api, bundles):
    """A server with gRPC's defaults answers the third ping with "too many pings" and closes the connection."""
    # The server's own pings come later, else the client would have no reason for any.
    with PeerServer(api, bundles["b"], JOB, "b", keepalive=Keepalive(1.0, 1.0)) as server:
        address = f"127.0.0.1:{server.start('127.0.0.1:0')}"
        with PeerClient(address, bundles["a"], JOB, "b", keepalive=Keepalive(0.6, 1.0)) as client:
            client.tell(beat("a"), WAIT)
            states, lost = [], threading.Event()

            def note(state):
                states.append(state)
                if len(states) > 1:
                    lost.set()

            client._channel.subscribe(note)
            assert not lost.wait(3.5), f"five pings: {states}"
            client.tell(beat("a"), WAIT)
            client._channel.unsubscribe(note)
            assert states == [grpc.ChannelConnectivity.READY]
