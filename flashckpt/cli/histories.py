"""`flashckpt histories`: the job's launches as a tree, and a person's choice between two histories. No torch."""

from __future__ import annotations

import secrets
import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import click

from flashckpt.cli.entry import NOTHING_FOUND, OK
from flashckpt.cli.memory import memory_dir_of, open_store, selected_job
from flashckpt.cli.options import where
from flashckpt.cli.output import note, print_json, printable
from flashckpt.cli.persisted import persist_dir_of, persisted_steps
from flashckpt.errors import FlashError, LiveJobError
from flashckpt.load.histories import chosen, date_of, ends
from flashckpt.protocol.line import EVERYTHING, NOTHING, Line, by_head, launch_of, name_of, order
from flashckpt.types import Launch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from flashckpt.persist.catalog import Persisted
    from flashckpt.store.slots import SlotStore
    from flashckpt.types import Generation

_SHOWN_STEPS = 8


@dataclass(frozen=True, slots=True)
class Seen:
    """What is known here of the job's launches."""

    job: str
    memory_dir: str
    persist_dir: str | None
    lines: tuple[Line, ...]
    memory: dict[Generation, tuple[int, int]]  # ranks with a shard on this node, and in all
    committed: frozenset[Generation]
    disk: tuple[Persisted, ...]
    problems: tuple[str, ...]

    @property
    def launches(self) -> set[Launch]:
        """That a step lies of here."""
        return {launch_of(one) for one in (*self.memory, *(step.generation for step in self.disk))}

    @property
    def whole(self) -> list[Generation]:
        """What counts as whole: in memory also what other nodes have the rest of."""
        memory = [one for one, (here, world) in self.memory.items() if here == world or one in self.committed]
        return [*memory, *(one.generation for one in self.disk if not one.problem)]


@dataclass(slots=True)
class Branch:
    """One launch in the tree."""

    launch: Launch
    parent: Launch | None
    from_step: int | None
    steps: dict[int, list[str]]  # step → where it lies: "memory", "partly in memory", "disk", "damaged on disk"
    state: str = "abandoned"  # current, continued, abandoned, or another history
    children: list[Branch] = field(default_factory=list)


@click.group("histories", invoke_without_command=True)
@where
@click.option("--persist-dir", metavar="DIR", help="Default: where the job's last launch on this node flushed to.")
@click.pass_context
def command(
    context: click.Context, job: str | None, memory_dir: str | None, as_json: bool, persist_dir: str | None
) -> None:
    """Show how the job's launches follow each other, with their steps on this node and on disk.

    A launch goes on from a step of the one before it. What that one saved above the step is abandoned: it is never
    loaded unless a person goes back to it. Two histories of which none goes on from the other are both kept until a
    person chooses: by load(history=NAME), or here. A name is the launch's; its first letters are enough.
    """
    directory = memory_dir_of(memory_dir, job)
    context.obj = seen = look(directory, selected_job(directory, job), persist_dir)
    if context.invoked_subcommand is not None:
        return
    roots = tree(seen)
    if as_json:
        shown = [_as_json(one) for one in _walk(roots)]
        print_json("histories/v1", {"job": seen.job, "launches": shown, "problems": list(seen.problems)})
    else:
        for text in _drawn(roots):
            click.echo(printable(text))
    for problem in seen.problems:
        note(problem)
    if not as_json:
        note("Steps in memory are those with shards on this node; other nodes may have more.")
    sys.exit(OK if roots else NOTHING_FOUND)


@command.command("choose")
@click.argument("name")
@click.pass_obj
def choose(seen: Seen, name: str) -> None:
    """Go on with history NAME at the job's next start, and abandon the others that are known here."""
    _say(seen, name, abandon=False)


@command.command("abandon")
@click.argument("name")
@click.pass_obj
def abandon(seen: Seen, name: str) -> None:
    """Abandon history NAME: the job's next start goes on with the only other one that is known here."""
    _say(seen, name, abandon=True)


def look(memory_dir: str, job: str, persist_dir: str | None) -> Seen:
    """Read what lies on this node and in persist_dir. Changes nothing."""
    from flashckpt.persist.catalog import read_lines
    from flashckpt.persist.storage import open_storage
    from flashckpt.persist.tenancy import look_around

    problems: list[str] = []
    memory: dict[Generation, set[int]] = {}
    worlds: dict[Generation, int] = {}
    with open_store(memory_dir, job) as store:
        for sealed in store.scan():
            memory.setdefault(sealed.shard.generation, set()).add(sealed.shard.rank)
            worlds[sealed.shard.generation] = sealed.shard.world
        lines = list(store.read_lines())
        committed = frozenset(record.generation for record in store.read_records())
        problems += [f"{store.path}/{name} is damaged and ignored" for name in store.damaged_lines()]
        directory = persist_dir or persist_dir_of(store)
    disk: tuple[Persisted, ...] = ()
    if directory is not None:
        try:
            storage = open_storage(directory)
            disk = look_around(storage, job).ours
            lines += read_lines(storage)
        except (FlashError, OSError) as error:
            problems.append(error.message if isinstance(error, FlashError) else str(error))
            disk = disk or tuple(persisted_steps(directory)[0])
    shards = {one: (len(ranks), worlds[one]) for one, ranks in memory.items()}
    found = tuple(by_head(lines).values())
    return Seen(job, memory_dir, directory, found, shards, committed, disk, tuple(problems))


