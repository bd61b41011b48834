"""Forwards TCP and misbehaves on command: flips bits, breaks links, stalls, delays, or closes halfway."""

from __future__ import annotations

import contextlib
import queue
import socket
import struct
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from flashckpt.errors import ConfigError

if TYPE_CHECKING:
    from types import TracebackType

# "up": from the client to the target; "down": back.
Way = Literal["up", "down"]

_READ_BYTES = 64 << 10
_QUEUED_READS = 64
_CONNECT_TIMEOUT = 10.0
_TICK = 0.05
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER of 0 seconds: closing sends a reset


@dataclass(slots=True, eq=False)
class _Flip:
    byte: int
    bit: int
    way: Way
    remaining: int


@dataclass(slots=True, eq=False)
class _Pipe:
    """Forwards one direction of one connection."""

    way: Way
    source: socket.socket
    target: socket.socket
    passed_bytes: int = 0
    half_closed: bool = False
    reads: queue.Queue[tuple[float, bytes]] = field(default_factory=lambda: queue.Queue(_QUEUED_READS))


class Proxy:
    """Listens on a port of its own and forwards to `target`. A context manager; faults may be set at any time.

    With TLS inside, a flipped bit makes a broken record and ends the connection; without TLS, it arrives.
    """

    def __init__(self, target: str, *, host: str = "127.0.0.1") -> None:
        """`target` as `host:port`, IPv6 in brackets."""
        name, separator, port = target.rpartition(":")
        if not separator or not port.isdigit():
            raise ConfigError(f"target: expected host:port, found {target!r}")
        self._target = (name.strip("[]"), int(port))
        self._lock = threading.Condition()  # protects everything below
        self._flips: list[_Flip] = []
        self._pipes: list[_Pipe] = []
        self._is_cut = self._is_stalled = self._is_closed = False
        self._delay = 0.0
        self._flipped = self._accepted = 0
        self._passed: dict[Way, int] = {"up": 0, "down": 0}
        self._threads: list[threading.Thread] = []
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family)
        self._host = host
        self.port: int = self._listener.getsockname()[1]
        self._start(self._accept)

    def __enter__(self) -> Proxy:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def address(self) -> str:
        return f"[{self._host}]:{self.port}" if ":" in self._host else f"{self._host}:{self.port}"

    @property
    def flipped(self) -> int:
        """Return the number of bits flipped so far: the proof that a fault took place."""
        with self._lock:
            return self._flipped

    @property
    def connections(self) -> int:
        """Return the number of connections accepted so far."""
        with self._lock:
            return self._accepted

    def passed_bytes(self, way: Way) -> int:
        """Return the bytes forwarded so far, over all connections."""
        with self._lock:
            return self._passed[way]

    def wait_passed(self, way: Way, size_bytes: int, timeout: float) -> bool:
        """Wait until as many bytes went that way; False if the time is over."""
        with self._lock:
            return self._lock.wait_for(lambda: self._passed[way] >= size_bytes, timeout)

    # --- switches -------------------------------------------------------------------------------------------

    def flip(self, byte: int, bit: int = 0, *, way: Way = "up", times: int = 1) -> None:
        """Flip a bit of that byte of the stream, in the next `times` connections that reach it."""
        if byte < 0 or not 0 <= bit < 8 or times < 1:
            raise ConfigError(f"flip: expected byte >= 0, bit 0 to 7, times >= 1, found {byte}, {bit}, {times}")
        with self._lock:
            self._flips.append(_Flip(byte, bit, way, times))

    def cut(self) -> None:
        """Reset all connections; new ones are reset as soon as they are made, until heal()."""
        with self._lock:
            self._is_cut = True
            self._reset_all()

    def stall(self) -> None:
        """Stop all traffic, but keep all connections and accept new ones."""
        with self._lock:
            self._is_stalled = True

    def heal(self) -> None:
        """End cut() and stall(), and every delay. What was stalled moves on."""
        with self._lock:
            self._is_cut = self._is_stalled = False
            self._delay = 0.0
            self._lock.notify_all()

    def delay(self, seconds: float) -> None:
        """Delay every byte by that time, in each direction; the rate stays."""
        if not seconds >= 0:
            raise ConfigError(f"delay: expected seconds of at least 0, found {seconds}")
        with self._lock:
            self._delay = seconds

    def half_close(self, way: Way) -> None:
        """End that direction of all connections as if its sender had; the other direction stays open."""
        with self._lock:
            for pipe in self._pipes:
                if pipe.way == way:
                    pipe.half_closed = True
                    with contextlib.suppress(OSError):
                        pipe.target.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Reset what is open, and wait for the threads. May be called twice."""
        with self._lock:
            self._is_closed = True
            self._reset_all()
            self._lock.notify_all()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes accept()
        self._listener.close()
        for thread in self._threads:
            thread.join()

    # --- inside ---------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            with self._lock:
                self._accepted += 1
                refused = self._is_cut or self._is_closed
            server = None if refused else self._connect()
            if server is None:
                _reset(client)
                continue
            pipes = [_Pipe("up", client, server), _Pipe("down", server, client)]
            with self._lock:
                if self._is_cut or self._is_closed:
                    _reset(client)
                    _reset(server)
                    continue
                self._pipes += pipes
            for pipe in pipes:
                self._start(self._read, pipe)
                self._start(self._write, pipe)

    def _connect(self) -> socket.socket | None:
        try:
            server = socket.create_connection(self._target, _CONNECT_TIMEOUT)
        except OSError:
            return None
        server.settimeout(None)
        return server

    def _read(self, pipe: _Pipe) -> None:
        """Read bytes as they come; the bounded queue slows the sender down."""
        data = b"\0"
        while data:
            try:
                data = pipe.source.recv(_READ_BYTES)
            except OSError:
                self._drop(pipe)
                data = b""
            due = time.monotonic() + self._delay
            while not self._is_gone(pipe):
                with contextlib.suppress(queue.Full):
                    pipe.reads.put((due, data), timeout=_TICK)
                    break

    def _write(self, pipe: _Pipe) -> None:
        while not self._is_gone(pipe):
            try:
                due, data = pipe.reads.get(timeout=_TICK)
            except queue.Empty:
                continue
            if not self._wait_turn(pipe, due):
                return
            try:
                if not data:
                    pipe.target.shutdown(socket.SHUT_WR)
                    self._finish(pipe)
                    return
                if not pipe.half_closed:
                    pipe.target.sendall(self._spoil(pipe, data))
            except OSError:
                self._drop(pipe)
                return
            with self._lock:
                pipe.passed_bytes += len(data)
                self._passed[pipe.way] += len(data)
                self._lock.notify_all()

    def _wait_turn(self, pipe: _Pipe, due: float) -> bool:
        """Wait until nothing holds these bytes back; False if the connection ended meanwhile."""
        with self._lock:
            while pipe in self._pipes:
                late = due - time.monotonic() if self._delay else 0.0
                if not self._is_stalled and late <= 0:
                    return True
                self._lock.wait(_TICK if self._is_stalled else late)
        return False

    def _spoil(self, pipe: _Pipe, data: bytes) -> bytes:
        with self._lock:
            here = [
                flip
                for flip in self._flips
                if flip.way == pipe.way and pipe.passed_bytes <= flip.byte < pipe.passed_bytes + len(data)
            ]
            if not here:
                return data
            spoiled = bytearray(data)
            for flip in here:
                spoiled[flip.byte - pipe.passed_bytes] ^= 1 << flip.bit
                self._flipped += 1
                flip.remaining -= 1
            self._flips = [flip for flip in self._flips if flip.remaining]
        return bytes(spoiled)

    def _is_gone(self, pipe: _Pipe) -> bool:
        with self._lock:
            return pipe not in self._pipes

    def _finish(self, pipe: _Pipe) -> None:
        """Note that one direction has ended; after both, close the sockets."""
        with self._lock:
            if pipe in self._pipes:
                self._pipes.remove(pipe)
            if not any(other.source is pipe.target for other in self._pipes):
                pipe.source.close()
                pipe.target.close()

    def _drop(self, pipe: _Pipe) -> None:
        """Close both ends after one broke."""
        with self._lock:
            self._pipes = [one for one in self._pipes if one.source not in (pipe.source, pipe.target)]
            _reset(pipe.source)
            _reset(pipe.target)
            self._lock.notify_all()

    def _reset_all(self) -> None:
        for pipe in self._pipes:
            _reset(pipe.source)
            _reset(pipe.target)
        self._pipes.clear()
        self._lock.notify_all()

    def _start(self, target: object, *arguments: object) -> None:
        thread = threading.Thread(target=target, args=arguments, daemon=True)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()


def _reset(one: socket.socket) -> None:
    """Close with a reset. shutdown() first, because closing alone does not wake a thread in recv()."""
    with contextlib.suppress(OSError):
        one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    with contextlib.suppress(OSError):
        one.shutdown(socket.SHUT_RD)
    one.close()
