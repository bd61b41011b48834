"""The attempts of one launch to save: which generation each is, and whether it may be one at all."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from flashckpt.errors import AmbiguousHistoryError, ConfigError
from flashckpt.save.retention import GenerationState, GenerationVerdict
from flashckpt.types import Generation, age_order

if TYPE_CHECKING:
    from flashckpt.save.write import ShardWriter
    from flashckpt.store.slots import SlotStore


def check_step_to_load(step: object) -> None:
    """Raise ConfigError if `step`, which a load is asked for, is neither a step nor None."""
    if isinstance(step, (str, os.PathLike)):
        raise ConfigError(
            f"step: expected an integer or None, found {step!r}",
            hint=f"to load what lies at a path: manager.load(path={os.fspath(step)!r}), or Checkpointer.load_path",
        )
    if step is not None and not _is_step(step):
        raise ConfigError(f"step: expected an integer from 0 on or None, found {_shown(step)}")


def _is_step(step: object) -> bool:
    return isinstance(step, int) and not isinstance(step, bool) and 0 <= step < 1 << 62


def _shown(value: object) -> str:
    """Return `value` as text that fits into a message: a state dict does not."""
    text = repr(value) if isinstance(value, (int, float, str, bytes)) else ""
    return text if 0 < len(text) <= 80 else f"a {type(value).__name__}"


class Attempts:
    """Numbers them alike on every rank, without a word between ranks."""

    def __init__(self, job: str, store: SlotStore, writer: ShardWriter) -> None:
        self._job = job
        self._store = store
        self._writer = writer
        self._seq = 0
        self._last_step: int | None = None
        self._loaded_step: int | None = None
        self._anchored = False  # what this launch saves is known to follow what is there

    def begin(self) -> None:
        """Another launch."""
        self._seq, self._last_step, self._loaded_step = 0, None, None

    def follow(self, base: Generation | None) -> None:
        """A load of `base`, or a fresh start, has said what is there before."""
        self._anchored, self._loaded_step = True, None if base is None else base.step

    def check(self, step: int) -> None:
        if not _is_step(step):
            raise ConfigError(f"step: expected an integer from 0 on, found {_shown(step)}", hint="save(step, …)")
        if self._last_step is not None and step < self._last_step:
            raise ConfigError(
                f"step {step} after step {self._last_step}: steps must not go down within a launch",
                hint="call load(step=…) to go back; it starts a new launch",
            )
        if self._loaded_step is not None and step < self._loaded_step:
            # On one line the highest step is the newest: the next load would take what was loaded here, not this save.
            raise ConfigError(
                f"step {step} after step {self._loaded_step} was loaded: steps must not go down from a launch to the "
                "one that goes on from it",
                hint="count on from the `step` of the LoadResult; to count from the beginning, begin with "
                "load(path=…) or initial_load_path under another job name, or abandon what is there with start_fresh()",
            )

    def anchor(self, step: int) -> None:
        """Refuses to start a second history beside one that is whole and newer."""
        if self._anchored:
            return
        _, verdicts = self._writer.verdicts()
        whole = {generation for generation, verdict in verdicts.items() if verdict.state is GenerationState.COMPLETE}
        line = self._store.read_line()
        # On several nodes no directory holds all shards of a generation, but each holds its record.
        committed = {record.generation for record in self._store.read_records()}
        whole |= {generation for generation in committed if line is None or not line.kills(generation)}
        for generation in whole:
            if generation.epoch < self._writer.launch.epoch and generation.step >= step:
                raise AmbiguousHistoryError(
                    f"job {self._job!r}: asked to save step {step}, but an earlier launch left {generation} "
                    "and this one did not load it",
                    hint="call load() first; or start_fresh() to abandon what is there; or use another job name",
                    step=step,
                )
        self._anchored = True

    def next(self, step: int) -> Generation:
        # Attempts count within a step, so that a rank that missed one is in step again at the next.
        self._seq = self._seq + 1 if step == self._last_step else 1
        self._last_step = step
        return Generation(self._writer.launch.epoch, self._writer.launch.nonce, step, self._seq)

    def judged(self) -> list[tuple[Generation, GenerationVerdict]]:
        """What lies on this node, newest first."""
        _, verdicts = self._writer.verdicts()
        # On several nodes no directory holds all shards of a generation, but each holds its record.
        for record in self._store.read_records():
            if record.generation in verdicts and verdicts[record.generation].state is GenerationState.PENDING:
                verdicts[record.generation] = GenerationVerdict(
                    GenerationState.COMPLETE, f"committed with {record.replicas} replicas"
                )
        return sorted(verdicts.items(), key=lambda item: age_order(item[0]), reverse=True)
