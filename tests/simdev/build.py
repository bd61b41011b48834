"""Builds the simulated accelerator's library once and keeps it under build/simdev."""

from __future__ import annotations

import concurrent.futures
import fcntl
import hashlib
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

_HERE = Path(__file__).parent
_BUILDS = _HERE.parent.parent / "build" / "simdev"
_TORCH = Path(torch.__file__).parent
# Torch's headers are system headers here: its warnings are not ours. -O0 compiles fastest, and copies are memcpy's.
_FLAGS = [
    "-std=c++20",
    "-O0",
    "-fPIC",
    "-pthread",
    "-Wall",
    "-Wextra",
    f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",
    "-isystem",
    str(_TORCH / "include"),
]
_LINK = ["-shared", "-pthread", f"-L{_TORCH / 'lib'}", "-lc10", "-ltorch_cpu"]


def library(sources: Path = _HERE, builds: Path = _BUILDS) -> Path:
    """Return the path of the library. Builds it if these sources were not built yet with this torch and compiler.

    Processes that call this at the same time wait for the one that builds.
    """
    compiler = shlex.split(os.environ.get("CXX", "g++"))
    directory = builds / _key(compiler, sources)
    built = directory / "libsimdev.so"
    if built.exists():
        return built
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not built.exists():
            _build(compiler, sorted(sources.glob("*.cpp")), built)
    return built


def _key(compiler: list[str], sources: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted([*sources.glob("*.cpp"), *sources.glob("*.h")]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    version = _run([*compiler, "--version"])
    # The path of torch is in the key as the flags name it, so that no library is used with another torch's headers.
    for part in (torch.__version__, sys.version, version, *_FLAGS, *_LINK):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()[:16]


def _build(compiler: list[str], sources: list[Path], built: Path) -> None:
    with tempfile.TemporaryDirectory(dir=built.parent) as scratch:
        objects = [Path(scratch) / f"{source.stem}.o" for source in sources]
        commands = [
            [*compiler, *_FLAGS, "-c", str(source), "-o", str(target)]
            for source, target in zip(sources, objects, strict=True)
        ]
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(_run, commands))
        finished = Path(scratch) / built.name
        _run([*compiler, *map(str, objects), *_LINK, "-o", str(finished)])
        finished.replace(built)  # complete or not there: readers look without the lock


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise RuntimeError(
            f"building the simulated accelerator needs a C++ compiler: {command[0]} not found; set CXX"
        ) from error
    if done.returncode != 0:
        raise RuntimeError(f"building the simulated accelerator failed: {shlex.join(command)}\n{done.stderr}")
    return done.stdout
