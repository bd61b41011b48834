from __future__ import annotations

from collections import OrderedDict

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from flashckpt.errors import CorruptShardError, IncompatibleError
from flashckpt.format.dtypes import ITEMSIZE
from flashckpt.format.values import Blob, decode_values, encode_values
from tests.compat.sameness import plain

# A busy machine is no failure.
unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

texts = st.text(st.characters(exclude_categories=["Cs"]))
numpy_dtypes = (
    hnp.boolean_dtypes()
    | hnp.integer_dtypes(endianness="?")
    | hnp.unsigned_integer_dtypes(endianness="?")
    | hnp.floating_dtypes(sizes=(16, 32, 64), endianness="?")
    | hnp.complex_number_dtypes(sizes=(64, 128), endianness="?")
    | hnp.datetime64_dtypes(endianness="?")
    | hnp.timedelta64_dtypes(endianness="?")
)
numpy_scalars = hnp.arrays(numpy_dtypes, ()).map(lambda array: array[()])
hashable_leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(2**300), 2**300)
    | st.floats()
    | st.complex_numbers()
    | texts
    | st.binary()
    | st.builds(Blob, st.binary())
    | st.sampled_from([getattr(torch, name) for name in ITEMSIZE])
    | st.sampled_from([torch.device("cpu"), torch.device("cuda", 2), torch.device("meta")])
    | st.lists(st.integers(0, 2**63 - 1), max_size=4).map(torch.Size)
    | st.builds(range, st.integers(), st.integers(), st.integers().filter(bool))
)
hashables = st.recursive(
    hashable_leaves,
    lambda inner: st.lists(inner, max_size=3).map(tuple) | st.frozensets(inner, max_size=3),
    max_leaves=5,
)
leaves = (
    hashables
    | st.binary().map(bytearray)
    | numpy_scalars
    | hnp.arrays(numpy_dtypes, hnp.array_shapes(min_dims=0, min_side=0, max_dims=3))
    | st.builds(slice, st.none() | st.integers(), st.none() | st.integers(), st.none() | st.integers())
    | st.sets(hashables, max_size=4)
)
anything = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(hashables, inner, max_size=4)
        | st.dictionaries(hashables, inner, max_size=4).map(OrderedDict)
    ),
    max_leaves=12,
)
mappings = st.dictionaries(texts, anything, max_size=4)


@unhurried
@given(mappings)
def test_values_round_trip(values):
    raw = encode_values(values)
    back = decode_values(raw)
    assert plain(back) == plain(values)
    assert encode_values(back) == raw
    assert plain(decode_values(memoryview(bytearray(raw)))) == plain(values)


@unhurried
@given(mappings, st.data())
def test_no_prefix_or_extension_of_values_is_accepted(values, data):
    raw = encode_values(values)
    cut = data.draw(st.integers(0, max(0, len(raw) - 1)))
    extra = data.draw(st.binary(min_size=1, max_size=4))
    for changed in (raw[:cut], raw + extra):
        if changed and changed != raw:
            try:
                decoded = decode_values(changed)
            except CorruptShardError:
                continue
            # Only appending to no values at all makes values: nothing else is a valid prefix of them.
            assert raw == b""
            assert encode_values(decoded) == changed


@unhurried
@given(mappings, st.integers(0), st.integers(1, 255))
def test_a_changed_byte_is_other_values_or_refused(values, position, change):
    raw = bytearray(encode_values(values))
    if raw:
        raw[position % len(raw)] ^= change
        try:
            decoded = decode_values(bytes(raw))
        except (CorruptShardError, IncompatibleError):
            return
        assert encode_values(decoded) == raw
