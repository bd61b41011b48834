"""From figures to rows: what is compared with what, which bar it has to meet, and whether it does. Pure."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bench.samples import SHARE, NotMeasuredError
from bench.stall import EVERY, OVERLAP, RECHECK, SYNC, WITHOUT

if TYPE_CHECKING:
    from bench.samples import Samples, Series


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
    unit: str  # "x" a ratio, "x faster", "ms", "s", "%"
    bar: Bar | None  # None: for information
    numbers: str

    @property
    def met(self) -> bool | None:
        return None if self.bar is None else self.bar.is_met_by(self.value)


_Maker = Callable[[], Row]
_REPLICATED = "flashckpt-replicated"


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
        faster("load, verified, against dcp.load from tmpfs", "steady", "load", "dcp", 3),
        lambda: _load_against_memcpy(samples, "steady", "load from own memory, verified", 0.4),
        lambda: _load_against_memcpy(samples, "huge pages", "the same on a mount with huge pages", 0.6),
        lambda: _against_socket(
            "replication of the state between two agents, from sealed to replicated, speed against a plain socket",
            samples.get("replicate", _REPLICATED, "replicate"),
            samples.get("replicate", "socket", "replicate"),
            samples.state_bytes["replicate"],
            Bar(0.85, at_most=False),
        ),
        lambda: _against_socket(
            "node lost: speed of the retrieval against a plain socket",
            samples.get("peer", "flashckpt", "load: retrieve"),
            samples.get("peer", "socket", "load"),
            samples.state_bytes["peer"],
            Bar(0.85, at_most=False),
        ),
        lambda: _blocked_in_training(samples),
        lambda: _slower_steps(samples),
        lambda: _idle(samples),
        lambda: _memory(samples),
        slower("steady save against memcpy tensor by tensor", "steady", "save", "memcpy-tensors"),
        lambda: _second_against_first(samples),
        lambda: _restart(samples),
        faster("load of many small tensors against dcp.load", "small", "load", "dcp"),
        faster("save of 2,000 tiny tensors against dcp.save", "planning", "save", "dcp"),
    ]
    makers += [
        lambda: _agent_adds("the agent adds to a steady save", samples, "agent"),
        lambda: _agent_adds("the agent adds to a save of four tiny tensors", samples, "agent, tiny state"),
        *_replication(samples),
        *_slowdown(samples),
        lambda: _proof(samples, OVERLAP, "proof by version counters that nothing changed during an overlapped copy"),
        lambda: _proof(samples, RECHECK, 'the same by checksums as well (verify="recheck", and two saves per launch)'),
    ]
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


def _agent_adds(name: str, samples: Samples, section: str) -> Row:
    """To the time that save() blocks: the slot comes over a socket, and whoever replicates needs the CPU, too."""
    alone = samples.get(section, "flashckpt-off", "save")
    one_node, two_nodes = (samples.get(section, who, "save") for who in ("flashckpt", "flashckpt-replicated"))
    return Row(
        name=name,
        value=(one_node.median - alone.median) * 1e3,
        best=(one_node.best - alone.best) * 1e3,
        unit="ms",
        bar=None,
        numbers=f"{milliseconds(one_node.median)} against {milliseconds(alone.median)} without; "
        f"of two nodes {milliseconds(two_nodes.median)}",
    )


def _replication(samples: Samples) -> list[_Maker]:
    def against(name: str, measure: str, limit: str) -> _Maker:
        return lambda: _against_socket(
            name,
            samples.get("replicate", _REPLICATED, measure),
            samples.get("replicate", limit, "replicate"),
            samples.state_bytes["replicate"],
        )

    return [
        against("replication, from sealed to replicated, speed against a socket with TLS", "replicate", "socket-tls"),
        against("the push alone, until acknowledged, speed against a plain socket", "push", "socket"),
        against("the push alone, until acknowledged, speed against a socket with mutual TLS", "push", "socket-tls"),
        lambda: _agents_cpu(samples),
        lambda: _until_replicated(samples, "replicate 64 MiB"),
    ]


def _against_socket(name: str, ours: Series, theirs: Series, size_bytes: int, bar: Bar | None = None) -> Row:
    speeds = [size_bytes / series.median / 1e9 for series in (ours, theirs)]
    return Row(
        name=name,
        value=theirs.median / ours.median,
        best=theirs.best / ours.best,
        unit="x",
        bar=bar,
        numbers=f"{milliseconds(ours.median)} against {milliseconds(theirs.median)}; "
        f"{speeds[0]:.2f} against {speeds[1]:.2f} GB/s",
    )


def _load_against_memcpy(samples: Samples, section: str, what: str, at_least: float) -> Row:
    """Its memcpy goes from warm pages to warm pages, with as many threads, and verifies nothing."""
    ours, limit = samples.get(section, "flashckpt", "load"), samples.get(section, "memcpy", "load")
    return Row(
        name=f"{what}, speed against warm memcpy",
        value=limit.median / ours.median,
        best=limit.best / ours.best,
        unit="x",
        bar=Bar(at_least, at_most=False),
        numbers=f"{milliseconds(ours.median)} against {milliseconds(limit.median)}",
    )


def _blocked_in_training(samples: Samples) -> Row:
    """The bar is for a step whose forward and backward take at least as long as the copy: both are told."""
    blocked = samples.get("stall", OVERLAP, "loop: blocked")
    copied, passes = samples.get("stall", SYNC, "loop: staged"), samples.get("stall", OVERLAP, "loop: passes")
    return Row(
        name="training thread blocked by an overlapped save, optimizer's wait included",
        value=blocked.median * 1e3,
        best=blocked.best * 1e3,
        unit="ms",
        bar=Bar(5, at_most=True),
        numbers=f"p99 {milliseconds(blocked.p99)} of {len(blocked.values)}; forward and backward "
        f"{milliseconds(passes.median)}, the copy alone {milliseconds(copied.median)}",
    )


def _proof(samples: Samples, kind: str, name: str) -> Row:
    """Of the blocked time of an overlapped save."""
    proof, blocked = samples.get("stall", kind, "loop: proof"), samples.get("stall", kind, "loop: blocked")
    return Row(
        name=name,
        value=proof.median * 1e3,
        best=proof.best * 1e3,
        unit="ms",
        bar=None,
        numbers=f"of {milliseconds(blocked.median)} blocked",
    )


def _slower_steps(samples: Samples) -> Row:
    """On average, so that one long stall counts; round by round, each against the steps without saves beside it."""
    with_saves, without = samples.get("stall", OVERLAP, "loop"), samples.get("stall", WITHOUT, "loop")
    slower = [a / b - 1 for a, b in zip(with_saves.values, without.values, strict=True)]
    return Row(
        name=f"steps slower on average while every {EVERY}th saves, overlapped",
        value=statistics.fmean(slower) * 100,
        best=min(slower) * 100,
        unit="%",
        bar=Bar(10, at_most=True),
        numbers=f"median {statistics.median(slower):.1%}; {EVERY} steps {milliseconds(with_saves.median)} against "
        f"{milliseconds(without.median)}",
    )


def _idle(samples: Samples) -> Row:
    """Of the agent that takes more."""
    agents = [samples.get("idle", f"agent that {what}", SHARE) for what in ("sends", "receives")]
    more = max(agents, key=lambda series: series.median)
    busiest = max(series.worst for series in agents)
    return Row(
        name="an agent with nothing to do, of a core",
        value=more.median * 100,
        best=more.best * 100,
        unit="%",
        bar=Bar(0.5, at_most=True),
        numbers=f"busiest window {busiest:.2%}; {len(more.values)} windows of each of two agents",
    )


def _agents_cpu(samples: Samples) -> Row:
    sender, receiver = (
        samples.get("replicate", f"agent that {what}", "cpu: replicate") for what in ("sends", "receives")
    )
    gib = samples.state_bytes["replicate"] / (1 << 30)
    return Row(
        name="CPU seconds of both agents for a GiB replicated",
        value=(sender.median + receiver.median) / gib,
        best=(sender.best + receiver.best) / gib,
        unit="s",
        bar=None,
        numbers=f"sender {sender.median / gib:.2f} s, receiver {receiver.median / gib:.2f} s",
    )


def _until_replicated(samples: Samples, section: str) -> Row:
    ours, limit = samples.get(section, _REPLICATED, "replicate"), samples.get(section, "socket", "replicate")
    return Row(
        name="64 MiB from sealed to replicated",
        value=ours.median * 1e3,
        best=ours.best * 1e3,
        unit="ms",
        bar=None,
        numbers=f"{ours.median / limit.median:.1f} times the plain socket's {milliseconds(limit.median)}",
    )


def _slowdown(samples: Samples) -> list[_Maker]:
    def against(name: str, ours: str, theirs: str) -> _Maker:
        return lambda: _slower_loop(name, samples, ours, theirs)

    return [
        against("slowdown of a training loop by replicated saves, against none", _REPLICATED, "no saving"),
        against("slowdown of a training loop by saves without replication, against none", "flashckpt-off", "no saving"),
        against("slowdown of a training loop by replication alone", _REPLICATED, "flashckpt-off"),
    ]


def _slower_loop(name: str, samples: Samples, ours: str, theirs: str) -> Row:
    """Round by round, since what else runs on the machine changes from round to round."""
    section = "slowdown"
    with_it, without = samples.get(section, ours, "loop"), samples.get(section, theirs, "loop")
    slower = [a / b - 1 for a, b in zip(with_it.values, without.values, strict=True)]
    lost = statistics.median(a - b for a, b in zip(with_it.values, without.values, strict=True))
    gib = samples.saves[section] * samples.state_bytes[section] / (1 << 30)
    every = without.median / samples.saves[section]
    return Row(
        name=name,
        value=statistics.median(slower) * 100,
        best=min(slower) * 100,
        unit="%",
        bar=None,
        numbers=f"{samples.state_bytes[section] / (1 << 20):.0f} MiB every {every:.1f} s; "
        f"{lost / gib:.2f} s of training lost for a GiB",
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
