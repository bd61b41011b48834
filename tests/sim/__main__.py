"""`python -m tests.sim --seeds 20000`: histories by the thousand; `--seed S --trace` tells one."""

from __future__ import annotations

import argparse
import sys
import time

from tests.sim.mutants import MUTANTS, SURVIVORS
from tests.sim.probes import PROBES
from tests.sim.swarm import Outcome, run


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.sim")
    parser.add_argument("--seeds", type=int, default=20000)
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--mutant", choices=sorted({**MUTANTS, **SURVIVORS}))
    parser.add_argument("--seed", type=int)
    parser.add_argument("--trace", action="store_true")
    parser.add_argument("--stop", action="store_true", help="at the first violation")
    options = parser.parse_args()
    mutants = {**MUTANTS, **{name: mutant for name, (mutant, _) in SURVIVORS.items()}}
    play = mutants[options.mutant].run if options.mutant else run
    if options.seed is not None:
        outcome = play(options.seed, trace=options.trace)
        print("\n".join(outcome.log))
        return 1 if outcome.violation else 0
    began = time.perf_counter()
    found: dict[str, list[Outcome]] = {}
    probes: dict[str, int] = {}
    events = launches = commits = done = 0
    for seed in range(options.start, options.start + options.seeds):
        outcome = play(seed)
        done += 1
        events += outcome.events
        launches += outcome.launches
        commits += outcome.commits
        for probe in outcome.probes:
            probes[probe] = probes.get(probe, 0) + 1
        if outcome.violation:
            found.setdefault(outcome.violation, []).append(outcome)
            if options.stop:
                break
    seconds = time.perf_counter() - began
    print(f"{done} seeds in {seconds:.1f} s ({done / seconds:.0f}/s)")
    print(f"{events} events, {launches} launches, {commits} commits, {len(probes)} of {len(PROBES)} probes")
    for probe, count in sorted(probes.items()):
        print(f"  {count:7} {probe}")
    for name, outcomes in found.items():
        print(f"{len(outcomes)} of {name}: seeds {[one.seed for one in outcomes[:8]]}")
        shortest = min(outcomes, key=lambda one: one.events)
        print(f"  seed {shortest.seed} after {shortest.events} events: {shortest.story}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
