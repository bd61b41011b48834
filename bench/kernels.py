"""How fast the native core moves and checks bytes, as a share of what memcpy does on the same machine.

`python -m bench.kernels [--mib 1024] [--rounds 9] [--json]`. The destination is tmpfs, mapped and faulted, as a
slot is. Rounds are interleaved, so that a busy minute of the machine hits all rows alike; the ratio is that of the
best times, with memcpy in as many threads.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import statistics
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from flashckpt import native

if TYPE_CHECKING:
    from collections.abc import Callable

CHUNK_BYTES = 256 << 10
_memcpy = ctypes.CDLL(None).memcpy  # called through ctypes, it runs without the GIL
_memcpy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
_memcpy.restype = ctypes.c_void_p


@dataclass
class Row:
    name: str
    threads: int
    size_bytes: int
    call: Callable[[], object]
    before: Callable[[], object] = lambda: None
    seconds: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Result:
    name: str
    threads: int
    best_gb_per_s: float
    median_gb_per_s: float
    time_over_memcpy: float


def memcpy(destination: int, source: int, size_bytes: int, threads: int) -> None:
    share = size_bytes // threads
    helpers = [
        threading.Thread(target=_memcpy, args=(destination + i * share, source + i * share, share))
        for i in range(1, threads)
    ]
    for helper in helpers:
        helper.start()
    _memcpy(destination, source, share)
    for helper in helpers:
        helper.join()


def with_kernel(name: str, call: Callable[[], object]) -> Callable[[], object]:
    def run() -> None:
        native.set_kernel(name)
        call()
        native.set_kernel(native.kernels()[0])

    return run


def tensors(source: int, size_bytes: int, tensor_bytes: int) -> tuple[np.ndarray, int]:
    """Pieces of one size, each aligned to 64 bytes as in a shard, and how many bytes they are."""
    step = -(-tensor_bytes // 64) * 64
    count = max(size_bytes // step, 1)
    offsets = np.arange(count, dtype=np.int64) * step
    pieces = np.stack([source + offsets, offsets, np.full(count, tensor_bytes, dtype=np.int64)], axis=1)
    return np.ascontiguousarray(pieces), count * tensor_bytes


def rows(fd: int, slot: mmap.mmap, source: np.ndarray, target: np.ndarray) -> list[Row]:
    size = len(source)
    slot_address = np.frombuffer(slot, dtype=np.uint8).ctypes.data
    whole = np.array([(source.ctypes.data, 0, size)], dtype=np.int64)
    load = np.array([(0, target.ctypes.data, size)], dtype=np.int64)
    crcs = native.scatter_copy(slot, whole, CHUNK_BYTES, 2)
    fresh: dict[str, mmap.mmap] = {}

    def map_anew() -> None:
        if "map" in fresh:
            fresh.pop("map").close()
        fresh["map"] = mmap.mmap(-1, size)

    def refill() -> None:  # the rows before have laid other tensors into the slot
        native.scatter_copy(slot, whole, CHUNK_BYTES, 2)

    table = []
    for threads in (1, 2):
        table.append(Row("memcpy", threads, size, lambda t=threads: memcpy(slot_address, source.ctypes.data, size, t)))
        for name in native.kernels():
            scatter = with_kernel(name, lambda t=threads: native.scatter_copy(slot, whole, CHUNK_BYTES, t))
            table.append(Row(f"scatter_copy {name}", threads, size, scatter))
        for label, tensor_bytes in (("4 KiB", 4 << 10), ("4 KiB + 4", (4 << 10) + 4), ("10 MiB", 10 << 20)):
            pieces, moved = tensors(source.ctypes.data, size, tensor_bytes)
            table.append(
                Row(
                    f"scatter_copy, tensors of {label}",
                    threads,
                    moved,
                    lambda p=pieces, t=threads: native.scatter_copy(slot, p, CHUNK_BYTES, t),
                )
            )
        table.extend(
            Row(
                "gather_read" if verify else "gather_read, not verified",
                threads,
                size,
                lambda t=threads, v=verify: must_be_good(
                    native.gather_read(fd, 0, size, CHUNK_BYTES, crcs, load, t, v)
                ),
                refill,
            )
            for verify in (True, False)
        )
        table.append(
            Row(
                "verify_file",
                threads,
                size,
                lambda t=threads: must_be_good(native.verify_file(fd, 0, size, CHUNK_BYTES, crcs, t)),
            )
        )
        table.append(
            Row(
                "verify_chunks",
                threads,
                size,
                lambda t=threads: must_be_good(native.verify_chunks(slot, CHUNK_BYTES, crcs, t)),
            )
        )
        table.append(
            Row("prefault of new pages", threads, size, lambda t=threads: native.prefault(fresh["map"], t), map_anew)
        )
    return table


def must_be_good(bad: list[int]) -> None:
    if bad:
        raise ValueError(f"expected no bad chunk, found {len(bad)}: the measurement is worthless")


def measure(table: list[Row], rounds: int) -> list[Result]:
    for _ in range(rounds):
        for row in table:
            row.before()
            start = time.perf_counter()
            row.call()
            row.seconds.append(time.perf_counter() - start)
    memcpy_rates = {row.threads: row.size_bytes / min(row.seconds) for row in table if row.name == "memcpy"}
    return [
        Result(
            row.name,
            row.threads,
            round(row.size_bytes / min(row.seconds) / 1e9, 2),
            round(row.size_bytes / statistics.median(row.seconds) / 1e9, 2),
            round(memcpy_rates[row.threads] * min(row.seconds) / row.size_bytes, 2),
        )
        for row in table
    ]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.kernels", description=__doc__)
    parser.add_argument("--mib", type=int, default=1024, help="bytes moved per call (default 1024 MiB)")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--directory", default="/dev/shm", help="a tmpfs with room for one copy")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if not native.IS_NATIVE:
        parser.error("the native core is not built: pip install -e .")
    size = arguments.mib << 20
    source = np.random.default_rng(0).integers(0, 256, size, dtype=np.uint8)
    room = np.ones(size + 64, dtype=np.uint8)
    start = -room.ctypes.data % 64  # torch aligns its tensors so, NumPy does not
    target = room[start : start + size]
    with tempfile.TemporaryFile(dir=arguments.directory) as file:
        os.ftruncate(file.fileno(), size)
        slot = mmap.mmap(file.fileno(), size)
        native.prefault(slot, 2)
        results = measure(rows(file.fileno(), slot, source, target), arguments.rounds)
    if arguments.json:
        print(json.dumps([asdict(result) for result in results]))
        return 0
    print(f"{'':36}{'threads':>8}{'best GB/s':>12}{'median':>9}{'time / memcpy':>16}")
    for result in results:
        print(
            f"{result.name:36}{result.threads:>8}{result.best_gb_per_s:>12.2f}{result.median_gb_per_s:>9.2f}"
            f"{result.time_over_memcpy:>16.2f}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
