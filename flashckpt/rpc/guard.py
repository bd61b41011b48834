"""Stands before every method of both servers: who calls, may it, and what becomes of an exception."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc

from flashckpt.errors import DeniedError, FlashError, InternalError
from flashckpt.rpc import errors
from flashckpt.rpc.roles import ROLES, Role, may_call

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Caller:
    role: Role
    node_id: str = ""  # of a member
    ticket: bytes = b""  # of a trainer


@dataclass(frozen=True, slots=True)
class Call:
    """What a method gets instead of gRPC's context: without the guard it would not have a caller to work for."""

    context: grpc.ServicerContext
    caller: Caller


class Guard(grpc.ServerInterceptor):
    """Default deny: a method that ROLES has no row for is refused, whatever the server knows of it."""

    def __init__(self, authenticate: Callable[[grpc.ServicerContext], Caller]) -> None:
        self._authenticate = authenticate

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], grpc.RpcMethodHandler[Any, Any] | None],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        method = handler_call_details.method
        if method not in ROLES:
            return grpc.unary_unary_rpc_method_handler(_refuse_unknown)
        handler = continuation(handler_call_details)
        if handler is None:
            return None  # the other server's method: UNIMPLEMENTED
        if handler.response_streaming:
            behaviour = handler.stream_stream if handler.request_streaming else handler.unary_stream
            make = (
                grpc.stream_stream_rpc_method_handler
                if handler.request_streaming
                else grpc.unary_stream_rpc_method_handler
            )
            return make(self._guarded_stream(method, behaviour))
        if handler.request_streaming:
            return grpc.stream_unary_rpc_method_handler(self._guarded(method, handler.stream_unary))
        return grpc.unary_unary_rpc_method_handler(self._guarded(method, handler.unary_unary))

    def _admit(self, method: str, context: grpc.ServicerContext) -> Call:
        caller = self._authenticate(context)
        if not may_call(caller.role, method):
            raise DeniedError(
                f"{method}: expected one of {sorted(role.value for role in ROLES[method])}, "
                f"found {caller.role.value} without a ticket",
                hint="trainers say hello first and send the ticket they get",
            )
        return Call(context, caller)

    def _guarded(self, method: str, behaviour: Any) -> Callable[[Any, grpc.ServicerContext], Any]:
        def run(request: Any, context: grpc.ServicerContext) -> Any:
            try:
                return behaviour(request, self._admit(method, context))
            except Exception as error:
                errors.abort(context, _typed(method, error))

        return run

    def _guarded_stream(self, method: str, behaviour: Any) -> Callable[[Any, grpc.ServicerContext], Iterator[Any]]:
        def run(request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
            try:
                yield from behaviour(request, self._admit(method, context))
            except Exception as error:
                errors.abort(context, _typed(method, error))

        return run


def _typed(method: str, error: Exception) -> FlashError:
    if isinstance(error, FlashError):
        return error
    _log.error("%s failed", method, exc_info=error)
    return InternalError(f"{method}: {type(error).__name__}: {error}")


def _refuse_unknown(_request: bytes, context: grpc.ServicerContext) -> bytes:
    errors.abort(context, DeniedError("expected a method of this service, found another one"))
