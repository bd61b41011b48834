"""The simulator in CI: kept seeds, fresh ones, all probes reached, all mutants noticed. `make simulate` plays more."""

from __future__ import annotations

import os
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest

from tests.sim.mutants import MUTANTS
from tests.sim.probes import PROBES
from tests.sim.swarm import run

START = int(os.environ.get("FLASHCKPT_SIM_START", "0"))
SEEDS = int(os.environ.get("FLASHCKPT_SIM_SEEDS", "2000"))
QUICK_SEEDS = 400
BATCH = 100
KEPT = Path(__file__).with_name("seeds.txt")


def kept_seeds():
    lines = [line.split("#")[0].strip() for line in KEPT.read_text().splitlines()]
    return [int(line.split()[0]) for line in lines if line]


def play(start):
    """One batch: what was found, and which rare states were reached."""
    outcomes = [run(seed) for seed in range(start, start + BATCH)]
    found = [f"seed {one.seed}: {one.story}" for one in outcomes if one.violation]
    return found, set().union(*(one.probes for one in outcomes)), sum(one.commits for one in outcomes)


def test_a_seed_is_one_history():
    first, second = (run(12, trace=True) for _ in range(2))
    assert first.log == second.log
    assert len(first.log) > 20


@pytest.mark.parametrize("seed", kept_seeds())
def test_seeds_that_once_told_something(seed):
    outcome = run(seed)
    assert not outcome.violation, outcome.story


@pytest.mark.parametrize("start", range(0, QUICK_SEEDS, BATCH))
def test_quick_histories_break_no_invariant(start):
    found, _, commits = play(start)
    assert not found, f"{len(found)} of {BATCH}; the first: {found[0]} (python -m tests.sim --seed … --trace tells it)"
    assert commits > BATCH


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_no_history_breaks_an_invariant_and_all_rare_states_are_reached():
    # Spawned: the test process has threads of other tests.
    with ProcessPoolExecutor(2, get_context("spawn")) as pool:
        results = list(pool.map(play, range(START, START + SEEDS, BATCH)))
    found = [story for stories, _, _ in results for story in stories]
    assert not found, f"{len(found)} of {SEEDS}; the first: {found[0]} (python -m tests.sim --seed … --trace tells it)"
    assert sum(commits for _, _, commits in results) > SEEDS
    # Some rare states are reached once in a thousand histories: a kept seed stands for each of these.
    reached = set().union(*(probes for _, probes, _ in results), *(run(seed).probes for seed in kept_seeds()))
    missing = PROBES - reached
    assert not missing, f"never reached: {sorted(missing)}"


@pytest.mark.parametrize("name", sorted(MUTANTS))
def test_mutants_are_noticed(name):
    """By the kept seed. Where the core has changed so much that this seed tells another story, by one soon after it."""
    mutant = MUTANTS[name]
    for seed in range(mutant.seed, mutant.seed + 2000):
        if mutant.run(seed).violation:
            assert not run(seed).violation, f"seed {seed}: the real core breaks an invariant too"
            return
    pytest.fail(f"{name}: not noticed in 2000 histories from seed {mutant.seed} on")
