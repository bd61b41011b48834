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
from bench.growth import FULL, QUICK
from bench.page import make_page
from bench.report import WIDE, show
from bench.result import Done, Report, as_json, from_json, merged
from bench.rows import make_rows
from bench.run import Run, Section
from bench.samples import Samples
from bench.scratch import scratch_directory
from bench.sections import OTHERS, Options, plan_sections
from bench.slowdown import Loop
from bench.spec import parse_size

if TYPE_CHECKING:
    from bench.machine import Machine

INTERRUPTED = "interrupted"
_WIDTH = WIDE  # of the table in a file or a pipe
_ONLY = "Only sections whose name starts so; repeatable, or with commas."
_WHO = "Compare with these only; repeatable. See bench/README.md for the names."
_WRITES = ("--out", "--json", "--text", "--html", "--png")
_OUT = click.Path(path_type=Path)
_IN = click.Path(path_type=Path, exists=True, dir_okay=False)


def _size(_: click.Context, __: click.Parameter, value: str | None) -> int | None:
    try:
        return None if value is None else parse_size(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from error


@click.command()
@click.option("--size", callback=_size, help="Bytes of the large state, e.g. 512M. Default 1G, with --quick 16M.")
@click.option("--rounds", type=click.IntRange(1), help="Rounds of steady saves and loads. Default 7, with --quick 2.")
@click.option("--quick", is_flag=True, help="A small state, few rounds, nothing to install: does it run, not how fast.")
@click.option("--only", multiple=True, metavar="SECTION", help=_ONLY)
@click.option("--contender", "contenders", multiple=True, metavar="NAME", type=click.Choice(OTHERS), help=_WHO)
@click.option("--visits", type=click.IntRange(1), help="Visits of each contender in the comparison. Default 3 (1).")
@click.option("--wait", type=click.FloatRange(0), help="Seconds to wait for a quiet machine, before each step.")
@click.option("--out", "directory", type=_OUT, help="Write all of the following into this directory.")
@click.option("--json", "json_file", type=_OUT, help="Write every figure to this file.")
@click.option("--text", "text_file", type=_OUT, help="Write the tables to this file.")
@click.option("--html", "html_file", type=_OUT, help="Write a page with tables and plots to this file.")
@click.option("--png", "png_directory", type=_OUT, help="Write the plots as pictures into this directory.")
@click.option("--show", "shown", type=_IN, multiple=True, help="Measure nothing; show the result in this JSON file.")
@click.option("--resume", is_flag=True, help="Keep what the JSON file has of complete sections; measure the others.")
@click.option("--strict", is_flag=True, help="End with status 1 when a bar is missed.")
def main(
    size: int | None,
    rounds: int | None,
    quick: bool,
    only: tuple[str, ...],
    contenders: tuple[str, ...],
    visits: int | None,
    wait: float | None,
    directory: Path | None,
    json_file: Path | None,
    text_file: Path | None,
    html_file: Path | None,
    png_directory: Path | None,
    shown: tuple[Path, ...],
    resume: bool,
    strict: bool,
) -> None:
    """Measures saving, loading and recovery on this machine: flashckpt, its limits, and every other library."""
    options = Options(
        size_bytes=size or (16 << 20 if quick else 1 << 30),
        rounds=rounds or (2 if quick else 7),
        first_rounds=1 if quick else 3,
        small_tensors=500 if quick else 20_000,
        loop=Loop(interval_seconds=0.2, saves=1) if quick else Loop(interval_seconds=3.0, saves=2),
        visits=visits or (1 if quick else 3),
        limit_seconds=60.0 if quick else 180.0,
        axes=QUICK if quick else FULL,
        is_quick=quick,
        contenders=contenders,
    )
    only = tuple(name.strip() for names in only for name in names.split(",") if name.strip())
    sections = [one for one in plan_sections(options) if not only or one.name.startswith(only)]
    if not sections:
        raise click.BadParameter(f"no section starts with {' or '.join(only)}", param_hint="--only")
    patience = (0.0 if quick else 20.0) if wait is None else wait
    if directory is not None:
        directory.mkdir(parents=True, exist_ok=True)
        json_file, text_file = json_file or directory / "result.json", text_file or directory / "result.txt"
        html_file, png_directory = html_file or directory / "index.html", png_directory or directory
    try:
        if shown:
            report = merged([_read(path) for path in shown])
        else:
            before = _resumed(json_file, options) if resume else None
            report = _measure(options, sections, machine.describe(), patience, json_file, before)
    except BenchError as error:
        print(f"bench: {error}", file=sys.stderr)
        sys.exit(2)
    if json_file is not None:
        _write(json_file, report)
    if text_file is not None:
        text = io.StringIO()
        show(report, Console(file=text, width=_WIDTH))
        text_file.write_text("\n".join(line.rstrip() for line in text.getvalue().splitlines()) + "\n")
    if html_file is not None:
        html_file.write_text(make_page(report))
    if png_directory is not None:
        from bench.picture import write_pictures  # matplotlib takes a second to import

        png_directory.mkdir(parents=True, exist_ok=True)
        write_pictures(report, png_directory)
    console = Console()
    show(report, console if console.is_terminal else Console(width=_WIDTH))
    if html_file is not None:
        print(f"the page: {html_file.resolve().as_uri()}")
    if any(one.problem != INTERRUPTED for one in report.incomplete):
        sys.exit(2)
    sys.exit(1 if strict and report.missed else 0)


def _read(path: Path) -> Report:
    return from_json(json.loads(path.read_text()))


def _write(path: Path, report: Report) -> None:
    """Whoever is killed while he writes leaves the result of before."""
    written = path.with_name(f".{path.name}.new")
    written.write_text(json.dumps(as_json(report), indent=1) + "\n")
    written.replace(path)


def _resumed(json_file: Path | None, options: Options) -> Report | None:
    """What an earlier run left in the file that this one writes."""
    if json_file is None:
        raise BenchError("--resume: expected --out or --json, found neither: there is nothing to go on from")
    if not json_file.is_file():
        return None
    before = _read(json_file)
    if before.options != options:
        raise BenchError(f"--resume: expected the options of {json_file}, found others; measure anew, or elsewhere")
    return before


def _measure(
    options: Options,
    sections: list[Section],
    described: Machine,
    patience: float,
    json_file: Path | None,
    before: Report | None,
) -> Report:
    """Section by section. What there is is written after each, so that whatever ends a run costs one section."""
    quietness = machine.Quietness()
    began = time.monotonic()
    samples, done = Samples(), list[Done]()

    def report() -> Report:
        interrupted = any(one.problem == INTERRUPTED for one in done)
        new = Report(
            machine=described,
            options=options,
            date=datetime.now(UTC).isoformat(timespec="seconds"),
            duration=time.monotonic() - began,
            others_share=quietness.others_share(),
            samples=samples,
            rows=make_rows(samples),
            command=what_was_measured(sys.argv[1:]) + ("  # interrupted" if interrupted else ""),
            done=tuple(done),
        )
        return new if before is None else merged([before, new])

    if before is not None:
        sections = [section for section in sections if section.name not in before.complete]
        if not sections:
            return before
        report()  # raises for another machine, before any time is spent
    columns = (TextColumn("{task.description:<40}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with (
        scratch_directory() as directory,
        Progress(*columns, console=Console(stderr=True), transient=True) as progress,
    ):
        task = progress.add_task("starting", total=sum(section.steps for section in sections) + 1)

        def note(doing: str, *, advance: int = 0) -> None:
            progress.update(task, advance=advance, description=doing)
            if not progress.console.is_terminal:  # a log shows how far it is, too
                print(f"{time.monotonic() - began:7.1f} s  {doing}", file=sys.stderr, flush=True)

        def tell(doing: str) -> None:
            note(doing, advance=1)
            machine.wait_until_quiet(patience)

        run = Run(directory, samples, quietness, tell, note)
        for section in sections:
            started = time.monotonic()
            problem = _problem_of(section, run)
            done.append(Done(section.name, time.monotonic() - started, problem))
            if problem == INTERRUPTED:  # an hour's figures are worth showing
                break
            if json_file is not None:
                _write(json_file, report())
    return report()


def _problem_of(section: Section, run: Run) -> str:
    """Why the section did not come to its end; the others are measured all the same."""
    try:
        section.measure(run)
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception as error:  # of whatever kind: what was measured before is not lost for it
        run.clear()
        run.note(f"{section.name} failed: {error}")
        lines = [line for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        return lines[-1].strip()
    return ""


def what_was_measured(arguments: list[str]) -> str:
    """The command without where its result went, which is nobody else's business."""
    kept, skip = [], False
    for argument in arguments:
        name, _, value = argument.partition("=")
        if skip or name in _WRITES:
            skip = not skip and not value
            continue
        kept.append(argument)
    return " ".join(["python -m bench", *kept])


if __name__ == "__main__":
    main()
