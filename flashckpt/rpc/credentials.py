"""Proves by a certificate which node one is: with a small authority per launch, or the operator's own.

A node's private key is made on the node and never leaves it. Rank 0 makes an authority in memory, signs one certificate
per node, and forgets it. Certificates name job and node in a URI, `flashckpt://<job>/<node>`, which a server checks,
and once more as a DNS name, a hash of the two: with it TLS itself makes sure that a client talks to the intended node,
at whatever address. They are valid for long: a launch is ended by a newer line, not by a date. cryptography is imported
inside functions: it takes 0.1 s and 10 to 13 MB, which a job on one node need not spend.
"""

from __future__ import annotations

import hashlib
import os
import stat
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, NoReturn
from urllib.parse import quote, unquote

from flashckpt.errors import ConfigError, DeniedError, InternalError

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec

DNS_NAME = "agent.flashckpt"
_SCHEME = "flashckpt://"
_LIFETIME = timedelta(days=366)
_SKEW = timedelta(days=1)  # nodes whose clocks differ by so much still accept each other
_MAX_FILE_BYTES = 1 << 20
_MAX_NAME_BYTES = 256  # of a job's name or a node id


@dataclass(frozen=True, slots=True)
class Identity:
    """The job and the node that a certificate names."""

    job: str
    node_id: str

    @property
    def uri(self) -> str:
        return f"{_SCHEME}{quote(self.job, safe='')}/{quote(self.node_id, safe='')}"

    @property
    def dns_name(self) -> str:
        """The name that TLS compares: it can't compare a URI, and a node id need not be a host's name."""
        return f"node-{hashlib.sha256(self.uri.encode()).hexdigest()[:40]}.{DNS_NAME}"


@dataclass(frozen=True, slots=True)
class Bundle:
    """A node's key and certificates, all PEM."""

    certificate_pem: bytes
    key_pem: bytes
    ca_pem: bytes

    def __repr__(self) -> str:
        return "Bundle(certificate_pem=…, key_pem=***, ca_pem=…)"

    def __reduce__(self) -> NoReturn:
        # Code that pickles or copies complete objects (a queue, a crash dump) must not copy the key.
        raise InternalError("a bundle of credentials can't be pickled: its key stays in this process")


def make_request(job: str, node_id: str) -> tuple[bytes, bytes]:
    """Make a private key and a request for its certificate, both PEM; only the request may be sent."""
    for what, name in (("job", job), ("node id", node_id)):
        if not _is_name(name):
            raise ConfigError(f"{what}: expected 1 to {_MAX_NAME_BYTES} bytes of UTF-8, found {name!r}")
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    names = x509.SubjectAlternativeName([x509.UniformResourceIdentifier(Identity(job, node_id).uri)])
    request = x509.CertificateSigningRequestBuilder().subject_name(_name("node")).add_extension(names, critical=True)
    signed = request.sign(key, hashes.SHA256())
    key_pem = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return key_pem, signed.public_bytes(serialization.Encoding.PEM)


class Authority:
    """Signs the certificates of one launch. Its key exists in this object only."""

    def __init__(self, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey, job: str) -> None:
        """Use create()."""
        self._certificate = certificate
        self._key = key
        self._job = job

    @staticmethod
    def create(job: str, lifetime: timedelta = _LIFETIME) -> Authority:
        from cryptography import x509
        from cryptography.hazmat.primitives.asymmetric import ec

        key = ec.generate_private_key(ec.SECP256R1())
        builder = _certificate(_name("authority"), key.public_key(), _name("authority"), lifetime)
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        builder = builder.add_extension(_usage(signs_certificates=True), critical=True)
        builder = builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        return Authority(_sign(builder, key), key, job)

    @property
    def certificate_pem(self) -> bytes:
        return _pem(self._certificate)

    def sign(self, request_pem: bytes, job: str, node_id: str, lifetime: timedelta = _LIFETIME) -> bytes:
        """Return a certificate, PEM. Raise DeniedError if the request is broken, or is for another job or node than
        expected."""
        from cryptography import x509
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.x509.oid import ExtendedKeyUsageOID

        where = f"certificate request of node {node_id!r}"
        try:
            request = x509.load_pem_x509_csr(request_pem)
            names = request.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
            key = request.public_key()
            intact = request.is_signature_valid
        except _unreadable() as error:
            raise DeniedError(f"{where}: expected a request with a name, found: {error}") from error
        if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
            raise DeniedError(f"{where}: expected a key on P-256, found {type(key).__name__}")
        if not intact:
            raise DeniedError(f"{where}: expected one that its own key has signed, found another signature")
        found, expected = _identity_in(names, where), Identity(job, node_id)
        if found != expected or job != self._job:
            raise DeniedError(
                f"{where}: expected {expected.uri} of an authority for job {self._job!r}, found {found.uri}",
                job=found.job,
                node_id=found.node_id,
            )
        builder = _certificate(_name("node"), key, self._certificate.subject, lifetime)
        alternatives = [
            x509.DNSName(DNS_NAME),
            x509.DNSName(expected.dns_name),
            x509.UniformResourceIdentifier(expected.uri),
        ]
        builder = builder.add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
        builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        builder = builder.add_extension(_usage(signs_certificates=False), critical=True)
        purposes = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
        builder = builder.add_extension(purposes, critical=False)
        # Strict verifiers (OpenSSL's, Python's default from 3.13 on) require the id of the key that signed.
        signer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        builder = builder.add_extension(signer, critical=False)
        builder = builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
        return _pem(_sign(builder, self._key))


