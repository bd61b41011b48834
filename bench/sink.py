"""The other end of a plain socket: `python -m bench.sink PORT BYTES FILE [CERTIFICATES]`.

Takes so many bytes into a tmpfs mapping and acknowledges them, or sends them back, until the connection ends. The
mapping is faulted in already, or made anew for what comes: as a node that has lost its memory has to.
"""

from __future__ import annotations

import mmap
import os
import socket
import ssl
import sys
from pathlib import Path

from flashckpt import native

SEND, SEND_INTO_NEW, BACK, ACKNOWLEDGED = b"S", b"N", b"B", b"A"
PIECE_BYTES = 1 << 20  # a call; larger ones are not faster


def send_all(connection: socket.socket, view: memoryview) -> None:
    while view:
        view = view[connection.send(view[:PIECE_BYTES]) :]


def receive_into(connection: socket.socket, view: memoryview) -> None:
    while view:
        count = connection.recv_into(view[:PIECE_BYTES])
        if not count:
            raise EOFError(f"expected {len(view)} more bytes, found the end of the connection")
        view = view[count:]


def serve(connection: socket.socket, file: Path, size_bytes: int) -> None:
    mapping = _map(file, size_bytes)
    while command := connection.recv(1):
        if command == SEND_INTO_NEW:
            mapping.close()
            file.unlink()
            mapping = _map(file, size_bytes)
        with memoryview(mapping) as view:
            if command == BACK:
                send_all(connection, view)
            else:
                receive_into(connection, view)
                connection.sendall(ACKNOWLEDGED)


def _map(file: Path, size_bytes: int) -> mmap.mmap:
    fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, size_bytes)
        mapping = mmap.mmap(fd, size_bytes)
    finally:
        os.close(fd)
    native.prefault(mapping, len(os.sched_getaffinity(0)))
    return mapping


def main(port: int, size_bytes: int, file: Path, certificates: Path | None) -> None:
    connection = socket.create_connection(("127.0.0.1", port))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if certificates is not None:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=certificates / "ca.pem")
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_cert_chain(certificates / "receiver.pem", certificates / "receiver.key")
        connection = context.wrap_socket(connection, server_side=True)
    with connection:
        serve(connection, file, size_bytes)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4]) if len(sys.argv) > 4 else None)
