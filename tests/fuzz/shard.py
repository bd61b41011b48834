"""Spoils shards and values and holds the reader against an independent one.

    python -m tests.fuzz.shard --count 200000 [--seed S]

For every case: only the reader's own errors, within a second, with bounded memory; and whatever one of the two
readers accepts, the other accepts with the same meaning.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import random
import resource
import sys
import time
import tracemalloc
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from flashckpt import native
from flashckpt.errors import CorruptShardError, FlashError, IncompatibleError
from flashckpt.format.dtypes import ITEMSIZE
from flashckpt.format.shard import read_envelope, read_header
from flashckpt.format.values import decode_values, encode_values
from flashckpt.types import Box, Generation, ShardHeader, ShardId
from tests.compat.make_golden import DIRECTORY, Sample, build, place, samples
from tests.fuzz.checker import Bad, check
from tests.fuzz.mutate import spoil_shard, spoil_values

if TYPE_CHECKING:
    from collections.abc import Callable

SECONDS = 1.0
SAMPLE_EVERY = 50  # tracing allocations makes a case ten times slower


class Finding(AssertionError):
    """Something the reader must not do."""


@dataclass
class Report:
    cases: int = 0
    accepted: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    slowest: float = 0.0
    largest_ratio: float = 0.0
    grown_bytes: int = 0


def random_sample(source: random.Random) -> Sample:
    regions = []
    for index in range(source.randrange(8)):
        dims = source.randrange(4)
        sizes = tuple(source.randrange(5) for _ in range(dims))
        offsets = tuple(source.randrange(9) for _ in range(dims))
        shape = tuple(o + s + source.randrange(3) for o, s in zip(offsets, sizes, strict=True))
        dtype = source.choice(sorted(ITEMSIZE))
        path = tuple(source.choice(["a", "b.c", "", 0, -1, 2**63 - 1]) for _ in range(source.randrange(1, 4)))
        region = (f"t{index}", path, dtype, shape, Box(offsets, sizes), source.random() < 0.2)
        regions.append(region)
        if all(sizes) and source.random() < 0.2:
            regions.append(("=" + region[0] + "tied", *region[1:]))
    generation = Generation(*(source.randrange(2**63) for _ in range(4)))
    return Sample(
        place(*regions),
        {"k": [1, source.random(), {"x": "y"}]},
        job=source.choice(["j", "a-job", "ü"]),
        shard=ShardId(generation, 1, 4),
        chunk_bytes=source.choice([4096, 8192]),
        seed=source.randrange(1000),
    )


def corpora(source: random.Random) -> tuple[list[bytes], list[bytes]]:
    """Valid shards and valid blobs of values to start from."""
    shards = [path.read_bytes() for path in sorted(DIRECTORY.glob("*.shard"))]
    shards += [build(random_sample(source)) for _ in range(20)]
    every = samples()["v1-kinds"].values
    values = [encode_values({key: value}) for key, value in every.items()]
    values += [encode_values(every), encode_values({str(i): i for i in range(200)})]
    return shards, values


class Limits:
    """Runs one case and raises Finding where it takes too long, too much memory, or the wrong error."""

    def __init__(self, report: Report) -> None:
        self.report = report

    def run(self, call: Callable[[], Any], input_bytes: int) -> Any:
        """The result, or None where the input was refused."""
        traced = self.report.cases % SAMPLE_EVERY == 0
        if traced:
            tracemalloc.start()
        start = time.thread_time()
        try:
            result = call()
        except (CorruptShardError, IncompatibleError) as error:
            if not error.message or not str(error):
                raise Finding("an error without a message") from error
            result = None
            self.report.outcomes[type(error).__name__] += 1
        finally:
            took = time.thread_time() - start
            peak = 0
            if traced:
                peak = tracemalloc.get_traced_memory()[1]
                tracemalloc.stop()
        if took > SECONDS and not traced:
            raise Finding(f"took {took:.2f} s for {input_bytes} bytes")
        allowed = 2 * input_bytes + (1 << 20)
        if peak > allowed:
            raise Finding(f"allocated {peak} bytes for {input_bytes}; allowed are {allowed}")
        self.report.slowest = max(self.report.slowest, 0 if traced else took)
        self.report.largest_ratio = max(self.report.largest_ratio, peak / allowed)
        return result


def compare(header: ShardHeader | None, data: bytes, fd: int) -> None:
    """Both readers accept or both refuse, and what they accept means the same."""
    try:
        found = check(data)
    except Bad as error:
        if header is not None:
            raise Finding(f"accepted what breaks {error}") from error
        return
    if header is None:
        raise Finding("refused what breaks no rule")
    shard, area = header.shard, (header.data_offset_bytes, header.data_length_bytes)
    ours = {
        "job": header.job,
        "identity": (*shard.generation, shard.rank, shard.world),
        "entries": [
            (
                e.fqn,
                e.path,
                e.dtype,
                e.global_shape,
                (e.box.offsets, e.box.sizes),
                e.offset_bytes,
                e.length_bytes,
                e.per_rank,
            )
            for e in header.layout.entries
        ],
        "values": (header.values_offset_bytes, header.values_length_bytes),
        "chunk_bytes": header.chunk_bytes,
        "chunk_crcs": header.chunk_crcs,
        "saved_at": header.saved_at,
        "data": area,
        "bad_chunks": native.verify_file(fd, *area, header.chunk_bytes, header.chunk_crcs, 1),
    }
    if ours != found:
        raise Finding(f"two meanings: {[key for key in ours if ours[key] != found[key]]}")
    envelope = read_envelope(fd, expect=shard, job=header.job)
    if (envelope.chunk_crcs, envelope.layout_fingerprint) != (header.chunk_crcs, header.layout_fingerprint):
        raise Finding("envelope and header differ")


def one_shard(source: random.Random, corpus: list[bytes], limits: Limits) -> None:
    name, data = spoil_shard(source, source.choice(corpus))
    fd = os.memfd_create("case", os.MFD_CLOEXEC)
    try:
        os.truncate(fd, len(data))
        os.pwrite(fd, data, 0)
        header = limits.run(lambda: read_header(fd), len(data))
        compare(header, data, fd)
    except Exception as error:
        raise _reported(error, name, data) from error
    finally:
        os.close(fd)
    limits.report.accepted += header is not None
    limits.report.outcomes[f"{name.split(' + ')[0]}: {'accepted' if header else 'refused'}"] += 1


def one_values(source: random.Random, corpus: list[bytes], limits: Limits) -> None:
    data = spoil_values(source, source.choice(corpus), source.choice(corpus))
    try:
        values = limits.run(lambda: decode_values(data), len(data))
        # Bytes and values are one to one: what is accepted is what a writer would have written.
        if values is not None and encode_values(values) != data:
            raise Finding("accepted values that would be written in another way")
    except Exception as error:
        raise _reported(error, "values", data) from error
    limits.report.accepted += values is not None
    limits.report.outcomes[f"values: {'refused' if values is None else 'accepted'}"] += 1


def _reported(error: Exception, name: str, data: bytes) -> Finding:
    kind = "" if isinstance(error, Finding) else f"{type(error).__name__}, "
    if isinstance(error, FlashError):
        kind += "from the comparison, "
    return Finding(f"{name}: {kind}{error}\n  case: {data.rstrip(bytes(1)).hex()} ({len(data)} bytes)")


def fuzz(count: int, seed: int, report_every: int = 0) -> Report:
    """Runs `count` cases; raises Finding, with the case, for the first that goes wrong."""
    source = random.Random(seed)
    shards, values = corpora(source)
    report = Report()
    limits = Limits(report)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number in range(count):
        if number % 500 == 0:
            # A case that hangs inside compiled code can't be interrupted, but it can be shown.
            faulthandler.dump_traceback_later(120, exit=True)
            if report_every and number % report_every == 0:
                print(f"{number} cases, {report.accepted} accepted", flush=True)
        report.cases += 1
        if number % 4 == 3:
            one_values(source, values, limits)
        else:
            one_shard(source, shards, limits)
    faulthandler.cancel_dump_traceback_later()
    # Also what protobuf's own allocator took, which tracemalloc does not see.
    report.grown_bytes = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    return report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200_000)
    parser.add_argument("--seed", type=int, default=None, help="default: another one every time, printed")
    arguments = parser.parse_args()
    seed = arguments.seed if arguments.seed is not None else random.SystemRandom().randrange(2**32)
    print(f"seed {seed}", flush=True)
    start = time.monotonic()
    try:
        report = fuzz(arguments.count, seed, report_every=20_000)
    except Finding as finding:
        print(f"FOUND (seed {seed}): {finding}", file=sys.stderr)
        return 1
    for outcome, times in sorted(report.outcomes.items()):
        print(f"  {times:8d}  {outcome}")
    print(
        f"{report.cases} cases in {time.monotonic() - start:.0f} s: {report.accepted} accepted by both readers, "
        f"the rest refused by both; slowest {report.slowest * 1000:.0f} ms, "
        f"most memory {report.largest_ratio:.0%} of what is allowed, process grew {report.grown_bytes >> 20} MiB"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