def identity(certificate: bytes) -> Identity:
    """Return whose certificate, PEM or DER, it is. Raise DeniedError if it names no job and node, or several."""
    from cryptography import x509

    load = x509.load_pem_x509_certificate if b"-----BEGIN" in certificate else x509.load_der_x509_certificate
    try:
        names = load(certificate).extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except _unreadable() as error:
        raise DeniedError(f"certificate: expected one with names in it, found: {error}", hint=_NAMES_HINT) from error
    return _identity_in(names, "certificate")


def check_peer(certificate: bytes, job: str) -> str:
    """Return the node id in a peer's certificate, whose chain TLS has verified. Raise DeniedError if it is another
    job's."""
    found = identity(certificate)
    if found.job != job:
        raise DeniedError(
            f"certificate of node {found.node_id!r}: expected job {job!r}, found {found.job!r}",
            hint="an agent of another job reached this one: check addresses and ports",
            job=found.job,
        )
    return found.node_id


def load_operator_bundle(certificate_path: str, key_path: str, ca_path: str) -> Bundle:
    """Read and check the certificates that the operator brings. ConfigError says which file is wrong, and how."""
    from cryptography import x509
    from cryptography.hazmat.primitives import serialization

    bundle = Bundle(
        _read(certificate_path, "a certificate"),
        _read(key_path, "a private key", secret=True),
        _read(ca_path, "a certificate of an authority"),
    )
    try:
        certificate = x509.load_pem_x509_certificate(bundle.certificate_pem)
        public_key = _public(certificate.public_key())
    except _unreadable() as error:
        raise ConfigError(f"{certificate_path}: expected a certificate in PEM, found: {error}") from error
    try:
        authorities = x509.load_pem_x509_certificates(bundle.ca_pem)
    except _unreadable() as error:
        raise ConfigError(f"{ca_path}: expected certificates in PEM, found: {error}") from error
    no_key: tuple[type[Exception], ...] = (*_unreadable(), TypeError)  # the latter if it needs a password
    try:
        key = serialization.load_pem_private_key(bundle.key_pem, None)
    except no_key as error:
        # Not the library's message: it may quote what was read.
        raise ConfigError(f"{key_path}: expected a private key in PEM without a password, found none") from error
    if _public(key.public_key()) != public_key:
        raise ConfigError(f"{key_path}: expected the key of {certificate_path}, found another one")
    for path, one in ((certificate_path, certificate), *((ca_path, one) for one in authorities)):
        if not one.not_valid_before_utc <= datetime.now(UTC) < one.not_valid_after_utc:
            raise ConfigError(
                f"{path}: expected a certificate that is valid now, found one from "
                f"{one.not_valid_before_utc} to {one.not_valid_after_utc}",
                hint="renew it, and check this machine's clock",
            )
    try:
        identity(bundle.certificate_pem)
    except DeniedError as error:
        raise ConfigError(f"{certificate_path}: {error.message}", hint=_NAMES_HINT) from error
    _check_purposes(certificate, certificate_path)
    return bundle