def tree(seen: Seen) -> list[Branch]:
    """Return the launches that began with nothing, each with those that go on from it, oldest first."""
    known = by_head(seen.lines)
    launches = {*known, *seen.launches, *(one.launch for line in known.values() for one in line.listed)}
    branches: dict[Launch, Branch] = {}
    for launch in sorted(launches, key=order):
        line = known.get(launch)
        base = next((one for one in reversed(line.listed) if one.step > NOTHING), None) if line else None
        parent, step = (None, None) if base is None else (base.launch, base.step)
        branches[launch] = Branch(launch, parent, step, _steps_of(launch, seen))
    heads = ends(seen.lines, seen.whole)
    for branch in branches.values():
        branch.state = _state_of(branch, heads, known)
    roots: list[Branch] = []
    for branch in branches.values():
        above = branches.get(branch.parent) if branch.parent is not None else None
        (roots if above is None else above.children).append(branch)
    return roots


def _steps_of(launch: Launch, seen: Seen) -> dict[int, list[str]]:
    steps: dict[int, list[str]] = {}
    for one, (here, world) in seen.memory.items():
        if launch_of(one) == launch:
            is_whole = here == world or one in seen.committed
            steps.setdefault(one.step, []).append("memory" if is_whole else "partly in memory")
    for step in seen.disk:
        if launch_of(step.generation) == launch:
            steps.setdefault(step.step, []).append("damaged on disk" if step.problem else "disk")
    return dict(sorted(steps.items()))


def _state_of(branch: Branch, heads: list[Line], known: dict[Launch, Line]) -> str:
    line = known.get(branch.launch)
    root = None if line is None else line.root
    for head in reversed(heads):
        if head.head == branch.launch:
            return "current" if len(heads) == 1 else "one of several histories: a load asks which"
        cut = head.cut(branch.launch, root)
        if cut is not None and cut > NOTHING:
            return f"continued up to step {cut}" if cut < EVERYTHING else "chosen"
        if cut is not None:
            return "abandoned"
    return "of a history with nothing whole here"


def _walk(branches: list[Branch]) -> Iterator[Branch]:
    for branch in branches:
        yield branch
        yield from _walk(branch.children)


def _drawn(branches: list[Branch], margin: str = "", is_root: bool = True) -> Iterator[str]:
    for index, branch in enumerate(branches):
        is_last = index == len(branches) - 1
        mark, more = ("", "") if is_root else ("└─ ", "   ") if is_last else ("├─ ", "│  ")
        origin = "began with nothing" if branch.from_step is None else f"from step {branch.from_step}"
        if branch.from_step is not None and branch.from_step >= EVERYTHING:
            origin = "chosen by a person"
        yield f"{margin}{mark}{name_of(branch.launch)}  {date_of(branch.launch)}  {origin}  [{branch.state}]"
        inner = margin + more + ("│    " if branch.children else "     ")
        steps = list(branch.steps.items())
        if len(steps) > _SHOWN_STEPS:
            yield f"{inner}{len(steps) - _SHOWN_STEPS} older steps"
        for step, places in steps[-_SHOWN_STEPS:]:
            yield f"{inner}step {step}: {', '.join(places)}"
        yield from _drawn(branch.children, margin + more, is_root=False)


def _as_json(branch: Branch) -> dict[str, Any]:
    return {
        "name": name_of(branch.launch),
        "epoch": branch.launch.epoch,
        "state": branch.state,
        "parent": None if branch.parent is None else name_of(branch.parent),
        "from_step": branch.from_step,
        "steps": [{"step": step, "places": places} for step, places in branch.steps.items()],
    }


def _say(seen: Seen, name: str, *, abandon: bool) -> None:
    """Write the line of the choice, on this node and in persist_dir. A load by any nodes heeds it if this one is among
    them."""
    with open_store(seen.memory_dir, seen.job) as store:
        _refuse_beside_live(store, seen)
        epochs = [one.epoch for one in seen.launches] + [line.head.epoch for line in seen.lines]
        head = Launch(max([int(time.time() * 1000), store.highest_epoch() + 1, *(one + 1 for one in epochs)]), _nonce())
        line = chosen(seen.lines, seen.whole, seen.launches, head, history=name, abandon=abandon)
        store.write_line(line.compacted(seen.launches))
    if seen.persist_dir is not None and seen.disk:
        from flashckpt.persist.catalog import write_line
        from flashckpt.persist.storage import open_storage

        write_line(open_storage(seen.persist_dir), line)
    kept = next(name_of(one.launch) for one in reversed(line.listed) if one.step > NOTHING)
    note(f"job {seen.job!r} goes on with history {kept} when it is started with this node; the others are abandoned")


def _nonce() -> int:
    return secrets.randbits(64)


def _refuse_beside_live(store: SlotStore, seen: Seen) -> None:
    """LiveJobError if trainers of the job are alive on this node: the choice would take the job from them."""
    from flashckpt.agent.start import look as look_at_agent

    agent = look_at_agent(seen.memory_dir, seen.job)
    trainers = [] if agent is None else (agent.status or {}).get("trainers") or []
    if trainers:
        raise LiveJobError(
            f"job {seen.job!r}: expected no live trainers on this node, found {len(trainers)}",
            hint="end the training first: a choice is for the job's next start",
            job=seen.job,
        )
