"""The demo's story as tables: every loss of the three launches side by side, then what it cost."""

from __future__ import annotations

from statistics import mean
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from flashckpt.store.room import format_bytes

if TYPE_CHECKING:
    from rich.console import Console

    from flashckpt.demo.job import Event, Run
    from flashckpt.demo.scenario import Outcome

_SAVE_STAGES = ("plan", "claim", "copy", "seal")
_LOAD_STAGES = ("inventory", "plan", "read")


def print_report(outcome: Outcome, console: Console) -> None:
    console.print()
    console.print(_losses(outcome))
    console.print()
    console.print(_saves(outcome))
    console.print()
    console.print(_restart(outcome))
    console.print()
    _verdict(outcome, console)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for index, name in enumerate(columns):
        table.add_column(name, justify="left" if index == len(columns) - 1 else "right", no_wrap=True)
    return table


def _losses(outcome: Outcome) -> Table:
    table = _table("loss at each step", "step", "uninterrupted", "before the kill", "after the resume", "")
    whole, killed, resumed = (run.losses() for run in (outcome.whole, outcome.killed, outcome.resumed))
    last_before = max(killed, default=0)
    sealed = set(outcome.killed.saved_steps()) | set(outcome.resumed.saved_steps())
    for step in sorted(whole.keys() | killed.keys() | resumed.keys()):
        remarks = Text()
        if step in sealed:
            remarks.append("snapshot  ", "cyan")
        if step == outcome.resumed_step:
            remarks.append("resumed from here  ", "green")
        if step == last_before:
            remarks.append("killed here", "bold red")
        expected = whole.get(step)
        table.add_row(
            str(step),
            _loss(expected, expected),
            _loss(killed.get(step), expected),
            _loss(resumed.get(step), expected),
            remarks,
        )
    return table


def _loss(exact: str | None, expected: str | None) -> Text:
    if exact is None:
        return Text("")
    same = exact == expected
    return Text(f"{float.fromhex(exact):.9f}" + ("" if same else f" ≠ ({exact})"), "" if same else "bold red")


def _saves(outcome: Outcome) -> Table:
    table = _table("save, per rank, in ms", "", *_SAVE_STAGES, "total", "size", "copied at")
    new: list[Event] = []
    warm: list[Event] = []
    for run in (outcome.killed, outcome.resumed):
        # A rank writes into two slots in turn: from its third save on, memory is allocated, touched and mapped.
        steps = sorted({event.step for event in run.of("saved")})
        for event in run.of("saved"):
            if event.details["outcome"] == "ok":
                (new if event.step in steps[:2] else warm).append(event)
    kinds = (("first two of a launch", new), ("every later one", warm))
    for name, events in kinds:
        if events:
            stages = [mean(event.details["timings"][stage] for event in events) for stage in _SAVE_STAGES]
            size = mean(event.details["size_bytes"] for event in events)
            table.add_row(
                name,
                *(f"{seconds * 1e3:.1f}" for seconds in (*stages, sum(stages))),
                format_bytes(round(size)),
                f"{size / stages[2] / 1e9:.1f} GB/s" if stages[2] else "",
            )
    return table


def _restart(outcome: Outcome) -> Table:
    table = _table("from the restart to the first new step, in s", "", "")
    table.show_header = False
    run = outcome.resumed
    ready, loaded = run.first("ready"), run.first("loaded")
    first = next((event for event in run.events if event.kind == "step" and event.rank == 0), None)
    if ready is None or loaded is None or first is None:
        return table
    timings = [event.details["timings"] for event in run.of("loaded")]
    stages = ", ".join(f"{stage} {_slowest(timings, stage) * 1e3:.1f}" for stage in _LOAD_STAGES)
    size = sum(event.details["size_bytes"] for event in _last_save(outcome.killed, loaded.step))
    table.add_row(f"{ready.at - run.started_at:.2f}", "torchrun, imports, process group, model")
    table.add_row(
        f"{loaded.at - ready.at:.3f}",
        f"load of step {loaded.step} from {loaded.details['source']}, {format_bytes(size)} in all (ms: {stages})",
    )
    table.add_row(f"{first.at - loaded.at:.2f}", f"step {first.step}")
    table.add_row(f"{first.at - run.started_at:.2f}", "restart to first step")
    return table


def _slowest(timings: list[dict[str, float]], stage: str) -> float:
    return max((one[stage] for one in timings), default=0.0)


def _last_save(run: Run, step: int) -> list[Event]:
    return [event for event in run.of("saved") if event.step == step]


def _verdict(outcome: Outcome, console: Console) -> None:
    if outcome.problems:
        for problem in outcome.problems:
            console.print(Text(f"  - {problem}", "red"))
        console.print(Text(f"NOT IDENTICAL: {len(outcome.problems)} differences to the uninterrupted run", "bold red"))
        return
    lost = max(outcome.killed.losses()) - (outcome.resumed_step or 0)
    console.print(
        Text(
            f"IDENTICAL: killed {outcome.killed.killed_processes} processes after step "
            f"{max(outcome.killed.losses())}, resumed from step {outcome.resumed_step} in memory, repeated "
            f"{lost} step{'' if lost == 1 else 's'}; all {len(outcome.whole.losses())} losses and the final weights "
            f"(blake2b {outcome.whole.digest}) equal the uninterrupted run bit for bit",
            "bold green",
        )
    )
