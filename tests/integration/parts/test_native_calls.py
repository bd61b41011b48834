"""The compiled core and its twin, each in a fresh interpreter."""

from __future__ import annotations

import os
import subprocess
import sys


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )


def test_the_twin_serves_when_asked_for_with_one_warning() -> None:
    code = "import flashckpt.native as n; print(n.IS_NATIVE, n.kernels(), n.crc32c(b'123456789'))"
    done = run_python(code, FLASHCKPT_NATIVE="0")
    assert done.stdout.split("\n")[0] == "False ['numpy'] 3808858755"
    assert done.stderr.count("FLASHCKPT_NATIVE=0") == 1


def test_the_twin_serves_when_nothing_is_compiled() -> None:
    code = "import sys; sys.modules['flashckpt.native._core'] = None; import flashckpt.native as n; print(n.IS_NATIVE)"
    done = run_python(code)
    assert done.stdout == "False\n"
    assert done.stderr.count("Python implementation of the native core") == 1


def test_the_compiled_core_needs_neither_numpy_nor_torch() -> None:
    code = "import sys, flashckpt.native as n; print(n.IS_NATIVE, {'numpy', 'torch'} & set(sys.modules))"
    assert run_python(code).stdout == "True set()\n"
