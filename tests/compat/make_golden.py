"""The golden shards: what they hold, and how their bytes are made.

`python -m tests.compat.make_golden` writes those that are missing. An existing golden file is never
overwritten: what version 1 looks like can't change any more.
"""

from __future__ import annotations

import random
import struct
from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flashckpt import native
from flashckpt.format import shard as shards
from flashckpt.format.dtypes import ITEMSIZE
from flashckpt.format.layout import encode_layout, end_bytes, fingerprint
from flashckpt.format.values import Blob, encode_values
from flashckpt.types import Box, Generation, Layout, ShardId, TensorEntry

DIRECTORY = Path(__file__).parent / "golden"
_SHARD = ShardId(Generation(1_750_000_000_000, 0xFEDCBA9876543210, 1200, 7), 3, 8)


@dataclass(frozen=True)
class Sample:
    """Everything that decides the bytes of a shard."""

    layout: Layout
    values: dict[str, Any] = field(default_factory=dict)
    job: str = "golden-job"
    shard: ShardId = _SHARD
    saved_at: float = 1_750_000_123.25
    chunk_bytes: int = 4096
    granule_bytes: int = 4096
    seed: int = 0

    @property
    def values_offset_bytes(self) -> int:
        return -(-end_bytes(self.layout) // 64) * 64


def build(sample: Sample) -> bytes:
    """The shard as a writer makes it: in a slot full of another one's bytes."""
    layout_bytes = encode_layout(sample.layout)
    values = encode_values(sample.values)
    payload_bytes = sample.values_offset_bytes + len(values)
    where = shards.geometry(len(layout_bytes), payload_bytes, sample.granule_bytes, sample.chunk_bytes)
    slot = bytearray(b"\xa5" * where.file_length_bytes)
    view = memoryview(slot)
    shards.invalidate(view)
    data = bytearray(where.data_length_bytes)
    source = random.Random(sample.seed)
    for entry in sample.layout.entries:
        raw = source.randbytes(entry.length_bytes)
        if entry.dtype == "bool":
            raw = bytes(byte & 1 for byte in raw)
        data[entry.offset_bytes : entry.offset_bytes + entry.length_bytes] = raw
    data[sample.values_offset_bytes : payload_bytes] = values
    view[where.data_offset_bytes :] = data
    crcs = b"".join(
        struct.pack("<I", native.crc32c(bytes(data[start : start + sample.chunk_bytes])))
        for start in range(0, len(data), sample.chunk_bytes)
    )
    header = shards.encode_header(
        job=sample.job,
        shard=sample.shard,
        layout_bytes=layout_bytes,
        layout_fingerprint=fingerprint(layout_bytes),
        values_offset_bytes=sample.values_offset_bytes,
        values_length_bytes=len(values),
        chunk_bytes=sample.chunk_bytes,
        chunk_crcs=crcs,
        saved_at=sample.saved_at,
    )
    shards.seal_bytes(view, header, where)
    return bytes(slot)


def place(*regions: tuple[str, tuple[str | int, ...], str, tuple[int, ...], Box, bool]) -> Layout:
    """Entries one behind the other; a region whose key starts with "=" has the range of the one before."""
    entries: list[TensorEntry] = []
    offset = 0
    for fqn, path, dtype, shape, box, per_rank in regions:
        length = box.volume * ITEMSIZE[dtype]
        start = entries[-1].offset_bytes if fqn.startswith("=") else offset
        entries.append(TensorEntry(fqn.removeprefix("="), path, dtype, shape, box, start, length, per_rank))
        offset = -(-(start + length) // 64) * 64
    return Layout(tuple(entries))


def whole(*shape: int) -> Box:
    return Box((0,) * len(shape), shape)


def _every_value() -> dict[str, Any]:
    import numpy as np
    import torch

    nan = struct.unpack("<d", bytes.fromhex("efbeadde0000f07f"))[0]  # a signalling NaN with a payload
    return {
        "none": None,
        "flags": [True, False],
        "ints": [0, 1, -1, 127, 128, -128, -129, 2**63, -(2**63) - 1, 3**200, -(7**99)],
        "floats": [0.0, -0.0, 1.5, float("inf"), float("-inf"), 5e-324, nan],
        "complex": complex(-0.0, nan),
        "text": ["", "plain", "ümläut \N{SNOWMAN} \N{GRINNING FACE}", "nul\x00inside"],
        "bytes": [b"", b"\x00\xff", bytearray(b"changeable"), Blob(b"\x80opaque")],
        "optimizer.param_groups": [{"lr": 1e-3, "betas": (0.9, 0.999), "params": [0, 1, 2], "fused": None}],
        "dict": {1: "one", "two": 2, (3, "x"): {None: False}, 2.5: [], b"k": {}, frozenset({1}): ()},
        "ordered": OrderedDict([("z", 1), ("a", OrderedDict())]),
        "sets": [set(), {3, 1, 2}, {"b", "a", ""}, frozenset({(1, 2), None, "x"})],
        "slices": [slice(None), slice(1, -1, 2), range(0), range(10, -10, -3)],
        "torch": [torch.Size([]), torch.Size([2, 0, 3]), torch.bfloat16, torch.float8_e4m3fn, torch.qint8],
        "devices": [torch.device("cpu"), torch.device("cuda:3"), torch.device("meta")],
        "numpy.scalars": [
            np.bool_(True),
            np.int8(-5),
            np.uint64(2**64 - 1),
            np.float16(1.5),
            np.float32(-0.0),
            np.float64(nan),
            np.complex64(1 - 2j),
            np.datetime64("2026-02-03T04:05:06.789", "ms"),
            np.timedelta64(-7, "D"),
        ],
        "numpy.arrays": [
            np.arange(12, dtype=np.int32).reshape(3, 4),
            np.asfortranarray(np.arange(6, dtype=np.float64).reshape(2, 3)),
            np.array(7, dtype=np.uint8),
            np.zeros((0, 5), dtype=np.complex128),
            np.array([True, False]),
            np.array([1, 2, 3], dtype=">u2"),
            np.array(["2026-01-01", "NaT"], dtype="datetime64[us]"),
        ],
    }


def samples() -> dict[str, Sample]:
    part = Box((2, 0), (2, 6))
    kinds = place(
        ("model.empty", ("model", "empty"), "float32", (0, 7), whole(0, 7), False),
        ("model.embed", ("model", "embed"), "bfloat16", (8, 6), part, False),
        ("=model.head", ("model", "head"), "bfloat16", (8, 6), part, False),
        ("model.scale", ("model", "scale"), "float64", (), whole(), False),
        ("model.w", ("model", "w"), "float32", (64, 64), Box((0, 16), (16, 16)), False),
        ("model.w", ("model", "w"), "float32", (64, 64), Box((32, 16), (16, 16)), False),
        ("optimizer.state.0.exp_avg", ("optimizer", "state", 0, "exp_avg"), "float32", (9,), whole(9), False),
        ("odd.-4.", ("odd", -4, ""), "complex64", (3, 1, 2), whole(3, 1, 2), False),
        ("rng", ("rng",), "uint8", (5056,), whole(5056), True),
        ("", ("",), "bool", (17,), whole(17), False),
        ("fp8.ünïcode", ("fp8", "ünïcode"), "float8_e4m3fn", (33,), Box((32,), (1,)), False),
        ("fp4", ("fp4",), "float4_e2m1fn_x2", (10,), whole(10), False),
        ("last.empty", ("last", "empty"), "int64", (4,), Box((4,), (0,)), False),
    )
    return {
        "v1-kinds": Sample(kinds, _every_value(), seed=1),
        "v1-empty": Sample(Layout(()), job="e", shard=ShardId(Generation(0, 0, 0, 0), 0, 1), saved_at=0.0),
        "v1-values-only": Sample(Layout(()), {"step": 3, "": None}, granule_bytes=8192, chunk_bytes=8192),
        "v1-every-dtype": Sample(
            place(*((f"t.{name}", ("t", name), name, (5, 3), Box((1, 0), (4, 3)), False) for name in ITEMSIZE)),
            {"epoch": 1},
            job="j" * 256,
            shard=ShardId(Generation(2**63 - 1, 2**64 - 1, 2**63 - 1, 2**63 - 1), 2**24 - 1, 2**24),
            seed=2,
        ),
    }


def main() -> None:
    DIRECTORY.mkdir(exist_ok=True)
    for name, sample in samples().items():
        path = DIRECTORY / f"{name}.shard"
        if not path.exists():
            path.write_bytes(build(sample))


if __name__ == "__main__":
    main()
