"""Plays the demo: train without interruption; train again and lose a node with its memory; resume with a blank one in
its place; compare every bit.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from flashckpt.demo.memory import NodeContents, holders, look, newest_record, size_of
from flashckpt.demo.proof import Facts, find_problems
from flashckpt.demo.run import Follower, JobFailedError, Run
from flashckpt.demo.screen import Row
from flashckpt.errors import ConfigError, DeadlineError
from flashckpt.store.room import format_bytes
from flashckpt.testing import Cluster
from flashckpt.types import Launch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from flashckpt.demo.screen import Screen
    from flashckpt.testing import Node
    from flashckpt.types import ShardId

_SCRIPT = Path(__file__).with_name("train.py")
_JOB = "demo"
_LOOK_SECONDS = 0.1
# Timeout without a line from any rank or a change in memory. Generous: a slow machine is no failure.
_SILENCE_SECONDS = 120.0
# Timeout for the first rank to notice that another is lost.
_END_SECONDS = 15.0


@dataclass(frozen=True, slots=True)
class Plan:
    """Says what to play."""

    nodes: int = 4
    steps: int = 30
    every: int = 5
    lose: int = 2  # which node
    lose_at: int | None = None
    memory_root: Path = Path("/dev/shm")

    def __post_init__(self) -> None:
        for name, least in (("nodes", 2), ("steps", 1), ("every", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name}: expected at least {least}, found {getattr(self, name)}")
        if not 0 <= self.lose < self.nodes:
            raise ConfigError(f"lose: expected a node from 0 to {self.nodes - 1}, found {self.lose}")
        at = self.loss_step
        if not self.every < at < self.steps or at % self.every == 0:
            raise ConfigError(
                f"lose_at {at}: expected a step after the first checkpoint (step {self.every}) and before the last "
                f"step ({self.steps}) at which none is made",
                hint=f"for example --steps {4 * self.every} --lose-at {2 * self.every + max(1, self.every // 2)}",
            )

    @property
    def loss_step(self) -> int:
        """Return a step half way, but between two checkpoints."""
        if self.lose_at is not None:
            return self.lose_at
        return self.steps // 2 // self.every * self.every + max(1, self.every // 2)


@dataclass(frozen=True, slots=True)
class Cost:
    """Holds what the loss of the node cost."""

    lost_bytes: int  # lost with the node
    killed_processes: int
    lost_at: float  # time.monotonic()
    restarted_at: float
    healed_bytes: int  # copied to the blank node, to have as many copies as before


@dataclass(frozen=True, slots=True)
class DemoOutcome:
    """Holds the three launches, what the loss cost, and what is wrong with them."""

    plan: Plan
    whole: Run  # the uninterrupted one
    broken: Run
    resumed: Run
    facts: Facts
    cost: Cost
    problems: tuple[str, ...]  # empty = proved


def play(plan: Plan, screen: Screen) -> DemoOutcome:
    """Run the three launches. On return or error, no process and no file of the demo is left."""
    cluster = Cluster(plan.nodes, job=_JOB, memory_root=plan.memory_root)
    with _interruptible(), cluster, screen:
        return _Play(plan, cluster, screen).play()


class _Play:
    def __init__(self, plan: Plan, cluster: Cluster, screen: Screen) -> None:
        self._plan, self._cluster, self._screen = plan, cluster, screen
        self._held: dict[str, NodeContents] = {}
        self._announced = 0  # the newest step that was reported as replicated
        self._past: Launch | None = None  # the launch that lost its node
        self._arrived: dict[ShardId, int] = {}  # that launch's shards on the blank node, with their bytes
        self._blank_name = f"node{plan.nodes}"

    def play(self) -> DemoOutcome:
        plan = self._plan
        whole = self._reference()
        broken, facts, lost_bytes, killed = self._lose_a_node()
        lost_at = time.monotonic()
        self._wait_for_the_end(broken)
        restarted_at = time.monotonic()
        resumed = self._resume(broken.run, facts)
        record = self._wait_for_record(plan.steps // plan.every * plan.every)
        facts = Facts(facts.lost_rank, facts.promised_step, record)
        cost = Cost(lost_bytes, killed, lost_at, restarted_at, sum(self._arrived.values()))
        problems = find_problems(plan.steps, plan.every, whole, broken.run, resumed, facts)
        return DemoOutcome(plan, whole, broken.run, resumed, facts, cost, tuple(problems))

    # --- the three acts -------------------------------------------------------------------------------------

    def _reference(self) -> Run:
        plan = self._plan
        self._screen.tell(f"1/3  {plan.nodes} ranks train {plan.steps} steps, uninterrupted and without flashckpt")
        # Switched off, so that the comparison also shows any effect of saving itself on the training.
        follower = self._start({"FLASHCKPT_DISABLE": "1"})
        self._follow(follower, "1/3  uninterrupted")
        self._screen.tell(f"     final loss {follower.run.losses(0).get(plan.steps, 'unknown')}")
        return follower.run

    def _lose_a_node(self) -> tuple[Follower, Facts, int, int]:
        plan, cluster = self._plan, self._cluster
        self._screen.tell(f"2/3  the same again on {plan.nodes} nodes, a checkpoint every {plan.every} steps")
        follower = self._start({})
        victim = cluster[plan.lose]

        def is_time() -> bool:
            record = newest_record(self._held)
            # Step 1 is saved too, as a trial; the demo waits for one that is due.
            return follower.run.furthest >= plan.loss_step and record is not None and record.generation.step > 1

        self._follow(follower, "2/3  about to lose a node", is_time)
        # Read before the node is killed: what was promised by then has to be kept.
        self._look()
        record = newest_record(self._held)
        if record is None or follower.ended():
            raise JobFailedError("the training ended before a node could be lost", hint=follower.last_words())
        lost_bytes = self._held[victim.name].size_bytes
        killed = victim.kill()
        victim.wipe()
        follower.poll()
        self._held[victim.name] = NodeContents()
        self._screen.tell(
            f"     {victim.name} is lost after step {follower.run.furthest}: {killed} processes and "
            f"{format_bytes(lost_bytes)} of memory gone",
            "bold red",
        )
        generation = record.generation
        self._past = Launch(generation.epoch, generation.nonce)
        copies = {rank: holders(self._held, generation, rank) for rank in range(plan.nodes)}
        self._screen.tell(
            f"     step {generation.step} was replicated: rank {plan.lose}'s shard still lies on "
            f"{', '.join(copies[plan.lose]) or 'no node'}"
        )
        self._show("2/3  a node is lost", follower, {plan.lose: "LOST"})
        return follower, Facts(plan.lose, generation.step, 0), lost_bytes, killed

    def _wait_for_the_end(self, follower: Follower) -> None:
        """Wait until a rank misses its peer in the next collective and ends; then end the rest, as torchrun does."""
        deadline = time.monotonic() + _END_SECONDS
        while not (ended := [rank for rank in follower.ended() if rank != self._plan.lose]):
            if time.monotonic() > deadline:
                break
            time.sleep(_LOOK_SECONDS)
            self._look()
            self._show("2/3  a node is lost", follower, {self._plan.lose: "LOST"})
        follower.launch.kill()
        follower.poll()
        who = f"rank {', '.join(map(str, ended))} missed its peer" if ended else "nobody missed the lost rank"
        self._screen.tell(f"     the job is down: {who}, the rest was stopped")

    def _resume(self, broken: Run, facts: Facts) -> Run:
        plan, cluster = self._plan, self._cluster
        node = cluster[plan.lose]
        old = node.name
        node.replace(self._blank_name)
        self._held.pop(old, None)
        self._screen.tell(f"3/3  {node.name}, blank, takes the place of {old}; the job is started again")
        follower = self._start({})
        self._follow(follower, "3/3  resuming", lambda: len(follower.run.of("resumed")) == plan.nodes)
        for said in sorted(follower.run.of("resumed"), key=lambda one: one.rank):
            where = cluster[said.rank].name
            how = "from its own memory" if said.source == "memory" else "fetched from other nodes"
            style = "bold green" if said.rank == facts.lost_rank else ""
            self._screen.tell(f"     {where}: step {said.step} {how} in {said.seconds:.3f} s", style)
        self._follow(follower, "3/3  resumed", lambda: follower.run.furthest > broken.furthest)
        self._screen.tell(f"     step {broken.furthest + 1}: further than before the loss")
        self._follow(follower, "3/3  resumed")
        return follower.run

    # --- watching -------------------------------------------------------------------------------------------

    def _start(self, environment: dict[str, str]) -> Follower:
        arguments = ["--steps", str(self._plan.steps), "--every", str(self._plan.every)]
        return Follower(self._cluster.start([sys.executable, str(_SCRIPT), *arguments], environment=environment))

    def _follow(self, follower: Follower, title: str, until: Callable[[], bool] | None = None) -> None:
        """Watch until `until` is true, or without it until every rank has ended well."""
        silent_since = time.monotonic()
        while True:
            ended = len(follower.ended()) == self._plan.nodes  # checked first, so that what was written before counts
            news = follower.poll()
            follower.raise_if_failed()
            before = {name: held.shards.keys() for name, held in self._held.items()}
            self._look()
            self._show(title, follower, {})
            if ended or (until is not None and until()):
                return
            if news or before != {name: held.shards.keys() for name, held in self._held.items()}:
                silent_since = time.monotonic()
            if time.monotonic() - silent_since > _SILENCE_SECONDS:
                raise DeadlineError(
                    f"expected a sign of life from the ranks within {_SILENCE_SECONDS:.0f} s, found none after step "
                    f"{follower.run.furthest}",
                    hint=follower.last_words(),
                )
            time.sleep(_LOOK_SECONDS)

    def _look(self) -> None:
        self._held = {node.name: look(node.memory_dir, _JOB) for node in self._cluster.nodes}
        record = newest_record(self._held)
        if record is not None and record.generation.step > self._announced:
            sizes = [size_of(self._held, record.generation, rank) for rank in range(self._plan.nodes)]
            if all(sizes):  # else it was committed between two reads: the next one sees it
                self._announced = record.generation.step
                moved = format_bytes(sum(sizes) * record.replicas)
                self._screen.tell(f"     step {self._announced} is replicated: {moved} copied to buddies")
        self._note_arrivals()

    def _note_arrivals(self) -> None:
        """Return what the blank node holds of the time before it was started. It can only have come from others."""
        blank = self._cluster[self._plan.lose]
        if self._past is None or blank.name != self._blank_name:
            return
        for shard, size_bytes in self._held[blank.name].shards.items():
            if Launch(shard.generation.epoch, shard.generation.nonce) == self._past:
                self._arrived[shard] = size_bytes

    def _wait_for_record(self, step: int) -> int:
        """Return the newest step that is committed, once it is `step` or the time is over: agents continue without
        trainers.
        """
        deadline = time.monotonic() + _SILENCE_SECONDS / 4
        while True:
            self._look()
            record = newest_record(self._held)
            if (record is not None and record.generation.step >= step) or time.monotonic() > deadline:
                return 0 if record is None else record.generation.step
            time.sleep(_LOOK_SECONDS)

    def _show(self, title: str, follower: Follower, states: dict[int, str]) -> None:
        ended = follower.ended()
        rows = [self._row(rank, node, follower, states, ended) for rank, node in enumerate(self._cluster.nodes)]
        self._screen.show(title, rows)

    def _row(self, rank: int, node: Node, follower: Follower, states: dict[int, str], ended: list[int]) -> Row:
        run, held = follower.run, self._held.get(node.name, NodeContents())
        step = run.reached(rank)
        state = states.get(rank) or ("stopped" if rank in ended else "training" if step else "starting")
        known = {one.generation.step for one in held.records if one.replicas}
        return Row(
            node=node.name,
            rank=rank,
            state=state,
            step=step,
            sealed_step=held.sealed_step(rank),
            replicated_step=max(known, default=0),
            loss=run.losses(rank).get(step, ""),
            held_bytes=held.size_bytes,
        )


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Let SIGINT, SIGTERM and SIGHUP end the demo through its clean-up. A second signal does not interrupt that."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def interrupt(number: int, frame: Any) -> NoReturn:
        for one in numbers:
            signal.signal(one, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
