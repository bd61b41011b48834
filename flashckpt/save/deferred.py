"""Deferred tensors of a save: copied after `save()` has returned, and proved not to have changed until then.

A tensor is *deferred* if its copy may be made after `save()` has returned; *immediate* tensors are copied before. The
proof compares torch's version counters. A write through `.data`, NumPy or a graph replay does not change a version
counter, so the first saves that defer a tensor, and all saves with `verify="recheck"`, also compare checksums taken in
`save()`. Of the other tensors a save checksums a small sample.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING

import torch

from flashckpt.devices import clone_on_device
from flashckpt.errors import BusyError, ChangedError, FlashError
from flashckpt.save.checksums import Checksums
from flashckpt.save.marks import (
    FrozenChunks,
    FrozenEntry,
    ImmediateMarks,
    Mark,
    counters_of,
    has_versions,
    is_shared,
    parts_of,
    version_of,
)
from flashckpt.state.regions import address_of, plain_local
from flashckpt.workers import Flag

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from flashckpt.save.handle import SaveHandle
    from flashckpt.save.plan import SavePlan, TensorSource
    from flashckpt.state.flatten import Flat

log = logging.getLogger(__name__)

# save() checksums a tensor in this many saves that defer it first: version counters do not show all changes.
RECHECKED_SAVES = 2
# Windows per later save, and bytes per window: takes some tenths of a millisecond, and finds a swap of all weights.
SAMPLED = 32
SAMPLE_WINDOW_BYTES = 16 << 10
_NONE: tuple[torch.Tensor, ...] = ()
_GOLDEN = (5**0.5 - 1) / 2
# A tensor of at least this size that no optimizer owns may be deferred if it has not changed since the last save.
STEADY_BYTES = 1 << 20
# Bytes of immediate tensors that are cloned per save; the others are copied into the slot while save() waits.
CLONED_BYTES = 4 << 20
# Immediate tensors are copied again this many times if another thread changes them meanwhile. Then the save fails.
_REPEATS = 5
# When a tensor of at least this size is freed, its memory may be unmapped: a read would then end the process.
_HELD_BYTES = 64 << 10
_NAMED = 5  # keys in a message


class Deferrals:
    """Remembers across saves which tensors a Checkpointer may defer."""

    def __init__(self, *, recheck: bool, device_snapshot: bool, threads: int, timeout: float) -> None:
        """`device_snapshot`: clone tensors on devices there instead of deferring them, if the device has room."""
        self._recheck = recheck
        self._device_snapshot = device_snapshot
        self._threads = threads
        self._timeout = timeout
        self._rechecked: dict[str, int] = {}  # key → in how many saves it was checksummed
        self._turn = 0
        self._changing: set[str] = set()  # found to change while they were deferred
        self._marks: dict[str, Mark] = {}
        self._private: dict[str, int] = {}  # key → address at which no other process could write to the tensor
        self.frozen = FrozenChunks()
        self._stored: tuple[SavePlan, list[int]] | None = None

    @property
    def changing(self) -> frozenset[str]:
        """Return the keys that changed while they were deferred. They are immediate from then on."""
        return frozenset(self._changing)

    def note(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Mark tensors after a load, so that the first save can tell which of them have not changed since."""
        for key, tensor in tensors.items():
            self._is_steady(key, tensor, ())

    def forget_frozen(self) -> None:
        """Forget what earlier shards prove: a load fills tensors by their addresses."""
        self.frozen = FrozenChunks()

    def everything(self, handle: SaveHandle, flat: Flat, plan: SavePlan) -> Deferred:
        """Watch all tensors of a save that copies while its caller waits: another thread might change them."""
        fqns, leaves = list(flat.tensors), list(flat.tensors.values())
        watched = [i for i in self._of(plan) if has_versions(fqns[i], leaves[i])]
        return Deferred(
            handle, self, flat, watched, frozenset(), None, self._timeout, marks=None, torn=[], overlapped=False
        )

    def split(
        self,
        handle: SaveHandle,
        flat: Flat,
        plan: SavePlan,
        defers: Callable[[str, torch.Tensor], bool | None],
        owner_of: Callable[[str, torch.Tensor], torch.Tensor | None],
    ) -> Deferred:
        """Decide for an overlapped save which tensors are deferred. Replaces some tensors in `flat` by clones."""
        began = time.perf_counter()
        fqns, leaves = list(flat.tensors), list(flat.tensors.values())
        deferred: list[int] = []
        immediate: list[int] = []
        frozen: set[int] = set()
        wrappers = flat.wrappers  # IMPORTANT: others_of outlives the copy, and must not keep the clones in `flat`

        def others_of(i: int) -> Sequence[torch.Tensor]:
            """Return the tensors whose version counters show changes to this one."""
            owner, around = owner_of(fqns[i], leaves[i]), wrappers.get(fqns[i], _NONE)
            return around if owner is None else [*around, owner]

        for i in self._of(plan):
            key, tensor = fqns[i], leaves[i]
            may = False if key in self._changing else defers(key, tensor)
            if may is None and (may := self._is_steady(key, tensor, others_of(i))):
                frozen.add(i)
            (deferred if may and self._is_provable(key, tensor) else immediate).append(i)
        marks = ImmediateMarks(fqns, leaves, immediate, others_of)
        immediate = _clone_on_devices(flat, fqns, leaves, immediate)
        if self._device_snapshot:
            left_there = _clone_on_devices(flat, fqns, leaves, deferred)
            # Tensors on the host (step counters) become immediate: the gate would be held for them alone.
            on_host = [i for i in left_there if leaves[i].is_cpu]
            marks.note(on_host)
            immediate += on_host
            deferred = [i for i in left_there if not leaves[i].is_cpu]
        decided = time.perf_counter()
        left = _clone_small(flat, fqns, leaves, immediate)
        torn = _clone_until_steady(flat, marks, left)
        cloned = time.perf_counter()
        _hold(flat, fqns, leaves, deferred)
        entries = _entries(fqns, plan, frozen.intersection(deferred)) if frozen else []
        unknown = {entry.key for entry in entries if not self.frozen.knows(entry)}
        checksums = self._checksum(flat, fqns, plan, deferred, unknown) if deferred else None
        made = Deferred(
            handle,
            self,
            flat,
            deferred,
            left,
            checksums,
            self._timeout,
            marks=marks,
            torn=torn,
            overlapped=True,
            others={i: others_of(i) for i in deferred},
        )
        made.frozen = entries
        if not deferred and not left:
            handle.queue(made)  # the caller's tensors are not read any more
        handle.proof_seconds = decided - began + time.perf_counter() - cloned
        return made

    def _checksum(
        self, flat: Flat, fqns: list[str], plan: SavePlan, deferred: Sequence[int], unknown: Collection[str]
    ) -> Checksums:
        """Checksum the tensors that were deferred seldom so far, and of the others another sample in each save.

        `unknown`: keys of frozen tensors whose chunks in earlier shards prove nothing.
        """
        counts = self._rechecked
        new = {i for i in deferred if self._recheck or counts.get(fqns[i], 0) < RECHECKED_SAVES or fqns[i] in unknown}
        for i in new:
            self._rechecked[fqns[i]] = self._rechecked.get(fqns[i], 0) + 1
        whole = [source for source in plan.sources if source.tensor in new] if new else []
        sample: list[TensorSource] = []
        if len(new) < len(deferred):
            left = frozenset(deferred) - new
            count = len(plan.sources)
            self._turn += 1
            places = {(self._turn + i * count // SAMPLED) % count for i in range(min(SAMPLED, count))}
            sample = [plan.sources[place] for place in sorted(places) if plan.sources[place].tensor in left]
        # Multiples of the golden ratio lie evenly between 0 and 1, however many there are.
        return Checksums(
            whole,
            sample,
            flat,
            self._threads if whole else 1,
            window_bytes=SAMPLE_WINDOW_BYTES,
            window_at=self._turn * _GOLDEN % 1.0,
        )

    def found_unseen(self) -> None:
        """Checksum all deferred tensors of the next saves, after a checksum has shown what no version counter did."""
        self._rechecked.clear()

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

    def _is_provable(self, key: str, tensor: torch.Tensor) -> bool:
        """Return True if version counters of this process show all changes that torch makes to the tensor."""
        local = plain_local(tensor)
        if local is None:
            return has_versions(key, tensor) and not is_shared(key, tensor)
        if local.is_inference():
            return False
        # Memory becomes shared by moving, so a tensor at its old address need not be asked again, which takes a while.
        address = local.data_ptr()
        if self._private.get(key) == address:
            return True
        if is_shared(key, tensor):
            return False
        self._private[key] = address
        return True

    def _is_steady(self, key: str, tensor: torch.Tensor, others: Collection[torch.Tensor]) -> bool:
        """Mark a large tensor. Return True if it has not changed since the last save, as a frozen parameter."""
        local = plain_local(tensor)
        if local is None or local.nbytes < STEADY_BYTES or local.is_inference():
            return False
        mark = Mark(local.data_ptr(), version_of(tensor, others))
        known, self._marks[key] = self._marks.get(key), mark
        if known != mark:
            self.frozen.forget(key)
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
        marks: ImmediateMarks | None,
        torn: list[str],
        overlapped: bool,
        others: Mapping[int, Sequence[torch.Tensor]] | None = None,
    ) -> None:
        fqns, leaves = list(flat.tensors), list(flat.tensors.values())
        self.frozen: list[FrozenEntry] = []  # of tensors that have not changed since an earlier save
        self.immediate = immediate  # indices into `flat` of the tensors that are copied while save() waits
        self._handle = handle
        self._owner = owner
        # Of each part of a tensor: key, part, address, version.
        self._watched: list[tuple[str, torch.Tensor, int, int]] = []
        # Of each tensor that shows further changes: key, tensor, address, version.
        self._counters: list[tuple[str, torch.Tensor, int, int]] = []
        for i in indices:
            key, leaf = fqns[i], leaves[i]
            local, more = plain_local(leaf), () if others is None else others[i]
            if local is None:
                self._watched += [(key, part, part.data_ptr(), part._version) for part in parts_of(key, leaf)]
            else:
                self._watched.append((key, local, local.data_ptr(), local._version))
            if more or local is not leaf:
                self._counters += [(key, one, address_of(one), one._version) for one in counters_of(leaf, more)]
        self._checksums = checksums
        self._immediate_marks = marks
        self._torn = torn  # keys of immediate tensors that another thread changed each time they were copied
        self._timeout = timeout
        self._overlapped = overlapped
        self._taken = Flag()
        self._lock = threading.Lock()  # protects what follows: the copying thread and callers at the gate
        self._changed: list[str] | None = None  # keys; None: not compared yet
        self._events: Mapping[torch.device, torch.Event] = {}

    def took(self) -> None:
        """Let save() return: the immediate tensors are copied, or the copy has failed."""
        self._taken.set()

    def must_repeat(self, round_number: int) -> bool:
        """Return True if the immediate tensors have to be copied again, because another thread changed them.

        Called while save() waits for them.
        """
        if self._immediate_marks is None or not self.immediate:
            return False
        changed = self._immediate_marks.changed(self.immediate)
        if changed and round_number < _REPEATS:
            self._immediate_marks.note(changed)
            return True
        self._torn += self._immediate_marks.keys(changed)
        return False

    def wait_until_taken(self) -> None:
        """Hold save() until its immediate tensors are copied. Give the save up if that exceeds the timeout."""
        if self.immediate and not self._taken.wait(self._timeout) and self._handle.give_up():
            log.warning("step %d: not copied within %.1f s, so that the save fails", self._handle.step, self._timeout)

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

    def stage(self, data: memoryview, crcs: bytes) -> None:
        """Mark the copy as made. Raises BusyError or ChangedError if it must not be sealed."""
        if not self._handle.is_given_up:
            if self._torn:
                self._refuse_torn(self._torn)
            with self._lock:
                if self._changed is None:
                    self._changed = self._find()
                changed = self._changed
            if self._checksums is not None:
                changed = self._with_unseen(changed, self._checksums.differing(data))
            changed = self._with_unseen(changed, self._owner.frozen.differing(self.frozen, crcs))
            if changed:
                self._refuse(changed)
        if not self._handle.stage():
            raise BusyError(
                f"step {self._handle.step}: not copied within save_timeout ({self._timeout:g} s), training went on",
                hint="a loaded host copies slowly: overlap=False, fewer saves, or more cores",
            )
        self._owner.frozen.learn(self.frozen, crcs)

    def look_again(self) -> None:
        """Find, at the gate, tensors that changed since save(), also if they were copied before the change."""
        began = time.perf_counter()
        changed = self._sources_changed()
        self._handle.proof_seconds += time.perf_counter() - began
        if changed:
            self._owner.found_changing(changed, "changed between save() and optimizer.step()")

    def blame(self, error: BaseException) -> None:
        """Raise ChangedError if a copy failed because the memory of a deferred tensor was freed."""
        if self._overlapped and isinstance(error, (FlashError, RuntimeError)) and not self._handle.is_given_up:
            freed = [key for key, part, address, _ in self._watched if part.data_ptr() != address]
            if freed:
                self._refuse(list(dict.fromkeys(freed)))

    def _find(self) -> list[str]:
        """Compare the tensors after the copy, which `stage` compares itself.

        Of samples the bytes in the copy are not enough: a change that came after the copy of a sampled window may have
        come before the copy of other bytes.
        """
        if self._checksums is None or not self._checksums.has_samples:
            return self._marks_changed()
        return self._sources_changed()

    def _sources_changed(self) -> list[str]:
        changed = self._marks_changed()
        return changed if self._checksums is None else self._with_unseen(changed, self._checksums.changed_sources())

    def _with_unseen(self, changed: list[str], by_checksum: list[str]) -> list[str]:
        unseen = [key for key in by_checksum if key not in changed]
        if unseen:
            self._owner.found_unseen()
        return changed + unseen

    def _marks_changed(self) -> list[str]:
        changed = [
            key
            for key, part, address, version in self._watched
            if part._version != version or part.data_ptr() != address
        ]
        # At another address it is another tensor's memory by now (swap_tensors), and shows that one's changes.
        changed += [
            key
            for key, one, address, version in self._counters
            if one._version != version and address_of(one) == address
        ]
        return list(dict.fromkeys(changed)) if changed else changed

    def _refuse(self, changed: list[str]) -> None:
        if not self._overlapped:
            self._refuse_torn(changed)
        self._owner.found_changing(
            changed, f"changed while step {self._handle.step} was copied, so that this step is not sealed"
        )
        raise ChangedError(
            f"step {self._handle.step}: {_some(changed)} changed between save() and the end of the copy",
            step=self._handle.step,
            keys=changed,
        )

    def _refuse_torn(self, changed: list[str]) -> None:
        raise ChangedError(
            f"step {self._handle.step}: {_some(changed)} changed while save() copied it",
            hint="another thread changes the state: let it wait until save() has returned",
            step=self._handle.step,
            keys=changed,
        )


def _entries(fqns: list[str], plan: SavePlan, which: Collection[int]) -> list[FrozenEntry]:
    return [FrozenEntry(fqns[s.tensor], s.offset_bytes, s.length_bytes) for s in plan.sources if s.tensor in which]


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


def _clone_until_steady(flat: Flat, marks: ImmediateMarks, left: frozenset[int]) -> list[str]:
    """Repeat clones of tensors that another thread changed meanwhile. Returns the keys that changed each time."""
    cloned = marks.all_but(left)
    for _ in range(_REPEATS):
        again = marks.changed(cloned)
        if not again:
            return []
        marks.note(again)
        for i, key in zip(again, marks.keys(again), strict=True):
            flat.tensors[key] = marks.leaves[i].detach().clone()
    return marks.keys(marks.changed(cloned))


def _some(keys: Sequence[str]) -> str:
    more = len(keys) - _NAMED
    return ", ".join(keys[:_NAMED]) + (f" and {more} more" if more > 0 else "")
