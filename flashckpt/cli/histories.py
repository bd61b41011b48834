"""Implements `flashckpt histories`: shows the job's launches as a tree; a person may choose a history. No torch."""

from __future__ import annotations

import contextlib
import enum
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
from flashckpt.cli.persisted import persist_dir_of
from flashckpt.config import CheckpointConfig, resolve
from flashckpt.errors import AgentError, CorruptShardError, FlashError, LiveJobError, PersistError
from flashckpt.load.histories import chosen, date_of, ends
from flashckpt.protocol.line import EVERYTHING, NOTHING, Ancestor, Line, by_head, launch_of, name_of, order
from flashckpt.rpc.session import decode_session
from flashckpt.types import Launch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from flashckpt.persist.catalog import Persisted
    from flashckpt.store.slots import SlotStore
    from flashckpt.types import Generation, Session

_SHOWN_STEPS = 8
_SHOWN_NODES = 4


@dataclass(frozen=True, slots=True)
class Seen:
    """Holds what this node knows of the job's launches."""

    job: str
    memory_dir: str
    persist_dir: str | None  # None: there is none, or it is another job's
    lines: tuple[Line, ...]
    memory: dict[Generation, tuple[int, int]]  # ranks with a shard on this node, and ranks in all
    committed: frozenset[Generation]
    nodes: dict[Launch, tuple[str, ...]]  # of the launches whose sessions this node remembers
    here: str  # this node's name
    disk: tuple[Persisted, ...]
    problems: tuple[str, ...]

    @property
    def launches(self) -> set[Launch]:
        """Return the launches of which a step is on this node or on disk."""
        return {launch_of(one) for one in (*self.memory, *(step.generation for step in self.disk))}

    @property
    def whole(self) -> list[Generation]:
        """Return the complete generations. In memory, a committed one counts: other nodes have the rest."""
        memory = [one for one, (here, world) in self.memory.items() if here == world or one in self.committed]
        return [*memory, *(one.generation for one in self.disk if not one.problem)]


class State(enum.StrEnum):
    """Says how a launch is related to the histories that have a complete generation here."""

    CURRENT = "current"  # the newest of the only history
    ONE_OF_SEVERAL = "one of several histories"  # the newest of one of them: a person chooses
    CONTINUED = "continued"  # its steps up to some step are on a history
    ABANDONED = "abandoned"  # none of its steps is on a history
    UNRELATED = "of a history with nothing complete here"


@dataclass(slots=True)
class Step:
    """Says where one step of a launch is."""

    step: int
    places: list[str] = field(default_factory=list)  # "memory", "partly in memory", "disk", "damaged on disk"
    nodes: tuple[str, ...] = ()  # nodes that hold shards of it in memory, as far as this node knows


@dataclass(slots=True)
class Branch:
    """Describes one launch in the tree."""

    launch: Launch
    base: Ancestor | None  # the step and launch that it continued
    is_root: bool  # it began with nothing. False without a base: what it continued is not known here
    steps: list[Step]
    state: State = State.UNRELATED
    up_to: int | None = None  # CONTINUED: the last step that counts; None: all of them do
    children: list[Branch] = field(default_factory=list)


@click.group("histories", invoke_without_command=True)
@where
@click.option("--persist-dir", metavar="DIR", help="Default: that of the job's last launch on this node.")
@click.pass_context
def command(
    context: click.Context, job: str | None, memory_dir: str | None, as_json: bool, persist_dir: str | None
) -> None:
    """Show how the job's launches continue each other, with their steps on this node and on disk.

    A launch continues from a step of an earlier launch. Later steps of that launch are abandoned: they are never loaded
    unless a person goes back to them. Two histories of which neither continues the other are both kept until a person
    chooses: by load(history=NAME), or here, on a node that knows both. A name is the launch's; its first letters are
    enough.
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
        hidden = _hide_idle(roots)
        for text in _drawn(roots):
            click.echo(printable(text))
        if hidden:
            note(f"Not shown: {hidden} launches that the job did not continue and of which nothing is stored here.")
    for problem in seen.problems:
        note(problem)
    if not as_json:
        note("Steps in memory are those with shards on this node; other nodes may have more.")
    sys.exit(OK if seen.launches or seen.lines else NOTHING_FOUND)


@command.command("choose")
@click.argument("name")
@click.pass_obj
def choose(seen: Seen, name: str) -> None:
    """Continue with history NAME at the job's next start, and abandon the others that this node knows."""
    _say(seen, name, abandon=False)


