"""Finds, starts and stops the agent of one job on this node, from a trainer or the command line. No torch."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from flashckpt.agent.lock import AgentLock, Holder
from flashckpt.agent.process import HELD, LOG_NAME, OK, SOCKET_NAME, Options, open_log, read_log_tail
from flashckpt.errors import AgentError, FlashError, IncompatibleError
from flashckpt.store.directory import open_directory
from flashckpt.store.owner import Owner, find_from_outside, is_dead
from flashckpt.workers import on_main_thread, run_in_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from flashckpt.config import Settings
    from flashckpt.rpc.agent_client import AgentClient
    from flashckpt.store.directory import Directory

T = TypeVar("T")

_TAIL_LINES = 8
_MAX_TOLD_BYTES = 8192
_SLICE_SECONDS = 0.5
_RETRY_SECONDS = 0.02
_LOOK_SECONDS = 0.2  # between two looks at an agent that drains
_ASK_SECONDS = 5.0  # for a call that an agent answers at once unless it hangs
_DRAIN_SECONDS = 60.0  # for an agent that does not say how long it drains
_END_SECONDS = 15.0  # from the end of its drain to its exit: it ends running calls and closes descriptors

# The variables of the starter's environment that an agent inherits. All others, which a launcher or a user has set for
# the trainers (keys, tokens, proxies, preloaded libraries), would stay readable for as long as the agent lives.
_KEPT = (
    *("PATH", "HOME", "LANG", "LC_ALL", "LC_CTYPE", "TZ"),
    "LD_LIBRARY_PATH",  # some clusters' interpreters do not start without it
    *("FLASHCKPT_LOG", "FLASHCKPT_TESTING", "FLASHCKPT_FAILPOINTS_LOG"),  # all else are options, or trainers bring it
    *("GRPC_VERBOSITY", "GRPC_TRACE"),
)
# A failpoint that kills a trainer in a test must not kill the agent too, and again after each restart.
_AGENT_FAILPOINTS = "FLASHCKPT_AGENT_FAILPOINTS"


@dataclass(frozen=True, slots=True)
class FoundAgent:
    """A live agent that answers."""

    pid: int  # in its own pid namespace
    started: bool  # by this very call
    log_path: str


@dataclass(frozen=True, slots=True)
class SeenAgent:
    """The state of this node's agent when it was looked at."""

    holder: Holder
    status: dict[str, Any] | None  # its answer; None: it lives, but does not answer
    problem: str  # why it does not answer
    log_path: str


def options_of(settings: Settings) -> Options:
    """Return the options with which a trainer of these settings starts its node's agent."""
    config = settings.config
    return Options(
        job=settings.job,
        memory_dir=settings.memory_dir,
        node_id=settings.node_id,
        linger=config.agent_linger,
        budget_bytes=config.memory_budget_bytes,
        replicate_max_mbps=config.replicate_max_mbps,
        transport=config.transport,
        lanes=config.lanes,
        encrypt_data=int(settings.encrypts_data),
        # Several beats may be lost or late before a node counts as down. Sending and receiving them is most of what an
        # idle agent does.
        beat_interval=min(2.5, config.peer_timeout / 4),
        peer_timeout=config.peer_timeout,
    )


def ensure_agent(options: Options, timeout: float = 30.0, meanwhile: Callable[[], object] = lambda: None) -> FoundAgent:
    """Return the job's agent on this node once it answers; start it if there is none.

    While a new one starts, `meanwhile` is called. An agent that drains is waited for, and replaced when it has ended.

    Of several callers at once one starts the agent, the others find it. Raise AgentError, with the end of its log, if
    it can't be started, or lives and does not answer within `timeout`; IncompatibleError if it is another node's, or
    sends unencrypted what has to be encrypted.
    """
    deadline = time.monotonic() + timeout
    directory = open_directory(options.memory_dir, options.job)
    try:
        started = False
        while True:
            holder = AgentLock(directory).holder()
            if holder is None:
                started = _spawn(directory, options, deadline, meanwhile)
                holder = AgentLock(directory).holder()
            status = None if holder is None else _ask_until(directory, holder, deadline)
            if holder is not None and status is not None and status.get("draining"):
                _await_drained(directory, holder, deadline, timeout)
                continue
            if holder is not None and status is not None:
                _check(options, holder, status)
                return FoundAgent(holder.pid, started, str(directory.path / LOG_NAME))
            # It ended between two looks. The next agent found may be any.
            if time.monotonic() > deadline:
                raise _failed(directory, f"expected it within {timeout:g} s, found that each one ended", 0)
            time.sleep(_RETRY_SECONDS)
    finally:
        directory.close()


