"""Runs the agent as a process: its options, how it detaches, its log, its signals, and when it ends by itself."""

from __future__ import annotations

import argparse
import contextlib
import errno
import fcntl
import logging
import os
import resource
import select
import signal
import sys
import threading
import time
from dataclasses import MISSING, dataclass, fields
from typing import TYPE_CHECKING, Any

from flashckpt.agent.lock import AgentLock
from flashckpt.errors import ConfigError, ConflictError, FlashError
from flashckpt.move.transports.tcp.policy import LanePolicy, usual_count
from flashckpt.rpc.settings import prepare
from flashckpt.store.directory import Directory, open_directory

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from flashckpt.agent.shell import Shell

LOG_NAME = "agent.log"
SOCKET_NAME = "agent.sock"
_OLD_LOG_NAME = "agent.log.1"
_MAX_LOG_BYTES = 1 << 20  # the log lies on the tmpfs: it takes memory
_MAX_LINE_BYTES = 16 << 10
_LINE = "%(asctime)s.%(msecs)03d %(levelname)s %(message)s"

OK, FAILED, USAGE, HELD = 0, 1, 2, 4
_WATCH_SECONDS = 1.0
_OOM_SCORE_ADJUST = "-500"
_PR_SET_DUMPABLE = 4
_MALLOC_OPTIONS = ((-1, 256 << 20), (-3, 32 << 20), (-8, 2))  # trim threshold, mmap threshold, arenas
_SECONDS = ("linger", "beat_interval", "peer_timeout", "scrub_interval", "drain_timeout")

_MAX_REASON_BYTES = 4096  # fit into a pipe that nobody reads yet