@command.command("abandon")
@click.argument("name")
@click.pass_obj
def abandon(seen: Seen, name: str) -> None:
    """Abandon history NAME: the job's next start continues with the only other one that this node knows."""
    _say(seen, name, abandon=True)


def look(memory_dir: str, job: str, persist_dir: str | None) -> Seen:
    """Read what is on this node and in persist_dir. Changes nothing."""
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
        sessions = _sessions(store)
        directory = persist_dir or persist_dir_of(store)
    disk: tuple[Persisted, ...] = ()
    if directory is not None:
        directory, disk, more, found = _look_at_disk(directory, job)
        lines += more
        problems += found
    shards = {one: (len(ranks), worlds[one]) for one, ranks in memory.items()}
    nodes = {one.launch: tuple(member.node_id for member in one.members) for one in sessions}
    here = resolve(CheckpointConfig(job=job, memory_dir=memory_dir)).node_id
    if nodes and not any(here in members for members in nodes.values()):
        here = "this node"  # a trainer gave it a name that is not known here
    known = tuple(by_head(lines).values())
    return Seen(job, memory_dir, directory, known, shards, committed, nodes, here, disk, tuple(problems))


def _look_at_disk(
    directory: str, job: str
) -> tuple[str | None, tuple[Persisted, ...], tuple[Line, ...], tuple[str, ...]]:
    """Return the directory unless it is another job's, the job's steps there, its lines, and what can't be used."""
    from flashckpt.persist.catalog import read_lines
    from flashckpt.persist.storage import open_storage
    from flashckpt.persist.tenancy import check_place, look_around

    steps: tuple[Persisted, ...] = ()
    try:
        check_place(directory)
        storage = open_storage(directory)
        tenancy = look_around(storage, job)
        steps = tenancy.ours
        if tenancy.is_others:
            return None, steps, (), (tenancy.why_foreign(),)
        return directory, steps, read_lines(storage), ()
    except (FlashError, OSError) as error:
        return directory, steps, (), (error.message if isinstance(error, FlashError) else f"{directory}: {error}",)


def _sessions(store: SlotStore) -> list[Session]:
    """Read the sessions that this node remembers; what cannot be parsed is left out."""
    found = []
    for data in (*(past for _, past in store.read_past_sessions()), store.read_session()):
        with contextlib.suppress(CorruptShardError):
            found += [] if data is None else [decode_session(data)]
    return found


def tree(seen: Seen) -> list[Branch]:
    """Return the launches that began with nothing, or whose origin is not known, each with those that continued it,
    oldest first.
    """
    known = by_head(seen.lines)
    launches = {*known, *seen.launches, *(one.launch for line in known.values() for one in line.listed)}
    bases = _bases(known)
    branches = {
        launch: Branch(launch, bases.get(launch), launch in bases and bases[launch] is None, _steps_of(launch, seen))
        for launch in sorted(launches, key=order)
    }
    heads = ends(seen.lines, seen.whole)
    roots: list[Branch] = []
    for branch in branches.values():
        _set_state(branch, heads, known)
        above = None if branch.base is None else branches.get(branch.base.launch)
        (roots if above is None else above.children).append(branch)
    return roots


