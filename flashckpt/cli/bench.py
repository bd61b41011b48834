"""Implements `flashckpt bench`: runs the benchmarks of the source tree."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import click

from flashckpt.cli.entry import NOTHING_FOUND
from flashckpt.cli.output import note

_ROOT = Path(__file__).resolve().parents[2]


@click.command("bench", context_settings={"ignore_unknown_options": True, "help_option_names": []})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def command(arguments: tuple[str, ...]) -> None:
    """Measure save and load on this machine. Arguments are passed to the benchmark; try --help."""
    if not (_ROOT / "bench" / "__main__.py").is_file():
        note("the benchmarks are not part of the installed package")
        note("hint: get the source tree of flashckpt and run `make bench` in it")
        sys.exit(NOTHING_FOUND)
    # -P: do not run a `bench` in the user's directory instead. Paths in the arguments are still relative to it.
    path = os.pathsep.join([str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-P", "-m", "bench", *arguments]
    sys.exit(subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, check=False).returncode)
