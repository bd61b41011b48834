"""Implements `flashckpt demo`."""

from __future__ import annotations

import sys
from pathlib import Path

import click


@click.command("demo")
@click.option(
    "--nodes", type=click.IntRange(min=2), default=4, show_default=True, help="Number of nodes, with one rank each."
)
@click.option("--steps", type=click.IntRange(min=1), default=30, show_default=True, help="Number of training steps.")
@click.option("--every", type=click.IntRange(min=1), default=5, show_default=True, help="Steps between checkpoints.")
@click.option(
    "--lose", type=click.IntRange(min=0), default=2, show_default=True, help="Number of the node that is lost."
)
@click.option("--lose-at", type=click.IntRange(min=1), help="Step after which it is lost, between two checkpoints.")
@click.option("--memory-dir", envvar="FLASHCKPT_MEMORY_DIR", help="The demo makes its own directory beside it.")
@click.option("--plain", is_flag=True, help="Lines only, without live table and colours. Default if stdout is a file.")
def command(
    nodes: int, steps: int, every: int, lose: int, lose_at: int | None, memory_dir: str | None, plain: bool
) -> None:
    """Train a small FSDP2 transformer on several nodes (all on this machine), destroy one of them with its memory, put
    a blank one in its place, resume from the memory of the others, and prove that every loss and the final weights are
    bit for bit those of a run that was never interrupted."""
    from flashckpt.cli.entry import FAILED, OK
    from flashckpt.cli.output import make_console
    from flashckpt.demo.report import print_report
    from flashckpt.demo.scenario import Plan, play
    from flashckpt.demo.screen import Screen
    from flashckpt.store.default_place import own_place

    root = Path(memory_dir or own_place()).parent
    plan = Plan(nodes=nodes, steps=steps, every=every, lose=lose, lose_at=lose_at, memory_root=root)
    console = make_console(plain=plain)
    outcome = play(plan, Screen(console, live=console.is_terminal and not plain))
    print_report(outcome, console)
    sys.exit(FAILED if outcome.problems else OK)
