"""Deferred tensors of a save: copied after `save()` has returned, and proved not to have changed until then.

A tensor is *deferred* if its copy may be made after `save()` has returned; *immediate* ones are copied before. The
proof is torch's version counters, and for a launch's first saves, or with `verify="recheck"`, checksums taken in
`save()`: a write through `.data`, NumPy or a graph replay leaves no trace in a version counter. Of later saves a small
sample is checksummed.
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

# Saves of a launch whose deferred tensors are checksummed in save(): they show what version counters do not.
RECHECKED_SAVES = 2
# Of every later save: so many windows of so many bytes, some tenths of a millisecond. A swap of all weights shows.
SAMPLED = 32
SAMPLE_WINDOW_BYTES = 16 << 10
# From here on a tensor that nobody vouches for may be deferred if it is as it was at the last save.
STEADY_BYTES = 1 << 20
# So much of the immediate tensors is cloned, all together; the rest is copied into the slot while save() waits.
CLONED_BYTES = 4 << 20
# From here on the memory of a tensor may go back to the system when it is freed: to read it then would end the process.
_HELD_BYTES = 64 << 10
_NAMED = 5  # keys in a message


class _Mark(NamedTuple):
    """A tensor as it was at the last save. Not proof that it has not changed: whoever is deferred is watched."""

    address: int
    version: int


class Deferrals:
    """What a Checkpointer knows about its tensors from save to save."""

    def __init__(self, *, recheck: bool, device_snapshot: bool, threads: int, timeout: float) -> None:
        """`device_snapshot`: tensors on devices are cloned there, as far as there is room, and not deferred."""
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
        """Keys that are no longer deferred."""
        return frozenset(self._changing)

    def note(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Remember how tensors are now, so that the first save can tell which of them have not changed."""
        for key, tensor in tensors.items():
            self._is_steady(key, tensor)

    def everything(self, handle: SaveHandle, flat: Flat, plan: SavePlan) -> Deferred:
        """For a save that copies while its caller waits: all tensors are watched, against other threads."""
        fqns, leaves = list(flat.tensors), list(flat.tensors.values())
        watched = [i for i in self._of(plan) if _versions(fqns[i], leaves[i]) is not None]
        return Deferred(handle, self, flat, watched, frozenset(), None, self._timeout, overlapped=False)

    def split(
        self, handle: SaveHandle, flat: Flat, plan: SavePlan, defers: Callable[[str, torch.Tensor], bool | None]
    ) -> Deferred:
        """For a save that goes on after `save()` has returned. Puts clones in the place of some tensors of `flat`."""
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
            # What lies on the host beside them (step counters) would hold the gate alone.
            immediate += [i for i in left_there if leaves[i].is_cpu]
            deferred = [i for i in left_there if not leaves[i].is_cpu]
        decided = time.perf_counter()
        left = _clone_small(flat, fqns, leaves, immediate)
        cloned = time.perf_counter()
        _hold(flat, fqns, leaves, deferred)
        checksums = self._checksum(flat, plan, frozenset(deferred)) if deferred else None
        made = Deferred(handle, self, flat, deferred, left, checksums, self._timeout, overlapped=True)
        if not deferred and not left:
            handle.queue(made)  # nothing of the caller's is read any more
        handle.proof_seconds = decided - began + time.perf_counter() - cloned
        return made

    def _checksum(self, flat: Flat, plan: SavePlan, deferred: frozenset[int]) -> Checksums:
        """Of all deferred tensors in the first saves; of a sample, another one each time, in the others."""
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
        """A sample shows a change that no version counter does. Others may have changed so: look at all of them."""
        self._rechecks_left = max(self._rechecks_left, RECHECKED_SAVES)

    def found_changing(self, keys: Sequence[str], why: str) -> None:
        """From the next save on `keys` are immediate."""
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
        """Which tensors this rank stores."""
        if self._stored is None or self._stored[0] is not plan:
            self._stored = plan, sorted({source.tensor for source in plan.sources})
        return self._stored[1]

    def _may_defer(self, key: str, tensor: torch.Tensor, vouched: bool | None) -> bool:
        return self._is_steady(key, tensor) if vouched is None else vouched

    def _is_steady(self, key: str, tensor: torch.Tensor) -> bool:
        """Whether a large tensor is as it was at the last save: a frozen parameter, say."""
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
        self.immediate = immediate  # tensors, by their place in `flat`, that are copied while save() waits
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
        self._changed: list[str] | None = None  # once it is decided
        self._events: Mapping[torch.device, torch.Event] = {}

    def took(self) -> None:
        """Tell save() that the immediate tensors are copied, or that they never will be."""
        self._taken.set()

    def wait_until_taken(self) -> None:
        """Hold save() until its immediate tensors are copied. A copy that takes too long is thrown away."""
        if self.immediate and not self._taken.wait(self._timeout) and self._handle.give_up():
            log.warning("step %d: not copied within %.1f s; the save is given up", self._handle.step, self._timeout)

    def queue(self, events: Mapping[torch.device, torch.Event]) -> None:
        """All copies are made, or queued before `events`. Let the gate pass in the stream where the proof allows it.

        Checksums of all tensors are compared with the finished copy, and a change must not come before that.
        """
        if self._overlapped and events and (self._checksums is None or self._checksums.is_sample):
            self._events = events
            self._handle.queue(self)

    def pass_in_stream(self) -> None:
        """At the gate. What the caller changes from now on is no change during the copy: the verdict is taken here."""
        with self._lock:
            if self._changed is None:
                self._changed = self._sources_changed()
        for device, event in self._events.items():
            torch.accelerator.current_stream(device).wait_event(event)

    def stage(self, data: memoryview) -> None:
        """The copy is made. Raise where it must not be sealed: BusyError, ChangedError."""
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
        """At the gate: find what changed since save(), also where the copy was quicker than the change."""
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
        # What changed behind the copy of this sample may have come before the copy of its neighbours.
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
    """Clones those on accelerators in device memory: it is quick there. Returns the others, and what had no room."""
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
    """Puts aliases in the place of large tensors, which keep the memory if somebody gives the tensor another one.

    `state["exp_avg"].data = …` and `set_` do that, where state is offloaded. What a model tells are aliases already.
    """
    for i in deferred:
        if type(leaves[i]) is torch.Tensor and leaves[i].nbytes >= _HELD_BYTES:
            flat.tensors[fqns[i]] = leaves[i].detach()


def _clone_small(flat: Flat, fqns: list[str], leaves: list[torch.Tensor], immediate: list[int]) -> frozenset[int]:
    """Clones up to CLONED_BYTES in place, smallest first; returns those that are left."""
    room = CLONED_BYTES
    left = set()
    for i in sorted(immediate, key=lambda i: leaves[i].nbytes):
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
    """None where there is no version counter."""
    parts = _parts(key, tensor)
    return None if any(part.is_inference() for part in parts) else [part._version for part in parts]


def _some(keys: Sequence[str]) -> str:
    more = len(keys) - _NAMED
    return ", ".join(keys[:_NAMED]) + (f" and {more} more" if more > 0 else "")