def _bases(known: dict[Launch, Line]) -> dict[Launch, Ancestor | None]:
    """Return what each launch continued, None if it began with nothing. Launches whose origin is not known are left
    out.

    A line tells it of its head and of the head's ancestors, whose own lines may have been removed.
    """
    own: dict[Launch, Ancestor | None] = {}
    told: dict[Launch, Ancestor | None] = {}
    for line in known.values():
        path = [one for one in line.listed if one.step > NOTHING]
        launches = [*(one.launch for one in path), line.head]
        if launches[0] == line.root:
            told[line.root] = None
        # Between launches below the floor, others may be missing.
        told |= {
            launch: base
            for base, launch in zip(path, launches[1:], strict=True)
            if line.floor is None or order(base.launch) > order(line.floor.launch)
        }
        if path:
            own[line.head] = path[-1]
    return told | own


def _steps_of(launch: Launch, seen: Seen) -> list[Step]:
    steps: dict[int, Step] = {}
    for one, (here, world) in seen.memory.items():
        if launch_of(one) == launch:
            is_whole = here == world or one in seen.committed
            step = steps.setdefault(one.step, Step(one.step))
            step.places.append("memory" if is_whole else "partly in memory")
            # All nodes of a launch have shards of what it has committed.
            members = seen.nodes.get(launch, ()) if one in seen.committed else ()
            step.nodes = tuple(dict.fromkeys((*step.nodes, *members, *([] if seen.here in members else [seen.here]))))
    for persisted in seen.disk:
        if launch_of(persisted.generation) == launch:
            step = steps.setdefault(persisted.step, Step(persisted.step))
            step.places.append("damaged on disk" if persisted.problem else "disk")
    return [steps[step] for step in sorted(steps)]


def _set_state(branch: Branch, heads: list[Line], known: dict[Launch, Line]) -> None:
    line = known.get(branch.launch)
    cuts = [head.cut(branch.launch, None if line is None else line.root) for head in heads]
    found = [cut for cut in cuts if cut is not None]
    if any(head.head == branch.launch for head in heads):
        branch.state = State.CURRENT if len(heads) == 1 else State.ONE_OF_SEVERAL
    elif found:
        highest = max(found)
        branch.state = State.CONTINUED if highest > NOTHING else State.ABANDONED
        branch.up_to = highest if NOTHING < highest < EVERYTHING else None


def _walk(roots: list[Branch]) -> Iterator[Branch]:
    """Yield each launch before those that continued it."""
    todo = roots[::-1]
    while todo:
        branch = todo.pop()
        yield branch
        todo += branch.children[::-1]


def _hide_idle(roots: list[Branch]) -> int:
    """Remove launches of which nothing is here, and nothing of those that continued them. Return their number."""
    hidden = 0
    for siblings in reversed([roots, *(branch.children for branch in _walk(roots))]):
        idle = [one for one in siblings if not one.steps and not one.children and one.state is State.ABANDONED]
        siblings[:] = [one for one in siblings if one not in idle]
        hidden += len(idle)
    return hidden


def _drawn(roots: list[Branch]) -> Iterator[str]:
    """Draw the tree as lines. The only launch that continued another one is below it, not beside it."""
    todo = [(branch, "", "") for branch in roots[::-1]]  # prefix of the name, and of all lines below it
    while todo:
        branch, before, margin = todo.pop()
        yield f"{before}{_title(branch)}"
        inner = margin + ("│    " if branch.children else "     ")
        if len(branch.steps) > _SHOWN_STEPS:
            yield f"{inner}{len(branch.steps) - _SHOWN_STEPS} older steps"
        for step in branch.steps[-_SHOWN_STEPS:]:
            yield f"{inner}step {step.step}: {_places(step)}"
        if len(branch.children) == 1:
            todo.append((branch.children[0], margin, margin))
            continue
        for child in branch.children[::-1]:
            is_last = child is branch.children[-1]
            todo.append((child, margin + ("└─ " if is_last else "├─ "), margin + ("   " if is_last else "│  ")))


