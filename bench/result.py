"""A result as a file: everything a report is made of, so that it can be shown again without measuring again."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bench.errors import BenchError
from bench.growth import Axes
from bench.machine import Machine
from bench.rows import make_rows
from bench.samples import Samples, unit_of
from bench.sections import Options
from bench.slowdown import Loop

if TYPE_CHECKING:
    from bench.rows import Row

JSON_VERSION = 2


@dataclass(frozen=True, slots=True)
class Done:
    """A section that ran."""

    section: str
    seconds: float
    problem: str = ""  # why it did not come to its end


@dataclass(frozen=True, slots=True)
class Report:
    machine: Machine
    options: Options
    date: str
    duration: float  # seconds
    others_share: float  # of all CPU time, used by processes that are not ours
    samples: Samples
    rows: list[Row]
    command: str = ""
    done: tuple[Done, ...] = ()

    @property
    def missed(self) -> list[Row]:
        return [row for row in self.rows if row.met is False]

    @property
    def incomplete(self) -> list[Done]:
        return [one for one in self.done if one.problem]

    @property
    def complete(self) -> set[str]:
        return {one.section for one in self.done if not one.problem}


def as_json(report: Report) -> dict[str, Any]:
    samples = report.samples
    return {
        "version": JSON_VERSION,
        "command": report.command,
        "date": report.date,
        "duration_seconds": round(report.duration, 1),
        "others_cpu_share": round(report.others_share, 4),
        "machine": dataclasses.asdict(report.machine),
        "options": dataclasses.asdict(report.options),
        "sections": [dataclasses.asdict(one) | {"seconds": round(one.seconds, 1)} for one in report.done],
        "rows": [dataclasses.asdict(row) | {"met": row.met} for row in report.rows],
        "samples": [
            {
                "section": section,
                "contender": contender,
                "measure": measure,
                "unit": unit_of(section, measure),
                "state_bytes": samples.state_bytes[section],
                "values": [round(value, 6) for value in series.values],
            }
            for section, contender, measure, series in samples
        ],
        "saves": samples.saves,
        "ratios": [
            {"section": s, "contender": c, "measure": m, "other": o, "values": [round(value, 4) for value in values]}
            for (s, c, m, o), values in samples.ratios.items()
        ],
        "left_out": _listed(samples.left_out),
        "broken_off": _listed(samples.broken_off),
        "isolated": _listed(samples.isolated),
        "growth": [
            {"axis": axis, "measure": measure, "x": x, "values": [round(value, 6) for value in values]}
            for (axis, measure), points in samples.growth.items()
            for x, values in points.items()
        ],
    }


def from_json(told: dict[str, Any]) -> Report:
    """Raises BenchError for a file of another version."""
    if told.get("version") != JSON_VERSION:
        raise BenchError(f"result: expected version {JSON_VERSION}, found {told.get('version')!r}")
    samples = Samples()
    for one in told["samples"]:
        samples.state_bytes[one["section"]] = one["state_bytes"]
        for value in one["values"]:
            samples.add(one["section"], one["contender"], one["measure"], value)
    samples.saves.update(told["saves"])
    for one in told["ratios"]:
        for value in one["values"]:
            samples.add_ratio(one["section"], one["contender"], one["measure"], one["other"], value)
    for one in told["growth"]:
        for value in one["values"]:
            samples.add_growth(one["axis"], one["measure"], one["x"], value)
    for name, target in (
        ("left_out", samples.left_out),
        ("broken_off", samples.broken_off),
        ("isolated", samples.isolated),
    ):
        target.update({(one["section"], one["contender"]): one["value"] for one in told[name]})
    options = dict(told["options"])
    axes = {name: tuple(value) if isinstance(value, list) else value for name, value in options.pop("axes").items()}
    return Report(
        machine=Machine(**told["machine"]),
        options=Options(
            **options
            | {"loop": Loop(**options["loop"]), "axes": Axes(**axes), "contenders": tuple(options["contenders"])}
        ),
        date=told["date"],
        duration=told["duration_seconds"],
        others_share=told["others_cpu_share"],
        samples=samples,
        rows=make_rows(samples),
        command=told["command"],
        done=tuple(Done(**one) for one in told.get("sections", ())),
    )


def merged(reports: list[Report]) -> Report:
    """Runs of different sections as one. Where two have the same section, the later one's counts.

    Raises BenchError for runs of different machines.
    """
    first, last = reports[0], reports[-1]
    samples = Samples()
    for index, report in enumerate(reports):
        if dataclasses.replace(report.machine, commit="") != dataclasses.replace(first.machine, commit=""):
            raise BenchError(f"results: expected them of one machine, found {report.machine} and {first.machine}")
        newer = {section for later in reports[index + 1 :] for section in later.samples.sections()}
        samples.take_over(report.samples, report.samples.sections() - newer)
    return dataclasses.replace(
        last,
        duration=sum(report.duration for report in reports),
        others_share=max(report.others_share for report in reports),
        samples=samples,
        rows=make_rows(samples),
        command="\n".join(report.command for report in reports),
        done=tuple({one.section: one for report in reports for one in report.done}.values()),
    )


def _listed(found: dict[tuple[str, str], Any]) -> list[dict[str, Any]]:
    return [{"section": section, "contender": name, "value": value} for (section, name), value in found.items()]
