"""The table on the simulated accelerator, in a process of its own: the devices can't be taken away again.

on_sim.py OUT_FILE [ROW…]      appends a line of JSON for each row: its name, what is wrong, seconds
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
import warnings
from pathlib import Path

from tests import simdev
from tests.training.harness import run_pattern
from tests.training.rarer import PATTERNS

DEVICE = "sim"


# Besides being delayed, the copies of these rows go over a slow link: what misbehaves meets them half-way.
SLOW_LINK = (
    "adamw_foreach",
    "adamw_capturable",
    "lbfgs_closure",
    "two_optimizers_in_two_threads",
    "optimizers_in_backward_on_two_devices",
    "batch_norm",
    "average_in_a_dict",
    "optimizer_made_anew",
    "teacher_as_a_part",
    "moments_zeroed_after_save",
    "clamped_by_data",
    "written_by_storage_bytes",
)
SLOW_LINK_BYTES_PER_SECOND = 500_000


def rows() -> list[str]:
    names = [name for name, one in PATTERNS.items() if DEVICE in one.devices and not one.slow]
    return [*(f"{name}-delayed" for name in names), *(f"{name}-slow_link" for name in SLOW_LINK)]


def tell(row: str) -> list[str]:
    """What is wrong with a row."""
    name, _, how = row.partition("-")
    speed = SLOW_LINK_BYTES_PER_SECOND if how == "slow_link" else 0
    simdev.bandwidth(pinned=speed, pageable=speed)
    try:
        result = run_pattern(PATTERNS[name], DEVICE, delayed=how == "delayed")
        return result.problems(PATTERNS[name], delayed=how == "delayed")
    except Exception:  # the other rows go on
        return [traceback.format_exc()]


def main() -> None:
    out, *only = sys.argv[1:]
    os.environ.pop("FLASHCKPT_VERIFY", None)
    warnings.simplefilter("ignore")
    simdev.load()
    for row in only or rows():
        print(row, flush=True)  # the last line says where a crash came
        began = time.perf_counter()
        problems = tell(row)
        with Path(out).open("a") as file:
            print(json.dumps([row, problems, time.perf_counter() - began]), file=file)


if __name__ == "__main__":
    main()
