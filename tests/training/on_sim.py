"""The table on the simulated accelerator, in a process of its own: the devices can't be taken away again.

on_sim.py OUT_FILE [NAME…]      appends a line of JSON for each row: its name, what is wrong, seconds
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
from tests.training.patterns import PATTERNS

DEVICE = "sim"


def tell(name: str, delayed: bool) -> list[str]:
    """What is wrong with a row."""
    try:
        return run_pattern(PATTERNS[name], DEVICE, delayed=delayed).problems(PATTERNS[name], delayed=delayed)
    except Exception:  # the other rows go on
        return [traceback.format_exc()]


def main() -> None:
    out, *only = sys.argv[1:]
    os.environ.pop("FLASHCKPT_VERIFY", None)
    warnings.simplefilter("ignore")
    simdev.load()
    names = only or [name for name, one in PATTERNS.items() if DEVICE in one.devices and not one.slow]
    for name in names:
        for delayed in (True, False):
            row = f"{name}-{'delayed' if delayed else 'at_once'}"
            print(row, flush=True)  # the last line says where a crash came
            began = time.perf_counter()
            problems = tell(name, delayed)
            with Path(out).open("a") as file:
                print(json.dumps([row, problems, time.perf_counter() - began]), file=file)


if __name__ == "__main__":
    main()
