"""TLS for lanes, with the same certificates as the calls that order them."""

from __future__ import annotations

import os
import ssl
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flashckpt.credentials import Bundle


def server_context(bundle: Bundle) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.verify_mode = ssl.CERT_REQUIRED
    return _prepared(context, bundle)


def client_context(bundle: Bundle) -> ssl.SSLContext:
    return _prepared(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), bundle)  # which verifies the server's name


def _prepared(context: ssl.SSLContext, bundle: Bundle) -> ssl.SSLContext:
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_verify_locations(cadata=bundle.ca_pem.decode("ascii"))
    # ssl takes a key from files only; this one is memory of this process, and goes with its descriptor.
    fd = os.memfd_create("flashckpt-key", os.MFD_CLOEXEC)
    try:
        with open(fd, "wb", closefd=False) as file:
            file.write(bundle.certificate_pem + b"\n" + bundle.key_pem)
        context.load_cert_chain(f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)
    return context
