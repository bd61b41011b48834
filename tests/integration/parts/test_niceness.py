"""Helpers step back behind the training, also where the kernel schedules by session."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from flashckpt.agent.helper import Starter, be_nice, be_nice_as_session, hurry


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
    be_nice(process.pid, 10)
    assert hurry(process.pid), "nothing is left that is too slow"


def test_a_helper_is_as_nice_as_the_agent_was_before_and_is_hurried():
    code = (
        "import os, subprocess, sys\n"
        "from flashckpt.agent.helper import Starter\n"
        "starter = Starter()\n"
        "before = os.nice(0)\n"
        "os.nice(5)\n"
        "process = starter.start([sys.executable, '-c', 'input()'])\n"
        "assert os.getpriority(os.PRIO_PROCESS, process.pid) == before, 'not nice itself'\n"
        "assert os.getsid(process.pid) == process.pid\n"
        "process.kill()\n"
        "process.wait()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    process = Starter().start([sys.executable, "-c", "input()"])
    with process:
        be_nice(process.pid, 15)
        assert os.getpriority(os.PRIO_PROCESS, process.pid) == 15
        be_nice(process.pid, 3)
        assert os.getpriority(os.PRIO_PROCESS, process.pid) == 15, "never less than before"
        if hurry(process.pid):  # else this user may not
            assert os.getpriority(os.PRIO_PROCESS, process.pid) == 0
        process.kill()
    assert hurry(process.pid), "it has gone, which is no error"
