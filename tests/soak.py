"""Hours of a job in minutes: saves, restarts and recoveries, and whether anything grows.

    python -m tests.soak --minutes 20 --json build/soak.json

Real agents and trainers on three nodes. They save for two fifths of the time without a break. Then, again and again:
the trainers save for some seconds; they are stopped or killed, or an agent is, or a node with its memory; and they
start again. Measured of every agent and trainer: memory (RSS, PSS, anonymous), descriptors, threads and Python's
objects; and the files of each memory directory. A straight line is fitted to each after a warm-up. Exit code 1 if one
rises faster than it may.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

from flashckpt.agent.start import look
from flashckpt.errors import FlashError
from flashckpt.testing import processes
from tests.campaign.nursery import Nursery
from tests.campaign.runner import JOB, Report, World
from tests.campaign.schedule import Schedule

# What may be gained per hour, once a first quarter of the time has warmed everything up. At twenty saves per second a
# leak of one object per save is 72,000 of them.
BOUNDS = {
    "rss_bytes": 96 << 20,
    "pss_bytes": 96 << 20,
    "anonymous_bytes": 48 << 20,
    "descriptors": 40,
    "threads": 20,
    "objects": 5_000,
    "files": 40,
    "directory_bytes": 16 << 20,
}
_LEAST_POINTS = 8
_POINTS = 12  # of a trainer


@dataclass(frozen=True)
class Trend:
    """One series of measurements."""

    who: str
    what: str
    points: int
    first: float
    last: float
    per_hour: float  # the slope of a line through the points after the warm-up
    gained: float  # that the line rises within the time that was measured
    bound: float  # that it may rise per hour
    slack: float  # noise that is no rise

    @property
    def is_flat(self):
        return self.points < _LEAST_POINTS or self.per_hour <= self.bound or self.gained <= self.slack


def trend(who, what, points, bound, slack):
    """`points`: (seconds, value), oldest first. The first quarter is warm-up."""
    used = points[len(points) // 4 :]
    mean_x = sum(x for x, _ in used) / len(used)
    mean_y = sum(y for _, y in used) / len(used)
    spread = sum((x - mean_x) ** 2 for x, _ in used)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in used) / spread if spread else 0.0
    gained = slope * (used[-1][0] - used[0][0])
    return Trend(who, what, len(used), used[0][1], used[-1][1], slope * 3600, gained, bound, slack)


def measure_process(pid):
    """What the kernel says of a process; None where it has gone."""
    proc = Path(f"/proc/{pid}")
    try:
        rollup = dict(_sizes((proc / "smaps_rollup").read_text()))
        return {
            "rss_bytes": rollup["Rss"],
            "pss_bytes": rollup["Pss"],
            "anonymous_bytes": rollup["Anonymous"],
            "descriptors": len(list((proc / "fd").iterdir())),
            "threads": len(list((proc / "task").iterdir())),
        }
    except (OSError, KeyError):
        return None


def measure_directory(path):
    sizes = []
    for found in Path(path).rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # renamed since
            if found.is_file() and "agent.log" not in found.name:
                sizes.append(found.stat().st_size)
    return {"files": len(sizes), "directory_bytes": sum(sizes)}


def _sizes(text):
    for line in text.splitlines():
        fields = line.split()
        if len(fields) == 3 and fields[2] == "kB":
            yield fields[0].rstrip(":"), int(fields[1]) * 1024


class Soak:
    """A job that goes on for as long as it is wanted."""

    def __init__(self, world, report, round_seconds):
        self.world, self.report, self.round_seconds = world, report, round_seconds
        self.points = {}  # (who, what) → [(seconds, value)]
        self.began = time.monotonic()
        self.agents = {}  # node → pid of the agent that is measured: another one begins anew
        self.generation = {}

    def note(self, who, measured):
        for what, value in (measured or {}).items():
            self.points.setdefault((who, what), []).append((time.monotonic() - self.began, value))

    def measure(self, ranks):
        for node in self.world.cluster.nodes[:-1]:
            pid = node.agent_pid()
            if pid is not None:
                if self.agents.get(node.name) != pid:
                    self.agents[node.name] = pid
                    self.generation[node.name] = self.generation.get(node.name, 0) + 1
                who = f"agent {self.generation[node.name]} of {node.name}"
                self.note(who, measure_process(pid))
                with contextlib.suppress(FlashError):
                    seen = look(node.memory_dir, JOB)
                    self.note(who, seen and seen.status and {"objects": seen.status["objects"]})
            self.note(f"memory of {node.name}", measure_directory(node.memory_dir))

    def run(self, deadline):
        """Rounds; in each the trainers live through a few measurements."""
        number = 0
        nodes = self.world.cluster.nodes[:-1]
        while time.monotonic() < deadline:
            ranks = self.world.launch(nodes, 1, 1)
            facts = self.world.facts(nodes)
            if not self.world.wait_loaded(ranks, self.world.oracle, replace(facts, within_budget=False)):
                return
            # The first one for long: what a restart or a load clears away must not hide that it grows.
            seconds = self.round_seconds if number else max(self.round_seconds, 0.4 * (deadline - time.monotonic()))
            points = max(_POINTS, int(seconds / 5.0))
            for _ in range(points):
                self.world.train(ranks, seconds / points)
                self.measure(ranks)
                for rank, pid in enumerate(ranks.pids):
                    self.note(f"trainer {rank} of round {number}", measure_process(pid))
            for rank, said in enumerate(self._objects(ranks)):
                for at, count in said:
                    self.points.setdefault((f"trainer {rank} of round {number}", "objects"), []).append((at, count))
            match number % 6:
                case 1:
                    ranks.kill()
                case 3:
                    for pid in nodes[2].agent_pids():
                        processes.signal_to(pid, signal.SIGKILL)
                    self.world.train(ranks, 1.0)
                case 5:
                    self.world.lose(ranks, [2])
                case _:
                    pass
            self.report.events[("stop", "kill_trainers", "stop", "kill_agent", "stop", "lose_node")[number % 6]] += 1
            self.world.end(ranks)
            number += 1

    def _objects(self, ranks):
        """From the trainers' own words."""
        for rank in range(len(ranks.pids)):
            lines = (ranks.directory / f"rank{rank}.jsonl").read_text().splitlines()
            said = [json.loads(line) for line in lines if '"objects"' in line]
            yield [(one["time"], one["objects"]) for one in said if one["event"] == "objects"]

    def trends(self):
        slack = {
            "rss_bytes": 8 << 20,
            "pss_bytes": 8 << 20,
            "anonymous_bytes": 4 << 20,
            "descriptors": 6,
            "threads": 6,
            "objects": 500,
            "files": 8,
            "directory_bytes": 2 << 20,
        }
        return [
            trend(who, what, points, BOUNDS[what], slack[what])
            for (who, what), points in sorted(self.points.items())
            if len(points) > 2
        ]


