"""Sends errors through gRPC: a typed detail in the trailing metadata becomes the same class at the other end."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NoReturn

import grpc
from google.protobuf.message import DecodeError

from flashckpt import errors
from flashckpt.errors import DeniedError, FlashError, InternalError
from flashckpt.rpc.checks import printable, shorten
from flashckpt.v1 import common_pb2

if TYPE_CHECKING:
    from collections.abc import Iterator

DETAIL_KEY = "flashckpt-error-bin"

# Together they stay below metadata's limit of 8 KiB, even if the transport encodes them as text.
_MAX_MESSAGE_BYTES = 2048
_MAX_HINT_BYTES = 512
_MAX_FIELDS = 16
_MAX_FIELD_NAME_BYTES = 64
_MAX_FIELD_VALUE_BYTES = 256
_MAX_FIELDS_BYTES = 1024
_MAX_DETAIL_BYTES = 8192

_STATUS = {
    errors.ConfigError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.ClosedError: grpc.StatusCode.UNAVAILABLE,
    errors.ConflictError: grpc.StatusCode.ABORTED,
    errors.NoSpaceError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.BusyError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.NotFoundError: grpc.StatusCode.NOT_FOUND,
    errors.FencedError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.DeniedError: grpc.StatusCode.PERMISSION_DENIED,
    errors.CorruptShardError: grpc.StatusCode.DATA_LOSS,
    errors.IncompatibleError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.DeadlineError: grpc.StatusCode.DEADLINE_EXCEEDED,
}


def _tree(cls: type[FlashError]) -> Iterator[type[FlashError]]:
    for child in cls.__subclasses__():
        # Classes of other modules are internal to them: they are sent with the code of their public base, or as
        # unknown.
        if child.__module__ == errors.__name__:
            yield child
            yield from _tree(child)


_BY_CODE = {cls.code: cls for cls in _tree(FlashError)}


def encode_error(error: FlashError) -> bytes:
    fields, room = [], _MAX_FIELDS_BYTES
    for name, value in list(error.fields.items())[:_MAX_FIELDS]:
        text = json.dumps(value, default=str, separators=(",", ":"))
        size = len(text.encode())
        if size <= min(_MAX_FIELD_VALUE_BYTES, room) and len(name.encode()) <= _MAX_FIELD_NAME_BYTES:
            room -= size
            fields.append(common_pb2.ErrorField(name=name, value_json=text))
    detail = common_pb2.ErrorDetail(
        code=error.code,
        message=shorten(error.message, _MAX_MESSAGE_BYTES),
        hint=shorten(error.hint, _MAX_HINT_BYTES),
        fields=fields,
    )
    return detail.SerializeToString()


def decode_error(data: bytes, unknown: type[FlashError]) -> FlashError | None:
    """Decode a detail. None if the bytes are none. They may be anybody's: nothing in them is trusted to be
    printable."""
    if len(data) > _MAX_DETAIL_BYTES:
        return None
    try:
        detail = common_pb2.ErrorDetail.FromString(data)
    except DecodeError:
        return None
    fields: dict[str, Any] = {}
    for field in detail.fields[:_MAX_FIELDS]:
        name = field.name
        if not name.isidentifier() or name.startswith("_") or name in ("message", "hint", "self"):
            continue
        try:
            fields[name] = _frozen(json.loads(field.value_json))
        except (ValueError, RecursionError):
            continue
    message = printable(shorten(detail.message, _MAX_MESSAGE_BYTES))
    hint = printable(shorten(detail.hint, _MAX_HINT_BYTES))
    cls = _BY_CODE.get(detail.code)
    if cls is None:
        cls, message = unknown, f"{message} (code {printable(shorten(detail.code, 64))!r})"
    return cls(message, hint=hint, **fields)


def abort(context: grpc.ServicerContext, error: FlashError) -> NoReturn:
    """End a call on the server's side; the caller gets the same error."""
    context.set_trailing_metadata(((DETAIL_KEY, encode_error(error)),))
    code = next((_STATUS[cls] for cls in type(error).__mro__ if cls in _STATUS), grpc.StatusCode.INTERNAL)
    # The text of the status is for people who debug with other tools; the detail has everything.
    context.abort(code, error.code)
    raise InternalError("expected that abort() does not return")


def from_call(
    error: grpc.RpcError,
    *,
    where: str,
    unreachable: type[FlashError],
    **fields: Any,
) -> FlashError:
    """Return the error that a failed call means for its caller. `where` names the call and the other end."""
    # The exception is also the call itself, which the stubs do not declare.
    call: Any = error
    for key, value in call.trailing_metadata() or ():
        if key == DETAIL_KEY and isinstance(value, bytes):
            found = decode_error(value, unreachable)
            if found is not None:
                return found
    code, text = call.code(), printable(shorten(call.details() or "", 512))
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return unreachable(f"{where}: expected an answer in time, found none: hung, stopped or overloaded", **fields)
    if code in (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED) or _is_about_certificates(text):
        return DeniedError(
            f"{where}: expected to be accepted by a node of this job, found {text!r}",
            hint="both ends need certificates of one launch that have not expired; check the clocks of the nodes",
            **fields,
        )
    if code is grpc.StatusCode.UNAVAILABLE:
        return unreachable(f"{where}: can't be reached: {text}", **fields)
    if code is grpc.StatusCode.CANCELLED:
        return unreachable(f"{where}: cancelled at the other end: it stopped, or had waited too long", **fields)
    return unreachable(f"{where}: {code.name.lower()}: {text}", **fields)


def _is_about_certificates(text: str) -> bool:
    lowered = text.lower()
    return "certificate" in lowered or "verification check" in lowered or "handshake failed" in lowered


def _frozen(value: Any) -> Any:
    # JSON has no tuples, and fields of errors must not be changed.
    return tuple(_frozen(item) for item in value) if isinstance(value, list) else value