def _await_drained(directory: Directory, holder: Holder, deadline: float, timeout: float) -> None:
    """Wait until an agent that was told to stop has ended. Raise AgentError if it takes too long."""
    while AgentLock(directory).holder() == holder:
        if time.monotonic() > deadline:
            raise AgentError(
                f"agent of job {directory.job!r} with {holder}: expected it to end within {timeout:g} s, since it was "
                "told to stop, found that it still drains",
                hint=f"its log {directory.path / LOG_NAME} says what it waits for; wait longer (start_timeout), or end "
                "it with `flashckpt agent stop --kill`: what is sealed stays",
                pid=holder.pid,
            )
        time.sleep(_LOOK_SECONDS)


def stage_timeout(start_timeout: float) -> float:
    """Return the seconds for one rank's work in a stage of the start while the others wait `start_timeout` for it.

    A little less, so that the rank itself reports what was missing, before the others only miss the rank.
    """
    return max(start_timeout - 5.0, 0.9 * start_timeout)


def look(memory_dir: str, job: str, timeout: float = 2.0) -> SeenAgent | None:
    """Return the agent that runs now, and its status; None if none runs. Raise NotFoundError if the job has no
    directory."""
    directory = open_directory(memory_dir, job, create=False)
    try:
        holder = AgentLock(directory).holder()
        if holder is None:
            return None
        log_path = str(directory.path / LOG_NAME)
        try:
            return SeenAgent(holder, _ask(directory, timeout), "", log_path)
        except FlashError as error:
            return SeenAgent(holder, None, f"{error.message}{_state(holder.owner)}", log_path)
    finally:
        directory.close()


def ask_agent(memory_dir: str, job: str, call: Callable[[AgentClient], T], timeout: float) -> T:
    """Call the agent. Raise AgentError if none runs, NotFoundError if the job has no directory."""
    directory = open_directory(memory_dir, job, create=False)
    try:
        if AgentLock(directory).holder() is None:
            raise AgentError(f"job {job!r}: no agent runs on this node", hint="`flashckpt agent start` starts one")
        return _with_client(directory, timeout, call)
    finally:
        directory.close()


def stop_agent(memory_dir: str, job: str, timeout: float | None = None, *, kill: bool = False) -> Holder | None:
    """Tell the agent to drain and wait until it has exited; None if none runs.

    `timeout`: seconds that the agent may drain, instead of its own limits; None: its own, which it tells.

    Raise AgentError if it still runs afterwards; with `kill` it is ended at once instead: what is sealed stays, and the
    next agent adopts it.
    """
    directory = open_directory(memory_dir, job, create=False)
    try:
        lock = AgentLock(directory)
        holder = lock.holder()
        if holder is None:
            return None
        with _Process(lock, holder) as process:
            patience, answered = _tell_to_drain(directory, process, timeout)
            if process.await_exit(patience + _END_SECONDS if answered and not kill else patience):
                return holder
            if not kill:
                raise _still_there(directory, holder, patience, "--kill does not wait")
            if process.send(signal.SIGKILL):
                ended = process.await_exit(_END_SECONDS)
            else:
                try:  # the last resort: ask it to end without draining
                    _with_client(directory, _ASK_SECONDS, lambda client: client.stop(0.0))
                    ended = process.await_exit(_END_SECONDS)
                except FlashError:
                    ended = process.await_exit(0.0)
            if ended:
                return holder
            raise _still_there(directory, holder, patience, process.why_no_signal)
    finally:
        directory.close()


class _Process:
    """The process that holds an agent's lock, wherever it runs. The caller has to close it."""

    def __init__(self, lock: AgentLock, holder: Holder) -> None:
        self._lock = lock
        self._holder = holder
        self.why_no_signal = "the kernel keeps it from ending: look at its state in /proc"
        self._pidfd = self._open()

    def __enter__(self) -> _Process:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pidfd is not None:
            os.close(self._pidfd)

    def send(self, number: int) -> bool:
        """Send a signal. Return False if the process can't be reached by signals; `why_no_signal` says why."""
        if self._pidfd is None:
            return False
        try:
            signal.pidfd_send_signal(self._pidfd, number)
        except ProcessLookupError:
            pass
        except PermissionError:
            self.why_no_signal = "it belongs to another user: end it as that user, or as root"
            return False
        return True

    def await_exit(self, timeout: float) -> bool:
        deadline = time.monotonic() + timeout
        if self._pidfd is not None:
            return _await_exit(self._pidfd, timeout)
        # Its lock ends with the process.
        while self._lock.holder() is not None:
            if time.monotonic() > deadline:
                return False
            time.sleep(_RETRY_SECONDS)
        return True

    def _open(self) -> int | None:
        owner = self._holder.owner
        if owner.pid_namespace == Owner.current().pid_namespace:
            return self._checked(owner.pid, lambda: not is_dead(owner))
        pid = find_from_outside(owner)
        if pid is None:
            self.why_no_signal = (
                f"it is in another pid namespace (another container), where its pid is {owner.pid}, and can't be seen "
                "from here, so that no signal reaches it: run `flashckpt agent stop --kill` in that container or on "
                "its host as root, or end the container; what is sealed stays"
            )
            return None
        return self._checked(pid, lambda: find_from_outside(owner) == pid)

    def _checked(self, pid: int, is_still: Callable[[], bool]) -> int | None:
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            return None  # it has just ended, and its lock with it
        # Only now it is certain that the descriptor is the holder's, and not that of a process that got its pid since.
        if is_still():
            return pidfd
        os.close(pidfd)
        return None


