"""torchrun, but its workers are forks of a launcher that has imported torch once: a rank costs a fork, not an import.

    python -m tests.warm_torchrun --standalone --nproc-per-node=4 script.py ARGUMENT...

The elastic agent is torch's own; only how it starts a worker differs. That jobs run under the real command is shown by
tests of clusters, of the demo and of the examples.
"""

from __future__ import annotations

import atexit
import os
import sys
import types
import uuid
from pathlib import Path

import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.run
import torch.distributed.tensor.parallel
from torch import _dynamo  # noqa: F401  every optimizer imports it at its first step
from torch.distributed.launcher.api import elastic_launch


def work(script: str, *arguments: str) -> None:
    """Does in a forked worker what `python script arguments` would do."""
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).parent)
    # Processes that the script spawns look for it there.
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    module.__file__ = script
    atexit._clear()  # what the launcher has to do at its end
    try:
        exec(compile(Path(script).read_text(), script, "exec"), module.__dict__)
    finally:
        atexit._run_exitfuncs()  # multiprocessing leaves them out
        sys.stdout.flush()


def main() -> None:
    options = torch.distributed.run.parse_args(sys.argv[1:])
    if options.standalone:
        options.rdzv_backend, options.rdzv_endpoint, options.rdzv_id = "c10d", "localhost:0", str(uuid.uuid4())
    config, _, _ = torch.distributed.run.config_from_args(options)
    config.start_method = "fork"
    script = os.path.abspath(options.training_script)
    elastic_launch(config, work)(script, *options.training_script_args)


if __name__ == "__main__":
    main()
