"""Failpoints: a fault takes place where it is armed, not a little later."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from tests.conftest import environment

TIMES = 200

# The failpoint is on another thread than the first: that is the one which takes a signal to the process.
PASSES = """
import os, sys, threading
from flashckpt.failpoints import failpoint

def work():
    for _ in range(int(sys.argv[1])):
        failpoint("here")
        os.write(1, b"x")

idle = threading.Event()
others = [threading.Thread(target=idle.wait) for _ in range(3)]
worker = threading.Thread(target=work)
for thread in (*others, worker):
    thread.start()
worker.join()
idle.set()
"""


def test_a_thread_that_is_stopped_goes_no_further():
    extra = {"FLASHCKPT_TESTING": "1", "FLASHCKPT_FAILPOINTS": "here=stop"}
    child = subprocess.Popen(
        [sys.executable, "-c", PASSES, str(TIMES)], env=environment(**extra), stdout=subprocess.PIPE
    )
    with child:
        try:
            passed = []
            for _ in range(TIMES):
                # Returns once every thread of it stands still: nothing more can come.
                _, status = os.waitpid(child.pid, os.WUNTRACED)
                assert os.WIFSTOPPED(status), status
                os.set_blocking(child.stdout.fileno(), False)
                passed.append(len(child.stdout.read() or b""))
                os.kill(child.pid, signal.SIGCONT)
            os.set_blocking(child.stdout.fileno(), True)
            assert child.wait(60) == 0
            assert passed == [0] + [1] * (TIMES - 1)
            assert child.stdout.read() == b"x"
        finally:
            child.kill()
