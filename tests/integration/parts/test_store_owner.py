"""Owners that live, stop, end, come back as another process or in another namespace."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from flashckpt.store import owner as owner_module
from flashckpt.store.owner import LivenessCheck, Owner, is_dead

ROOT = Path(__file__).parents[3]
REPORT = "from flashckpt.store.owner import Owner\nprint(repr(Owner.current()), flush=True)\n"
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: mounts and namespaces")


@pytest.fixture
def writer():
    """A live process and its Owner."""
    process = subprocess.Popen(
        [sys.executable, "-c", REPORT + "import sys; sys.stdin.read()"],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    yield process, eval(process.stdout.readline())
    process.kill()
    process.communicate()


def run_script(command, script):
    result = subprocess.run(
        [*command, sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def begun_before(owner):
    """Check from now on, and ask later."""
    liveness = LivenessCheck(owner)
    return lambda _: liveness.is_dead()


def begun_now(owner):
    def ask(other):
        liveness = LivenessCheck(other)
        try:
            return liveness.is_dead()
        finally:
            liveness.close()

    return ask


@pytest.fixture(params=["asked once", "check begun before", "check begun now"])
def how(request):
    """Ways to ask whether an owner is dead."""
    return {"asked once": lambda _: is_dead, "check begun before": begun_before, "check begun now": begun_now}[
        request.param
    ]


def test_alive_stopped_zombie_gone(writer, how):
    process, owner = writer
    is_dead = how(owner)
    assert owner.pid == process.pid
    assert not is_dead(owner)
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    assert not is_dead(owner)
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert is_dead(owner), "a zombie has no mappings any more"
    process.wait()
    assert is_dead(owner)


def test_reused_pid_has_another_start_time(writer, how):
    _, owner = writer
    earlier = dataclasses.replace(owner, start_ticks=owner.start_ticks - 1)
    assert how(earlier)(earlier)


def test_other_boot_is_dead_even_if_all_else_fits(writer):
    _, owner = writer
    assert is_dead(dataclasses.replace(owner, boot_id8="00000000"))
    assert LivenessCheck(dataclasses.replace(owner, boot_id8="00000000")).is_dead()


def test_liveness_check_outlives_its_process(writer):
    process, owner = writer
    liveness = LivenessCheck(owner)
    process.kill()
    process.wait()
    assert liveness.is_dead()
    liveness.close()
    liveness.close()
    assert liveness.is_dead(), "closed, it asks as if for the first time"


def test_liveness_check_gives_its_descriptor_back(writer):
    _, owner = writer
    before = len(os.listdir("/proc/self/fd"))
    liveness = LivenessCheck(owner)
    assert len(os.listdir("/proc/self/fd")) == before + 1
    liveness.close()
    stale = LivenessCheck(dataclasses.replace(owner, start_ticks=1))
    assert len(os.listdir("/proc/self/fd")) == before
    stale.close()


def test_without_pidfds_the_start_time_decides(writer, monkeypatch):
    process, owner = writer

    def refuse(pid):
        raise PermissionError(1, "as a seccomp filter would")

    monkeypatch.setattr(os, "pidfd_open", refuse)
    assert not LivenessCheck(owner).is_dead()
    assert not is_dead(owner)
    assert is_dead(dataclasses.replace(owner, start_ticks=owner.start_ticks + 1))
    process.kill()
    process.wait()
    assert is_dead(owner)


def test_child_of_a_fork_is_another_owner():
    script = REPORT + (
        "import os, sys\n"
        "pid = os.fork()\n"
        "if pid == 0:\n    print(repr(Owner.current()), flush=True)\n    os._exit(0)\n"
        "os.waitpid(pid, 0)\n"
    )
    parent, child = map(eval, run_script([], script).splitlines())
    assert parent.pid != child.pid
    assert child.pid_namespace == parent.pid_namespace


@pytest.mark.root
@needs_root
def test_reboot(tmp_path):
    """The boot id is bound over in a mount namespace of its own, as a reboot would change it."""
    fake = tmp_path / "boot_id"
    fake.write_text("01234567-89ab-cdef-0123-456789abcdef\n")
    me = Owner.current()
    script = (
        "from flashckpt.store.owner import Owner, is_dead\n"
        f"print(is_dead({me!r}), Owner.current().boot_id8, is_dead(Owner.current()))\n"
    )
    bind = f'mount --bind {fake} {owner_module.BOOT_ID_PATH} && exec "$@"'
    assert run_script(["unshare", "-m", "sh", "-c", bind, "sh"], script).split() == ["True", "01234567", "False"]
    assert not is_dead(me)


@pytest.mark.root
@needs_root
def test_real_pid_reuse():
    """A pid namespace of its own, where the next pid can be chosen."""
    script = """
import os, time
from pathlib import Path
from flashckpt.store.owner import Owner, is_dead

def spawn():
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(writer, repr(Owner.current()).encode())
        time.sleep(600)
    os.close(writer)
    return eval(os.read(reader, 4096))

def end(owner):
    os.kill(owner.pid, 9)
    os.waitpid(owner.pid, 0)

first = spawn()
end(first)
tick = 1 / os.sysconf("SC_CLK_TCK")
while time.clock_gettime(time.CLOCK_BOOTTIME) < (first.start_ticks + 2) * tick:
    time.sleep(tick)
Path("/proc/sys/kernel/ns_last_pid").write_text(str(first.pid - 1))
second = spawn()
print(first.pid == second.pid, is_dead(first), is_dead(second))
end(second)
"""
    output = run_script(["unshare", "--pid", "--fork", "--mount-proc"], script)
    assert output.split() == ["True", "True", "False"]


@pytest.mark.root
@needs_root
def test_pid_namespace_with_the_outer_proc():
    """/proc still counts as the outer namespace: pids there are other processes."""
    script = (
        "from flashckpt.store.owner import Owner, is_dead\n"
        f"me = Owner.current(); print(me.pid, is_dead(me), is_dead({Owner.current()!r}))\n"
    )
    assert run_script(["unshare", "--pid", "--fork"], script).split() == ["1", "False", "False"]


@pytest.mark.root
@needs_root
def test_time_namespace_does_not_make_the_living_look_dead(writer):
    _, owner = writer
    script = f"from flashckpt.store.owner import Owner, is_dead\nprint(is_dead({owner!r}), is_dead(Owner.current()))\n"
    output = run_script(["unshare", "-T", "--boottime", "86400", "--fork"], script)
    assert output.split() == ["False", "False"]


def test_how_a_dead_process_ended_is_known(writer):
    """Before its parent has asked for it from /proc; afterwards from the descriptor, where the kernel keeps it."""
    process, owner = writer
    liveness = LivenessCheck(owner)
    assert liveness.exit_code() is None
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert liveness.is_dead()
    assert liveness.exit_code() == -signal.SIGKILL
    process.wait()
    release = tuple(int(part) for part in os.uname().release.split("-")[0].split(".")[:2])
    assert liveness.exit_code() == (-signal.SIGKILL if release >= (6, 15) else None)
    liveness.close()
    assert liveness.exit_code() is None
