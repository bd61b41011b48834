"""Draws what happens in a schedule: launches and what befalls them. Pure: the same seed, the same schedule."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

# What may happen while a launch trains, or between two launches.
FAULTS = (
    "kill_rank",
    "kill_trainers",
    "kill_agent",
    "lose_node",
    "lose_two_nodes",
    "pause_agent",
    "pause_rank",
    "flip",
    "fill",
    "cut",
)
OPERATORS = (
    "ctrl_c",
    "drain",
    "stray",
    "stray_saves",
    "split",
    "away",
    "fresh",
    "rollback",
    "rollback_without",
    "rollback_lost",
    "lose_all",
    "evaluate",
    "launch_beside",
    "second_job",
    "wrong_nodes",
    "start_again",
)
EVENTS = (*FAULTS, *OPERATORS)
# These are about persist_dir.
ON_DISK = ("rollback_lost", "lose_all", "second_job")
# Of a launch, beside the events: other replicas, permuted ranks, another number of ranks or nodes.
_STRONGER = {
    "lose_node": 2,
    "rollback": 2,
    "kill_agent": 2,
    "stray_saves": 2,
    "rollback_without": 2,
    "rollback_lost": 2,
}


@dataclass(frozen=True)
class Episode:
    """One launch, and what happens to it."""

    nodes: tuple[int, ...]  # by index, in the order of the ranks
    ranks_per_node: int
    replicas: int
    train_seconds: float  # before the event
    event: str
    victims: tuple[int, ...]  # indices into what the event chooses from
    after_seconds: float  # from the event to the end of the episode
    fraction: float  # a number in [0, 1) for whatever else the event has to choose


@dataclass(frozen=True)
class Schedule:
    """A cluster and its episodes."""

    number: int
    nodes: int
    persist: bool
    episodes: tuple[Episode, ...] = field(default=())


def draw(seed, number, events=EVENTS):
    """Schedule `number` of a campaign."""
    rng = random.Random(f"{seed}/{number}")
    nodes = rng.choice((2, 3, 3, 4))
    schedule = Schedule(number, nodes, rng.random() < 0.5)
    weights = [_STRONGER.get(event, 1) for event in events]
    episodes = []
    layout, per_node, replicas = list(range(nodes)), 1, 1
    for _ in range(rng.randint(3, 5)):
        change = rng.random()
        if change < 0.15:
            rng.shuffle(layout)
        elif change < 0.3:
            per_node = 3 - per_node
        elif change < 0.4:
            replicas = min(nodes - 1, rng.choice((1, 2)))
        event = rng.choices(events, weights)[0]
        if event in ON_DISK and not schedule.persist:
            event = "kill_trainers"
        episodes.append(
            Episode(
                nodes=tuple(layout),
                ranks_per_node=per_node if nodes < 4 else 1,
                replicas=replicas,
                train_seconds=rng.uniform(0.3, 1.5),
                event=event,
                victims=tuple(rng.sample(range(nodes), nodes)),
                after_seconds=rng.uniform(0.2, 1.5),
                fraction=rng.random(),
            )
        )
    return Schedule(number, nodes, schedule.persist, tuple(episodes))
