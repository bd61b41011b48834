"""`flashckpt demo`."""

from __future__ import annotations

import sys
from pathlib import Path

import click


@click.command("demo")
@click.option("--ranks", type=click.IntRange(min=1), default=2, show_default=True, help="Trainer processes.")
@click.option("--steps", type=click.IntRange(min=1), default=20, show_default=True, help="Training steps in all.")
@click.option("--every", type=click.IntRange(min=1), default=4, show_default=True, help="Steps between snapshots.")
@click.option("--kill-at", type=click.IntRange(min=1), help="Step at which the job is killed, between two snapshots.")
@click.option("--memory-dir", envvar="FLASHCKPT_MEMORY_DIR", help="The demo makes a directory of its own beside it.")
@click.option("--plain", is_flag=True, help="No colours.")
def command(ranks: int, steps: int, every: int, kill_at: int | None, memory_dir: str | None, plain: bool) -> None:
    """Train a small FSDP2 model twice, kill the second run with SIGKILL, resume it from memory, and prove that
    every loss and the final weights are bit for bit those of the first."""
    from flashckpt.cli.entry import FAILED, OK
    from flashckpt.cli.output import make_console
    from flashckpt.config import DEFAULT_MEMORY_DIR
    from flashckpt.demo.report import print_report
    from flashckpt.demo.scenario import Plan, play

    parent = Path(memory_dir or DEFAULT_MEMORY_DIR).parent
    plan = Plan(ranks=ranks, steps=steps, every=every, kill_at=kill_at, parent=parent)
    outcome = play(plan, lambda text: click.echo(text, err=True))
    print_report(outcome, make_console(plain=plain))
    sys.exit(FAILED if outcome.problems else OK)
