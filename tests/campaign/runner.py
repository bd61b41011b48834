"""Carries schedules out on real agents and trainers, and asks the oracle what to think of what it sees."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import threading
import time
import traceback
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path

from flashckpt.agent.start import look
from flashckpt.errors import FlashError
from flashckpt.persist.catalog import read_lines
from flashckpt.persist.storage import open_storage
from flashckpt.persist.tenancy import look_around
from flashckpt.protocol.line import launch_of, name_of
from flashckpt.store.slots import SlotStore
from flashckpt.testing import Cluster, processes
from flashckpt.types import Generation
from tests.campaign.oracle import AMBIGUOUS, Facts, Oracle

JOB = "campaign"
OTHER_JOB = "neighbour"
PEER_TIMEOUT = 2.0
# Of what takes a second on an idle machine.
PATIENCE = 60.0
_SETTLE = 6.0
_FLUSH = 60.0  # the flusher imports torch


@dataclass
class Report:
    """What a campaign has seen."""

    seed: str
    schedules: int = 0
    launches: int = 0
    events: Counter = field(default_factory=Counter)
    recoveries: Counter = field(default_factory=Counter)  # by source of the load, or the code of its refusal
    steps: int = 0
    promises: int = 0
    choices: int = 0  # between histories
    looks: Counter = field(default_factory=Counter)  # what status said
    violations: list = field(default_factory=list)
    seconds: float = 0.0

    def as_json(self):
        return {
            **self.__dict__,
            "events": dict(self.events),
            "recoveries": dict(self.recoveries),
            "looks": dict(self.looks),
        }

    def summary(self):
        counts = [("events", self.events), ("recoveries", self.recoveries), ("status said", self.looks)]
        lines = [
            f"seed {self.seed}: {self.schedules} schedules, {self.launches} launches, {self.steps} saves, "
            f"{self.promises} promises, {self.choices} choices between histories in {self.seconds:.0f} s"
        ]
        lines += [f"{name}: {', '.join(f'{one} {n}' for one, n in sorted(found.items()))}" for name, found in counts]
        lines += [
            f"VIOLATION in schedule {one['schedule']}, episode {one['episode']} ({one['event']}): {one['what']}"
            for one in self.violations
        ]
        lines.append(f"violations: {len(self.violations)}")
        return "\n".join(lines)


class Ranks:
    """One launch of forked ranks."""

    def __init__(self, directory, number, pids, nodes, spec):
        self.directory, self.number, self.pids, self.nodes, self.spec = directory, number, pids, nodes, spec
        self._read = [0] * len(pids)  # lines of each journal that were taken in
        self.heard = []  # what it has said of its load

    def news(self):
        """Events that were not returned yet, of all ranks."""
        found = []
        for rank in range(len(self.pids)):
            lines = _lines(self.directory / f"rank{rank}.jsonl")
            found += [json.loads(line) for line in lines[self._read[rank] :]]
            self._read[rank] = len(lines)
        found.sort(key=lambda event: event["time"])
        self.heard += [event for event in found if event["event"] in ("loaded", "refused")]
        return found

    def alive(self):
        return [pid for pid in self.pids if processes.state_of(pid) not in ("", "Z", "X")]

    def signal(self, number, ranks=None):
        for pid in self.pids if ranks is None else [self.pids[rank] for rank in ranks]:
            processes.signal_to(pid, number)

    def describe(self):
        """For a report: which nodes, what it was told to load, and what came of it."""
        asked = {
            name: self.spec[name] for name in ("step", "history", "fresh", "read_only", "train") if self.spec[name]
        }
        found = {
            (event.get("code") or event.get("mark"), event.get("step"), event.get("source"), event.get("name"))
            for event in self.heard
        }
        return f"launch {self.number} on {[node.name for node in self.nodes]} {asked}: {sorted(found, key=repr)}"

    def stop(self):
        (self.directory / "stop").touch()

    def wait(self, timeout):
        deadline = time.monotonic() + timeout
        while self.alive() and time.monotonic() < deadline:
            time.sleep(0.02)
        return not self.alive()

    def kill(self):
        self.signal(signal.SIGCONT)
        self.signal(signal.SIGKILL)
        self.wait(20)


class World:
    """One schedule's cluster, its oracle, and hands that do what the schedule says."""

    def __init__(self, schedule, report, nursery, kind, bound):
        self.schedule, self.report, self.nursery, self.bound = schedule, report, nursery, bound
        can_mount = not Cluster.available("netns")
        self.cluster = Cluster(
            schedule.nodes + 1,
            kind,  # the last one takes no part until something goes wrong
            memory_bytes=(64 << 20) if can_mount else None,
            job=JOB,
        )
        self.can_fill, self.can_cut = can_mount, kind == "netns"
        self.oracle, self.neighbour = Oracle(), Oracle()
        self.launches = []
        self.extra = []  # nodes that came to the job later
        self.away = []  # nodes that the launches do without
        self.losses = 0  # faults since the promise that count against its copies
        self.copies = 0  # on other nodes, when it was given
        self.flipped = set()  # (node, generation, rank)
        self.frozen = set()  # nodes whose agents don't answer just now
        self.episode, self.event = 0, ""
        self._number = 0

    def __enter__(self):
        self.cluster.start_nodes()
        self.persist_dir = self.cluster.scratch / "persist"
        self.persist_dir.mkdir()
        self._watcher = Watcher(self)
        self._watcher.start()
        return self

    def __exit__(self, *_):
        self._watcher.stop()
        for launch in self.launches:
            launch.kill()
        self.cluster.close()

    def violation(self, what):
        self.report.violations.append(
            {
                "schedule": self.schedule.number,
                "episode": self.episode,
                "event": self.event,
                "what": what,
                "launches": [one.describe() for one in list(self.launches)],
                "histories": [repr(one) for one in self.oracle.histories],
                "logs": {node.name: _tail(node) for node in self.cluster.nodes},
            }
        )

    @property
    def spare(self):
        return self.cluster[self.schedule.nodes]

    def nodes_of(self, episode):
        """In the order of their ranks."""
        nodes = [*(self.cluster[index] for index in episode.nodes), *self.extra]
        return [node for node in nodes if node not in self.away]

    # --- launches

    def launch(
        self,
        nodes,
        per_node,
        replicas,
        *,
        train=True,
        saves=None,
        step=None,
        history=None,
        fresh=False,
        read_only=False,
        load_only=False,
        job=JOB,
        persist=None,
    ):
        """`saves`: at most as many. `history`: the name of the one to take. `fresh`: start_fresh in place of a load."""
        self._number += 1
        directory = self.cluster.scratch / f"launch{self._number}"
        directory.mkdir()
        spec = {
            "directory": str(directory),
            "launch": self._number if job == JOB else -self._number,
            "step": step,
            "history": history,
            "fresh": fresh,
            "read_only": read_only,
            "train": train,
            "saves": saves,
            "pause": 0.05,
            "linger": 2.0,
            "patience": PATIENCE,
            "config": {
                "job": job,
                "replicas": replicas,
                "peer_timeout": PEER_TIMEOUT,
                "save_timeout": 6.0,
                "start_timeout": PATIENCE,
                "agent_linger": 900.0,
                "persist_on_exit": False,
                "keep_memory": 1 if persist else 2,
                **({"persist_dir": str(self.persist_dir)} if persist else {}),
                **({"load_only": True} if load_only else {}),
            },
        }
        port, first = nodes[0].host.free_port(), nodes[0].host.address
        owners = [node for node in nodes for _ in range(per_node)]
        pids = []
        for rank, node in enumerate(owners):
            keeper = getattr(node.host, "_namespace", None)
            variables = {
                **{name: value for name, value in node.environment.items() if name.startswith(("FLASHCKPT_", "GLOO_"))},
                "FLASHCKPT_JOB": job,
                "MASTER_ADDR": first,
                "MASTER_PORT": str(port),
                "RANK": str(rank),
                "WORLD_SIZE": str(len(owners)),
                "LOCAL_RANK": str(rank % per_node),
                "LOCAL_WORLD_SIZE": str(per_node),
                "GROUP_RANK": str(rank // per_node),
            }
            request = {
                "environment": variables,
                "log": str(directory / f"rank{rank}.log"),
                "network": "" if keeper is None else f"/proc/{keeper.pid}/ns/net",
                "spec": spec,
            }
            pids.append(self.nursery.fork(request))
        ranks = Ranks(directory, spec["launch"], pids, owners, spec)
        self.launches.append(ranks)
        self.report.launches += 1
        return ranks

    def wait_loaded(self, ranks, oracle, facts, *, chosen=None, stray=False):
        """Until all ranks have said what the load gave them; judges it. True where they go on from there. `chosen`: the
        history that was asked for; `stray`: nobody meant this launch to be the job."""
        deadline = time.monotonic() + PATIENCE
        said, early = {}, []  # early: of quick ranks, which train already
        while len(said) < len(ranks.pids):
            before = not ranks.alive()
            for event in ranks.news():
                if event["event"] in ("loaded", "refused"):
                    said[event["rank"]] = event
                else:
                    early.append(event)
            if len(said) == len(ranks.pids):
                break
            if before or time.monotonic() > deadline:
                outputs = _output(ranks)
                self.violation(
                    f"ranks {sorted(set(range(len(ranks.pids))) - said.keys())} did not come to load: {outputs}"
                )
                ranks.kill()
                return False
            time.sleep(0.01)
        refusals = {event["code"] for event in said.values() if event["event"] == "refused"}
        marks = {event["mark"] for event in said.values() if event["event"] == "loaded"}
        if len(marks) > 1 or (marks and refusals):
            self.violation(f"ranks disagree on what was loaded: {list(said.values())}")
            return False
        if not all(event.get("intact", True) for event in said.values()):
            self.violation(f"bytes are not those that were saved: {list(said.values())}")
        code = min(refusals - {"FC-RANK-001"} or refusals, default=None)
        mark = next(iter(marks), None)
        names = next((event["histories"] for event in said.values() if event.get("code") == AMBIGUOUS), ())
        source = code or ("nothing" if mark is None else next(iter(said.values()))["source"])
        step, how = ranks.spec["step"], ""
        if ranks.spec["fresh"]:
            how = " (start_fresh)"
        elif step is not None:
            how = " (rollback)"
        elif chosen is not None:
            how = " (history chosen)"
        self.report.recoveries[source + how] += 1
        problems = []
        if not ranks.spec["fresh"] or code is not None:
            if step is not None and code is not None:
                # Older ones go at any time, once a newer one is committed.
                facts = replace(facts, complete=facts.complete & self.facts(ranks.nodes).complete)
            problems = oracle.judge(mark, facts, code=code, step=step, history=chosen, names=names)
        for problem in problems:
            reasons = [event.get("message", "")[:600] or event.get("stepped_over", "") for event in said.values()][:1]
            self.violation(f"{problem}; the load said: {reasons}")
        if code is not None:
            return False
        if ranks.spec["read_only"] or ranks.spec["config"].get("load_only"):
            return True
        if problems and mark is not None and mark not in oracle.states:
            return False
        oracle.named(ranks.number, next(event["name"] for event in said.values()))
        if ranks.spec["fresh"]:
            oracle.started_fresh(ranks.number, facts)
        else:
            named = step is not None or chosen is not None
            oracle.loaded(mark, ranks.number, facts, chosen=named, stray=stray)
        if oracle is self.oracle and not (stray and mark is None):
            # A load of what had few copies left is no promise of new ones, until they are there.
            self.copies, self.losses = 0, 0
        for event in early:
            self.take(ranks, oracle, event)
        return True

    def take(self, ranks, oracle, event):
        match event["event"]:
            case "saving":
                oracle.saved(event["mark"], event["parent"], event["step"], ranks.number)
            case "saved":
                self.report.steps += 1
                for problem in oracle.saved(
                    event["mark"], event["parent"], event["step"], ranks.number, event["generation"]
                ):
                    self.violation(problem)
            case "level":
                if event["level"] not in ("replicated", "persisted"):
                    return
                bound = oracle.promised(event["generation"], event["level"])
                if bound is not None:
                    self.report.promises += 1
                    if oracle is self.oracle and bound is oracle.main:
                        names = {node.name for node in ranks.nodes}
                        self.copies, self.losses = min(ranks.spec["config"]["replicas"], len(names) - 1), 0
            case _:
                pass

    def take_all(self):
        for ranks in self.launches:
            oracle = self.oracle if ranks.number > 0 else self.neighbour
            for event in ranks.news():
                self.take(ranks, oracle, event)

    # --- the truth

    def holders(self, *, damaged=False):
        """(generation, world) → rank → indices of nodes with a good copy. `damaged`: count those that were flipped."""
        found = {}
        for node in self.cluster.nodes:
            with contextlib.suppress(FlashError, OSError), SlotStore.open(node.memory_dir, JOB, create=False) as store:
                for sealed in store.scan():
                    shard = sealed.shard
                    if damaged or (node.index, shard.generation, shard.rank) not in self.flipped:
                        ranks = found.setdefault((shard.generation, shard.world), {})
                        ranks.setdefault(shard.rank, set()).add(node.index)
        return found

    def on_disk(self):
        """Generations of the job that lie in persist_dir as a whole, and names of launches that its lines know."""
        storage = open_storage(str(self.persist_dir))
        ours = [one.generation for one in look_around(storage, JOB).ours if not one.problem]
        known = {launch_of(one) for one in ours}
        with contextlib.suppress(FlashError):
            known |= _launches(read_lines(storage))
        return {tuple(one) for one in ours}, known

    def lines(self):
        """By node: the lines that lie there."""
        found = {}
        for node in self.cluster.nodes:
            with contextlib.suppress(FlashError, OSError), SlotStore.open(node.memory_dir, JOB, create=False) as store:
                found[node.index] = store.read_lines()
        return found

    def facts(self, nodes, *, persist=None):
        """What is true when a launch of these nodes begins. `persist`: whether it looks at persist_dir; default: as the
        job does."""
        indices, everywhere = ({node.index for node in some} for some in (nodes, self.cluster.nodes))
        holders, sound = self.holders(damaged=True), self.holders()
        complete, rotten = (_complete(one, indices) for one in (sound, holders))
        alive = {one.generation for one in self.oracle.alive(self.oracle.main)}
        needed = [ranks for (one, _), ranks in sound.items() if tuple(one) in alive]
        known = {launch_of(one) for (one, _), ranks in holders.items() if _is_on(ranks, indices)}
        known |= {launch for index, lines in self.lines().items() if index in indices for launch in _launches(lines)}
        anything = any(_is_on(ranks, indices) for ranks in holders.values())
        disk = None
        if self.schedule.persist if persist is None else persist:
            disk, there = self.on_disk()
            complete, known, anything = complete | disk, known | there, anything or bool(disk)
        nobody_is_away = not any(_is_on(one, everywhere - indices) for one in needed)
        return Facts(
            0 < self.copies >= self.losses and nobody_is_away,
            frozenset(complete),
            anything,
            frozenset(map(name_of, known)),
            frozenset(rotten),
            None if disk is None else frozenset(disk),
        )

    # --- a schedule

    def run(self):
        for number, episode in enumerate(self.schedule.episodes):
            self.episode, self.event = number, episode.event
            ranks = self.launch_all(episode)
            if ranks is None:
                if self.is_broken or not self.start_anew():
                    return
                continue
            self.train(ranks, episode.train_seconds)
            self.report.events[episode.event] += 1
            getattr(self, f"do_{episode.event}")(ranks, episode)
            self.train(ranks, episode.after_seconds)
            self.end(ranks)
            if self.is_broken:
                return
        self.event = "end"
        self.away = []
        ranks = self.launch_all(self.schedule.episodes[-1])
        if ranks is not None:
            self.end(ranks)

    @property
    def is_broken(self):
        """Whether something was violated in this schedule: what follows would be judged wrongly."""
        return bool(self.report.violations) and self.report.violations[-1]["schedule"] == self.schedule.number

    def launch_all(self, episode, **options):
        """A launch of the job as its operators mean it, who choose if there are several histories. None if the load was
        refused."""
        nodes = self.nodes_of(episode)
        self.wait_quiet()
        facts = self.facts(nodes)
        how = {"persist": self.schedule.persist, **options}
        ranks = self.launch(nodes, episode.ranks_per_node, episode.replicas, **how)
        if self.wait_loaded(ranks, self.oracle, facts):
            return ranks
        ranks.wait(PATIENCE)
        ranks.kill()
        rivals = self.oracle.visible(facts.complete, options.get("step"))
        if self.is_broken or len(rivals) < 2:
            return None
        return self.choose(nodes, episode, rivals, facts.complete, how)

    def choose(self, nodes, episode, rivals, before, how):
        """The load was refused because of several histories. It has changed none; each can be had by its name."""
        facts = self.facts(nodes)
        self.report.choices += 1
        if lost := before - facts.complete:
            self.violation(f"a refused load has cost {sorted(lost)}, there is {sorted(facts.complete)}")
            return None
        chosen = rivals[int(episode.fraction * 1000) % len(rivals)]
        names = [self.oracle.names[one] for one in chosen.launches if one in self.oracle.names]
        ranks = self.launch(nodes, episode.ranks_per_node, episode.replicas, history=names[-1], **how)
        if self.wait_loaded(ranks, self.oracle, facts, chosen=chosen):
            return ranks
        if not self.is_broken:
            self.violation(f"history {names[-1]} is there and could not be chosen: {_output(ranks)}")
        ranks.kill()
        return None

    def start_anew(self):
        """After a refusal that was to be expected: the operator gives up what is lost."""
        for node in self.cluster.nodes:
            node.replace()
        for path in self.persist_dir.iterdir():
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        self.flipped.clear()
        self.oracle.forget()
        return True

    def train(self, ranks, seconds):
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self.take_all()
            time.sleep(0.02)

    def end(self, ranks):
        ranks.stop()
        if not ranks.wait(15):
            ranks.kill()
        self.take_all()

    def wait_quiet(self):
        """Until nothing is frozen; files still move for a moment after an agent has begun to heal."""
        time.sleep(0.1)

    def wait_saves(self, ranks, count=2):
        """Until this launch has been promised something, if it is at all able to."""
        before, deadline = self.report.promises, time.monotonic() + _SETTLE
        while self.report.promises < before + count and time.monotonic() < deadline and ranks.alive():
            self.train(ranks, 0.05)

    # --- faults

    def do_kill_rank(self, ranks, episode):
        ranks.signal(signal.SIGKILL, [int(episode.fraction * len(ranks.pids))])

    def do_kill_trainers(self, ranks, episode):
        ranks.kill()

    def do_kill_agent(self, ranks, episode):
        pid = self.cluster[episode.victims[0]].agent_pid()
        if pid is not None:
            processes.signal_to(pid, signal.SIGKILL)

    def lose(self, ranks, indices):
        """Their ranks, agents and memory; those of others notice by themselves."""
        self.wait_saves(ranks)
        self.take_all()
        for index in indices:
            node = self.cluster[index]
            # Before the processes: what is promised from now on is promised without it.
            ranks.signal(signal.SIGKILL, [rank for rank, owner in enumerate(ranks.nodes) if owner is node])
            node.kill()
            node.wipe()
            self.flipped = {one for one in self.flipped if one[0] != index}
        self.train(ranks, 0.3)
        self.losses += len(indices)
        ranks.kill()
        self.take_all()

    def do_lose_node(self, ranks, episode):
        self.lose(ranks, episode.victims[:1])

    def do_lose_two_nodes(self, ranks, episode):
        self.lose(ranks, episode.victims[:2])

    def do_pause_agent(self, ranks, episode):
        """For less or for more than others wait for it."""
        node = self.cluster[episode.victims[0]]
        if node.agent_pid() is None:
            return
        self.frozen.add(node.index)
        node.pause("agent")
        self.train(ranks, PEER_TIMEOUT * 2 * episode.fraction)
        node.resume("agent")
        self.frozen.discard(node.index)

    def do_pause_rank(self, ranks, episode):
        rank = [int(episode.fraction * len(ranks.pids))]
        ranks.signal(signal.SIGSTOP, rank)
        self.train(ranks, 1.0)
        ranks.signal(signal.SIGCONT, rank)

    def do_flip(self, ranks, episode):
        """A bit of one copy, while nobody trains."""
        self.wait_saves(ranks)
        self.end(ranks)
        wanted = self.oracle.required
        if wanted is None:
            return
        for index in episode.victims:
            node = self.cluster[index]
            with SlotStore.open(node.memory_dir, JOB, create=False) as store:
                mine = [one for one in store.scan() if one.shard.generation == Generation(*wanted.generation)]
            if mine:
                victim = mine[int(episode.fraction * len(mine))]
                path = next(Path(node.memory_dir).glob(f"*/sealed/{victim.name}"), None)
                if path is None:
                    continue
                size = path.stat().st_size
                with path.open("r+b") as file:
                    file.seek(int(episode.fraction * size))
                    byte = file.read(1)[0]
                    file.seek(-1, os.SEEK_CUR)
                    file.write(bytes([byte ^ 0x10]))
                self.flipped.add((index, victim.shard.generation, victim.shard.rank))
                self.losses += 1
                return

    def do_fill(self, ranks, episode):
        """Somebody else takes all of the tmpfs, for a while."""
        if not self.can_fill:
            return
        node = self.cluster[episode.victims[0]]
        path = Path(node.memory_dir).parent / "somebody-elses"
        with contextlib.suppress(OSError), path.open("wb") as file:
            while True:
                file.write(bytes(1 << 16))
        self.train(ranks, 1.0 + episode.fraction)
        path.unlink()

    def do_cut(self, ranks, episode):
        if not self.can_cut:
            return
        node = self.cluster[episode.victims[0]]
        self.frozen.add(node.index)
        node.cut()
        self.train(ranks, PEER_TIMEOUT * 2 * episode.fraction)
        node.heal()
        self.frozen.discard(node.index)

    # --- operators

    def do_ctrl_c(self, ranks, episode):
        ranks.signal(signal.SIGINT)
        ranks.wait(10)

    def do_drain(self, ranks, episode):
        """`flashckpt agent stop` on a node, while its trainers go on."""
        node = self.cluster[episode.victims[0]]
        node.python("-m", "flashckpt.cli", "agent", "stop", "--timeout", "10", "--kill", timeout=40)

    def do_start_again(self, ranks, episode):
        """A launch that begins before the one before has ended: its ranks are killed once it loads."""
        ranks.kill()

    def do_stray(self, ranks, episode):
        """The job is started once by mistake on a blank machine alone: it finds nothing, saves nothing and ends. From
        then on that machine is one of the job's, beside the others or in the place of one that is lost."""
        if self.extra:
            return
        if episode.fraction < 0.5:
            self.lose(ranks, episode.victims[:1])
        self.end(ranks)
        before = {index: lines for index, lines in self.lines().items() if lines}
        stray = self.launch([self.spare], 1, 1, train=False)
        self.wait_loaded(stray, self.oracle, self.facts([self.spare], persist=False), stray=True)
        stray.wait(PATIENCE)
        stray.kill()
        after = {index: lines for index, lines in self.lines().items() if lines}
        if before != after:
            self.violation(f"a launch that saved nothing has left a line: {before}, then {after}")
        self.extra = [self.spare]

    def do_stray_saves(self, ranks, episode):
        """The same, and it saves steps 1 and 2. That machine is one of the job's at once, or after another launch."""
        if self.extra:
            return
        self.wait_saves(ranks)
        self.end(ranks)
        stray = self.launch([self.spare], 1 + int(episode.fraction * 2), 0, saves=2)
        if not self.wait_loaded(stray, self.oracle, self.facts([self.spare], persist=False), stray=True):
            return
        stray.wait(PATIENCE)
        self.end(stray)
        if int(episode.fraction * 8) % 2:
            self.spare.kill()
            self.relaunch(episode)
        self.extra = [self.spare]
        self.relaunch(episode)

    def relaunch(self, episode, seconds=0.5):
        """Once more, as the operators mean it, for a moment."""
        ranks = None if self.is_broken else self.launch_all(episode)
        if ranks is not None:
            self.train(ranks, seconds)
            self.wait_saves(ranks, 1)
            self.end(ranks)
        return ranks is not None

    def do_split(self, ranks, episode):
        """Two parts of the job's nodes are started as the job, one after the other, and don't hear of each other."""
        self.end(ranks)
        nodes = self.nodes_of(episode)
        if not self.relaunch(replace(episode, replicas=len(nodes) - 1)):  # then each part has all it needs
            return
        one = self.cluster[episode.victims[0]]
        for node in nodes:
            node.kill()
        for part in ([one], [node for node in nodes if node is not one]):
            self.part(part, episode)
            for node in part:
                node.kill()

    def part(self, nodes, episode):
        """Some of the nodes are started as the job."""
        if self.is_broken:
            return
        facts = self.facts(nodes)
        ranks = self.launch(nodes, 1, episode.replicas, persist=self.schedule.persist)
        if self.wait_loaded(ranks, self.oracle, facts):
            self.train(ranks, 0.3)
            self.wait_saves(ranks, 1)
            if self.schedule.persist and episode.fraction * 100 % 1 < 0.5:
                self.wait_persisted(ranks, ranks.number)
        self.end(ranks)

    def do_fresh(self, ranks, episode):
        """An operator begins again with nothing, on purpose."""
        self.wait_saves(ranks, 1)
        self.end(ranks)
        again = self.launch_all(episode, fresh=True)
        if again is not None:
            self.train(again, 0.3)
            self.wait_saves(again, 1)
            self.end(again)

    def do_away(self, ranks, episode):
        """A node is away while the others go on, and comes back with what it had."""
        self.wait_saves(ranks)
        self.end(ranks)
        self.without(episode, self.relaunch)

    def without(self, episode, call):
        """While a node is away; None where there would be nobody left."""
        away = self.cluster[episode.victims[0]]
        self.away = [away]
        try:
            if self.nodes_of(episode):
                away.kill()
                call(episode)
        finally:
            self.away = []

    def do_rollback(self, ranks, episode):
        """An operator goes back to an older step that is there, and trains on from it."""
        self.wait_saves(ranks)
        self.end(ranks)
        self.roll_back(episode)

    def do_rollback_without(self, ranks, episode):
        """The same while a node is away, which comes back with what it had, maybe only after another launch."""
        self.wait_saves(ranks)
        self.end(ranks)
        self.without(episode, self.roll_back_and_restart)

    def roll_back_and_restart(self, episode):
        if self.roll_back(episode) and episode.fraction * 10 % 1 < 0.7:
            self.relaunch(episode)

    def do_rollback_lost(self, ranks, episode):
        """The same, restarts, and then all memory is lost: what comes back from disk is not what was abandoned."""
        self.wait_persisted(ranks)
        self.end(ranks)
        self.roll_back_and_restart(episode)
        self.lose_memory()

    def do_lose_all(self, ranks, episode):
        """All nodes with their memory."""
        self.wait_persisted(ranks)
        ranks.kill()
        self.lose_memory()

    def lose_memory(self):
        self.take_all()
        for node in self.cluster.nodes:
            node.kill()
            node.wipe()
        self.flipped.clear()
        self.copies, self.losses = 0, 1

    def wait_persisted(self, ranks, launch=None):
        """Until something of the job, or of this launch, is on disk, if that is at all possible."""
        deadline = time.monotonic() + _FLUSH
        while ranks.alive() and time.monotonic() < deadline:
            found = self.oracle.persisted
            if found is not None and launch in (None, found.launch):
                return
            self.train(ranks, 0.1)

    def roll_back(self, episode):
        """True where that was possible."""
        if self.is_broken:
            return False
        time.sleep(0.5)  # what has been committed last is followed by what goes
        facts = self.facts(self.nodes_of(episode))
        steps = self.oracle.candidates(facts.complete)
        if not steps:
            return False
        step = steps[int(episode.fraction * len(steps))]
        again = self.launch_all(episode, step=step)
        if again is not None:
            self.train(again, 0.5)
            self.end(again)
        return again is not None

    def do_evaluate(self, ranks, episode):
        """A reader beside the training, on the same nodes."""
        self.wait_saves(ranks)
        nodes = self.nodes_of(episode)
        alone = random.Random(episode.fraction).random() < 0.5
        where = nodes[:1] if alone else nodes
        persist = self.schedule.persist
        how = {"load_only": True} if episode.fraction < 0.5 else {"read_only": True}
        before, wanted = self.lines(), self.oracle.required
        reader = self.launch(where, 1, episode.replicas, train=False, persist=persist, **how)
        self.train(ranks, 0.2)
        if not reader.wait(PATIENCE):
            self.violation("a read-only load beside a training did not end")
        self.take_all()
        said = reader.heard
        codes = {event["code"] for event in said if event["event"] == "refused"}
        self.report.recoveries[f"{min(codes - {'FC-RANK-001'} or codes, default='loaded')} (evaluation)"] += 1
        for event in said:
            mark = event.get("mark")
            if mark is not None and not event["intact"]:
                self.violation(f"a reader got bytes that nobody saved: {event}")
            elif mark is not None and not self.oracle.is_alive(self.oracle.main, mark):
                self.violation(f"a reader got what is not of the job: {event}")
            elif event["event"] == "loaded" and not alone and wanted and not self.oracle.is_ancestor(wanted.mark, mark):
                self.violation(f"a reader got {event}, although {wanted} was promised")
        if before != self.lines():
            self.violation(f"a read-only load has changed lines: {before}, then {self.lines()}")
        self.check_unharmed(ranks, "a read-only load")

    def do_launch_beside(self, ranks, episode):
        """The job is started once more by mistake, on the same nodes, while it trains."""
        self.wait_saves(ranks)
        before = self.report.promises
        second = self.launch(self.nodes_of(episode), episode.ranks_per_node, episode.replicas, train=False)
        self.train(ranks, 0.2)
        if not second.wait(PATIENCE):
            self.violation("a second launch beside a training did not end")
        self.take_all()
        said = second.heard
        if len(ranks.alive()) == len(ranks.pids) and self.report.promises > before:
            refused = {event.get("code") for event in said}
            if "FC-JOB-002" not in refused or not refused <= {"FC-JOB-002", "FC-RANK-001"}:
                self.violation(f"a second launch beside a training was not refused: {said}")
        second.kill()
        self.check_unharmed(ranks, "a second launch")

    def check_unharmed(self, ranks, what):
        """The training goes on as if nothing had been."""
        before = self.report.promises
        self.train(ranks, 1.0)
        self.wait_saves(ranks, 1)
        if len(ranks.alive()) == len(ranks.pids) and self.report.promises == before:
            self.violation(f"after {what} beside it, nothing of the training was promised any more")

    def do_second_job(self, ranks, episode):
        """Another job with the same persist_dir, on the first node: refused, because the directory is not its own."""
        deadline = time.monotonic() + _FLUSH
        while not any(self.persist_dir.glob("step-*")) and time.monotonic() < deadline and ranks.alive():
            self.train(ranks, 0.1)
        node = self.cluster[0]
        facts = Facts(False, frozenset(), any(self.persist_dir.iterdir()))
        other = self.launch([node], 1, 0, job=OTHER_JOB, persist=True)
        if self.wait_loaded(other, self.neighbour, facts):
            self.train(ranks, 2.0)
        self.end(other)

    def do_wrong_nodes(self, ranks, episode):
        """The job is started on some of its nodes only, and ended when that has been noticed, maybe after it saved."""
        self.wait_saves(ranks)
        self.end(ranks)
        nodes = [self.cluster[index] for index in episode.victims[: 1 + int(episode.fraction * 2)]]
        if episode.fraction * 10 % 1 < 0.5:
            self.part(nodes, episode)
            return
        facts = self.facts(nodes)
        wrong = self.launch(nodes, 1, 0, train=False, persist=self.schedule.persist)
        self.wait_loaded(wrong, self.oracle, facts)
        wrong.wait(PATIENCE)
        wrong.kill()


class Watcher(threading.Thread):
    """Asks the agents how the job stands, and compares that with what lies on the nodes."""

    def __init__(self, world):
        super().__init__(daemon=True)
        self._world = world
        self._over = threading.Event()
        self._wrong_since = {}  # (node, generation) → when its status was first found to be wrong

    def stop(self):
        self._over.set()
        self.join(20)

    def run(self):
        while not self._over.wait(0.3):
            for node in list(self._world.cluster.nodes):
                try:
                    self._look(node)
                except (FlashError, OSError, ValueError):
                    continue  # it is just being killed, or wiped
                except Exception:
                    self._world.violation(f"the watcher failed: {traceback.format_exc()}")
                    return

    def _look(self, node):
        world = self._world
        if node.index in world.frozen:
            return
        asked_at = time.monotonic()
        seen = look(node.memory_dir, JOB, 1.0)
        kept = None if seen is None or seen.status is None else seen.status["kept"]
        if kept is None:
            return
        verdict = kept["verdict"]
        world.report.looks[verdict["safety"]] += 1
        generation = Generation(kept["epoch"], int(kept["nonce"], 16), kept["step"], kept["seq"])
        problem = self._compare(generation, verdict, kept["health"])
        key = (node.index, generation)
        for other in [one for one in self._wrong_since if one[0] == node.index and (one != key or not problem)]:
            del self._wrong_since[other]
        if problem:
            since = self._wrong_since.setdefault(key, asked_at)
            if time.monotonic() - since > world.bound:
                world.violation(f"status of {node.name} has been wrong for more than {world.bound} s: {problem}")
                self._wrong_since[key] = float("inf")

    def _compare(self, generation, verdict, health):
        """What is wrong with the verdict; "" where it is true, or says that it does not know."""
        if verdict["safety"] == "unknown" or health is None:
            return ""
        world = self._world
        answering = {n.index for n in world.cluster.nodes if n.index not in world.frozen and n.agent_pid() is not None}
        found = next((ranks for (one, _), ranks in world.holders(damaged=True).items() if one == generation), {})
        copies = [len(found.get(rank, set()) & answering) for rank in range(health["world"])]
        said = f"{verdict['safety']}: {verdict['words']} (by {verdict['source']}: {verdict['reason']})"
        if verdict["safety"] != "lost" and min(copies, default=0) == 0:
            return f"{said}; nobody that answers has shard {copies.index(0)} of {generation}"
        if verdict["safety"] == "lost" and min(copies, default=0) > 0:
            return f"{said}; every shard of {generation} is there: {found}"
        if health["survives"]["any_nodes"] > min(copies, default=0) - 1:
            return f"{said}; the shards of {generation} have {copies} copies"
        return ""


def _complete(holders, indices):
    """Generations that these nodes have all shards of."""
    return {
        tuple(generation)
        for (generation, world), ranks in holders.items()
        if all(ranks.get(rank, set()) & indices for rank in range(world))
    }


def _is_on(ranks, indices):
    return any(held & indices for held in ranks.values())


def _launches(lines):
    """That these lines speak of."""
    return {one for line in lines for one in (line.head, *(ancestor.launch for ancestor in line.listed))}


def _output(ranks):
    """The end of what its ranks have printed."""
    return "".join(_text(ranks.directory / f"rank{rank}.log")[-1500:] for rank in range(len(ranks.pids)))


def _lines(path):
    return [line for line in _text(path).splitlines(keepends=True) if line.endswith("\n")]


def _text(path):
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _tail(node):
    return "".join(_text(path)[-3000:] for path in sorted(Path(node.memory_dir).glob("*/agent.log")))
