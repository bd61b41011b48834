"""Prints the end of the demo: losses side by side around the break, the cost, and the verdict."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from flashckpt.store.room import format_bytes

if TYPE_CHECKING:
    from rich.console import Console

    from flashckpt.demo.scenario import DemoOutcome

_AROUND = 2  # steps that are shown before and after the repeated ones


def print_report(outcome: DemoOutcome, console: Console) -> None:
    console.print()
    console.print(_losses(outcome))
    console.print()
    console.print(_costs(outcome))
    console.print()
    _verdict(outcome, console)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for index, name in enumerate(columns):
        table.add_column(name, justify="left" if index == len(columns) - 1 else "right", no_wrap=True)
    return table


def _base(outcome: DemoOutcome) -> int:
    said = outcome.resumed.resumed(outcome.facts.lost_rank)
    return 0 if said is None else said.step


def _losses(outcome: DemoOutcome) -> Table:
    table = _table(
        "loss around the break, all digits", "step", "uninterrupted", "before the loss", "after the resume", ""
    )
    whole, broken, resumed = (run.losses(0) for run in (outcome.whole, outcome.broken, outcome.resumed))
    base, reached, last = _base(outcome), max(broken, default=0), outcome.plan.steps
    near = range(max(1, base - _AROUND + 1), min(last, reached + _AROUND) + 1)
    for step in [*near, *([last] if last not in near else [])]:
        if step == last and step - 1 not in near and step not in near:
            table.add_row("…")
        remarks = Text()
        if step == base:
            remarks.append("resumed from ", "green")
        if step == reached:
            remarks.append("node lost", "bold red")
        expected = whole.get(step)
        losses = (_loss(run.get(step), expected) for run in (whole, broken, resumed))
        table.add_row(str(step), *losses, remarks)
    return table


def _loss(loss: str | None, expected: str | None) -> Text:
    if loss is None:
        return Text("")
    same = loss == expected
    return Text(loss if same else f"≠ {loss}", "" if same else "bold red")


def _costs(outcome: DemoOutcome) -> Table:
    table = _table("what the loss of the node cost", "", "")
    table.show_header = False
    cost, resumed = outcome.cost, outcome.resumed
    said = resumed.resumed(outcome.facts.lost_rank)
    first = resumed.first_after(0)
    again = resumed.first_after(outcome.broken.furthest)
    table.add_row(f"{cost.restarted_at - cost.lost_at:.2f} s", "until the first rank had missed its peer")
    if said is not None and first is not None and again is not None:
        started = first.at - cost.restarted_at - said.seconds
        table.add_row(f"{started:.2f} s", "processes, imports, process group, model, first step")
        table.add_row(f"{said.seconds:.2f} s", f"load of step {said.step} on the blank node")
        table.add_row(f"{again.at - first.at:.2f} s", f"from step {first.step} to step {again.step}")
        table.add_row(f"{again.at - cost.lost_at:.2f} s", "in all, from the loss to a step further than before")
    table.add_row(format_bytes(cost.lost_bytes), "of memory lost with the node")
    if cost.healed_bytes:
        table.add_row(format_bytes(cost.healed_bytes), "of replicas copied to its successor while training continued")
    return table


def _verdict(outcome: DemoOutcome, console: Console) -> None:
    if outcome.problems:
        for problem in outcome.problems:
            console.print(Text(f"  - {problem}", "red"))
        console.print(Text(f"NOT IDENTICAL: {len(outcome.problems)} differences to the uninterrupted run", "bold red"))
        return
    repeated = outcome.broken.furthest - _base(outcome)
    console.print(
        Text(
            f"IDENTICAL: a node lost with its memory after step {outcome.broken.furthest}, resumed from step "
            f"{_base(outcome)} out of its buddy's memory, {repeated} step{'' if repeated == 1 else 's'} repeated; all "
            f"{outcome.plan.steps} losses and the final weights of all {outcome.plan.nodes} ranks equal those of the "
            "uninterrupted run bit for bit",
            "bold green",
        )
    )
