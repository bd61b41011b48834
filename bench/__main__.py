"""`python -m bench`: measure, show, and say whether the bars are met."""

from __future__ import annotations

import io
import json
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bench import machine
from bench.errors import BenchError
from bench.report import Report, as_json, show
from bench.rows import make_rows
from bench.run import Run, Section
from bench.samples import Samples
from bench.scratch import scratch_directory
from bench.sections import Options, plan_sections
from bench.slowdown import Loop
from bench.spec import parse_size

if TYPE_CHECKING:
    from bench.machine import Machine

_WIDTH = 140  # of the table in a file or a pipe


def _size(_: click.Context, __: click.Parameter, value: str | None) -> int | None:
    try:
        return None if value is None else parse_size(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from error


@click.command()
@click.option("--size", callback=_size, help="Bytes of the large state, e.g. 512M. Default 1G, with --quick 128M.")
@click.option("--rounds", type=click.IntRange(1), help="Rounds of steady saves and loads. Default 9, with --quick 3.")
@click.option("--quick", is_flag=True, help="A smaller state and fewer rounds: does it run, not how fast.")
@click.option("--only", multiple=True, metavar="SECTION", help="Only sections whose name starts so; repeatable.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write every figure to this file.")
@click.option("--text", "text_file", type=click.Path(path_type=Path), help="Write the tables to this file.")
@click.option("--strict", is_flag=True, help="End with status 1 when a bar is missed.")
def main(
    size: int | None,
    rounds: int | None,
    quick: bool,
    only: tuple[str, ...],
    json_file: Path | None,
    text_file: Path | None,
    strict: bool,
) -> None:
    """Measures saving and loading on this machine, against memcpy, dcp.save and others."""
    options = Options(
        size_bytes=size or (128 << 20 if quick else 1 << 30),
        rounds=rounds or (3 if quick else 9),
        first_rounds=2 if quick else 3,
        small_tensors=2_000 if quick else 20_000,
        loop=Loop(interval_seconds=1.0, saves=1) if quick else Loop(interval_seconds=3.0, saves=2),
    )
    sections = [one for one in plan_sections(options) if not only or one.name.startswith(only)]
    if not sections:
        raise click.BadParameter(f"no section starts with {' or '.join(only)}", param_hint="--only")
    try:
        report = _measure(options, sections, machine.describe())
    except BenchError as error:
        print(f"bench: {error}", file=sys.stderr)
        sys.exit(2)
    if json_file is not None:
        json_file.write_text(json.dumps(as_json(report), indent=1) + "\n")
    if text_file is not None:
        text = io.StringIO()
        show(report, Console(file=text, width=_WIDTH))
        text_file.write_text("\n".join(line.rstrip() for line in text.getvalue().splitlines()) + "\n")
    console = Console()
    show(report, console if console.is_terminal else Console(width=_WIDTH))
    sys.exit(1 if strict and report.missed else 0)


def _measure(options: Options, sections: list[Section], described: Machine) -> Report:
    quietness = machine.Quietness()
    began = time.monotonic()
    samples = Samples()
    columns = (TextColumn("{task.description:<40}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with (
        scratch_directory() as directory,
        Progress(*columns, console=Console(stderr=True), transient=True) as progress,
    ):
        task = progress.add_task("starting", total=sum(section.steps for section in sections) + 1)

        def tell(doing: str) -> None:
            progress.update(task, advance=1, description=doing)

        run = Run(directory, samples, quietness, tell)
        for section in sections:
            section.measure(run)
    return Report(
        machine=described,
        options=options,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        duration=time.monotonic() - began,
        others_share=quietness.others_share(),
        samples=samples,
        rows=make_rows(samples),
    )


if __name__ == "__main__":
    main()