def _check_purposes(certificate: x509.Certificate, path: str) -> None:
    """Refuse at the start a certificate with which handshakes would fail without a reason."""
    from cryptography import x509
    from cryptography.x509.oid import ExtendedKeyUsageOID

    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    expected = _identity_in(names, path).dns_name
    if expected not in names.get_values_for_type(x509.DNSName):
        raise ConfigError(f"{path}: expected the DNS name {expected}, found none", hint=_NAMES_HINT)
    try:
        purposes = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    except x509.ExtensionNotFound:
        return  # valid for any purpose
    if not {ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH} <= set(purposes):
        raise ConfigError(
            f"{path}: expected a certificate for servers and clients, found one for {[one._name for one in purposes]}",
            hint="agents are both: ask for the extended key usages serverAuth and clientAuth",
        )


_NAMES_HINT = (
    f"its subject alternative names need one URI {_SCHEME}<job>/<node>, both percent-encoded, and the DNS name "
    f"node-<the first 40 hexadecimal digits of the SHA-256 of that URI>.{DNS_NAME}"
)


def _identity_in(names: x509.SubjectAlternativeName, where: str) -> Identity:
    from cryptography import x509

    uris = [uri for uri in names.get_values_for_type(x509.UniformResourceIdentifier) if uri.startswith(_SCHEME)]
    parts = uris[0][len(_SCHEME) :].split("/") if len(uris) == 1 else []
    if len(parts) == 2:
        found = Identity(unquote(parts[0]), unquote(parts[1]))
        # Only one spelling is accepted: two names must never mean the same node.
        if _is_name(found.job) and _is_name(found.node_id) and found.uri == uris[0]:
            return found
    shown = [uri[:200] for uri in uris[:4]]
    raise DeniedError(f"{where}: expected one URI {_SCHEME}<job>/<node>, found {shown}", hint=_NAMES_HINT)


def _is_name(name: str) -> bool:
    try:
        return 1 <= len(name.encode()) <= _MAX_NAME_BYTES
    except UnicodeEncodeError:  # half a surrogate pair, as in undecodable environment variables
        return False


def _unreadable() -> tuple[type[Exception], ...]:
    """Return the exceptions that cryptography raises, without a common base, for bytes that it can't read."""
    from cryptography import exceptions, x509

    return (
        ValueError,
        x509.ExtensionNotFound,
        x509.DuplicateExtension,
        x509.InvalidVersion,
        x509.UnsupportedGeneralNameType,
        exceptions.UnsupportedAlgorithm,
        exceptions.InvalidSignature,
    )


def _read(path: str, what: str, *, secret: bool = False) -> bytes:
    try:
        # Without O_NONBLOCK opening a pipe would wait for a writer.
        with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode) or found.st_size > _MAX_FILE_BYTES:
                raise ConfigError(
                    f"{path}: expected {what} in a file of at most {_MAX_FILE_BYTES} bytes, found another"
                )
            if secret and (found.st_mode & 0o077 or found.st_uid not in (os.geteuid(), 0)):
                raise ConfigError(
                    f"{path}: expected a file that only its owner can read, and that is ours, found mode "
                    f"{stat.S_IMODE(found.st_mode):04o} of uid {found.st_uid}",
                    hint="chmod 0600",
                )
            return file.read(_MAX_FILE_BYTES)
    except OSError as error:
        raise ConfigError(
            f"{path}: expected {what}, found: {error.strerror}",
            hint="FLASHCKPT_TLS_CERT, FLASHCKPT_TLS_KEY and FLASHCKPT_TLS_CA name three files in PEM",
        ) from error


def _name(kind: str) -> x509.Name:
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"flashckpt {kind}")])


def _certificate(
    subject: x509.Name, public_key: object, issuer: x509.Name, lifetime: timedelta
) -> x509.CertificateBuilder:
    from cryptography import x509

    now = datetime.now(UTC)
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(public_key)  # type: ignore[arg-type]
    builder = builder.serial_number(x509.random_serial_number())
    return builder.not_valid_before(now - _SKEW).not_valid_after(now + lifetime)


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    from cryptography import x509

    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _sign(builder: x509.CertificateBuilder, key: ec.EllipticCurvePrivateKey) -> x509.Certificate:
    from cryptography.hazmat.primitives import hashes

    return builder.sign(key, hashes.SHA256())


def _pem(certificate: x509.Certificate) -> bytes:
    from cryptography.hazmat.primitives import serialization

    return certificate.public_bytes(serialization.Encoding.PEM)


def _public(key: object) -> bytes:
    from cryptography.hazmat.primitives import serialization

    found: bytes = key.public_bytes(  # type: ignore[attr-defined]
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    return found
