"""`flashckpt bench`: runs the benchmarks of the source tree."""

from __future__ import annotations

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
    """Measure save and load on this machine. Arguments go to the benchmark; try --help."""
    if not (_ROOT / "bench" / "__main__.py").is_file():
        note("the benchmarks are not part of the installed package")
        note("hint: get the source tree of flashckpt and run `make bench` in it")
        sys.exit(NOTHING_FOUND)
    # Where the benchmarks are, not where the user is: a `bench` of his own must not be run instead.
    sys.exit(subprocess.run([sys.executable, "-m", "bench", *arguments], cwd=_ROOT, check=False).returncode)
