from __future__ import annotations

import os
import time
import tracemalloc

import pytest

from flashckpt.errors import CorruptShardError
from flashckpt.format.shard import read_header
from flashckpt.format.values import decode_values
from tests.compat.make_golden import DIRECTORY
from tests.fuzz import shard as fuzzer
from tests.fuzz.forge import with_header


def test_five_thousand_cases():
    report = fuzzer.fuzz(5000, seed=20260101)
    assert report.cases == 5000
    # A fuzzer that reaches nothing finds nothing: each kind of case must get through sometimes.
    assert report.accepted > 200
    for name in ("lie_in_header", "spoil_layout_bytes", "lie_in_entry", "rearrange_entries", "values"):
        assert report.outcomes[f"{name}: accepted"] > 5, name
        assert report.outcomes[f"{name}: refused"] > 5, name
    assert report.grown_bytes < 64 << 20


def test_the_fuzzer_notices_a_reader_that_accepts_too_much(monkeypatch):
    """Switch one rule off and the fuzzer must find a case."""
    from flashckpt.format import layout

    monkeypatch.setattr(layout, "ENTRY_ALIGNMENT_BYTES", 1)
    with pytest.raises(fuzzer.Finding, match="accepted what breaks L10"):
        fuzzer.fuzz(5000, seed=1)


@pytest.mark.alone
@pytest.mark.parametrize("piece", [b"\x0a\x00", b"\x0a\x02\x12\x00", b"\x0a\x04\x12\x02\x10\x00"])
def test_many_tiny_entries_do_not_expand(piece, tmp_path):
    """8 MiB of entries of a few bytes, which would be gigabytes of objects."""
    data = with_header((DIRECTORY / "v1-empty.shard").read_bytes(), layout=piece * ((8 << 20) // len(piece)))
    path = tmp_path / "bomb"
    path.write_bytes(data)
    fd = os.open(path, os.O_RDONLY)
    tracemalloc.start()
    start = time.thread_time()
    with pytest.raises(CorruptShardError):
        read_header(fd)
    took = time.thread_time() - start
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    os.close(fd)
    assert peak < 2 * len(data) + (1 << 20)
    assert took < 1


def test_a_huge_count_allocates_nothing():
    raw = b"\x01\x01kl" + b"\xff" * 8 + b"\x7f" + bytes(1000)
    tracemalloc.start()
    with pytest.raises(CorruptShardError):
        decode_values(raw)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100_000
