"""Finding checkpoints in a process that never imports torch."""

from __future__ import annotations

import subprocess
import sys

from tests.unit.test_discover import tree

__all__ = ["tree"]  # the fixture


def test_no_torch_is_needed(tree):
    code = "import sys, flashckpt; print(flashckpt.peek(sys.argv[1])); sys.exit('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code, str(tree)], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (0, "30\n"), result.stderr
