"""A process that has imported torch once and forks the campaign's ranks: a rank costs a fork, not an import of seconds.

Requests come as JSON over a socket; the answer is the pid of the child, whose exit nobody has to wait for.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import traceback
from pathlib import Path

_CLONE_NEWNET = 0x40000000
_PR_SET_PDEATHSIG = 1


class Nursery:
    """The campaign's end."""

    def __init__(self):
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        kept = {name: value for name, value in os.environ.items() if not name.startswith("FLASHCKPT_")}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-W", "ignore", "-m", "tests.campaign.nursery", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env={**kept, "OMP_NUM_THREADS": "1", "GRPC_ENABLE_FORK_SUPPORT": "0"},
                stdin=subprocess.DEVNULL,
                cwd=Path(__file__).parent.parent.parent,
            )
        self._control.recv(16)  # it has imported what it needs

    def fork(self, request):
        self._control.send(json.dumps(request).encode())
        return int(self._control.recv(64))

    def close(self):
        self._control.close()
        try:
            self._process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _child(request):
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.setpgid(0, 0)
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    for name in [name for name in os.environ if name.startswith("FLASHCKPT_")]:
        del os.environ[name]
    os.environ.update(request["environment"])
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if request["network"]:
        with open(request["network"], "rb") as namespace:
            if libc.setns(namespace.fileno(), _CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), "setns")
    from tests.campaign import trainer

    trainer.main(request["spec"])


def _serve(control):
    # All that a rank imports: it must not be imported once for each fork.
    from torch.distributed import tensor as _tensor  # noqa: F401

    import flashckpt.checkpointer
    import flashckpt.dcp  # noqa: F401
    from tests.campaign import trainer  # noqa: F401

    control.send(b"ready")
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while data := control.recv(1 << 16):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                control.close()
                _child(json.loads(data))
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        control.send(str(pid).encode())


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
