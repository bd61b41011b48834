"""Ways to receive a shard: what each costs the receiver, beside a plain socket into warm memory.

    python -m bench.bench_receive [--size 1G] [--rounds 6] [--lanes 2]

One process sends the same tmpfs file with sendfile over loopback; this one receives frames of 1 MiB, verifies them,
and keeps them: through a buffer and pwrite, in a mapping that has to be faulted in, in one that is warm, or through
a buffer into new memory. Rounds are interleaved; best wall-clock seconds and their CPU seconds. Decision 17
(docs/decisions/0017-lanes.md) rests on it.
"""

from __future__ import annotations

import argparse
import mmap
import os
import resource
import socket
import statistics
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

from bench.scratch import check_room, scratch_directory
from bench.sink import receive_into, send_all
from bench.spec import format_size, parse_size
from flashckpt import native

FRAME_BYTES = 1 << 20
WAYS = ("plain socket, warm memory", "buffer, pwrite", "cold mapping", "warm mapping", "buffer, new memory")
_HEADER = struct.Struct("<Q")
_END = (1 << 64) - 1
_ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--size", type=parse_size, default=parse_size("1G"))
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--lanes", type=int, default=2)
    given = parser.parse_args()
    size = given.size // FRAME_BYTES * FRAME_BYTES
    check_room(4 * size)
    samples: dict[str, list[tuple[float, float, float]]] = {way: [] for way in WAYS}
    with scratch_directory() as directory:
        source = directory / "source"
        with source.open("wb") as file:
            for _ in range(size // FRAME_BYTES):
                file.write(os.urandom(FRAME_BYTES))
        receiver = Receiver(directory / "kept", size)
        for number in range(given.rounds):
            print(f"{number + 1} of {given.rounds}", file=sys.stderr)
            for way in WAYS:
                samples[way].append(_transfer(receiver, way, source, size, given.lanes))
    print(f"{format_size(size)}, {given.lanes} lanes, best and median of {given.rounds}")
    for way, found in samples.items():
        best = min(found)
        median = statistics.median(one[0] for one in found)
        print(
            f"  {way:<26} {best[0]:6.3f} s  ({median:6.3f} s)   CPU: receiver {best[1]:.3f} s, sender {best[2]:.3f} s"
        )


def _transfer(receiver: Receiver, way: str, source: Path, size: int, lanes: int) -> tuple[float, float, float]:
    """Seconds, and the CPU seconds of both ends."""
    is_plain = way == WAYS[0]
    count = 1 if is_plain else lanes
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(60.0)
        command = [sys.executable, "-m", "bench.bench_receive", "send", str(server.getsockname()[1]), str(source)]
        command += [str(size), "plain" if is_plain else "frames", str(count)]
        with subprocess.Popen(command, cwd=_ROOT, stdout=subprocess.PIPE, text=True) as sender:
            connections = [server.accept()[0] for _ in range(count)]
            began, cpu = time.perf_counter(), time.process_time()
            receiver.receive(way, connections)
            seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
            told, _ = sender.communicate(timeout=60.0)
    return seconds, cpu, float(told)


class Receiver:
    def __init__(self, path: Path, size: int) -> None:
        self._path, self._size = path, size
        self._fd = self._make()
        self._warm = mmap.mmap(self._fd, size)
        native.prefault(self._warm, len(os.sched_getaffinity(0)))

    def receive(self, way: str, connections: list[socket.socket]) -> None:
        if way == "plain socket, warm memory":
            with memoryview(self._warm) as view:
                receive_into(connections[0], view)
            connections[0].sendall(b"A")
            return
        fd, mapping = self._fd, self._warm
        if way == "buffer, new memory":
            fd = self._make()
        elif way == "cold mapping":
            mapping = mmap.mmap(self._fd, self._size)
        work = self._into_buffer if "buffer" in way else self._in_place
        threads = [threading.Thread(target=work, args=(one, fd, mapping)) for one in connections]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if fd != self._fd:
            os.close(fd)
        if mapping is not self._warm:
            mapping.close()

    def _make(self) -> int:
        self._path.unlink(missing_ok=True)
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.posix_fallocate(fd, 0, self._size)
        return fd

    def _into_buffer(self, connection: socket.socket, fd: int, _mapping: mmap.mmap) -> None:
        buffer = memoryview(bytearray(FRAME_BYTES))
        while (at := _next(connection)) is not None:
            receive_into(connection, buffer)
            native.crc32c(buffer)
            os.pwrite(fd, buffer, at)

    def _in_place(self, connection: socket.socket, _fd: int, mapping: mmap.mmap) -> None:
        with memoryview(mapping) as whole:
            while (at := _next(connection)) is not None:
                with whole[at : at + FRAME_BYTES] as room:
                    native.prefault(room, 1)
                    receive_into(connection, room)
                    native.crc32c(room)


def _next(connection: socket.socket) -> int | None:
    header = bytearray(_HEADER.size)
    receive_into(connection, memoryview(header))
    (at,) = _HEADER.unpack(header)
    if at != _END:
        return int(at)
    connection.sendall(b"A")
    return None


def send(port: int, source: Path, size: int, how: str, count: int) -> None:
    """The other end. Prints its CPU seconds."""
    fd = os.open(source, os.O_RDONLY | os.O_CLOEXEC)
    mapping = mmap.mmap(fd, size, prot=mmap.PROT_READ)
    view = memoryview(mapping)
    sum(view[at] for at in range(0, size, mmap.PAGESIZE))  # faults it in
    connections = [socket.create_connection(("127.0.0.1", port)) for _ in range(count)]
    offsets = iter(range(0, size, FRAME_BYTES))
    lock = threading.Lock()

    def frames(connection: socket.socket) -> None:
        while True:
            with lock:
                at = next(offsets, _END)
            connection.sendall(_HEADER.pack(at))
            if at == _END:
                break
            end = at + FRAME_BYTES
            while at < end:
                at += os.sendfile(connection.fileno(), fd, at, end - at)
        connection.recv(1)

    def plain(connection: socket.socket) -> None:
        send_all(connection, view)
        connection.recv(1)

    began = resource.getrusage(resource.RUSAGE_SELF)
    threads = [threading.Thread(target=plain if how == "plain" else frames, args=(one,)) for one in connections]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ended = resource.getrusage(resource.RUSAGE_SELF)
    print(ended.ru_utime + ended.ru_stime - began.ru_utime - began.ru_stime)


if __name__ == "__main__":
    if sys.argv[1:2] == ["send"]:
        send(int(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]), sys.argv[5], int(sys.argv[6]))
    else:
        main()
