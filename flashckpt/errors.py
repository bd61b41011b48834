"""Every error flashckpt raises.

    FlashError
    ├── ConfigError            (ValueError)         you: a setting or argument is wrong
    ├── ClosedError                                  you: used after close()
    ├── ConflictError                                you: two calls at once that must not overlap
    ├── ExistsError            (FileExistsError)    you: the file exists already
    ├── UnsupportedValueError  (TypeError)          you: a value in the state dict can't be saved
    ├── StructureError         (ValueError)         you: the state dict does not fit the checkpoint
    │   ├── MissingKeyError    (KeyError)            …a key is in one and not in the other
    │   └── MismatchError                            …compat= at the save and expect= at the load differ
    ├── UnsafeDirectoryError   (PermissionError)    the memory directory is not safely ours
    ├── StorageError           (OSError)            the memory directory's filesystem refuses an operation
    ├── NoSpaceError           (OSError)            busy: tmpfs, inodes, cgroup or budget is full
    ├── BusyError                                    busy: the previous generation is not complete
    ├── ChangedError                                 you: a tensor changed while it was copied
    ├── NotFoundError          (FileNotFoundError)  not found: no such step or shard
    ├── UnusableError                                not found: shards exist, no generation is usable
    ├── RetrieveError                                not found: no holder could give the chunks that a node lacks
    ├── AmbiguousHistoryError                        two histories, of which none goes on from the other
    ├── FencedError                                  a newer launch owns the job
    ├── LiveJobError                                 you: the trainers of another launch still run
    ├── AgentError             (ConnectionError)    this node's agent can't be started, reached or used
    ├── PeerError              (ConnectionError)    another node's agent is broken, hung or unreachable
    ├── DeniedError            (PermissionError)    a credential is missing, expired or another job's
    ├── OtherRankError                               another rank raised, and this one gave up with it
    ├── CorruptShardError                            corrupt: bytes fail verification
    ├── PersistError           (OSError)            a step could not be flushed to persist_dir
    │   └── ForeignStepError                         …another job's or program's checkpoint lies there
    ├── IncompatibleError                            incompatible: format version, job, number of nodes
    ├── DeadlineError          (TimeoutError)       timed out; says who was missing
    └── InternalError                                a bug in flashckpt

Each class has a stable `code`; each instance a message (expected, found, where) and a `hint` (what to do).
All are plain `Exception`s and survive pickling, because DCP and multiprocessing send them between ranks.
"""

from __future__ import annotations

from typing import Any, ClassVar


class FlashError(Exception):
    """Base of all errors of flashckpt. Never raised itself."""

    code: ClassVar[str] = "FC-GEN-000"
    default_hint: ClassVar[str] = ""

    def __init__(self, message: str, *, hint: str = "", **fields: Any) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint or self.default_hint
        self.fields = fields

    def __getattr__(self, name: str) -> Any:
        # Makes fields (step, rank, path …) readable as attributes.
        fields = self.__dict__.get("fields", {})
        if name in fields:
            return fields[name]
        raise AttributeError(name)

    def __str__(self) -> str:
        hint = f"\n  hint: {self.hint}" if self.hint else ""
        return f"[{self.code}] {self.message}{hint}"

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.message, self.hint, self.fields)


def _rebuild(cls: type[FlashError], message: str, hint: str, fields: dict[str, Any]) -> FlashError:
    return cls(message, hint=hint, **fields)


class ConfigError(FlashError, ValueError):
    """A setting or argument is wrong. Not for values inside the state dict."""

    code = "FC-CFG-001"


class ClosedError(FlashError):
    """Used after close(). Not raised by close() itself, which may be called twice."""

    code = "FC-USE-001"
    default_hint = "keep using it inside its `with` block, or make a new Checkpointer"


class ConflictError(FlashError):
    """Two calls overlap that must not. Not for a save that only has to wait (BusyError)."""

    code = "FC-USE-002"


class ExistsError(FlashError, FileExistsError):
    """Raised when a file to be written exists already. No file was changed. Not for steps, which may be saved again."""

    code = "FC-USE-003"


class UnsupportedValueError(FlashError, TypeError):
    """A value in the state dict can't be saved; names its key and type. Nothing was written."""

    code = "FC-VAL-001"


class StructureError(FlashError, ValueError):
    """The state dict does not fit the checkpoint: dtype, shape or nesting differ."""

    code = "FC-STR-001"


class MissingKeyError(StructureError, KeyError):
    """A key is missing on one side. Not raised with strict=False."""

    code = "FC-STR-002"


class MismatchError(StructureError):
    """What was declared with `compat=` at the save differs from `expect=` at the load. No tensor was read."""

    code = "FC-STR-003"


class UnsafeDirectoryError(FlashError, PermissionError):
    """The memory directory is not safely ours: owner, mode, type, links. Nothing in it was touched."""

    code = "FC-DIR-001"


