"""What the ways of copying cost on a simulated device whose pinned copies are twice as fast as pageable ones.

`python -m tests.devices.ratios [pageable bytes per second]` prints seconds and ratios: of how work overlaps, not of any
accelerator.
"""

from __future__ import annotations

import shutil
import statistics
import sys
import tempfile
import time

import pytest
import torch

from flashckpt import CheckpointConfig, Checkpointer
from flashckpt.devices import DeviceCopy, add_registrar
from tests import simdev
from tests.devices.sim import SimRegistrar, area, copier_of, gate_hold, without_pinned_memory

SIZE_BYTES = 96 << 20
TENSORS = 24
QUEUED_SECONDS = 0.5


def seconds_of(work):
    times = []
    for _ in range(3):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return min(times)


def median_hold():
    found = []
    for _ in range(5):
        directory = tempfile.mkdtemp(prefix="flashckpt-ratios-", dir="/dev/shm")
        try:
            found.append(gate_hold(directory, QUEUED_SECONDS)[0])
        finally:
            shutil.rmtree(directory, ignore_errors=True)
    return statistics.median(found)


def main(pageable_rate):
    pinned_rate = 2 * pageable_rate
    simdev.bandwidth(pinned=pinned_rate, pageable=pageable_rate)
    one = SIZE_BYTES // TENSORS
    tensors = {f"{n}": torch.full((one,), n, dtype=torch.uint8, device="sim:0") for n in range(TENSORS)}
    copies = [DeviceCopy(tensor, n * one, one) for n, tensor in enumerate(tensors.values())]
    data = area(SIZE_BYTES)

    def pageable():
        target = torch.frombuffer(data, dtype=torch.uint8)
        for copy in copies:
            target[copy.offset_bytes : copy.offset_bytes + one].copy_(copy.source)

    saves = {"pageable": seconds_of(pageable)}
    for way in ("ring", "registered"):
        copying = copier_of(way)
        saves[way] = seconds_of(lambda copying=copying: copying.copy(data, copies))
        copying.close()
    directory = tempfile.mkdtemp(prefix="flashckpt-ratios-", dir="/dev/shm")
    try:
        with Checkpointer(CheckpointConfig(job="job", memory_dir=directory, agent="off")) as checkpointer:
            checkpointer.save(1, tensors)

            def by_tensor():
                """Verified into host memory, then one pageable copy per tensor, each waited for."""
                host = {key: torch.empty(one, dtype=torch.uint8) for key in tensors}
                checkpointer.load(host, read_only=True)
                for key, tensor in tensors.items():
                    tensor.copy_(host[key])

            loads = {
                "pageable": seconds_of(by_tensor),
                "ring": seconds_of(lambda: checkpointer.load(tensors, read_only=True)),
            }
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    add_registrar("sim", SimRegistrar)
    holds = {"registered": median_hold()}
    simdev.fail_registration()
    holds["ring"] = median_hold()
    with pytest.MonkeyPatch.context() as patch:
        without_pinned_memory(patch)
        holds["pageable"] = median_hold()
    rates = f"pinned {pinned_rate:g}, pageable {pageable_rate:g} bytes per second"
    print(f"{SIZE_BYTES >> 20} MiB in {TENSORS} tensors; {rates}")
    for what, found in (("save", saves), ("load", loads)):
        for way, seconds in found.items():
            print(f"{what:5} {way:11} {seconds:6.3f} s  {found['pageable'] / seconds:5.2f} x")
    print(f"optimizer.step() behind a save, with {QUEUED_SECONDS:g} s of work queued on the device:")
    for way, seconds in holds.items():
        print(f"held  {way:11} {seconds:6.4f} s  {seconds / holds['pageable']:6.4f} of pageable")


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else 80e6)
