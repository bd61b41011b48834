"""Makes calls of raw bytes. convert.py decodes them, not gRPC's deserializers, which log their errors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator

    import grpc


class Stream(Protocol):
    """The answers of a call that has several."""

    def __iter__(self) -> Iterator[bytes]: ...

    def cancel(self) -> bool: ...


def call(channel: grpc.Channel, method: str, request: bytes, timeout: float, metadata: Metadata = ()) -> bytes:
    make: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(method)
    return make(request, timeout=timeout, metadata=metadata)


def call_for_stream(
    channel: grpc.Channel, method: str, request: bytes, metadata: Metadata = (), timeout: float | None = None
) -> Stream:
    make: grpc.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(method)
    return make(request, timeout=timeout, metadata=metadata)


def stream(channel: grpc.Channel, method: str, requests: Iterator[bytes], timeout: float | None) -> Stream:
    make: grpc.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(method)
    return make(requests, timeout=timeout)


Metadata = tuple[tuple[str, str | bytes], ...]
