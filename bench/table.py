"""The comparison: one entry for each contender of a section, and where flashckpt wins and loses. Pure."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bench.contenders import CONTENDERS, Kind

if TYPE_CHECKING:
    from bench.samples import Samples, Series

COMPARED = ("compare", "small")
PEER, REPLICATE = "peer", "replicate"
_OUR_RECOVERY = "flashckpt, load() on a blank node"
_ORDER = [Kind.LIMIT, Kind.SYNCHRONOUS, Kind.ASYNCHRONOUS, Kind.PEER]


@dataclass(frozen=True, slots=True)
class Entry:
    """What is known of one contender in one section; None where it was not measured."""

    name: str
    title: str
    kind: Kind
    first: Series | None  # seconds of the first save of a process, blocked
    blocked: Series | None
    in_training: Series | None  # blocked while a training loop runs
    safe: Series | None
    replicated: Series | None  # until it survives the loss of the node
    load: Series | None
    slowdown: float | None  # of the training loop, of 1
    peak_bytes: float | None
    wire_bytes: float | None
    of_limit: dict[str, float]  # by measure: its time divided by that of the limit beside it
    of_ours: dict[str, float]  # the same by flashckpt's
    isolated: bool | None
    checked: bool
    note: str
    problem: str  # why it is not here, or not with everything

    @property
    def decisive(self) -> Series | None:
        """What it is ranked by; None: there is no figure of it."""
        return self.safe or self.load or self.replicated


def is_ours(name: str) -> bool:
    return name.startswith("flashckpt")


def make_entries(samples: Samples, section: str) -> list[Entry]:
    """Contenders of a section, by kind and then the fastest first; those without a figure last."""
    names = {contender for found, contender, _, _ in samples if found == section and contender in CONTENDERS}
    names |= {contender for found, contender in samples.left_out if found == section and contender in CONTENDERS}
    entries = [_entry(samples, section, name) for name in names]

    def rank(entry: Entry) -> tuple[bool, int, float]:
        decisive = entry.decisive
        return decisive is None, _ORDER.index(entry.kind), decisive.median if decisive else 0.0

    return sorted(entries, key=rank)


def _entry(samples: Samples, section: str, name: str) -> Entry:
    about = CONTENDERS[name]
    key = (section, name)
    loops, without = samples.find(section, name, "loop"), samples.find(section, name, "loop without saves")
    slowdown = None
    if loops and without and len(loops.values) == len(without.values):
        pairs = zip(loops.values, without.values, strict=True)
        slowdown = statistics.median(with_saves / none - 1 for with_saves, none in pairs)
    peak, wire = samples.find(section, name, "peak memory"), samples.find(section, name, "on the wire")

    def ratios(other: str) -> dict[str, float]:
        return {
            measure: statistics.median(values)
            for (found, contender, measure, whom), values in samples.ratios.items()
            if (found, contender, whom) == (section, name, other)
        }

    return Entry(
        name=name,
        title=_OUR_RECOVERY if section == PEER and is_ours(name) else about.title,
        kind=Kind.PEER if section == PEER and about.kind is not Kind.LIMIT else about.kind,
        first=samples.find(section, name, "first save"),
        blocked=samples.find(section, name, "save"),
        in_training=samples.find(section, name, "loop: blocked"),
        safe=samples.find(section, name, "safe"),
        replicated=samples.find(section, name, "replicate" if section == REPLICATE else "replicated"),
        load=samples.find(section, name, "load"),
        slowdown=slowdown,
        peak_bytes=peak.median if peak else None,
        wire_bytes=wire.median if wire else None,
        of_limit=ratios("memcpy" if section in COMPARED else "socket"),
        of_ours=ratios("flashckpt"),
        isolated=samples.isolated.get(key),
        checked=about.checked,
        note=about.note,
        problem=samples.left_out.get(key, "") or samples.broken_off.get(key, ""),
    )


@dataclass(frozen=True, slots=True)
class Contest:
    """One question, flashckpt's best answer, and the best of the others whose checkpoints are isolated."""

    question: str
    ours: str
    ours_seconds: float
    other: str
    other_seconds: float
    limit_seconds: float | None
    n: int  # figures of the other
    aliasing: tuple[str, ...]  # who would have been faster, but only refers to the caller's tensors

    @property
    def won(self) -> bool:
        return self.ours_seconds <= self.other_seconds

    @property
    def factor(self) -> float:
        return self.other_seconds / self.ours_seconds


_QUESTIONS = (
    ("compare", "in_training", "blocked per save, in training", True),
    ("compare", "blocked", "blocked per save, nothing else running", False),
    ("compare", "safe", "safe in memory", True),
    ("compare", "load", "restored from own memory into live tensors", True),
    ("small", "blocked", "many small tensors: blocked per save", True),
    ("small", "safe", "many small tensors: safe in memory", True),
    ("small", "load", "many small tensors: restored", True),
    (PEER, "load", "restored from a peer into live tensors", True),
)


def make_contests(samples: Samples) -> list[Contest]:
    contests = []
    for section, measure, question, with_limit in _QUESTIONS:
        entries = [
            (entry, series)
            for entry in make_entries(samples, section)
            if (series := _series(entry, measure)) is not None
        ]
        ours = [pair for pair in entries if is_ours(pair[0].name)]
        others = [pair for pair in entries if not is_ours(pair[0].name) and pair[0].kind is not Kind.LIMIT]
        fair = [pair for pair in others if pair[0].isolated is not False]
        if not ours or not fair:
            continue
        best, best_series = min(ours, key=lambda pair: pair[1].median)
        rival, rival_series = min(fair, key=lambda pair: pair[1].median)
        limits = [series.median for entry, series in entries if entry.kind is Kind.LIMIT]
        contests.append(
            Contest(
                question=question,
                ours=best.title,
                ours_seconds=best_series.median,
                other=rival.title,
                other_seconds=rival_series.median,
                limit_seconds=min(limits) if limits and with_limit and measure != "in_training" else None,
                n=len(rival_series.values),
                aliasing=tuple(
                    entry.title
                    for entry, series in others
                    if entry.isolated is False and series.median < best_series.median
                ),
            )
        )
    return contests


def _series(entry: Entry, measure: str) -> Series | None:
    found: Series | None = getattr(entry, measure)
    return found
