"""The garbage collector in a child that was forked while it rested."""

from __future__ import annotations

import gc
import os

from flashckpt.collector import collector_paused
from tests.unit.test_collector import as_it_was

__all__ = ["as_it_was"]  # the fixture


def test_a_child_that_was_forked_meanwhile_collects():
    with collector_paused():
        child = os.fork()
        if child == 0:
            os._exit(0 if gc.isenabled() else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert not gc.isenabled()
