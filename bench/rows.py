"""From figures to rows: what is compared with what, which bar it has to meet, and whether it does. Pure."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bench.samples import NotMeasuredError

if TYPE_CHECKING:
    from bench.samples import Samples


@dataclass(frozen=True, slots=True)
class Bar:
    """What a figure must not exceed, or must reach."""

    limit: float
    at_most: bool

    def is_met_by(self, value: float) -> bool:
        return value <= self.limit if self.at_most else value >= self.limit


@dataclass(frozen=True, slots=True)
class Row:
    """One comparison. `value` is made of medians and decides; `best` is the same of the best rounds."""

    name: str
    value: float
    best: float | None
    unit: str  # "x" a ratio, "x faster", "ms", "%"
    bar: Bar | None  # None: for information
    numbers: str

    @property
    def met(self) -> bool | None:
        return None if self.bar is None else self.bar.is_met_by(self.value)


_Maker = Callable[[], Row]


def make_rows(samples: Samples) -> list[Row]:
    """The rows whose sections ran, those with a bar first."""

    def slower(name: str, section: str, measure: str, other: str, at_most: float | None = None) -> _Maker:
        return lambda: _slower(name, samples, section, measure, other, at_most)

    def faster(name: str, section: str, measure: str, other: str, at_least: float | None = None) -> _Maker:
        return lambda: _faster(name, samples, section, measure, other, at_least)

    makers = [
        slower("steady save, sealed with checksums, against memcpy", "steady", "save", "memcpy", 1.5),
        faster("steady save against dcp.save", "steady", "save", "dcp", 8),
        lambda: _first_after_prewarm(samples),
        lambda: _first_cold(samples),
        faster("steady save of many small tensors against dcp.save", "small", "save", "dcp", 20),
        lambda: _planning(samples),
        faster("load, verified, against dcp.load", "steady", "load", "dcp", 3),
        lambda: _memory(samples),
        slower("steady save against memcpy tensor by tensor", "steady", "save", "memcpy-tensors"),
        slower("load against memcpy", "steady", "load", "memcpy"),
        lambda: _second_against_first(samples),
        lambda: _restart(samples),
        faster("load of many small tensors against dcp.load", "small", "load", "dcp"),
        faster("save of 2,000 tiny tensors against dcp.save", "planning", "save", "dcp"),
    ]
    versus = {(section, contender) for section, contender, _, _ in samples if section.startswith("versus")}
    for section, other in sorted(versus):
        if other == "dcp-async":
            makers.append(faster("steady save against the time that dcp.async_save blocks", section, "save", other))
        elif other != "flashckpt":
            makers.append(faster(f"steady save against {other}", section, "save", other))
            makers.append(faster(f"load against {other}", section, "load", other))
    rows = []
    for make in makers:
        with contextlib.suppress(NotMeasuredError):
            rows.append(make())
    return rows


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f} ms" if seconds < 0.1 else f"{seconds * 1e3:,.0f} ms"


def _slower(name: str, samples: Samples, section: str, measure: str, other: str, at_most: float | None = None) -> Row:
    ours, theirs = samples.get(section, "flashckpt", measure), samples.get(section, other, measure)
    return Row(
        name=name,
        value=ours.median / theirs.median,
        best=ours.best / theirs.best,
        unit="x",
        bar=None if at_most is None else Bar(at_most, at_most=True),
        numbers=f"{milliseconds(ours.median)} against {milliseconds(theirs.median)}",
    )


def _faster(name: str, samples: Samples, section: str, measure: str, other: str, at_least: float | None = None) -> Row:
    ours, theirs = samples.get(section, "flashckpt", measure), samples.get(section, other, measure)
    return Row(
        name=name,
        value=theirs.median / ours.median,
        best=theirs.best / ours.best,
        unit="x faster",
        bar=None if at_least is None else Bar(at_least, at_most=False),
        numbers=f"{milliseconds(ours.median)} against {milliseconds(theirs.median)}",
    )


def _first_after_prewarm(samples: Samples) -> Row:
    """Each process is compared with itself: later, the machine may be busier."""
    first = samples.get("first", "flashckpt-prewarmed", "first save").values
    later = samples.get("first", "flashckpt-prewarmed", "later save").values
    each = len(later) // len(first)
    ratios = [one / statistics.median(later[i * each : (i + 1) * each]) for i, one in enumerate(first)]
    prewarm = samples.get("first", "flashckpt-prewarmed", "prewarm").median
    return Row(
        name="first save after prewarm() against the steady ones of the same process",
        value=statistics.median(ratios),
        best=min(ratios),
        unit="x",
        bar=Bar(2, at_most=True),
        numbers=f"{milliseconds(statistics.median(first))} against {milliseconds(statistics.median(later))}; "
        f"prewarm() itself {milliseconds(prewarm)}",
    )


def _first_cold(samples: Samples) -> Row:
    """With what it takes to open the checkpointer, since dcp has nothing to open."""

    def total(contender: str) -> list[float]:
        opened = samples.get("first", contender, "open").values
        saved = samples.get("first", contender, "first save").values
        return [a + b for a, b in zip(opened, saved, strict=True)]

    ours, theirs = total("flashckpt"), total("dcp")
    return Row(
        name="first save of a fresh process, nothing allocated, against dcp.save's",
        value=statistics.median(theirs) / statistics.median(ours),
        best=min(theirs) / min(ours),
        unit="x faster",
        bar=Bar(1, at_most=False),
        numbers=f"{milliseconds(statistics.median(ours))} against {milliseconds(statistics.median(theirs))}",
    )


def _planning(samples: Samples) -> Row:
    """The whole save counts, though its 512 kB of copying are not planning."""
    whole = samples.get("planning", "flashckpt", "save")
    plan = samples.get("planning", "flashckpt", "save: plan").median
    return Row(
        name="Python time of a save of 2,000 tensors, plan cached",
        value=whole.median * 1e3,
        best=whole.best * 1e3,
        unit="ms",
        bar=Bar(15, at_most=True),
        numbers=f"of which plan {milliseconds(plan)}",
    )


def _memory(samples: Samples) -> Row:
    def share(contender: str, measure: str) -> float:
        return samples.get("memory", contender, measure).worst / samples.state_bytes["memory"] * 100

    first, steady, dcp = share("flashckpt", "first save"), share("flashckpt", "save"), share("dcp", "save")
    return Row(
        name="growth of the trainer's anonymous memory during a save, of the state",
        value=max(first, steady),
        best=min(first, steady),
        unit="%",
        bar=Bar(5, at_most=True),
        numbers=f"first {first:.1f} %, steady {steady:.1f} %; dcp.save {dcp:.1f} %",
    )


def _second_against_first(samples: Samples) -> Row:
    first = samples.get("first", "flashckpt", "first save")
    second = samples.get("first", "flashckpt", "second save")
    later = samples.get("first", "flashckpt", "later save")
    return Row(
        name="first save without prewarm() against the second",
        value=first.median / second.median,
        best=first.best / second.best,
        unit="x",
        bar=None,
        numbers=f"{milliseconds(first.median)} against {milliseconds(second.median)}; "
        f"from the third on {milliseconds(later.median)}",
    )


def _restart(samples: Samples) -> Row:
    ours = samples.get("first", "flashckpt", "load after restart")
    theirs = samples.get("first", "dcp", "load after restart")
    return Row(
        name="first load of a restarted process against dcp.load's",
        value=theirs.median / ours.median,
        best=theirs.best / ours.best,
        unit="x faster",
        bar=None,
        numbers=f"{milliseconds(ours.median)} against {milliseconds(theirs.median)}",
    )
