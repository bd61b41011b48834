"""What importing the credentials costs, in a fresh interpreter."""

from __future__ import annotations

import subprocess
import sys


def test_the_module_alone_imports_nothing_heavy():
    heavy = {"cryptography", "grpc", "numpy", "torch"}
    code = f"import sys, flashckpt.rpc.credentials; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
