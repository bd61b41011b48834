"""Fixtures that every kind of test shares: a memory directory of its own, and processes that end with the test."""

from __future__ import annotations

import collections
import gc
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.s3_server import s3_server

ROOT = Path(__file__).parent.parent

# What is about tensors, formats and slots needs no agent; tests of agents ask for one. So none is left behind.
os.environ["FLASHCKPT_AGENT"] = "off"
# Every overlapped save of a test is checked by checksums: also for what torch's version counters do not show.
os.environ["FLASHCKPT_VERIFY"] = "recheck"

# What an example takes says more about the machine's load than about the code.
settings.register_profile("flashckpt", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("flashckpt")


@pytest.fixture
def memory_dir():
    path = tempfile.mkdtemp(prefix="flashckpt-test-", dir="/dev/shm")
    yield path
    shutil.rmtree(path, ignore_errors=True)


def count_objects():
    """How many there are of each type in this process."""
    gc.collect()
    kinds = (type(one) for one in gc.get_objects())
    return collections.Counter(f"{kind.__module__}.{kind.__qualname__}" for kind in kinds)


def environment(**extra):
    """Of a test's child: ours, importable from anywhere, without a setting that the outer shell may have."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("FLASHCKPT_")}
    return {
        **kept,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "FLASHCKPT_AGENT": "off",
        "FLASHCKPT_VERIFY": "recheck",
        **extra,
    }


def torchrun(ranks, script, *arguments, timeout=400, launcher=(), **extra):
    """Runs a script on `ranks` real trainers; the whole process group is gone when this returns."""
    command = [sys.executable, "-u", "-W", "ignore", "-m", "tests.warm_torchrun", "--standalone"]
    command += [f"--nproc-per-node={ranks}", *launcher, str(script), *map(str, arguments)]
    child = subprocess.Popen(
        command,
        env=environment(**extra),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = child.communicate(timeout=timeout)
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    return child.returncode, output


def run_python(code, *arguments, timeout=120, **extra):
    """Runs a snippet in a fresh interpreter."""
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        env=environment(**extra),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


@pytest.fixture(scope="session")
def s3_endpoint(tmp_path_factory):
    """A real S3-compatible server; the test is skipped where none is installed."""
    pytest.importorskip("moto")
    pytest.importorskip("s3fs")
    with s3_server(tmp_path_factory.mktemp("s3") / "log") as endpoint:
        yield endpoint


@pytest.fixture(name="torchrun")
def _torchrun():
    return torchrun


@pytest.fixture(name="run_python")
def _run_python():
    return run_python


@pytest.fixture(name="run_on_sim")
def _run_on_sim():
    """Runs a snippet or a function in a fresh interpreter that has the simulated accelerator."""
    from tests.simdev.runner import run_on_sim  # not above: it imports torch, which most tests of agents do without

    return run_on_sim
