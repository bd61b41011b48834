"""The limit of replication: the same bytes through one TCP connection over loopback, into memory of another process.

Nothing is verified, named or kept apart from what was sent before: not a replica, but what one is measured by.
"""

from __future__ import annotations

import socket
import ssl
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from bench.contenders.base import Synchronous
from bench.errors import BenchError
from bench.sink import ACKNOWLEDGED, BACK, SEND, SEND_INTO_NEW, receive_into, send_all
from bench.state import tensors_of
from flashckpt.rpc.credentials import DNS_NAME, Authority, make_request

if TYPE_CHECKING:
    from bench.contenders.base import Details
    from bench.state import StateDict

_ROOT = Path(__file__).resolve().parents[2]
_DEADLINE = 60.0


class PlainSocket(Synchronous):
    """socket.send of each tensor's memory; the other end calls recv_into on a tmpfs mapping that is faulted."""

    command = SEND

    def set_up(self, state: StateDict, directory: Path) -> Details:
        self._state = state
        self._views = [memoryview(tensor.numpy()).cast("B") for tensor in tensors_of(state)]
        self._kept = dict(state["trainer"])
        size_bytes = sum(map(len, self._views))
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.settimeout(_DEADLINE)
            command = [str(server.getsockname()[1]), str(size_bytes), str(directory / "mapping")]
            command += self._make_certificates(directory)
            self._process = subprocess.Popen([sys.executable, "-m", "bench.sink", *command], cwd=_ROOT)
            try:
                plain, _ = server.accept()
                plain.settimeout(_DEADLINE)
                plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._socket = self._secured(plain, directory)
            except BaseException:
                self._end()
                raise
        return {}

    def save(self, step: int) -> Details:
        """Until the receiver says that it has the last byte."""
        self._kept = dict(self._state["trainer"])
        self._socket.sendall(self.command)
        for view in self._views:
            send_all(self._socket, view)
        if self._socket.recv(1) != ACKNOWLEDGED:
            raise BenchError("socket: expected an acknowledgement, found the end of the connection")
        return {}

    def load(self) -> Details:
        self._socket.sendall(BACK)
        for view in self._views:
            receive_into(self._socket, view)
        self._state["trainer"].update(self._kept)
        return {}

    def close(self) -> None:
        self._socket.close()
        self._process.wait(_DEADLINE)
        self._end()

    def _end(self) -> None:
        self._process.kill()
        self._process.wait()

    def _make_certificates(self, directory: Path) -> list[str]:
        return []

    def _secured(self, plain: socket.socket, directory: Path) -> socket.socket:
        return plain


class SocketIntoNew(PlainSocket):
    """As above, into memory that the receiver has to get first: the limit of a node that has lost its own."""

    command = SEND_INTO_NEW


class TlsSocket(PlainSocket):
    """As above with mutual TLS, as between agents: what of the distance to the limit is encryption."""

    def _make_certificates(self, directory: Path) -> list[str]:
        authority = Authority.create("bench")
        (directory / "ca.pem").write_bytes(authority.certificate_pem)
        for name in ("sender", "receiver"):
            key, request = make_request("bench", name)
            (directory / f"{name}.key").write_bytes(key)
            (directory / f"{name}.pem").write_bytes(authority.sign(request, "bench", name))
        return [str(directory)]

    def _secured(self, plain: socket.socket, directory: Path) -> socket.socket:
        context = ssl.create_default_context(ssl.Purpose.SERVER_AUTH, cafile=directory / "ca.pem")
        context.load_cert_chain(directory / "sender.pem", directory / "sender.key")
        return context.wrap_socket(plain, server_hostname=DNS_NAME)
