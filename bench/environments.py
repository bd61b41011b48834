"""A virtual environment for each contender that is not part of the development environment.

Made on first use below a cache directory that git ignores, from the pinned list in bench/locks/. torch and the rest of
the development environment are shared with it, so that everybody runs on the same torch, and an environment takes
seconds and a few MB. What can't be installed is left out with the reason.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import time
import venv
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_ROOT = Path(__file__).resolve().parent.parent
LOCKS = _ROOT / "bench" / "locks"
CACHE_VARIABLE = "FLASHCKPT_BENCH_CACHE"
_DEADLINE = 600.0  # seconds for one environment; ml-flashpoint compiles
_REMEMBERED = 3600.0  # seconds that a failure counts: the network may be back by then
_REASON_CHARACTERS = 160


@dataclass(frozen=True, slots=True)
class Ready:
    python: Path


@dataclass(frozen=True, slots=True)
class Unavailable:
    reason: str


def cache_directory() -> Path:
    return Path(os.environ.get(CACHE_VARIABLE) or _ROOT / ".bench-cache")


def prepare(name: str, note: Callable[[str], None] = lambda _: None) -> Ready | Unavailable:
    """Makes the environment of that lock file, unless it exists. A failure is remembered for a while, or until the
    list changes. `note` is told before something is installed."""
    lock = LOCKS / f"{name}.txt"
    directory = cache_directory() / name
    stamp, failure = directory / "installed", directory / "failed"
    wanted = f"{sys.version}\n{_shared_packages()}\n{lock.read_text()}"
    if stamp.is_file() and stamp.read_text() == wanted:
        return Ready(directory / "bin" / "python")
    if failure.is_file() and time.time() - failure.stat().st_mtime < _REMEMBERED:
        remembered, _, reason = failure.read_text().partition("\n\n")
        if remembered == wanted.strip():
            return Unavailable(reason)
    note(f"installing {name}")
    shutil.rmtree(directory, ignore_errors=True)
    venv.EnvBuilder(with_pip=True, symlinks=True).create(directory)
    python = directory / "bin" / "python"
    packages = directory / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    # Appended to the path: what the environment itself has comes first.
    (packages / "shared-with-flashckpt.pth").write_text(_shared_packages() + "\n")
    try:
        done = subprocess.run(
            [python, "-m", "pip", "install", "--disable-pip-version-check", "--no-deps", "-r", lock],
            capture_output=True,
            text=True,
            check=False,
            timeout=_DEADLINE,
        )
        output, installed = done.stdout + done.stderr, done.returncode == 0
    except subprocess.TimeoutExpired:
        output, installed = f"not installed within {_DEADLINE:.0f} s", False
    if not installed:
        reason = "can't be installed: " + why_pip_failed(output)
        failure.write_text(f"{wanted.strip()}\n\n{reason}")
        return Unavailable(reason)
    stamp.write_text(wanted)
    return Ready(python)


def why_pip_failed(output: str) -> str:
    """The first line that names the cause, which pip prints far above its last one."""
    lines = [line.strip() for line in output.splitlines()]
    for mark in ("fatal:", "CMake Error", "error:", "ERROR:"):
        for line in lines:
            if mark in line and "subprocess-exited-with-error" not in line:
                return line[:_REASON_CHARACTERS]
    return lines[-1][:_REASON_CHARACTERS] if lines else "pip said nothing"


def _shared_packages() -> str:
    return sysconfig.get_paths()["purelib"]
