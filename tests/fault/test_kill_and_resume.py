"""SIGKILL of trainers at every failpoint of snapshot, slot life and load; then a restart that must be exact."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from flashckpt.store.names import parse_sealed_name

STEPS = 5

# (failpoint, at which pass of a rank it fires)
KILLS = [
    ("before_allocate", 1),
    ("mid_allocate", 1),
    ("after_create", 2),
    ("after_allocate", 2),
    ("after_map", 2),
    ("after_claim", 1),
    ("after_claim", 4),
    ("after_take", 1),
    ("after_invalidate", 3),
    ("before_copy", 3),
    ("mid_copy", 1),
    ("mid_copy", 4),
    ("after_copy", 4),
    ("before_header", 3),
    ("before_seal", 4),
    ("before_rename_sealed", 3),
    ("after_rename_sealed", 1),
    ("after_rename_sealed", 4),
    ("after_seal", 5),
    ("before_recycle", 2),
    ("before_release", 1),
    ("mid_release", 2),
    ("after_zero_released", 1),
    ("after_release", 2),
]


def armed(tmp_path, spec):
    return {
        "FLASHCKPT_TESTING": "1",
        "FLASHCKPT_FAILPOINTS": spec,
        "FLASHCKPT_FAILPOINTS_LOG": str(tmp_path / "fired"),
    }


def promised(job):
    """The newest step that every rank was told is safe."""
    told = [{int(step) for step, outcome, *_ in saved if outcome == "ok"} for saved in job.said("saved")]
    return max(set.intersection(*told), default=0)


def sealed_by_step(memory_dir):
    """Step → the ranks whose shards lie sealed."""
    found = {}
    for path in Path(memory_dir).glob("*/sealed/*"):
        shard = parse_sealed_name(path.name).shard
        found.setdefault(shard.generation.step, set()).add(shard.rank)
    return found


def resumed(job):
    """The step all ranks resumed at; 0 for a fresh start."""
    steps = {int(words[0][0]) if words else 0 for words in job.said("resumed")}
    assert len(steps) == 1, f"ranks resumed at different steps: {steps}"
    return steps.pop()


@pytest.mark.parametrize("only_rank", [None, 1], ids=["all-ranks", "one-rank"])
@pytest.mark.parametrize(("name", "at"), KILLS, ids=[f"{name}-{at}" for name, at in KILLS])
def test_killed_at(name, at, only_rank, nursery, memory_dir, tmp_path):
    scale = 1500 if name == "mid_allocate" else 1  # only a large slot is allocated in several steps
    killed = nursery.run(
        2,
        memory_dir=memory_dir,
        first=1,
        steps=STEPS,
        scale=scale,
        environment=armed(tmp_path, f"{name}=kill@{at}"),
        only_rank=only_rank,
    )
    assert (tmp_path / "fired").read_text().startswith(name), "the fault did not take place"
    assert -9 in killed.codes
    fresh = not promised(killed)
    if fresh:
        # Half of a first generation is not silently a fresh start: the caller has to allow it. What all ranks sealed,
        # and one did not live to say so, loads.
        sealed = sealed_by_step(memory_dir)
        whole = max((step for step, ranks in sealed.items() if ranks == {0, 1}), default=0)
        found = nursery.run(2, memory_dir=memory_dir, first=1, steps=0, scale=scale)
        if sealed and not whole:
            assert all("FC-LOAD-002" in out for out in found.outputs), (sealed, found.outputs)
        else:
            assert (found.codes, resumed(found)) == ([0, 0], whole), (sealed, found.outputs)
    again = nursery.run(2, memory_dir=memory_dir, first=1, steps=STEPS + 2, scale=scale, allow_fresh=fresh)
    assert again.codes == [0, 0], again.outputs
    assert resumed(again) >= promised(killed)


@pytest.mark.parametrize(
    "name", ["after_inventory", "after_plan", "mid_read", "after_read", "before_line", "after_line"]
)
def test_killed_while_loading(name, nursery, memory_dir, tmp_path):
    saved = nursery.run(2, memory_dir=memory_dir, first=1, steps=STEPS)
    assert saved.codes == [0, 0], saved.outputs
    killed = nursery.run(2, memory_dir=memory_dir, first=1, steps=STEPS, environment=armed(tmp_path, f"{name}=kill"))
    assert (tmp_path / "fired").read_text().startswith(name)
    assert -9 in killed.codes
    again = nursery.run(2, memory_dir=memory_dir, first=1, steps=STEPS + 3)
    assert again.codes == [0, 0], again.outputs
    assert resumed(again) == STEPS


def test_first_save_after_a_restore_is_torn(nursery, memory_dir, tmp_path):
    """The restored generation still loads: its slots are not touched before a newer one is whole."""
    assert nursery.run(2, memory_dir=memory_dir, first=1, steps=3).codes == [0, 0]
    for _ in range(3):
        torn = nursery.run(
            2, memory_dir=memory_dir, first=1, steps=4, environment=armed(tmp_path, "mid_copy=kill"), only_rank=0
        )
        assert resumed(torn) == 3
        assert -9 in torn.codes
    again = nursery.run(2, memory_dir=memory_dir, first=1, steps=6)
    assert (resumed(again), again.codes) == (3, [0, 0])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killed_at_random_moments(nursery, memory_dir):
    """Thirty kills of a job that saves all the time; nothing promised is ever lost, nothing is ever mixed."""
    moments = random.Random(20)
    best, rounds_with_saves = 0, 0
    for _ in range(30):
        killed = nursery.run(
            2,
            memory_dir=memory_dir,
            first=1,
            steps=10_000,
            scale=200,
            kill_after=moments.random(),  # seconds after the first word
            allow_fresh=best == 0,
        )
        # A rank may have been killed before it could say where it resumed; the first to speak has.
        started = {int(words[0][0]) for words in killed.said("resumed") if words} or {0}
        assert len(started) == 1, killed.outputs
        assert min(started) >= best, killed.outputs
        assert not any("exit" in out for out in killed.outputs), killed.outputs
        rounds_with_saves += promised(killed) > 0
        best = max(best, promised(killed), *started)
    assert rounds_with_saves >= 10, "too few rounds got as far as saving"
    last = nursery.run(2, memory_dir=memory_dir, first=1, steps=best + 2, scale=200)
    assert last.codes == [0, 0], last.outputs
    assert resumed(last) >= best


@pytest.mark.parametrize("ranks", [1, 3])
def test_other_world_after_a_kill(ranks, nursery, memory_dir, tmp_path):
    killed = nursery.run(
        2, memory_dir=memory_dir, first=1, steps=STEPS, environment=armed(tmp_path, "before_seal=kill@4"), only_rank=1
    )
    assert -9 in killed.codes
    again = nursery.run(ranks, memory_dir=memory_dir, first=1, steps=STEPS + 3, task="work")
    assert (resumed(again), again.codes) == (3, [0] * ranks), again.outputs
