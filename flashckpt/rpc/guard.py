"""Checks every call of both servers before its method runs: its caller, the caller's role, and what it raises."""

from __future__ import annotations

import enum
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc

from flashckpt.errors import DeniedError, FlashError, InternalError
from flashckpt.rpc import errors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_log = logging.getLogger(__name__)


# Which role may call which method. A method without a row may be called by nobody.


class Role(enum.Enum):
    OPERATOR = "operator"  # can open the agent's socket: the job's user
    TRAINER = "trainer"  # the same, with the ticket of a live lease
    MEMBER = "member"  # another node with a certificate of the job


_LOCAL = frozenset({Role.OPERATOR, Role.TRAINER})
_LEASED = frozenset({Role.TRAINER})
_REMOTE = frozenset({Role.MEMBER})

# No call deletes anything, and other nodes have only the four calls of their own service.
ROLES: dict[str, frozenset[Role]] = {
    "/flashckpt.v1.Agent/Hello": _LOCAL,
    "/flashckpt.v1.Agent/Listen": _LEASED,
    "/flashckpt.v1.Agent/Claimants": _LEASED,
    "/flashckpt.v1.Agent/Begin": _LEASED,
    "/flashckpt.v1.Agent/PutLine": _LEASED,
    "/flashckpt.v1.Agent/Acquire": _LEASED,
    "/flashckpt.v1.Agent/Prepare": _LEASED,
    "/flashckpt.v1.Agent/Sealed": _LEASED,
    "/flashckpt.v1.Agent/Flush": _LOCAL,
    "/flashckpt.v1.Agent/Void": _LEASED,
    "/flashckpt.v1.Agent/Watch": _LEASED,
    "/flashckpt.v1.Agent/Inventory": _LEASED,
    "/flashckpt.v1.Agent/Retrieve": _LEASED,
    "/flashckpt.v1.Agent/Trainers": _LEASED,
    "/flashckpt.v1.Agent/Bye": _LEASED,
    "/flashckpt.v1.Agent/Status": _LOCAL,
    "/flashckpt.v1.Agent/Stop": _LOCAL,
    "/flashckpt.v1.Peer/Hello": _REMOTE,
    "/flashckpt.v1.Peer/Tell": _REMOTE,
    "/flashckpt.v1.Peer/Put": _REMOTE,
    "/flashckpt.v1.Peer/Get": _REMOTE,
}


def may_call(role: Role, method: str) -> bool:
    return role in ROLES.get(method, frozenset())


@dataclass(frozen=True, slots=True)
class Caller:
    role: Role
    node_id: str = ""  # of a member
    ticket: bytes = b""  # the trainer's


@dataclass(frozen=True, slots=True)
class Call:
    """What a method is given instead of gRPC's context. Without the guard there is no caller in it."""

    context: grpc.ServicerContext
    caller: Caller


class Guard(grpc.ServerInterceptor):
    """Denies by default: a method without a row in ROLES is refused, even if the server has it."""

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
            return None  # a method of the other server: UNIMPLEMENTED
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
    _log.error("%s failed unexpectedly; the caller gets an InternalError", method, exc_info=error)
    return InternalError(f"{method}: {type(error).__name__}: {error}")


def _refuse_unknown(_request: bytes, context: grpc.ServicerContext) -> bytes:
    errors.abort(context, DeniedError("expected a method of this service, found another one"))
