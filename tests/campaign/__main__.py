"""Random faults and operators' actions on real agents and trainers, with an oracle that remembers every promise.

    python -m tests.campaign --minutes 10 --seed 7 --json build/campaign.json

Exit code 1 if a promise was broken, or status said what was not true for longer than it may.
"""

from __future__ import annotations

import argparse
import json
import secrets
import sys
import time
from pathlib import Path

from flashckpt.testing import Cluster
from tests.campaign.nursery import Nursery
from tests.campaign.runner import Report, World
from tests.campaign.schedule import EVENTS, draw


def run(seed, *, minutes=None, schedules=None, events=EVENTS, kind="loopback", bound=5.0, first=0, show=print):
    """Schedules from `first` on, until the time is over or as many have run; returns the report."""
    report, began = Report(str(seed)), time.monotonic()
    nursery = Nursery()
    try:
        number = first
        while schedules is None or number < first + schedules:
            if minutes is not None and time.monotonic() - began > minutes * 60:
                break
            schedule = draw(seed, number, events)
            show(f"schedule {number}: {schedule.nodes} nodes, {', '.join(one.event for one in schedule.episodes)}")
            before = len(report.violations)
            with World(schedule, report, nursery, kind, bound) as world:
                world.run()
            report.schedules += 1
            for one in report.violations[before:]:
                show(f"  episode {one['episode']} ({one['event']}): {one['what'][:1500]}")
            number += 1
    finally:
        nursery.close()
        report.seconds = round(time.monotonic() - began, 1)
    return report


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="no schedule begins after that")
    parser.add_argument("--seed", default=secrets.token_hex(4), help="the same seed, the same schedules")
    parser.add_argument("--first", type=int, default=0, help="number of the schedule to begin with")
    parser.add_argument("--schedules", type=int, help="at most as many")
    parser.add_argument("--only", help="of these events, with commas between")
    parser.add_argument("--without", default="", help="these events, with commas between")
    parser.add_argument(
        "--kind", choices=("loopback", "netns"), help="netns has partitions; default: where it can be had"
    )
    parser.add_argument("--status-bound", type=float, default=5.0, help="seconds that status may be wrong for")
    parser.add_argument("--json", type=Path, help="where the report goes to")
    options = parser.parse_args()
    chosen = options.only.split(",") if options.only else EVENTS
    events = tuple(one for one in chosen if one not in options.without.split(","))
    if not events or set(events) - set(EVENTS):
        parser.error(f"events: expected some of {', '.join(EVENTS)}")
    kind = options.kind or ("loopback" if Cluster.available("netns") else "netns")
    report = run(
        options.seed,
        minutes=options.minutes,
        schedules=options.schedules,
        events=events,
        kind=kind,
        bound=options.status_bound,
        first=options.first,
    )
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(report.as_json(), indent=1))
    print(report.summary())
    sys.exit(bool(report.violations))


if __name__ == "__main__":
    main()
