"""Credentials: identities in certificates, real handshakes with them, what is refused, and keys that never show."""

from __future__ import annotations

import copy
import logging
import os
import pickle
import socket
import ssl
import threading
from datetime import UTC, datetime, timedelta

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from hypothesis import given, settings
from hypothesis import strategies as st

from flashckpt.errors import ConfigError, DeniedError, FlashError, InternalError
from flashckpt.rpc.credentials import (
    DNS_NAME,
    Authority,
    Bundle,
    Identity,
    check_peer,
    identity,
    load_operator_bundle,
    make_request,
)

EXPIRED = timedelta(hours=-1)  # certificates begin a day early, so this one was valid until an hour ago


def issue(authority, job="run1", node_id="node-a", **options):
    key, request = make_request(job, node_id)
    return Bundle(authority.sign(request, job, node_id, **options), key, authority.certificate_pem)


@pytest.fixture(scope="module")
def authority():
    return Authority.create("run1")


@pytest.fixture(scope="module")
def bundle(authority):
    return issue(authority)


def contexts(tmp_path, client, server):
    """TLS as strict as Python's ssl offers it, with these bundles; the client expects the fixed name."""
    made = []
    for name, one, purpose in (
        ("client", client, ssl.PROTOCOL_TLS_CLIENT),
        ("server", server, ssl.PROTOCOL_TLS_SERVER),
    ):
        context = ssl.SSLContext(purpose)
        context.verify_mode = ssl.CERT_REQUIRED
        context.verify_flags |= ssl.VERIFY_X509_STRICT
        if one is not None:
            for part in ("certificate_pem", "key_pem", "ca_pem"):
                (tmp_path / f"{name}-{part}").write_bytes(getattr(one, part))
            context.load_cert_chain(tmp_path / f"{name}-certificate_pem", tmp_path / f"{name}-key_pem")
            context.load_verify_locations(tmp_path / f"{name}-ca_pem")
        made.append(context)
    return made


