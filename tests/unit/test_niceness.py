"""Helpers step back behind the training, also where the kernel schedules by session."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from flashckpt.niceness import be_nice_as_session


@pytest.mark.skipif(not Path("/proc/self/autogroup").exists(), reason="this kernel does not schedule by session")
def test_the_session_of_a_process_is_nice():
    sleeper = [sys.executable, "-c", "input()"]
    with subprocess.Popen(sleeper, stdin=subprocess.PIPE, start_new_session=True) as process:
        group = Path(f"/proc/{process.pid}/autogroup")
        before = Path("/proc/self/autogroup").read_text()
        be_nice_as_session(process.pid, 10)
        assert group.read_text().split()[1:] == ["nice", "10"]
        assert Path("/proc/self/autogroup").read_text() == before, "ours stays as it is"
        process.communicate(b"\n")


def test_a_process_that_has_gone_is_no_error():
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    be_nice_as_session(process.pid, 10)
