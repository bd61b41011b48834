"""The quick encoding of chunks is protobuf's, byte for byte; the quick decoding agrees with it or gives up."""

from __future__ import annotations

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from flashckpt.move.transports.grpc.frames import decode_chunks, encode_chunks
from flashckpt.v1 import peer_pb2

indexes = st.integers(0, (1 << 64) - 1)
chunks = st.lists(st.binary(max_size=300), min_size=1, max_size=5)


def by_protobuf(first_index, data):
    return peer_pb2.PutRequest(chunks=peer_pb2.PutChunks(first_index=first_index, data=data)).SerializeToString()


@given(indexes, chunks)
def test_encoding_is_protobufs(first_index, data):
    encoded = encode_chunks(first_index, data)
    assert encoded == by_protobuf(first_index, data)
    found = decode_chunks(encoded)
    assert found is not None
    assert found[0] == first_index
    assert [bytes(piece) for piece in found[1]] == data


@given(indexes, chunks, st.data())
def test_decoding_of_altered_bytes_agrees_with_protobuf_or_gives_up(first_index, data, draw):
    altered = bytearray(by_protobuf(first_index, data))
    for _ in range(draw.draw(st.integers(1, 3))):
        altered[draw.draw(st.integers(0, len(altered) - 1))] = draw.draw(st.integers(0, 255))
    cut = draw.draw(st.integers(0, len(altered)))
    agree(bytes(altered[:cut]))
    agree(bytes(altered))


@given(st.binary(max_size=40))
def test_decoding_of_any_bytes_agrees_with_protobuf_or_gives_up(data):
    agree(data)
    agree(b"\x1a" + bytes([len(data)]) + data)


def agree(data):
    found = decode_chunks(data)
    if found is None:
        return
    try:
        message = peer_pb2.PutRequest.FromString(data)
    except DecodeError:
        pytest.fail(f"protobuf does not take {data!r} at all")
    assert message.WhichOneof("part") == "chunks"
    assert (message.chunks.first_index, list(message.chunks.data)) == (found[0], [bytes(one) for one in found[1]])


def test_chunks_are_not_copied():
    encoded = encode_chunks(7, [b"a" * 1000, b"b" * 1000])
    _, pieces = decode_chunks(encoded)
    assert all(piece.obj is encoded for piece in pieces)