def _title(branch: Branch) -> str:
    launch, base = branch.launch, branch.base
    if launch.epoch == 0:
        return "steps of no launch, put there by a person"
    if base is not None:
        origin = f"from step {base.step}" if base.step < EVERYTHING else "from all that was there"
    else:
        origin = "began with nothing" if branch.is_root else "what it continued is not known here"
    state = str(branch.state)
    if branch.state is State.CONTINUED:
        state += " with all its steps" if branch.up_to is None else f" up to step {branch.up_to}"
    elif branch.state is State.ONE_OF_SEVERAL:
        state += ": choose one before a load"
    return f"{name_of(launch)}  {date_of(launch)}  {origin}  [{state}]"


def _places(step: Step) -> str:
    more = f" and {len(step.nodes) - _SHOWN_NODES} more" if len(step.nodes) > _SHOWN_NODES else ""
    nodes = f" ({', '.join(step.nodes[:_SHOWN_NODES])}{more})" if step.nodes else ""
    return ", ".join(f"{place}{nodes if 'memory' in place else ''}" for place in dict.fromkeys(step.places))


def _as_json(branch: Branch) -> dict[str, Any]:
    base = branch.base
    return {
        "name": name_of(branch.launch),
        "epoch": branch.launch.epoch,
        "state": branch.state.value,
        "up_to": branch.up_to,
        "is_root": branch.is_root,
        "parent": None if base is None else name_of(base.launch),
        "from_step": None if base is None or base.step >= EVERYTHING else base.step,
        "steps": [
            {"step": one.step, "places": list(dict.fromkeys(one.places)), "nodes": list(one.nodes)}
            for one in branch.steps
        ],
    }


def _say(seen: Seen, name: str, *, abandon: bool) -> None:
    """Write the line of the choice, on this node and in persist_dir. A load heeds it if this node takes part."""
    with open_store(seen.memory_dir, seen.job) as store:
        _refuse_beside_live(store, seen)
        epochs = [one.epoch for one in seen.launches] + [line.head.epoch for line in seen.lines]
        head = Launch(max([int(time.time() * 1000), store.highest_epoch() + 1, *(one + 1 for one in epochs)]), _nonce())
        line = chosen(seen.lines, seen.whole, seen.launches, head, history=name, abandon=abandon)
        store.write_line(line.compacted(seen.launches))
    kept = next(name_of(one.launch) for one in reversed(line.listed) if one.step > NOTHING)
    if seen.persist_dir is not None and seen.disk:
        from flashckpt.persist.catalog import write_line
        from flashckpt.persist.storage import open_storage

        try:
            write_line(open_storage(seen.persist_dir), line)
        except OSError as error:
            raise PersistError(
                f"{seen.persist_dir}: the choice of history {kept} could not be written there: {error}",
                hint="it counts for loads in which this node takes part; repeat it when persist_dir can be written",
            ) from error
    note(f"job {seen.job!r} continues with history {kept} when it is started with this node; the others are abandoned")


def _nonce() -> int:
    return secrets.randbits(64)


def _refuse_beside_live(store: SlotStore, seen: Seen) -> None:
    """Raise LiveJobError if trainers of the job are alive on this node, because the choice would take the job from
    them. Raise AgentError if the agent, which knows it, does not answer.
    """
    from flashckpt.agent.start import look as look_at_agent

    agent = look_at_agent(seen.memory_dir, seen.job)
    if agent is not None and agent.status is None:
        raise AgentError(
            f"job {seen.job!r}: expected this node's agent to say whether trainers are alive, found: {agent.problem}",
            hint="`flashckpt agent stop` ends it",
        )
    trainers = [] if agent is None or agent.status is None else agent.status["trainers"]
    if trainers:
        who = ", ".join(f"rank {one['rank']} (pid {one['pid']})" for one in trainers)
        raise LiveJobError(
            f"job {seen.job!r}: expected no live trainers on this node, found {who}",
            hint="end the training first: a choice is for the job's next start",
            job=seen.job,
        )
