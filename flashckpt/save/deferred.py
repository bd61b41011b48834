"""Deferred tensors of a save: copied after `save()` has returned, and proved not to have changed until then.

A tensor is *deferred* if its copy may be made after `save()` has returned; *immediate* tensors are copied before. The
proof compares torch's version counters. A write through `.data`, NumPy or a graph replay does not change a version
counter, so the first saves of a launch, and all saves with `verify="recheck"`, also compare checksums taken in
`save()`. All other saves checksum a small sample.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, NamedTuple

import torch

from flashckpt.devices import clone_on_device
from flashckpt.errors import BusyError, ChangedError
from flashckpt.save.checksums import Checksums
from flashckpt.state.regions import local_parts, plain_local
from flashckpt.workers import Flag

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from flashckpt.save.handle import SaveHandle
    from flashckpt.save.plan import SavePlan
    from flashckpt.state.flatten import Flat

log = logging.getLogger(__name__)

# In so many first saves of a launch, save() checksums all deferred tensors: version counters do not show all changes.
RECHECKED_SAVES = 2
# Windows per later save, and bytes per window: takes some tenths of a millisecond, and finds a swap of all weights.
SAMPLED = 32
SAMPLE_WINDOW_BYTES = 16 << 10
# A tensor of at least this size that no optimizer owns may be deferred if it has not changed since the last save.
STEADY_BYTES = 1 << 20
# Bytes of immediate tensors that are cloned per save; the others are copied into the slot while save() waits.
CLONED_BYTES = 4 << 20
# When a tensor of at least this size is freed, its memory may be unmapped: a read would then end the process.
_HELD_BYTES = 64 << 10
_NAMED = 5  # keys in a message


class _Mark(NamedTuple):
    """Address and version of a tensor at the last save. An equal mark allows deferring it, but is not the proof."""

    address: int
    version: int


class Deferrals:
    """Remembers across saves which tensors a Checkpointer may defer."""

    def __init__(self, *, recheck: bool, device_snapshot: bool, threads: int, timeout: float) -> None:
        """`device_snapshot`: clone tensors on devices there instead of deferring them, if the device has room."""
        self._recheck = recheck
        self._device_snapshot = device_snapshot
        self._threads = threads
        self._timeout = timeout
        self._rechecks_left = RECHECKED_SAVES
        self._turn = 0
        self._changing: set[str] = set()  # found to change while they were deferred
        self._marks: dict[str, _Mark] = {}
        self._stored: tuple[SavePlan, list[int]] | None = None

    @property
    def changing(self) -> frozenset[str]:
        """Return the keys that changed while they were deferred. They are immediate from then on."""
        return frozenset(self._changing)

    def note(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Mark tensors after a load, so that the first save can tell which of them have not changed since."""
        for key, tensor in tensors.items():
            self._is_steady(key, tensor)

    def everything(self, handle: SaveHandle, flat: Flat, plan: SavePlan) -> Deferred:
        """Watch all tensors of a save that copies while its caller waits: another thread might change them."""
        fqns, leaves = list(flat.tensors), list(flat.tensors.values())
        watched = [i for i in self._of(plan) if _versions(fqns[i], leaves[i]) is not None]
        return Deferred(handle, self, flat, watched, frozenset(), None, self._timeout, overlapped=False)

    def split(
        self, handle: SaveHandle, flat: Flat, plan: SavePlan, defers: Callable[[str, torch.Tensor], bool | None]
    ) -> Deferred:
        """Decide for an overlapped save which tensors are deferred. Replaces some tensors in `flat` by clones."""
        began = time.perf_counter()
        fqns, leaves = list(flat.tensors), list(flat.tensors.values())
        deferred: list[int] = []
        immediate: list[int] = []
        for i in self._of(plan):
            key, tensor = fqns[i], leaves[i]
            may = key not in self._changing and self._may_defer(key, tensor, defers(key, tensor))
            # An inference tensor has no version counter: nothing would show that it was changed.
            (deferred if may and _versions(key, tensor) is not None else immediate).append(i)
        immediate = _clone_on_devices(flat, fqns, leaves, immediate)
        if self._device_snapshot:
            left_there = _clone_on_devices(flat, fqns, leaves, deferred)
            # Tensors on the host (step counters) become immediate: the gate would be held for them alone.
            immediate += [i for i in left_there if leaves[i].is_cpu]
            deferred = [i for i in left_there if not leaves[i].is_cpu]
        decided = time.perf_counter()
        left = _clone_small(flat, fqns, leaves, immediate)
        cloned = time.perf_counter()
        _hold(flat, fqns, leaves, deferred)
        checksums = self._checksum(flat, plan, frozenset(deferred)) if deferred else None
        made = Deferred(handle, self, flat, deferred, left, checksums, self._timeout, overlapped=True)
        if not deferred and not left:
            handle.queue(made)  # the caller's tensors are not read any more
        handle.proof_seconds = decided - began + time.perf_counter() - cloned
        return made

    def _checksum(self, flat: Flat, plan: SavePlan, deferred: frozenset[int]) -> Checksums:
        """Checksum all deferred tensors in the first saves of a launch, and another sample in each later save."""
        if self._recheck or self._rechecks_left > 0:
            self._rechecks_left -= 1
            sources = [source for source in plan.sources if source.tensor in deferred]
            return Checksums(sources, flat, self._threads)
        count = len(plan.sources)
        self._turn += 1
        places = {(self._turn + i * count // SAMPLED) % count for i in range(min(SAMPLED, count))}
        sample = [plan.sources[place] for place in sorted(places) if plan.sources[place].tensor in deferred]
        return Checksums(sample, flat, 1, window_bytes=SAMPLE_WINDOW_BYTES)

    def found_unseen(self) -> None:
        """Checksum all deferred tensors of the next saves, after a checksum has shown what no version counter did."""
        self._rechecks_left = max(self._rechecks_left, RECHECKED_SAVES)

    def found_changing(self, keys: Sequence[str], why: str) -> None:
        """Make `keys` immediate from the next save on, and log `why`."""
        new = [key for key in keys if key not in self._changing]
        self._changing.update(new)
        if new:
            log.warning(
                "%s: %s; from now on save() copies %s before it returns. To have the copy overlapped again, change "
                "them in optimizer.step() only, or after maybe_wait_for_staging()",
                _some(new),
                why,
                "it" if len(new) == 1 else "them",
            )

    def _of(self, plan: SavePlan) -> list[int]:
        """Return the indices of the tensors that this rank stores."""
        if self._stored is None or self._stored[0] is not plan:
            self._stored = plan, sorted({source.tensor for source in plan.sources})
        return self._stored[1]

    def _may_defer(self, key: str, tensor: torch.Tensor, vouched: bool | None) -> bool:
        return self._is_steady(key, tensor) if vouched is None else vouched

    def _is_steady(self, key: str, tensor: torch.Tensor) -> bool:
        """Mark a large tensor. Return True if it has not changed since the last save, as a frozen parameter."""
        local = plain_local(tensor)
        if local is None or local.nbytes < STEADY_BYTES or local.is_inference():
            return False
        mark = _Mark(local.data_ptr(), local._version)
        known, self._marks[key] = self._marks.get(key), mark
        return known == mark


class Deferred:
    """The deferred tensors of one save."""

    def __init__(
        self,
        handle: SaveHandle,
        owner: Deferrals,
        flat: Flat,
        indices: Sequence[int],
        immediate: frozenset[int],
        checksums: Checksums | None,
        timeout: float,
        *,
        overlapped: bool,
    ) -> None:
        fqns, leaves = list(flat.tensors), list(flat.tensors.values())
        self.immediate = immediate  # indices into `flat` of the tensors that are copied while save() waits
        self._handle = handle
        self._owner = owner
        self._keys = [fqns[i] for i in indices]
        self._parts = [_parts(fqns[i], leaves[i]) for i in indices]
        self._known = [[part._version for part in parts] for parts in self._parts]
        self._checksums = checksums
        self._timeout = timeout
        self._overlapped = overlapped
        self._taken = Flag()
        self._lock = threading.Lock()  # protects what follows: the copying thread and callers at the gate
        self._changed: list[str] | None = None  # keys; None: not compared yet
        self._events: Mapping[torch.device, torch.Event] = {}

    def took(self) -> None:
        """Let save() return: the immediate tensors are copied, or the copy has failed."""
        self._taken.set()

    def wait_until_taken(self) -> None:
        """Hold save() until its immediate tensors are copied. Give the save up if that exceeds the timeout."""
        if self.immediate and not self._taken.wait(self._timeout) and self._handle.give_up():
            log.warning("step %d: not copied within %.1f s, so the save fails", self._handle.step, self._timeout)

    def queue(self, events: Mapping[torch.device, torch.Event]) -> None:
        """Open the gate in the streams if the proof allows it. All copies are made, or queued before `events`.

        Checksums of all tensors are compared with the finished copy, so no tensor may change before that.
        """
        if self._overlapped and events and (self._checksums is None or self._checksums.is_sample):
            self._events = events
            self._handle.queue(self)

    def pass_in_stream(self) -> None:
        """Make the current streams wait for the copies. Compare first: the caller may change tensors from now on."""
        with self._lock:
            if self._changed is None:
                self._changed = self._sources_changed()
        for device, event in self._events.items():
            torch.accelerator.current_stream(device).wait_event(event)

    def stage(self, data: memoryview) -> None:
        """Mark the copy as made. Raises BusyError or ChangedError if it must not be sealed."""
        if not self._handle.is_given_up:
            with self._lock:
                if self._changed is None:
                    self._changed = self._find(data)
                changed = self._changed
            if changed:
                self._refuse(changed)
        if not self._handle.stage():
            raise BusyError(
                f"step {self._handle.step}: not copied within save_timeout ({self._timeout:g} s), training went on",
                hint="a loaded host copies slowly: overlap=False, fewer saves, or more cores",
            )

    def look_again(self) -> None:
        """Find, at the gate, tensors that changed since save(), also if they were copied before the change."""
        began = time.perf_counter()
        changed = self._sources_changed()
        self._handle.proof_seconds += time.perf_counter() - began
        if changed:
            self._owner.found_changing(changed, "changed between save() and optimizer.step()")

    def _find(self, data: memoryview) -> list[str]:
        if self._checksums is None:
            return self._versions_changed()
        if not self._checksums.is_sample:
            return self._with_unseen(self._checksums.differing(data))
        # A change that came after the copy of a sampled window may have come before the copy of other bytes.
        return self._sources_changed() or self._with_unseen(self._checksums.differing(data))

    def _sources_changed(self) -> list[str]:
        return self._with_unseen([] if self._checksums is None else self._checksums.changed_sources())

    def _with_unseen(self, by_checksum: list[str]) -> list[str]:
        changed = self._versions_changed()
        unseen = [key for key in by_checksum if key not in changed]
        if unseen:
            self._owner.found_unseen()
        return changed + unseen

    def _versions_changed(self) -> list[str]:
        return [
            key
            for key, parts, known in zip(self._keys, self._parts, self._known, strict=True)
            if [part._version for part in parts] != known
        ]

    def _refuse(self, changed: list[str]) -> None:
        if not self._overlapped:
            raise ChangedError(
                f"step {self._handle.step}: {_some(changed)} changed while save() copied it",
                hint="another thread changes the state: let it wait until save() has returned",
                step=self._handle.step,
                keys=changed,
            )
        self._owner.found_changing(changed, f"changed while step {self._handle.step} was copied, which is not sealed")
        raise ChangedError(
            f"step {self._handle.step}: {_some(changed)} changed between save() and the end of the copy",
            step=self._handle.step,
            keys=changed,
        )


def _clone_on_devices(flat: Flat, fqns: list[str], leaves: list[torch.Tensor], indices: list[int]) -> list[int]:
    """Clone tensors on accelerators in device memory, which is quick. Returns the indices of those not cloned."""
    simple = {i: local for i in indices if (local := plain_local(leaves[i])) is not None and not local.is_cpu}
    clones = dict(zip(simple, clone_on_device(simple.values()), strict=True))
    left = []
    for i in indices:
        clone = clones.get(i)
        if clone is None:
            left.append(i)
        else:
            flat.tensors[fqns[i]] = clone
    return left


def _hold(flat: Flat, fqns: list[str], leaves: list[torch.Tensor], deferred: list[int]) -> None:
    """Replace large tensors by aliases, which keep the memory if the tensor gets other memory before it is copied.

    Code that offloads state does that: `state["exp_avg"].data = …`, `set_`. A model's state dict has aliases already.
    """
    for i in deferred:
        if type(leaves[i]) is torch.Tensor and leaves[i].nbytes >= _HELD_BYTES:
            flat.tensors[fqns[i]] = leaves[i].detach()


def _clone_small(flat: Flat, fqns: list[str], leaves: list[torch.Tensor], immediate: list[int]) -> frozenset[int]:
    """Replace tensors in `flat` by clones, smallest first, up to CLONED_BYTES. Returns the indices of those left.

    Those that are not one ordinary tensor are left: a ShardedTensor has neither a size in bytes nor a clone.
    """
    room = CLONED_BYTES
    left = {i for i in immediate if plain_local(leaves[i]) is None}
    for i in sorted((i for i in immediate if i not in left), key=lambda i: leaves[i].nbytes):
        room -= leaves[i].nbytes
        if room < 0:
            left.add(i)
        else:
            flat.tensors[fqns[i]] = leaves[i].detach().clone()
    return frozenset(left)


def _parts(key: str, tensor: torch.Tensor) -> list[torch.Tensor]:
    local = plain_local(tensor)
    return local_parts(key, tensor) if local is None else [local]


def _versions(key: str, tensor: torch.Tensor) -> list[int] | None:
    """Return the version counter of each part. None: an inference tensor, which has none."""
    parts = _parts(key, tensor)
    return None if any(part.is_inference() for part in parts) else [part._version for part in parts]


def _some(keys: Sequence[str]) -> str:
    more = len(keys) - _NAMED
    return ", ".join(keys[:_NAMED]) + (f" and {more} more" if more > 0 else "")
