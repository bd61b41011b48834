"""Checks fields that arrive. One that does not fit is an IncompatibleError that names the field."""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING, Protocol, TypeVar

from flashckpt.errors import ConfigError, IncompatibleError
from flashckpt.rpc.address import parse_address

if TYPE_CHECKING:
    from collections.abc import Callable, Sized

_MAX_INTEGER = (1 << 63) - 1
_MAX_WORLD = 1 << 24
MAX_NAME_BYTES = 256
MAX_TEXT_BYTES = 4096
_MAX_SECONDS = 7 * 86400.0
DIGEST_BYTES = 16


class Message(Protocol):
    def HasField(self, field_name: str) -> bool: ...  # noqa: N802 - protobuf's name


_T = TypeVar("_T")
_P = TypeVar("_P")
_S = TypeVar("_S", bound="Sized")


def maybe(value: _T | None, convert: Callable[[_T], _P]) -> _P | None:
    return None if value is None else convert(value)


def digest16(digest: bytes) -> bytes:
    if len(digest) != DIGEST_BYTES:
        raise refused("digest", f"{DIGEST_BYTES} bytes", f"{len(digest)} bytes")
    return digest


def positive(value: int, what: str) -> int:
    if value == 0:
        raise refused(what, "more than 0", value)
    return integer(value, what)


def seconds(value: float, what: str) -> float:
    if not 0 <= value <= _MAX_SECONDS:  # also refuses NaN
        raise refused(what, f"0 to {_MAX_SECONDS:g} seconds", value)
    return value


def needed(message: Message, field: str, convert: Callable[[_T], _P]) -> _P:
    """Convert a part that must be there."""
    if not message.HasField(field):
        raise refused(field, "one", "none")
    return convert(getattr(message, field))


def optional(message: Message, field: str, convert: Callable[[_T], _P]) -> _P | None:
    """Convert a part whose absence has a meaning."""
    return convert(getattr(message, field)) if message.HasField(field) else None


def bounded(items: _S, what: str, most: int) -> _S:
    if len(items) > most:
        raise refused(what, f"at most {most}", len(items))
    return items


def address(value: str) -> str:
    """Check a node's address, or "".

    IMPORTANT: it is what we connect to, and gRPC accepts far more as a target: names to resolve, sockets of this
    machine, control planes.
    """
    if not value:
        return value
    text(value, "address", MAX_NAME_BYTES)
    try:
        ipaddress.ip_address(parse_address(value)[0])
    except (ConfigError, ValueError) as error:
        raise refused("address", "host:port with a numeric host", value) from error
    return value


def line(value: str, what: str) -> str:
    """Make text of another node fit into a log, where it must not look like two entries."""
    return printable(text(value, what, MAX_TEXT_BYTES)).replace("\n", "\\n")


def integer(value: int, what: str) -> int:
    if value > _MAX_INTEGER:
        raise refused(what, f"at most {_MAX_INTEGER}", value)
    return value


def world(value: int) -> int:
    if not 0 < value <= _MAX_WORLD:
        raise refused("world", f"1 to {_MAX_WORLD}", value)
    return value


def name(value: str, what: str) -> str:
    if not value:
        raise refused(what, "a name", "none")
    return text(value, what, MAX_NAME_BYTES)


def text(value: str, what: str, limit_bytes: int) -> str:
    if len(value.encode()) > limit_bytes:
        raise refused(what, f"at most {limit_bytes} bytes", f"{len(value.encode())} bytes")
    return value


def refused(what: str, expected: str, found: object) -> IncompatibleError:
    return IncompatibleError(
        f"{what} of a message: expected {expected}, found {printable(shorten(str(found), 200))}",
        hint="run the same version of flashckpt on all nodes",
    )


def shorten(text: str, limit_bytes: int) -> str:
    data = text.encode(errors="replace")
    if len(data) <= limit_bytes:
        return data.decode()
    return data[: limit_bytes - 3].decode(errors="ignore") + "…"


def printable(text: str) -> str:
    """Text of another process may end up on a terminal; it must not steer it."""
    return "".join(c if c.isprintable() or c == "\n" else f"\\x{ord(c):02x}" for c in text)