def handshake(client_context, server_context):
    """What each side saw of the other: its certificate in DER, or the error."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(20)
        seen = {}

        def serve():
            connection, _ = listener.accept()
            connection.settimeout(20)
            try:
                with server_context.wrap_socket(connection, server_side=True) as secured:
                    seen["server"] = secured.getpeercert(binary_form=True)
                    secured.sendall(b"x")
            except OSError as error:
                seen["server"] = error
            finally:
                connection.close()

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            with (
                socket.create_connection(listener.getsockname(), timeout=20) as connection,
                client_context.wrap_socket(connection, server_hostname=DNS_NAME) as secured,
            ):
                seen["client"] = secured.getpeercert(binary_form=True)
                # With TLS 1.3 a refused client learns it from the first byte that does not come.
                if not secured.recv(1):
                    seen["client"] = ConnectionError("closed")
        except OSError as error:
            seen["client"] = error
        thread.join(20)
    return seen["client"], seen["server"]


def test_both_sides_of_a_handshake_know_who_the_other_one_is(tmp_path, authority):
    client, server = issue(authority, node_id="node-a"), issue(authority, node_id="node-b")
    seen_by_client, seen_by_server = handshake(*contexts(tmp_path, client, server))
    assert check_peer(seen_by_client, "run1") == "node-b"
    assert check_peer(seen_by_server, "run1") == "node-a"


def test_another_launch_of_the_same_job_is_refused_by_both(tmp_path, authority):
    stranger = issue(Authority.create("run1"), node_id="node-b")
    seen_by_client, seen_by_server = handshake(*contexts(tmp_path, issue(authority), stranger))
    assert isinstance(seen_by_client, ssl.SSLCertVerificationError)
    assert isinstance(seen_by_server, OSError)
    # Even a client that trusts this server is refused for its own certificate.
    trusting = Bundle(stranger.certificate_pem, stranger.key_pem, authority.certificate_pem)
    seen_by_client, seen_by_server = handshake(*contexts(tmp_path, trusting, issue(authority)))
    assert isinstance(seen_by_server, ssl.SSLCertVerificationError)
    assert isinstance(seen_by_client, OSError)


def test_a_client_without_a_certificate_is_refused(tmp_path, authority):
    client, server = contexts(tmp_path, issue(authority), issue(authority))
    bare = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    bare.load_verify_locations(cadata=authority.certificate_pem.decode())
    seen_by_client, seen_by_server = handshake(bare, server)
    assert isinstance(seen_by_client, OSError)
    assert "PEER_DID_NOT_RETURN_A_CERTIFICATE" in str(seen_by_server)
    assert isinstance(handshake(client, server)[1], bytes)


def test_an_expired_certificate_is_refused(tmp_path, authority):
    expired = issue(authority, lifetime=EXPIRED)
    _, seen_by_server = handshake(*contexts(tmp_path, expired, issue(authority)))
    assert "expired" in str(seen_by_server)
    seen_by_client, _ = handshake(*contexts(tmp_path, issue(authority), expired))
    assert "expired" in str(seen_by_client)


def test_a_node_certificate_signs_nothing(tmp_path, authority, bundle):
    """A node that plays authority with its own key makes certificates that nobody accepts."""
    signer = serialization.load_pem_private_key(bundle.key_pem, None)
    forged = Authority(x509.load_pem_x509_certificate(bundle.certificate_pem), signer, "run1")
    key, request = make_request("run1", "node-b")
    chain = forged.sign(request, "run1", "node-b") + bundle.certificate_pem
    _, seen_by_server = handshake(*contexts(tmp_path, Bundle(chain, key, authority.certificate_pem), issue(authority)))
    assert isinstance(seen_by_server, ssl.SSLCertVerificationError)


def test_another_jobs_identity_is_refused(bundle):
    with pytest.raises(DeniedError, match="certificate of node 'node-a': expected job 'run2', found 'run1'") as caught:
        check_peer(bundle.certificate_pem, "run2")
    assert caught.value.hint


def test_what_a_certificate_says(authority, bundle):
    certificate = x509.load_pem_x509_certificate(bundle.certificate_pem)
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    own = Identity("run1", "node-a").dns_name
    assert names.get_values_for_type(x509.DNSName) == [DNS_NAME, own]
    assert DNS_NAME == "agent.flashckpt"
    assert own.endswith(".agent.flashckpt")
    assert own != Identity("run1", "node-b").dns_name != Identity("run2", "node-b").dns_name
    assert names.get_values_for_type(x509.UniformResourceIdentifier) == ["flashckpt://run1/node-a"]
    purposes = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert set(purposes) == {ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH}
    now = datetime.now(UTC)
    # Clocks that differ by a day still work, and no launch outlives its certificates.
    assert now - timedelta(days=1, minutes=5) < certificate.not_valid_before_utc <= now - timedelta(days=1)
    assert now + timedelta(days=365) < certificate.not_valid_after_utc < now + timedelta(days=367)
    der = certificate.public_bytes(serialization.Encoding.DER)
    assert identity(der) == identity(bundle.certificate_pem) == Identity("run1", "node-a")
    assert x509.load_pem_x509_certificate(authority.certificate_pem).extensions.get_extension_for_class(
        x509.BasicConstraints
    ).value == x509.BasicConstraints(ca=True, path_length=0)


@pytest.mark.parametrize(
    ("job", "node_id"),
    [
        ("a/b", "../../etc/passwd"),
        ("job with spaces", "node\n\0\t"),
        ("ü" * 128, "🙂" * 64),
        ("%2F", "%"),
        ("x" * 256, "y" * 256),
        (".", ".."),
    ],
)
def test_any_name_comes_back_as_it_was(job, node_id):
    found = issue(Authority.create(job), job, node_id)
    assert identity(found.certificate_pem) == Identity(job, node_id)
    assert check_peer(found.certificate_pem, job) == node_id


@pytest.mark.parametrize("name", ["", "x" * 257, "ü" * 129, "\udc80"])
def test_names_that_fit_no_certificate_are_refused(name):
    with pytest.raises(ConfigError, match="job: expected 1 to 256 bytes of UTF-8"):
        make_request(name, "node")
    with pytest.raises(ConfigError, match="node id: expected 1 to 256 bytes of UTF-8"):
        make_request("job", name)


def test_only_the_expected_request_is_signed(authority):
    _, request = make_request("run1", "node-a")
    with pytest.raises(DeniedError, match=r"node 'node-b'.*flashckpt://run1/node-b.*found flashckpt://run1/node-a"):
        authority.sign(request, "run1", "node-b")
    _, other = make_request("run2", "node-a")
    with pytest.raises(DeniedError, match="found flashckpt://run2/node-a"):
        authority.sign(other, "run1", "node-a")
    with pytest.raises(DeniedError, match="an authority for job 'run1'"):
        authority.sign(other, "run2", "node-a")
    for broken in (b"", b"nonsense", request[:200], request.replace(b"REQUEST", b"REQUESTS")):
        with pytest.raises(DeniedError, match="certificate request of node 'node-a': expected a request"):
            authority.sign(broken, "run1", "node-a")


def csr(key, *extensions):
    builder = x509.CertificateSigningRequestBuilder().subject_name(
        x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "x")])
    )
    for extension in extensions:
        builder = builder.add_extension(extension, critical=False)
    return builder.sign(key, hashes.SHA256())


def uris(*texts):
    return x509.SubjectAlternativeName([x509.UniformResourceIdentifier(text) for text in texts])


def test_requests_with_other_keys_signatures_or_names_are_refused(authority):
    named = uris("flashckpt://run1/node-a")
    weak = csr(rsa.generate_private_key(65537, 1024), named).public_bytes(serialization.Encoding.PEM)
    with pytest.raises(DeniedError, match="expected a key on P-256, found RSAPublicKey"):
        authority.sign(weak, "run1", "node-a")
    key = ec.generate_private_key(ec.SECP256R1())
    nameless = csr(key).public_bytes(serialization.Encoding.PEM)
    with pytest.raises(DeniedError, match="expected a request with a name"):
        authority.sign(nameless, "run1", "node-a")
    good = csr(key, named)
    der = bytearray(good.public_bytes(serialization.Encoding.DER))
    der[-1] ^= 1  # the last byte of the signature
    changed = ssl.DER_cert_to_PEM_cert(bytes(der)).replace("CERTIFICATE", "CERTIFICATE REQUEST").encode()
    with pytest.raises(DeniedError, match="expected one that its own key has signed"):
        authority.sign(changed, "run1", "node-a")
    assert check_peer(authority.sign(good.public_bytes(serialization.Encoding.PEM), "run1", "node-a"), "run1")


def test_a_request_asks_for_a_name_and_gets_nothing_else(authority):
    key = ec.generate_private_key(ec.SECP256R1())
    greedy = csr(key, uris("flashckpt://run1/node-a"), x509.BasicConstraints(ca=True, path_length=9))
    signed = authority.sign(greedy.public_bytes(serialization.Encoding.PEM), "run1", "node-a")
    constraints = x509.load_pem_x509_certificate(signed).extensions.get_extension_for_class(x509.BasicConstraints)
    assert constraints.value.ca is False


def self_signed(key, *extensions, days=1):
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "operator")])
    now = datetime.now(UTC)
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    builder = builder.serial_number(1).not_valid_before(now - timedelta(days=9))
    builder = builder.not_valid_after(now + timedelta(days=days))
    for extension in extensions:
        builder = builder.add_extension(extension, critical=False)
    return builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


KEY = ec.generate_private_key(ec.SECP256R1())


@pytest.mark.parametrize(
    "texts",
    [
        [],
        ["https://run1/node-a"],
        ["flashckpt://run1/node-a", "flashckpt://run1/node-b"],
        ["flashckpt://run1"],
        ["flashckpt://run1/"],
        ["flashckpt:///node-a"],
        ["flashckpt://run1/a/b"],
        ["flashckpt://run1/%6eode"],  # another spelling of "node"
        ["flashckpt://run1/a%2fb"],  # another spelling of "a%2Fb"
        ["flashckpt://run1/%ff"],
        ["flashckpt://run1/%"],
        ["flashckpt://run1/" + "a" * 257],
        ["FLASHCKPT://run1/node-a"],
    ],
)
def test_identities_of_another_form_are_refused(texts):
    with pytest.raises(DeniedError) as caught:
        identity(self_signed(KEY, *([uris(*texts)] if texts else [])))
    assert "flashckpt://<job>/<node>" in caught.value.hint
    assert len(str(caught.value)) < 1500


@given(st.lists(st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=60), min_size=1, max_size=3))
@settings(max_examples=150)
def test_no_uri_means_two_things(tails):
    texts = ["flashckpt://" + tail for tail in tails]
    try:
        found = identity(self_signed(KEY, uris(*texts)))
    except DeniedError:
        return
    assert [found.uri] == texts


@given(st.text(min_size=1, max_size=64), st.text(min_size=1, max_size=64))
@settings(max_examples=100)
def test_every_identity_comes_back(job, node_id):
    assert identity(self_signed(KEY, uris(Identity(job, node_id).uri))) == Identity(job, node_id)


PEM = self_signed(KEY, uris("flashckpt://run1/node-a"))
DER = x509.load_pem_x509_certificate(PEM).public_bytes(serialization.Encoding.DER)


@given(st.data())
@settings(max_examples=400)
def test_broken_certificates_are_denied_and_never_crash(data):
    original = data.draw(st.sampled_from([PEM, DER]))
    raw = bytearray(original)
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    raw = bytes(raw[: data.draw(st.integers(0, len(raw)))])
    try:
        found = identity(raw)
    except DeniedError:
        return
    assert isinstance(found, Identity)


@given(st.binary(max_size=300))
def test_arbitrary_bytes_are_denied(data):
    for text in (data, b"-----BEGIN CERTIFICATE-----\n" + data + b"\n-----END CERTIFICATE-----\n"):
        with pytest.raises(DeniedError):
            identity(text)


def test_a_certificate_with_an_extension_twice_is_denied():
    # The issuer's names are relabelled as a second list of the subject's.
    doubled = self_signed(KEY, uris("flashckpt://run1/a"), x509.IssuerAlternativeName([x509.DNSName("a")]))
    der = x509.load_pem_x509_certificate(doubled).public_bytes(serialization.Encoding.DER)
    subject, issuer = bytes.fromhex("0603551d11"), bytes.fromhex("0603551d12")
    assert der.count(subject) == der.count(issuer) == 1
    with pytest.raises(DeniedError, match="Duplicate"):
        identity(der.replace(issuer, subject))


# The operator's files


@pytest.fixture
def files(tmp_path, bundle):
    paths = {}
    for name, content in (("cert", bundle.certificate_pem), ("key", bundle.key_pem), ("ca", bundle.ca_pem)):
        paths[name] = tmp_path / f"{name}.pem"
        paths[name].write_bytes(content)
    paths["key"].chmod(0o600)
    return paths


def load(files):
    return load_operator_bundle(*(str(files[name]) for name in ("cert", "key", "ca")))


@pytest.mark.parametrize("mode", [0o600, 0o400])
def test_operator_files_are_taken_as_they_are(files, bundle, mode):
    files["key"].chmod(mode)
    assert load(files) == bundle


@pytest.mark.parametrize("name", ["cert", "key", "ca"])
def test_operator_files_that_are_missing_empty_or_nonsense_are_named(files, name):
    original = files[name].read_bytes()
    for content in (b"", b"nonsense", original[: len(original) // 2]):
        files[name].write_bytes(content)
        with pytest.raises(ConfigError, match=f"{name}.pem: expected .*PEM"):
            load(files)
    files[name].write_bytes(b"x" * ((1 << 20) + 1))
    with pytest.raises(ConfigError, match=f"{name}.pem: expected .* at most 1048576 bytes"):
        load(files)
    files[name].unlink()
    with pytest.raises(ConfigError, match=rf"{name}.pem: expected .*No such file") as caught:
        load(files)
    assert "FLASHCKPT_TLS_CERT" in caught.value.hint


def test_a_pipe_in_place_of_a_file_does_not_hang(files):
    files["ca"].unlink()
    os.mkfifo(files["ca"])
    with pytest.raises(ConfigError, match=r"ca.pem: expected"):
        load(files)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660])
def test_a_key_that_others_can_read_is_refused(files, mode):
    files["key"].chmod(mode)
    with pytest.raises(ConfigError, match=f"only its owner can read.*found mode {mode:04o}") as caught:
        load(files)
    assert caught.value.hint == "chmod 0600"


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="gives a file to another user")
def test_a_key_of_another_user_is_refused(files):
    os.chown(files["key"], 12345, -1)
    with pytest.raises(ConfigError, match="that is ours, found mode 0600 of uid 12345"):
        load(files)


def test_operator_files_that_do_not_fit_are_refused(files, authority):
    files["key"].write_bytes(issue(authority).key_pem)
    with pytest.raises(ConfigError, match=r"key.pem: expected the key of .*cert.pem, found another one"):
        load(files)


def test_expired_operator_files_are_refused(files, authority):
    expired = issue(authority, lifetime=EXPIRED)
    files["cert"].write_bytes(expired.certificate_pem)
    files["key"].write_bytes(expired.key_pem)
    with pytest.raises(ConfigError, match=r"cert.pem: expected a certificate that is valid now") as caught:
        load(files)
    assert "clock" in caught.value.hint
    fresh = issue(authority)
    files["cert"].write_bytes(fresh.certificate_pem)
    files["key"].write_bytes(fresh.key_pem)
    files["ca"].write_bytes(Authority.create("run1", EXPIRED).certificate_pem)
    with pytest.raises(ConfigError, match=r"ca.pem: expected a certificate that is valid now"):
        load(files)


@pytest.mark.parametrize(
    ("extensions", "message"),
    [
        ([], "expected one with names in it"),
        ([uris("https://example.org")], "expected one URI flashckpt://"),
        ([uris("flashckpt://run1/node-a")], "expected the DNS name node-[0-9a-f]{40}.agent.flashckpt"),
        (
            [
                x509.SubjectAlternativeName(
                    [
                        x509.DNSName(Identity("run1", "node-a").dns_name),
                        x509.UniformResourceIdentifier("flashckpt://run1/node-a"),
                    ]
                ),
                x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]),
            ],
            "expected a certificate for servers and clients, found one for .*serverAuth",
        ),
    ],
)
def test_operator_certificates_that_would_fail_later_are_refused(files, extensions, message):
    files["cert"].write_bytes(self_signed(KEY, *extensions))
    files["key"].write_bytes(
        KEY.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    with pytest.raises(ConfigError, match=f"cert.pem: .*{message}") as caught:
        load(files)
    assert caught.value.hint


def test_a_key_with_a_password_is_refused(files, bundle):
    key = serialization.load_pem_private_key(bundle.key_pem, None)
    locked = serialization.BestAvailableEncryption(b"secret")
    files["key"].write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, locked))
    with pytest.raises(ConfigError, match=r"key.pem: expected a private key in PEM without a password"):
        load(files)


# Keys never show


def secrets_of(bundle):
    lines = [line for line in bundle.key_pem.decode().splitlines() if "-----" not in line]
    assert lines
    return lines


def test_no_text_of_a_bundle_shows_the_key(bundle, authority, caplog):
    with caplog.at_level(logging.DEBUG):
        logging.getLogger("flashckpt.test").warning("have %s and %r of %s", bundle, [bundle], authority)
    shown = [caplog.text, repr(bundle), str(bundle), f"{bundle}", repr({"a": bundle}), repr(authority)]
    shown += [str(FlashError("x", bundle=bundle)), repr(FlashError("x", bundle=bundle).fields)]
    for text in shown:
        assert not any(secret in text for secret in secrets_of(bundle))


def test_bundles_and_authorities_are_not_pickled(bundle, authority):
    for dump in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(InternalError, match="can't be pickled"):
            dump(bundle)
    with pytest.raises(TypeError):
        pickle.dumps(authority)


def test_no_error_about_a_key_file_shows_the_key(files, bundle):
    text = bundle.key_pem.decode().replace("A", "B")
    files["key"].write_text(text)
    with pytest.raises(ConfigError) as caught:
        load(files)
    error, shown = caught.value, ""
    while error is not None:
        shown += str(error) + repr(error)
        error = error.__cause__ or error.__context__
    assert not any(line in shown for line in text.splitlines() if "-----" not in line)
