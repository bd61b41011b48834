"""Checks the machine and the programs: descriptors, clock, native core, torch and its known problems."""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import re
import resource
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from flashckpt.doctor.finding import Finding, fail, ok, warn

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_OLDEST_TORCH = (2, 7)
_FEWEST_FDS = 4096
_TIME_ERROR = 5  # of adjtimex(2): the clock is not synchronised
_STA_UNSYNC = 0x0040
_EARLIEST = 1_700_000_000  # seconds since 1970; a clock before that was never set
_SEEN = (
    *("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "TORCHELASTIC_MAX_RESTARTS"),
    *("GRPC_ENABLE_FORK_SUPPORT", "FLASHCKPT_DISABLE"),
)


@dataclass(frozen=True, slots=True)
class HostFacts:
    fd_soft: int
    fd_hard: int
    wall_seconds: float
    synchronised: bool | None  # None: not known
    native: bool
    kernel: str
    kernels: tuple[str, ...]
    torch: str | None  # its version; None: not installed
    environ: Mapping[str, str] = field(default_factory=dict)


def look_at_host(environ: Mapping[str, str] = os.environ) -> HostFacts:
    from flashckpt import native

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        torch: str | None = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        torch = None
    return HostFacts(
        fd_soft=soft,
        fd_hard=hard,
        wall_seconds=time.time(),
        synchronised=_synchronised(),
        native=native.IS_NATIVE,
        kernel=native.kernel(),
        kernels=tuple(native.kernels()),
        torch=torch,
        environ={name: environ[name] for name in _SEEN if name in environ},
    )


def judge_host(facts: HostFacts) -> Iterator[Finding]:
    yield _descriptors(facts)
    yield _clock(facts)
    yield _native(facts)
    yield _torch(facts)
    yield from _environment(facts.environ)


def _descriptors(facts: HostFacts) -> Finding:
    found = f"{facts.fd_soft} open files, at most {facts.fd_hard}"
    unlimited = resource.RLIM_INFINITY in (facts.fd_soft, facts.fd_hard)
    if not unlimited and facts.fd_hard < 1024:
        return fail("host.descriptors", found, "raise the limit: ulimit -n 65536, LimitNOFILE=, --ulimit nofile=")
    if facts.fd_soft != resource.RLIM_INFINITY and facts.fd_soft < min(_FEWEST_FDS, max(1024, facts.fd_hard)):
        advice = f"raise it to {_FEWEST_FDS} if many ranks or data loader workers share the process: ulimit -n"
        return warn("host.descriptors", found, advice)
    return ok("host.descriptors", found)


def _clock(facts: HostFacts) -> Finding:
    shown = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(facts.wall_seconds))
    if facts.wall_seconds < _EARLIEST:
        advice = "set it: it orders launches if memory and disk are blank, and certificates need it"
        return fail("host.clock", f"{shown}: this clock was never set", advice)
    if facts.synchronised is False:
        advice = "run chrony or ntpd: clocks order launches of nodes that know nothing of each other"
        return warn("host.clock", f"{shown}, not synchronised", advice)
    return ok("host.clock", shown if facts.synchronised is None else f"{shown}, synchronised")


def _native(facts: HostFacts) -> Finding:
    if not facts.native:
        return fail(
            "host.native",
            "the Python twin of the native core is in use, which is hundreds of times slower",
            "install a wheel, or build with a C++17 compiler; unset FLASHCKPT_NATIVE",
        )
    return ok("host.native", f"kernel {facts.kernel} of {', '.join(facts.kernels)}")


def _torch(facts: HostFacts) -> Finding:
    oldest = ".".join(map(str, _OLDEST_TORCH))
    if facts.torch is None:
        advice = "trainers and flushers need it; an agent alone does not"
        return warn("host.torch", "torch is not installed in this environment", advice)
    match = re.match(r"(\d+)\.(\d+)", facts.torch)
    if match is None or (int(match[1]), int(match[2])) < _OLDEST_TORCH:
        return fail("host.torch", f"torch {facts.torch}", f"install torch {oldest} or newer")
    return ok("host.torch", f"torch {facts.torch}")


def _environment(environ: Mapping[str, str]) -> Iterator[Finding]:
    if environ.get("FLASHCKPT_DISABLE", "") not in ("", "0"):
        yield fail("host.disabled", "FLASHCKPT_DISABLE is set: nothing is saved or loaded", "unset it")
    if environ.get("GRPC_ENABLE_FORK_SUPPORT", "0").lower() not in ("", "0", "false"):
        yield warn(
            "host.fork",
            f"GRPC_ENABLE_FORK_SUPPORT={environ['GRPC_ENABLE_FORK_SUPPORT']}: forked data loader workers may hang",
            "unset it, or set it to 0",
        )
    restarts = environ.get("TORCHELASTIC_MAX_RESTARTS")
    shares_store = environ.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE") != "1"
    if shares_store and (restarts is None or (restarts.isdigit() and int(restarts) > 0)):
        found = "torchrun restarts workers" if restarts else "if torchrun is to restart workers (--max-restarts)"
        yield warn(
            "host.torchrun",
            f"{found}: without TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 restarted workers find dead addresses",
            "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 before torchrun (docs/operations.md)",
        )
    else:
        yield ok("host.torchrun", "restarted workers get a store of their own" if not shares_store else "no restarts")


def _synchronised() -> bool | None:
    class Timex(ctypes.Structure):
        _fields_ = [("modes", ctypes.c_uint), *((f"_{n}", ctypes.c_long) for n in range(4)), ("status", ctypes.c_int)]
        _fields_ += [("_rest", ctypes.c_char * 256)]

    found = Timex()
    call = getattr(ctypes.CDLL(None, use_errno=True), "adjtimex", None)
    if call is None:
        return None
    state = call(ctypes.byref(found))
    return None if state < 0 else state != _TIME_ERROR and not found.status & _STA_UNSYNC
