"""A checkpointer and other processes: a restart, a fork, a clock that is far ahead."""

from __future__ import annotations

import os
from pathlib import Path

import torch

import flashckpt
from tests.unit.test_checkpointer import make

__all__ = ["make"]  # the fixture


def test_a_fork_can_use_the_state_but_not_the_store(make):
    checkpointer = make()
    checkpointer.save(1, {"n": 1})
    pid = os.fork()
    if pid == 0:
        try:
            checkpointer.save(2, {"n": 2})
            os._exit(1)
        except flashckpt.ConflictError:
            os._exit(0)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert checkpointer.save(3, {"n": 3}).outcome == "ok"


def test_slots_are_reused_after_a_restart(make, memory_dir, run_python):
    """A new process takes over the memory of the one that died; nothing new is allocated."""
    code = (
        "import sys, torch, flashckpt\n"
        "c = flashckpt.Checkpointer(flashckpt.CheckpointConfig(job='job', memory_dir=sys.argv[1]))\n"
        "state = {'t': torch.ones(100_000), 'n': 0}\n"
        "first = (c.load(state) or type('none', (), {'step': 0})).step + 1\n"
        "for step in range(first, first + 3):\n"
        "    assert c.save(step, state).outcome == 'ok'\n"
        "import os; os._exit(9)\n"
    )
    inodes = []
    for _ in range(3):
        assert run_python(code, memory_dir).returncode == 9
        inodes.append(
            {
                path.stat().st_ino
                for path in Path(memory_dir, "job").rglob("*")
                if path.is_file() and path.stat().st_size > 4096
            }
        )
    assert inodes[0] == inodes[1] == inodes[2]
    live = {"t": torch.zeros(100_000), "n": 1}
    assert make().load(live).step == 9


def test_a_clock_that_is_centuries_ahead_is_refused_before_anything_is_written(memory_dir, run_python):
    code = (
        "import sys, time\n"
        "real = time.time\n"
        "time.time = lambda: real() + 174 * 366 * 86400\n"
        "import flashckpt\n"
        "config = flashckpt.CheckpointConfig(job='run1', memory_dir=sys.argv[1], node_id='a', agent='off')\n"
        "try:\n"
        "    flashckpt.Checkpointer(config)\n"
        "except flashckpt.ConfigError as error:\n"
        "    print(error.code, error.message, error.hint)\n"
    )
    told = run_python(code, memory_dir)
    assert told.stdout.startswith("FC-CFG-001 clocks of the nodes: expected them within 24 h"), told.stderr
    assert "on node 'a'" in told.stdout
    assert "set the clock" in told.stdout
