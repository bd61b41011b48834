"""Runs the process that writes the persistent tier: a process of its own, because it imports torch.

It is nice, unless somebody waits for the flush. One flush runs at a time. However the process ends (it crashes, hangs,
is killed), the result is an outcome with a reason.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import signal
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

from flashckpt.agent.helper import Starter, be_nice, be_nice_as_session, hurry
from flashckpt.failpoints import failpoint
from flashckpt.protocol.events import FlushEnded, Rotten
from flashckpt.protocol.flush_spec import encode_spec
from flashckpt.types import ShardId

if TYPE_CHECKING:
    from collections.abc import Callable

    from flashckpt.protocol.events import Event
    from flashckpt.protocol.flush_spec import FlushSpec

_log = logging.getLogger(__name__)

_GRACE_SECONDS = 30.0  # beyond the time limit of a flush, for the process to end by itself
# Until the process has imported torch: it is nice, and on a busy machine the import alone takes minutes.
_START_SECONDS = 600.0
_REAP_SECONDS = 5.0
_MAX_LINE_BYTES = 64 << 10
_SESSION_NICENESS = 10
_NICENESS = 19


class Flusher:
    """Starts and watches the flush process. Any thread may call it."""

    def __init__(self, feed: Callable[[Event], object], starter: Starter | None = None) -> None:
        """`starter` has the niceness for a flush that somebody waits for."""
        self._feed = feed
        self._starter = starter or Starter()
        self._lock = threading.Lock()  # protects what follows
        self._process: subprocess.Popen[bytes] | None = None
        self._attempt: int | None = None
        self._stopped = False  # the attempt was stopped
        self._urgent = False  # somebody waits for the attempt
        self._begun = False  # its process has imported what it needs
        self._again = False  # its process was ended only because its niceness could not be undone
        self.done_bytes = 0
        self._seconds = 0.0  # duration of the last flush, without the start of its process

    def start(self, spec: FlushSpec) -> None:
        """Start a flush and return at once; FlushEnded follows."""
        threading.Thread(target=self._run, args=(spec,), name="flush", daemon=True).start()

    def hurry(self) -> None:
        """Raise the priority of the running flush: somebody waits for it.

        If the kernel does not allow that and the process has not begun to write, another process takes its place.
        """
        with self._lock:
            if self._urgent or self._stopped:
                return
            self._urgent = True
            if self._process is None or hurry(self._process.pid) or self._begun:
                return
            self._again = True
            _kill(self._process)

    def stop(self) -> None:
        """End a running flush. What it has written is a temporary directory that the next flush removes."""
        with self._lock:
            self._stopped = True
            if self._process is not None:
                _kill(self._process)

    def _run(self, spec: FlushSpec) -> None:
        attempt = int(spec.attempt, 16)
        began = time.monotonic()
        with self._lock:
            self._urgent = spec.urgent
        try:
            reason = self._flush(spec)
            with self._lock:
                again, self._again = self._again and not self._stopped, False
            if reason and again:
                reason = self._flush(spec)
        except Exception as error:
            _log.exception("the flusher could not be run; the flush is tried again")
            reason = f"the flusher could not be run: {error}"
        step = spec.generation.step
        if reason:
            _log.warning("step %d was not flushed to %s: %s", step, spec.settings.directory, reason)
        else:
            _log.info(
                "step %d: this node's part lies in %s: %d bytes in %.3f s, %.3f s in all",
                step,
                spec.settings.directory,
                self.done_bytes,
                self._seconds,
                time.monotonic() - began,
            )
        self._feed(FlushEnded(attempt, reason))

    def _flush(self, spec: FlushSpec) -> str:
        """Run the flush. Return why it failed; "" = it succeeded."""
        failpoint("before_flusher")
        with self._lock:
            before, urgent = self._process, self._urgent
            self._stopped = self._begun = False
        if before is not None and not _reap(before, _REAP_SECONDS):
            return f"the previous flusher (process {before.pid}) can't be ended: its storage hangs"
        # -I: neither the working directory nor PYTHON* variables decide what is imported.
        process = self._starter.start([sys.executable, "-I", "-m", "flashckpt.persist"])
        if not urgent:
            # At once: most of a flush's CPU time is the start of this process.
            be_nice(process.pid, _NICENESS)
            be_nice_as_session(process.pid, _SESSION_NICENESS)
        with self._lock:
            self._process, self.done_bytes = process, 0
            if self._urgent and not urgent:
                hurry(process.pid)
            if self._stopped:
                _kill(process)
        _log.info("flushing step %d (%s): process %d", spec.generation.step, spec.reason, process.pid)
        try:
            return self._watch(process, spec)
        finally:
            _kill(process)
            with contextlib.suppress(OSError):
                if process.stdin is not None:
                    process.stdin.close()
            if process.stdout is not None:
                process.stdout.close()
            _reap(process, _REAP_SECONDS)

    def _watch(self, process: subprocess.Popen[bytes], spec: FlushSpec) -> str:
        limit = _Limit("start", _START_SECONDS)
        try:
            _tell(process, encode_spec(spec) + b"\n")
        except BrokenPipeError:
            return _died(process)
        for line in _lines(process, limit):
            answer = _parse(line)
            if answer.get("state") == "begun":
                with self._lock:
                    self._begun = True
                limit.set("end", spec.settings.timeout + _GRACE_SECONDS)
            elif answer.get("state") == "writing":
                self.done_bytes = int(answer.get("done_bytes", 0))
            elif answer.get("state") == "done":
                self.done_bytes, self._seconds = int(answer.get("size_bytes", 0)), float(answer.get("seconds", 0.0))
                return ""
            elif answer.get("state") == "failed":
                self._report_rot(spec, answer)
                hint = f" ({answer['hint']})" if answer.get("hint") else ""
                return f"{answer.get('reason', 'no reason given')}{hint}"
        if self._stopped:
            return "it was stopped"
        if limit.left <= 0:
            return f"expected it to {limit.what} within {limit.seconds:g} s, found that it hangs"
        return _died(process)

    def _report_rot(self, spec: FlushSpec, answer: dict[str, Any]) -> None:
        rank = answer.get("shard")
        if isinstance(rank, int) and rank in spec.ranks:
            self._feed(Rotten(ShardId(spec.generation, rank, spec.world), str(answer.get("reason"))))


class _Limit:
    """The time that the process may take for its next step."""

    def __init__(self, what: str, seconds: float) -> None:
        self.set(what, seconds)

    def set(self, what: str, seconds: float) -> None:
        self.what, self.seconds = what, seconds
        self._deadline = time.monotonic() + seconds

    @property
    def left(self) -> float:
        return self._deadline - time.monotonic()


def _tell(process: subprocess.Popen[bytes], line: bytes) -> None:
    if process.stdin is None:
        return
    process.stdin.write(line)
    process.stdin.flush()


def _lines(process: subprocess.Popen[bytes], limit: _Limit) -> Any:
    """Yield what the process says, until it ends or reaches the limit, which may be set anew meanwhile."""
    if process.stdout is None:
        return
    fd = process.stdout.fileno()
    poll = select.poll()
    poll.register(fd, select.POLLIN | select.POLLHUP)
    buffered = b""
    while (left := limit.left) > 0:
        if not poll.poll(min(left, 1.0) * 1000):
            continue
        data = os.read(fd, _MAX_LINE_BYTES)
        if not data:
            return
        buffered += data
        *whole, buffered = buffered.split(b"\n")
        yield from whole
        buffered = buffered[-_MAX_LINE_BYTES:]


def _parse(line: bytes) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _died(process: subprocess.Popen[bytes]) -> str:
    if not _reap(process, _REAP_SECONDS):
        return "the flusher closed its output, but still runs"
    code = process.returncode
    how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return f"the flusher ended with {how}; the agent's log may say why"


def _kill(process: subprocess.Popen[bytes]) -> None:
    # Popen knows whether the process was reaped: if not, the pid is still its own.
    with contextlib.suppress(ProcessLookupError):
        process.kill()


def _reap(process: subprocess.Popen[bytes], timeout: float) -> bool:
    try:
        process.wait(timeout)
    except subprocess.TimeoutExpired:
        return False
    return True