def _tell_to_drain(directory: Directory, process: _Process, timeout: float | None) -> tuple[float, bool]:
    """Tell the agent to drain. Return the seconds that it drains at most, and whether it has answered."""

    def tell(client: AgentClient) -> float:
        client.stop(timeout)
        return float(client.status().get("drain_seconds", _DRAIN_SECONDS)) if timeout is None else timeout

    ask_seconds = _ASK_SECONDS if timeout is None else min(_ASK_SECONDS, max(0.5, timeout))
    try:
        return _with_client(directory, ask_seconds, tell), True
    except FlashError:
        # It does not answer: it is stopped, hangs, or has just started. A signal stays pending until it runs.
        process.send(signal.SIGTERM)
        return _DRAIN_SECONDS if timeout is None else max(0.0, timeout - ask_seconds), False


def environment_of_agent(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of the starter's environment that an agent inherits."""
    kept = {name: environ[name] for name in _KEPT if name in environ}
    if _AGENT_FAILPOINTS in environ:
        kept["FLASHCKPT_FAILPOINTS"] = environ[_AGENT_FAILPOINTS]
    return {**kept, "GRPC_ENABLE_FORK_SUPPORT": "0"}


def _spawn(directory: Directory, options: Options, deadline: float, meanwhile: Callable[[], object]) -> bool:
    """Start an agent. Return False if another caller's agent was quicker. Raise AgentError if it died."""
    if not sys.executable:
        raise AgentError(
            "expected the path of the Python interpreter in sys.executable, found none",
            hint="start the agent yourself before the trainers: `flashckpt agent start`",
        )
    remaining = max(0.1, deadline - time.monotonic())
    log = open_log(directory)
    start_bytes = os.fstat(log).st_size
    # -I: neither the working directory nor PYTHON* variables decide what is imported. The process forks twice by
    # itself, so the one that is waited for here has exited, and is reaped, when the agent runs.
    command = [sys.executable, "-I", "-m", "flashckpt.agent", "run", "--daemon", f"--start-timeout={remaining:.3f}"]
    try:
        child = subprocess.Popen(
            [*command, *options.arguments()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,  # the reason if it does not run; all other output goes to its log
            stderr=log,
            cwd="/",
            env=environment_of_agent(os.environ),
            start_new_session=True,
        )
    except OSError as error:
        raise AgentError(f"{sys.executable}: expected to run it, found: {error.strerror}") from error
    finally:
        os.close(log)
    try:
        meanwhile()
        code = _wait(child, max(0.1, deadline - time.monotonic()) + 1)
        told = _told(child)
    except subprocess.TimeoutExpired as error:
        raise _failed(directory, f"expected it to be ready within {remaining:.1f} s", start_bytes) from error
    finally:
        if child.poll() is None:
            child.kill()
            child.wait()
        if child.stdout is not None:
            child.stdout.close()
    if code not in (OK, HELD):
        why = f" ({told})" if told else ""
        raise _failed(directory, f"expected it to run, found that it ended with exit code {code}{why}", start_bytes)
    return code == OK


def _told(child: subprocess.Popen[bytes]) -> str:
    """Return what it has written so far. Not up to the end of the pipe: an agent that runs may hold it for a moment
    longer."""
    if child.stdout is None or not select.select([child.stdout], [], [], 0)[0]:
        return ""
    return _printable(os.read(child.stdout.fileno(), _MAX_TOLD_BYTES).decode("utf-8", "replace").strip())


def _printable(text: str) -> str:
    return "".join(one if one.isprintable() else " " for one in text)


def _wait(child: subprocess.Popen[bytes], timeout: float) -> int:
    """Wait as Popen.wait() does, which polls 20 times per second, but without a delay."""
    with contextlib.suppress(OSError):  # a kernel without pidfds
        pidfd = os.pidfd_open(child.pid)
        try:
            _await_exit(pidfd, timeout)
        finally:
            os.close(pidfd)
        timeout = 0
    return child.wait(timeout)


def _ask_until(directory: Directory, holder: Holder, deadline: float) -> dict[str, Any] | None:
    """Return the agent's status; None if it ended meanwhile. It may have just been started."""
    while True:
        remaining = deadline - time.monotonic()
        try:
            return _ask(directory, max(0.05, min(_SLICE_SECONDS, remaining)))
        except FlashError as error:
            if AgentLock(directory).holder() is None:
                return None
            if remaining <= 0:
                raise AgentError(
                    f"agent of job {directory.job!r} with {holder}: expected an answer on "
                    f"{directory.path / SOCKET_NAME}, found none{_state(holder.owner)}",
                    hint="continue it (SIGCONT) if it was stopped; else `flashckpt agent stop --kill` ends it; "
                    f"its log is {directory.path / LOG_NAME}",
                    pid=holder.pid,
                ) from error
            time.sleep(_RETRY_SECONDS)


def _ask(directory: Directory, timeout: float) -> dict[str, Any]:
    # Does not wait for the channel first: gRPC looks at its state only every 0.2 s. If nobody listens yet, the call
    # fails at once, and the caller decides whether to ask again.
    return _with_client(directory, timeout, lambda client: client.status())


def _with_client(directory: Directory, timeout: float, call: Callable[[AgentClient], T]) -> T:
    """Make a call in another thread.

    Not on the main thread: Ctrl-C could leave a lock of gRPC locked, and closing the client would hang.
    """
    path = _socket_path(directory)

    def run() -> T:
        from flashckpt.rpc.agent_client import AgentClient

        with AgentClient(path, timeout=timeout) as client:
            return call(client)

    return run_in_thread(run, "flashckpt-ask") if on_main_thread() else run()


def _socket_path(directory: Directory) -> str:
    # Through the held descriptor: works however long the job's name is, and whatever happens to the path.
    return f"/proc/self/fd/{directory.fd}/{SOCKET_NAME}"


def _check(options: Options, holder: Holder, status: dict[str, Any]) -> None:
    """Raise if the agent that runs can't be used with these options. Its other settings stay those it was started
    with."""
    if status["node"] != options.node_id:
        raise IncompatibleError(
            f"memory directory {options.memory_dir}: expected the agent of node {options.node_id!r}, found that of "
            f"node {status['node']!r} with {holder}",
            hint="several nodes on one machine each need their own FLASHCKPT_MEMORY_DIR",
            pid=holder.pid,
        )
    if options.encrypt_data and not status.get("encrypts_data"):
        raise IncompatibleError(
            f"job {options.job!r}: expected an agent that encrypts shards between nodes, as encrypt_data or "
            f"certificates of your own ask for, found one that was started without, with {holder}",
            hint="`flashckpt agent stop` ends it, and trainers start another one; an operator's takes --encrypt-data",
            pid=holder.pid,
        )


def _await_exit(pidfd: int, timeout: float) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(timeout * 1000))


def _still_there(directory: Directory, holder: Holder, timeout: float, what_else: str) -> AgentError:
    return AgentError(
        f"agent of job {directory.job!r} with {holder}: expected it to end within {timeout:g} s, found that it runs"
        + _state(holder.owner),
        hint=f"its log {directory.path / LOG_NAME} says what it waits for; {what_else}",
        pid=holder.pid,
    )


def _state(owner: Owner) -> str:
    """Return why a process does not answer, if the kernel knows it."""
    if owner.pid_namespace != Owner.current().pid_namespace:
        return ""
    try:
        with open(f"/proc/{owner.pid}/stat", "rb") as file:
            state = file.read().rpartition(b")")[2].split()[0]
    except (OSError, IndexError):
        return ""
    return {b"T": " (it is stopped)", b"t": " (a debugger holds it)", b"D": " (the kernel holds it)"}.get(state, "")


def _failed(directory: Directory, what: str, start_bytes: int) -> AgentError:
    tail = read_log_tail(directory, _TAIL_LINES, start_bytes)
    log = f"; its log ends with:\n{tail}" if tail else ""
    missing = "No module named flashckpt" in tail
    return AgentError(
        f"agent of job {directory.job!r} in {directory.path}: {what}{log}",
        hint=f"{sys.executable} -I has to find flashckpt: install it there, not only in PYTHONPATH" if missing else "",
    )