class StorageError(FlashError, OSError):
    """The memory directory's filesystem refused an operation (EIO, EMFILE …). Not for lack of room (NoSpaceError), nor
    for a directory that is not safely ours (UnsafeDirectoryError).
    """

    code = "FC-DIR-002"
    default_hint = (
        "look at the cause: a limit of the process (`ulimit -n`), or a directory that was removed or remounted"
    )


class NoSpaceError(FlashError, OSError):
    """tmpfs, inodes, memory cgroup or budget is full. Earlier generations are untouched."""

    code = "FC-MEM-001"


class BusyError(FlashError):
    """The previous generation is not complete yet, so its slots can't be reused."""

    code = "FC-MEM-002"


class ChangedError(FlashError):
    """Raised when a tensor changed between save() and the end of its copy. The shard was not sealed.

    Not raised for immediate tensors that change after an overlapped save() has returned: they may change at any time.
    """

    code = "FC-SAVE-001"
    default_hint = (
        "the next saves copy the tensor before they return; to keep its copy overlapped, change it only in "
        "optimizer.step() or after maybe_wait_for_staging(); or save with overlap=False"
    )


class NotFoundError(FlashError, FileNotFoundError):
    """The step that was asked for does not exist. Not raised where "newest" was asked for."""

    code = "FC-LOAD-001"


class UnusableError(FlashError):
    """Shards of the job exist, but no generation is usable; lists the reason for each."""

    code = "FC-LOAD-002"
    default_hint = "pass allow_fresh=True to start anew in spite of that"


class AmbiguousHistoryError(FlashError):
    """Two complete histories of which none goes on from the other. Nothing was changed. Not for a history that a later
    launch has knowingly left behind: that one is abandoned.

    `histories`: their names, oldest first; `steps`: the newest complete step of each.
    """

    code = "FC-LOAD-003"


class RetrieveError(FlashError):
    """No holder of a shard gave the chunks that this node lacks. Not for an agent of this node that ended (AgentError),
    nor for a deadline that passed (DeadlineError).

    `problems`: (shard, ((node, reason), …)) for each such shard; node "" if the reason is on this node.
    """

    code = "FC-LOAD-005"
    default_hint = "an older generation may be usable; `flashckpt status` shows which node holds what"


class FencedError(FlashError):
    """A newer launch owns the job; this one is dead and must not write."""

    code = "FC-JOB-001"


class LiveJobError(FlashError):
    """Raised on all ranks when the trainers of another launch of the job still run. Nothing was changed.

    Not raised with `take_over=True` or `read_only=True`, nor for trainers that have ended or were overtaken themselves.
    `trainers`: for each of them a mapping with `node`, `rank`, `pid` and `since` (seconds since 1970).
    """

    code = "FC-JOB-002"
    default_hint = (
        "for an evaluation beside it: load(read_only=True), or CheckpointConfig(load_only=True); to stop its saves and "
        "go on in its place: load(take_over=True); for a run of its own: another job name"
    )


class AgentError(FlashError, ConnectionError):
    """This node's agent can't be started, reached or used. What is sealed in the node's memory is not affected."""

    code = "FC-AGT-001"
    default_hint = "`flashckpt agent status` shows its state, and where its log is"


class PeerError(FlashError, ConnectionError):
    """Another node's agent is broken, hung or unreachable; names it. Replication to it is tried again by itself."""

    code = "FC-PEER-001"


class DeniedError(FlashError, PermissionError):
    """A credential is missing, expired, another job's or another node's; or its role may not call this."""

    code = "FC-SEC-001"


class OtherRankError(FlashError):
    """Another rank raised; this one gave up with it, so that all do the same. The cause is in that rank's error and
    log.

    With on_save_error="raise", also raised for a step that was saved here, but that another rank failed to save or
    skipped.
    """

    code = "FC-RANK-001"


class CorruptShardError(FlashError):
    """Bytes fail verification. Not for a shard that is merely missing."""

    code = "FC-FMT-001"


class IncompatibleError(FlashError):
    """A format version, a job or a topology that this version can't work with. The bytes are not damaged."""

    code = "FC-FMT-002"


class PersistError(FlashError, OSError):
    """A step was not flushed to persist_dir. It stays in memory, and the flush is tried again."""

    code = "FC-DISK-001"
    default_hint = "`flashckpt status` shows whether the next attempts succeed"


class ForeignStepError(PersistError):
    """persist_dir has a step that this job did not write. No file was changed."""

    code = "FC-DISK-002"


class DeadlineError(FlashError, TimeoutError):
    """A wait reached its deadline; names who was missing."""

    code = "FC-TIME-001"


class InternalError(FlashError):
    """A bug in flashckpt."""

    code = "FC-BUG-001"
    default_hint = "please report this with the log"