def run(minutes, seed="soak", kind="loopback"):
    """The report and the trends."""
    report, began = Report(seed), time.monotonic()
    nursery = Nursery()
    try:
        with World(Schedule(0, 3, persist=False), report, nursery, kind, bound=15.0) as world:
            for node in world.cluster.nodes:
                node.set_environment(FLASHCKPT_TESTING="1")  # then agents count their objects
            # Some rounds in any case, each long enough for trainers to warm up in.
            soak = Soak(world, report, round_seconds=max(6.0, min(60.0, minutes * 60 / 18)))
            soak.run(began + minutes * 60)
    finally:
        nursery.close()
    report.schedules, report.seconds = 1, round(time.monotonic() - began, 1)
    return report, soak.trends()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    report, trends = run(options.minutes)
    rising = [one for one in trends if not one.is_flat]
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        found = {**report.as_json(), "trends": [one.__dict__ for one in trends], "rising": len(rising)}
        options.json.write_text(json.dumps(found, indent=1))
    print(report.summary())
    judged = [one for one in trends if one.points >= _LEAST_POINTS]
    for one in sorted(judged, key=lambda one: one.gained / one.slack)[-12:]:
        state = "flat" if one.is_flat else "RISING"
        print(f"{state:7} {one.who}: {one.what} {one.first:,.0f} → {one.last:,.0f}, {one.per_hour:,.0f} an hour")
    print(f"{len(judged)} series judged, {len(rising)} rise")
    sys.exit(bool(rising or report.violations or not judged))


if __name__ == "__main__":
    main()