_log = logging.getLogger(__name__)
_starter: int | None = None  # descriptor from which the starter of a detached agent reads why it does not run


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The settings that an agent is given when it starts. It learns everything else from trainers and peers."""

    job: str
    memory_dir: str
    node_id: str

    linger: float = 3600.0
    """Seconds without a trainer after which it exits by itself; 0: never."""

    budget_bytes: int | None = None
    """Most bytes of all slots of the job on this node, replicas included; None: as many as tmpfs and cgroup allow."""

    replicate_max_mbps: float | None = None
    """Most megabits per second that it sends to all peers together; None: no limit."""

    transport: str = "auto"
    """How shards are sent between nodes: by lanes ("tcp"), by calls ("grpc"), or by whichever works ("auto")."""

    lanes: int | None = None
    """Connections per transfer; None: by the number of cores."""

    encrypt_data: int = 0
    """1: lanes use TLS."""

    nice: int = 10
    """Added to the niceness it inherits, so that training comes first."""

    beat_interval: float = 1.0
    """Seconds between two signs of life to each peer."""

    peer_timeout: float = 10.0
    """Seconds of silence after which a peer counts as down, and a call to it fails."""

    scrub_interval: float = 600.0
    """Seconds between two passes that verify all shards it holds."""

    drain_timeout: float = 10.0
    """Seconds that running pushes have to finish when the agent is told to stop."""

    def __post_init__(self) -> None:
        for name in ("job", "memory_dir", "node_id"):
            if not getattr(self, name):
                raise ConfigError(f"{name}: expected a name, found nothing")
        for name in _SECONDS:
            value = getattr(self, name)
            may_be_0 = name in ("linger", "drain_timeout")
            endless = value == float("inf") and name != "linger"
            if not value >= 0 or endless or (value == 0 and not may_be_0):
                raise ConfigError(f"{name}: expected seconds {'from 0 on' if may_be_0 else 'above 0'}, found {value!r}")
        for name in ("budget_bytes", "replicate_max_mbps"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ConfigError(f"{name}: expected a number above 0 or None, found {value!r}")
        _ = self.lane_policy  # raises if one of them is wrong
        if not 0 <= self.nice <= 19:
            raise ConfigError(f"nice: expected 0 to 19, found {self.nice!r}")
        if self.peer_timeout <= self.beat_interval:
            raise ConfigError(
                f"peer_timeout: expected more than beat_interval ({self.beat_interval} s), found {self.peer_timeout}"
            )

    @property
    def lane_policy(self) -> LanePolicy:
        usual = usual_count(os.cpu_count() or 1)  # not the number it is bound to: its trainers would be bound as well
        return LanePolicy(self.transport, bool(self.encrypt_data), usual if self.lanes is None else self.lanes)

    def arguments(self) -> list[str]:
        """The command line that parses to these options. Nothing in it is secret: every user may read it."""
        found = []
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None and value != field.default:
                found.append(f"--{field.name.replace('_', '-')}={value}")
        return found


def parse(argv: Sequence[str]) -> tuple[Options, bool, float]:
    """Parse a command line into the options, whether to detach, and how long the start may take then."""
    parser = argparse.ArgumentParser(prog="flashckpt.agent", allow_abbrev=False)
    run_parser = parser.add_subparsers(dest="command", required=True).add_parser("run", allow_abbrev=False)
    kinds: dict[str, Callable[[str], Any]] = dict.fromkeys(("budget_bytes", "nice", "lanes", "encrypt_data"), int)
    kinds["replicate_max_mbps"] = float
    kinds |= dict.fromkeys(_SECONDS, float)
    for field in fields(Options):
        run_parser.add_argument(
            f"--{field.name.replace('_', '-')}",
            type=kinds.get(field.name, str),
            required=field.default is MISSING,
            default=None if field.default is MISSING else field.default,
        )
    run_parser.add_argument("--daemon", action="store_true")
    run_parser.add_argument("--start-timeout", type=float, default=30.0)
    given = vars(parser.parse_args(argv))
    options = Options(**{field.name: given[field.name] for field in fields(Options)})
    return options, given["daemon"], given["start_timeout"]


def main(argv: Sequence[str]) -> int:
    """Run `python -m flashckpt.agent`. Programs that start an agent use this; people use `flashckpt agent`."""
    try:
        options, daemon, start_timeout = parse(argv)
    except ConfigError as error:
        print(f"error {error}", file=sys.stderr)
        return USAGE
    if daemon:
        return detach(lambda ready: run(options, ready=ready, daemon=True), start_timeout)
    return run(options)


def run(options: Options, *, ready: Callable[[], None] = lambda: None, daemon: bool = False) -> int:
    """Run the agent from start to end. `ready` is called once it answers. Returns the exit code."""
    os.umask(0o077)
    os.chdir("/")
    signal.pthread_sigmask(signal.SIG_SETMASK, [])  # the mask inherited from the starter may have been anything
    _log_to(logging.StreamHandler())
    try:
        directory = open_directory(options.memory_dir, options.job)
        try:
            if daemon:  # until here the starter decides where stderr goes
                _log_to(_LogFile(directory))
            with AgentLock(directory) as lock:
                return _run_locked(options, directory, lock, ready)
        finally:
            directory.close()
    except FlashError as error:
        _log.error("the agent of job %r does not run: %s", options.job, error)
        _tell_starter(str(error), daemon=daemon)
        if isinstance(error, ConflictError):
            return HELD
        return USAGE if isinstance(error, ConfigError) else FAILED
    except Exception as error:
        _log.exception("the agent of job %r failed", options.job)
        _tell_starter(repr(error), daemon=daemon)
        return FAILED


def _tell_starter(reason: str, *, daemon: bool) -> None:
    """Write the reason to the starter: the log may have no room for it."""
    if daemon and _starter is not None:
        with contextlib.suppress(OSError):
            os.write(_starter, reason.encode("utf-8", "backslashreplace")[:_MAX_REASON_BYTES])


def _run_locked(options: Options, directory: Directory, lock: AgentLock, ready: Callable[[], None]) -> int:
    stop = threading.Event()
    _handle_signals(stop)
    _keep_buffers()
    _make_harmless()
    # Before grpc is imported, which the shell does; and that after detaching: grpc's threads survive no fork.
    prepare()
    from flashckpt.agent.helper import Starter
    from flashckpt.agent.shell import Shell
    from flashckpt.store.slots import SlotStore

    # After the imports, so that niceness does not delay the start on a busy node; before the first thread, because
    # niceness belongs to a thread and is inherited by those that it starts.
    starter = Starter()
    os.nice(options.nice)
    with SlotStore.open(options.memory_dir, options.job, budget_bytes=options.budget_bytes) as store:
        if store.directory_id != directory.identity():
            raise ConflictError(
                f"memory directory {directory.path}: expected the one whose lock this process holds, found another",
                hint="somebody replaced it at this moment; start the agent again",
            )
        shell = Shell(store, options, starter)
        try:
            shell.start()
            _log.info(
                "agent of job %r on node %r runs: pid %d, %s", options.job, options.node_id, os.getpid(), store.path
            )
            ready()
            watcher = threading.Thread(
                target=_watch, args=(shell, options.linger, directory, lock, stop), name="watch", daemon=True
            )
            watcher.start()
            shell.serve_until(stop)
            # Whatever stopped the agent, the watcher is not needed any more.
            stop.set()
            _log.info("draining, for at most %g s", shell.drain_seconds)
            shell.drain()
        finally:
            stop.set()
            shell.close()
    _log.info("stopped")
    return OK


def _watch(shell: Shell, linger: float, directory: Directory, lock: AgentLock, stop: threading.Event) -> None:
    """Stop an agent that nobody needs, and one whose memory directory is gone."""
    while not stop.wait(_WATCH_SECONDS):
        try:
            _rotate_log(directory)
            reason = _why_end(shell, linger, directory, lock)
        except Exception:
            _log.exception("the check whether this agent is still needed failed; trying again")
            continue
        if reason is not None:
            _log.warning("stopping: %s", reason)
            stop.set()


def _why_end(shell: Shell, linger: float, directory: Directory, lock: AgentLock) -> str | None:
    try:
        directory.check_still_ours()
        if not lock.is_in_force():
            return "its lock file was removed, so that a second agent could start"
    except FlashError as error:
        return str(error)
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):  # these say nothing about the directory
            return str(error)
    idle = shell.idle_seconds()
    if linger and idle is not None and idle >= linger:
        return f"no trainer for {idle:.0f} s (linger is {linger:g} s)"
    return None


# --- signals, memory, other processes -------------------------------------------------------------------


def _handle_signals(stop: threading.Event) -> None:
    asked = False

    def terminate(number: int, _: object) -> None:
        nonlocal asked
        if asked:
            os._exit(128 + number)  # the second signal: end at once. What is sealed stays, as after a crash.
        asked = True  # not the same as `stop`: an agent that drains for another reason still has its time
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, terminate)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the terminal it was started from may close
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def _keep_buffers() -> None:
    """Keep freed memory in the process. Elsewhere than on glibc nothing happens.

    Messages of a push are a mebibyte each; by default glibc returns each one to the kernel, and faulting it in again is
    a sixth of an agent's work. Few arenas, so that what is kept stays small.
    """
    import ctypes

    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for option, value in _MALLOC_OPTIONS:
            mallopt(option, value)


def _make_harmless() -> None:
    """Keep this process's memory (keys, weights) out of core files and debuggers, and the process from the OOM
    killer."""
    # Without the agent a node's checkpoints exist, but unreplicated. Lowering the score needs a privilege. It is done
    # before the process is made undumpable: afterwards the file belongs to root.
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
        file.write(_OOM_SCORE_ADJUST)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    import ctypes

    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0) != 0:
        _log.warning("the process stays open to debuggers: %s", os.strerror(ctypes.get_errno()))


def detach(target: Callable[[Callable[[], None]], int], timeout: float) -> int:
    """Run `target(ready)` in a process of its own session that no group kill of the starter reaches.

    Returns in the caller, which has to be single-threaded: 0 as soon as target called ready(), else the exit code with
    which it failed before. Forks twice, so that the process is nobody's child and never gets a terminal.
    """
    os.closerange(3, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    reader, writer = os.pipe()
    child = os.fork()
    if child != 0:
        os.close(writer)
        os.waitpid(child, 0)
        return _await_report(reader, timeout)
    code = FAILED
    try:
        os.setsid()
        if os.fork() == 0:
            os.close(reader)
            code = _be_detached(target, writer)
        else:
            code = OK
    finally:
        # Not through the interpreter's exit: threads of gRPC may still run, and two processes would run the same exit
        # handlers.
        os._exit(code)


def _be_detached(target: Callable[[Callable[[], None]], int], writer: int | None) -> int:
    global _starter
    _starter = os.dup(1)  # a pipe, while its starter waits
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    if null > 2:
        os.close(null)

    def report(code: int) -> None:
        global _starter
        nonlocal writer
        if _starter is not None:
            os.close(_starter)
            _starter = None
        if writer is not None:
            with contextlib.suppress(BrokenPipeError):  # the starter waits no longer
                os.write(writer, bytes([code]))
            os.close(writer)
            writer = None  # the number may belong to another file now

    try:
        code = target(lambda: report(OK))
    except BaseException:
        _log.exception("the agent failed")
        code = FAILED
    report(code)
    return code


def _await_report(reader: int, timeout: float) -> int:
    poll = select.poll()
    poll.register(reader, select.POLLIN)
    if not poll.poll(timeout * 1000):
        print(f"the agent was not ready within {timeout:g} s; it may still become so", file=sys.stderr)
        return FAILED
    report = os.read(reader, 1)
    return report[0] if report else FAILED


# -- the log ---------------------------------------------------------------------------------------------


def open_log(directory: Directory) -> int:
    """Return a descriptor that appends to the job's agent.log; of /dev/null if the filesystem can't store text."""
    if directory.mount.fs_type == "hugetlbfs":
        return os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    try:
        fd = directory.open_file(None, LOG_NAME, write=True, create=True)
    except OSError as error:
        if isinstance(error, FlashError) or error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        return os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)  # no inode is left for it
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_APPEND)
    return fd


def read_log_tail(directory: Directory, lines: int, start_bytes: int = 0) -> str:
    """Return the last lines that were written after `start_bytes`."""
    try:
        fd = directory.open_file(None, LOG_NAME)
    except (FlashError, OSError):
        return ""
    try:
        size = os.fstat(fd).st_size
        start = start_bytes if start_bytes <= size else 0  # rotated meanwhile
        text = os.pread(fd, _MAX_LINE_BYTES, max(start, size - _MAX_LINE_BYTES)).decode("utf-8", "replace")
    finally:
        os.close(fd)
    return "\n".join(text.splitlines()[-lines:])


class _LogFile(logging.Handler):
    """Writes the log where stdout and stderr go, so that output of libraries is in it too."""

    def __init__(self, directory: Directory) -> None:
        super().__init__()
        self._directory = directory
        _redirect(open_log(directory))

    def emit(self, record: logging.LogRecord) -> None:
        line = self.format(record).encode("utf-8", "backslashreplace")
        with contextlib.suppress(OSError):  # a full tmpfs must not stop the agent
            os.write(2, line[:_MAX_LINE_BYTES] + b"\n")
        _rotate_log(self._directory)


def _rotate_log(directory: Directory) -> None:
    """Rename the log if it is too large, and keep one old file.

    Only if stderr is the log: an agent in the foreground has none.
    """
    with contextlib.suppress(FlashError, OSError):
        mine, named = os.fstat(2), directory.stat(None, LOG_NAME)
        if mine.st_size < _MAX_LOG_BYTES or named is None or named.st_ino != mine.st_ino:
            return
        directory.replace(None, LOG_NAME, _OLD_LOG_NAME)
        _redirect(open_log(directory))


def _redirect(fd: int) -> None:
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    if fd > 2:
        os.close(fd)


def _log_to(handler: logging.Handler) -> None:
    formatter = logging.Formatter(_LINE, "%Y-%m-%dT%H:%M:%S")
    formatter.converter = time.gmtime
    handler.setFormatter(formatter)
    level = logging.getLevelNamesMapping().get(os.environ.get("FLASHCKPT_LOG", "").upper(), logging.INFO)
    package = logging.getLogger("flashckpt")
    package.handlers[:] = [handler]
    package.setLevel(level)
    package.propagate = False
