"""HTTP/2 by hand over TLS: what gRPC's own client would never send."""

from __future__ import annotations

import socket
import ssl
import struct

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, CONTINUATION = 0x0, 0x1, 0x3, 0x4, 0x6, 0x9
END_STREAM, END_HEADERS, ACK = 0x1, 0x4, 0x1
INITIAL_WINDOW_SIZE = 0x4


def frame(kind, flags=0, stream=0, payload=b""):
    return struct.pack(">I", len(payload))[1:] + bytes((kind, flags)) + struct.pack(">I", stream) + payload


def headers(method, *extra):
    """A call's, each header literal and never indexed."""
    fields = [
        (b":method", b"POST"),
        (b":scheme", b"https"),
        (b":path", method.encode()),
        (b":authority", b"agent.flashckpt"),
        (b"te", b"trailers"),
        (b"content-type", b"application/grpc"),
        *extra,
    ]
    return b"".join(b"\x10" + _text(name) + _text(value) for name, value in fields)


def message(data):
    """As gRPC frames it, not compressed."""
    return b"\x00" + struct.pack(">I", len(data)) + data


def settings(**values):
    numbers = {"window": INITIAL_WINDOW_SIZE}
    payload = b"".join(struct.pack(">HI", numbers[name], value) for name, value in values.items())
    return frame(SETTINGS, payload=payload)


def context(bundle, folder):
    """A TLS context that proves to be the bundle's owner; None proves nothing."""
    found = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    found.check_hostname = False
    found.verify_mode = ssl.CERT_NONE
    found.set_alpn_protocols(["h2"])
    if bundle is not None:
        path = folder / "certificate-and-key.pem"
        path.write_bytes(bundle.certificate_pem + bundle.key_pem)
        found.load_cert_chain(path)
    return found


def connect(endpoint, tls=None, timeout=5.0):
    plain = socket.create_connection(endpoint, timeout=timeout)
    return plain if tls is None else tls.wrap_socket(plain)


def is_closed(connection, timeout=10.0):
    """Reads until the other end closes; False where it does not in time."""
    connection.settimeout(timeout)
    try:
        while connection.recv(1 << 16):
            pass
    except TimeoutError:
        return False
    except OSError:
        return True
    return True


def _text(value):
    # The length is a number with a prefix of seven bits.
    if len(value) < 127:
        return bytes((len(value),)) + value
    rest, out = len(value) - 127, bytearray((127,))
    while rest > 127:
        out.append(rest & 127 | 128)
        rest >>= 7
    out.append(rest)
    return bytes(out) + value
