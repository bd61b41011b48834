"""The simulated world: time, the network between agents, and the execution of what their cores decide.

One thread, one random stream: a seed is a whole history. Delays, losses, duplicates and crashes are drawn where
they happen; nothing else is random.
"""

from __future__ import annotations

import heapq
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import flashckpt.protocol.current_launch as standing_module
from flashckpt.protocol.core import AgentCore
from flashckpt.protocol.events import (
    Accept,
    Acknowledge,
    Answered,
    Begun,
    Decline,
    Gone,
    Grant,
    KeepLine,
    KeepRecord,
    KeepSession,
    LinePut,
    Notify,
    Pushed,
    PushEnd,
    PutAsked,
    Quarantine,
    Received,
    RefuseBusy,
    RefuseFenced,
    Release,
    Reply,
    Rotten,
    Send,
    ShardSealed,
    StartPush,
    Tick,
    Told,
    Unreachable,
)
from flashckpt.protocol.replicate import Limits
from flashckpt.protocol.wire import Announce, Beat, Envelope, Holds, Lost, PutHave, PutOpen, Report, WantBack
from flashckpt.types import Level
from tests.sim.machine import File, Machine
from tests.sim.truth import Truth, Violation

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

    from flashckpt.protocol.events import Effect, Event
    from flashckpt.protocol.wire import Answer, Body
    from flashckpt.types import Held
    from tests.sim.job import Job
    from tests.sim.swarm import Swarm

# The same members are placed again at every start of an agent; the answer is a pure function of them.
standing_module.place = lru_cache(maxsize=4096)(standing_module.place)

LIMITS = Limits(beat=1.9, retry_first=0.1, retry_most=1.0, peer_timeout=3.0)
TICK = 1.0
RPC_TIMEOUT = 0.6
KEPT_RECORDS = 4


class World:
    """Machines, messages in flight, and the clock."""

    job: Job

    def __init__(self, rng: Random, swarm: Swarm, core: type[AgentCore] = AgentCore, trace: bool = False) -> None:
        self.rng = rng
        self.swarm = swarm
        self.core_class = core
        self.trace = trace
        self.log: list[str] = []
        self.now = 0.0
        self.events = 0
        self.probes: set[str] = set()
        self.machines: list[Machine] = []
        self.by_name: dict[str, Machine] = {}
        self.cut: set[tuple[Machine, Machine]] = set()  # from → to
        self.truth = Truth(self.machines, self.probes)
        self.last_news = 0.0  # when something other than a sign of life was sent
        self.faults_on = True
        self._queue: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._number = 0
        self._crash_points = 0.0

    # --- time -----------------------------------------------------------------------------------------------

    def after(self, delay: float, action: Callable[..., None], *arguments: Any) -> None:
        self._number += 1
        heapq.heappush(self._queue, (self.now + delay, self._number, action, arguments))

    def run_until(self, end: float) -> None:
        queue = self._queue
        while queue and queue[0][0] <= end:
            self.now, _, action, arguments = heapq.heappop(queue)
            action(*arguments)
        self.now = end

    def say(self, text: str) -> None:
        self.log.append(f"{self.now:7.2f} {text}")

    # --- machines and agents --------------------------------------------------------------------------------

    def add_machine(self, name: str | None = None) -> Machine:
        number = len(self.machines)
        domain = f"d{number % self.swarm.domains}" if self.swarm.domains else ""
        machine = Machine(number, name or f"m{number}", domain, offset=1000.0 * self.rng.random())
        self.machines.append(machine)
        self.by_name[machine.name] = machine
        self.start_agent(machine)
        return machine

    def start_agent(self, machine: Machine) -> None:
        if machine.core is not None or not machine.alive:
            return
        machine.core = self.core_class(machine.name, LIMITS)
        machine.incarnation += 1
        machine.paused_until = 0.0
        machine.heard = machine.current()
        if self.trace:
            self.say(f"{machine}: agent starts")
        if self.feed(machine, machine.started()) is not None:
            self.after(TICK * self.rng.random(), self._tick, machine, machine.incarnation)

    def crash_agent(self, machine: Machine, restart_in: float | None = None) -> None:
        if machine.core is None:
            return
        machine.core = None
        machine.partial.clear()
        if self.trace:
            self.say(f"{machine}: agent crashes")
        self.job.agent_crashed(machine)
        self.after(0.3 + 1.5 * self.rng.random() if restart_in is None else restart_in, self.start_agent, machine)

    def _tick(self, machine: Machine, incarnation: int) -> None:
        if machine.incarnation != incarnation or machine.core is None:
            return
        if not self.is_paused(machine):
            if self.feed(machine, Tick()) is None:
                return
            self.job.check_deadlines(machine)
            if self.rng.random() < 0.5:
                self._look_around(machine)
        self.after(TICK, self._tick, machine, incarnation)

    def _look_around(self, machine: Machine) -> None:
        """The agent compares what it believes to hold with what lies there."""
        core = machine.core
        if core is None or core.held.keys() == machine.files.keys():
            return
        self.probes.add("a look around finds a difference")
        for shard in [s for s in machine.files if s not in core.held]:
            if self.feed(machine, ShardSealed(machine.files[shard].held)) is None:
                return
        for shard in [s for s in core.held if s not in machine.files]:
            if self.feed(machine, Gone(shard)) is None:
                return

    def is_paused(self, machine: Machine) -> bool:
        return machine.paused_until > self.now

    def deliver(self, machine: Machine, incarnation: int, event: Event) -> None:
        """An event without an answer, for this incarnation of the agent; a paused one gets it when it wakes up."""
        if machine.core is None or machine.incarnation != incarnation:
            return
        if self.is_paused(machine):
            self.after(machine.paused_until - self.now + 0.001, self.deliver, machine, incarnation, event)
            return
        self.feed(machine, event)

    def feed(self, machine: Machine, event: Event) -> list[Effect] | None:
        """One step of a core, and its effects in order; None where the agent died before the last of them."""
        core = machine.core
        if core is None:
            return None
        self.events += 1
        stale = _launch_in(event)
        before = None
        if stale is not None and stale < machine.heard:
            before = _state_of(core)
        _hear(machine, event)
        effects = core.handle(event, self.now + machine.offset)
        if before is not None and before != _state_of(core):
            raise Violation("FENCED-WRITER", f"{machine}: {event} of an older launch changed its state")
        if not effects:
            return effects
        cut = -1
        if self._crash_points and self.faults_on and self.rng.random() < self._crash_points:
            cut = self.rng.randrange(len(effects))
        for index, effect in enumerate(effects):
            if index == cut:
                self._note_cut(effects, cut)
                self.crash_agent(machine)
                return None
            _EXECUTE[type(effect)](self, machine, effect)
        return effects

    def _note_cut(self, effects: list[Effect], cut: int) -> None:
        done = {type(effect) for effect in effects[:cut]}
        left = {type(effect) for effect in effects[cut:]}
        if KeepRecord in done and Send in left:
            self.probes.add("crash between a record and its announcement")
        if Release in done and Release in left:
            self.probes.add("crash between two releases")
        if KeepLine in done and Release in left:
            self.probes.add("crash between a line and its releases")

    def allow_crashes_between_effects(self, probability: float) -> None:
        self._crash_points = probability

    # --- effects --------------------------------------------------------------------------------------------

    def _keep_session(self, machine: Machine, effect: KeepSession) -> None:
        machine.session, machine.base = effect.session, effect.base

    def _keep_line(self, machine: Machine, effect: KeepLine) -> None:
        self.truth.on_line(machine, effect.line)
        machine.keep_line(effect.line)
        if self.trace:
            self.say(f"{machine}: keeps {self.truth.describe(effect.line)}")

    def _keep_record(self, machine: Machine, effect: KeepRecord) -> None:
        kept = [one for one in machine.records if one.generation != effect.record.generation]
        machine.records = tuple(sorted((*kept, effect.record), key=lambda one: one.generation)[-KEPT_RECORDS:])
        if self.trace:
            self.say(f"{machine}: keeps the record of {self.truth.instances[effect.record.generation]}")
        self.truth.on_record(machine, effect.record)
        self.job.on_record(effect.record)

    def _release(self, machine: Machine, effect: Release) -> None:
        file = machine.files.get(effect.shard)
        if self.trace and file is not None:
            self.say(f"{machine}: drops rank {effect.shard.rank} of {file.instance}: {effect.reason}")
        self.truth.on_release(machine, effect.shard, file, effect.reason)
        machine.files.pop(effect.shard, None)

    def _quarantine(self, machine: Machine, effect: Quarantine) -> None:
        if machine.files.pop(effect.shard, None) is not None:
            machine.quarantined += 1

    def _grant(self, machine: Machine, effect: Grant) -> None:
        self.job.on_grant(machine, effect.request_id)

    def _refuse_busy(self, machine: Machine, effect: RefuseBusy) -> None:
        self.job.on_busy(machine, effect.request_id)

    def _refuse_fenced(self, machine: Machine, effect: RefuseFenced) -> None:
        if effect.request_id is not None:
            self.job.on_fenced(machine, effect.request_id)

    def _notify(self, machine: Machine, effect: Notify) -> None:
        if effect.level is Level.REPLICATED:
            self.truth.on_replicated(machine, effect.generation)
        self.job.on_notify(machine, effect)

    def _nothing(self, machine: Machine, effect: Effect) -> None:
        """Answers are taken from the list by whoever asked."""

    # --- the network ----------------------------------------------------------------------------------------

    def delay(self) -> float:
        slow = self.swarm.reorder if self.faults_on else 0.0
        return 0.002 + 0.01 * self.rng.random() if self.rng.random() >= slow else 2.0 * self.rng.random()

    def loses(self) -> bool:
        return self.faults_on and self.swarm.lossy > 0 and self.rng.random() < self.swarm.lossy

    def connected(self, source: Machine, target: Machine) -> bool:
        if not (source.alive and target.alive) or source.isolated or target.isolated:
            return False
        return not self.cut or (source, target) not in self.cut

    def _send(self, machine: Machine, effect: Send) -> None:
        core, body = machine.core, effect.body
        if core is None or core.session is None:
            return
        if type(body) is not Beat and type(body) is not Holds:
            self._note_news(machine)
            self._probe_body(machine, body)
        envelope = Envelope(machine.name, core.session.launch, core.line, body)
        target = self.by_name[effect.node_id]
        self.after(self.delay(), self._arrive, machine, machine.incarnation, target, target.incarnation, envelope)
        if self.faults_on and self.swarm.duplicates and self.rng.random() < self.swarm.duplicates:
            # The second one may come much later.
            late = 3.0 * self.rng.random()
            self.after(late, self._arrive, machine, machine.incarnation, target, target.incarnation, envelope)

    def _note_news(self, machine: Machine) -> None:
        """Agents that the newest launch left behind may repeat themselves for ever."""
        newest = self.job.newest
        if newest is not None and machine in newest.members:
            self.last_news = self.now

    def _arrive(
        self, source: Machine, incarnation: int, target: Machine, target_incarnation: int, envelope: Envelope
    ) -> None:
        if target.core is not None and target.incarnation == target_incarnation and self.is_paused(target):
            wait = target.paused_until - self.now + 0.001
            self.after(wait, self._arrive, source, incarnation, target, target_incarnation, envelope)
            return
        # A connection ends with the process at its other end: nothing that was sent to it reaches its successor.
        gone = target.core is None or target.incarnation != target_incarnation
        if gone or self.loses() or not self.connected(source, target):
            self._unreachable(source, incarnation, target)
            return
        self._probe_told(target, envelope)
        effects = self.feed(target, Told(envelope))
        reply = effects[-1] if effects and isinstance(effects[-1], Reply) else None
        if reply is not None and reply.answer.copies and not target.core.is_coordinator:
            self.probes.add("another node heals than the coordinator")
        if reply is None or self.loses() or not self.connected(target, source):
            self._unreachable(source, incarnation, target)
            return
        self.after(self.delay(), self._answer, source, incarnation, target.name, reply.answer)

    def _answer(self, machine: Machine, incarnation: int, node_id: str, answer: Answer) -> None:
        self.deliver(machine, incarnation, Answered(node_id, answer))

    def _unreachable(self, machine: Machine, incarnation: int, target: Machine) -> None:
        self.after(RPC_TIMEOUT, self.deliver, machine, incarnation, Unreachable(target.name, "no answer"))

    # --- pushes ---------------------------------------------------------------------------------------------

    def _push(self, machine: Machine, effect: StartPush) -> None:
        core, held = machine.core, effect.held
        if core is None or core.session is None:
            return
        self._note_news(machine)
        self._probe_push(core, effect)
        target = self.by_name[effect.node_id]
        put = PutOpen(
            machine.name, core.session.launch, core.line, held.shard, held.tag, held.digest, held.size_bytes, 64
        )
        self.after(self.delay(), self._put_asked, machine, machine.incarnation, target, target.incarnation, put, held)

    def _push_failed(self, machine: Machine, incarnation: int, held: Held, target: Machine) -> None:
        event = Pushed(held.shard, target.name, PushEnd.FAILED, reason="broken")
        self.after(RPC_TIMEOUT, self.deliver, machine, incarnation, event)

    def _put_asked(
        self, source: Machine, incarnation: int, target: Machine, target_incarnation: int, put: PutOpen, held: Held
    ) -> None:
        if target.core is not None and target.incarnation == target_incarnation and self.is_paused(target):
            wait = target.paused_until - self.now + 0.001
            self.after(wait, self._put_asked, source, incarnation, target, target_incarnation, put, held)
            return
        if target.incarnation != target_incarnation or self.loses() or not self.connected(source, target):
            self._push_failed(source, incarnation, held, target)
            return
        old = (put.launch.epoch, put.launch.nonce) < target.heard
        effects = self.feed(target, PutAsked(put))
        answer = next((e for e in effects or () if isinstance(e, Accept | Decline)), None)
        if answer is None:
            self._push_failed(source, incarnation, held, target)
        elif isinstance(answer, Accept):
            if old:
                raise Violation("FENCED-WRITER", f"{target} takes a replica from a launch that it knows to be dead")
            self.probes.add("push resumed") if put.shard in target.partial else None
            self.job.check_put(target, put)
            length = 0.02 + self.swarm.push_time * self.rng.random()
            self.after(length, self._put_ends, source, incarnation, target, target.incarnation, put, held)
        elif isinstance(answer.answer, PutHave):
            self.probes.add("push of what is there already")
            event = Pushed(held.shard, target.name, PushEnd.ACKED, digest=answer.answer.digest)
            self.after(self.delay(), self.deliver, source, incarnation, event)
        else:
            refused = answer.answer
            end = PushEnd.LATER if refused.retry else PushEnd.REFUSED
            if refused.retry:
                self.probes.add("push put off")
            event = Pushed(
                held.shard, target.name, end, reason=refused.reason, launch=refused.launch, line=refused.line
            )
            self.after(self.delay(), self.deliver, source, incarnation, event)

    def _put_ends(
        self, source: Machine, incarnation: int, target: Machine, target_incarnation: int, put: PutOpen, held: Held
    ) -> None:
        if target.core is None or target.incarnation != target_incarnation:
            self._push_failed(source, incarnation, held, target)
            return
        if self.is_paused(target):
            wait = target.paused_until - self.now + 0.001
            self.after(wait, self._put_ends, source, incarnation, target, target_incarnation, put, held)
            return
        file = source.files.get(held.shard)
        broken = self.faults_on and self.swarm.breaks and self.rng.random() < self.swarm.breaks
        if broken or not self.connected(source, target):
            target.partial.add(held.shard)
            self._push_failed(source, incarnation, held, target)
            return
        if file is None:
            # Released, set aside or lost under the reader.
            self._push_failed(source, incarnation, held, target)
            return
        if not file.good:
            self.probes.add("sender finds its own copy bad")
            self.deliver(source, incarnation, Rotten(held.shard, "crc"))
            self._push_failed(source, incarnation, held, target)
            return
        if source.core is None or source.incarnation != incarnation:
            self.probes.add("a push outlives its sender")
        target.partial.discard(held.shard)
        if held.shard not in target.files:
            target.files[held.shard] = File(held, file.instance)
            self.truth.stored(target, target.files[held.shard])
        late = (put.launch.epoch, put.launch.nonce) < target.heard
        if late:
            self.probes.add("a replica arrives after a newer launch was seen")
        effects = self.feed(target, Received(source.name, put.launch, held))
        acked = any(isinstance(effect, Acknowledge) for effect in effects or ())
        if not acked or self.loses() or not self.connected(target, source):
            if acked:
                self.probes.add("an acknowledgement is lost")
            self._push_failed(source, incarnation, held, target)
            return
        if late:
            raise Violation("FENCED-WRITER", f"{target} acknowledges {held.shard} to a dead launch")
        event = Pushed(held.shard, target.name, PushEnd.ACKED, digest=held.digest)
        self.after(self.delay(), self.deliver, source, incarnation, event)

    # --- probes ---------------------------------------------------------------------------------------------

    def _probe_push(self, core: AgentCore, effect: StartPush) -> None:
        one = core.pushing.transfers.get((effect.held.shard, effect.node_id))
        if one is not None and one.heals:
            committed = core.threshold is not None and core.threshold.generation == effect.held.shard.generation
            self.probes.add("a committed shard is healed" if committed else "a shard of what was loaded is healed")

    def _probe_body(self, machine: Machine, body: Body) -> None:
        if isinstance(body, WantBack):
            self.probes.add("an owner asks for its own shard")
        elif isinstance(body, Lost):
            self.probes.add("a holder tells that its copy is bad")
        elif isinstance(body, Announce) and body.record is not None:
            if all(record.generation != body.record.generation for record in machine.records):
                raise Violation("RECORD-FIRST", f"{machine} announces {body.record.generation} without its record")
        elif isinstance(body, Announce) and body.voids:
            self.probes.add("a void is announced")

    def _probe_told(self, target: Machine, envelope: Envelope) -> None:
        body = envelope.body
        launch = (envelope.launch.epoch, envelope.launch.nonce)
        if launch < target.heard:
            self.probes.add("a message of an overtaken launch arrives")
            if isinstance(body, Report):
                self.probes.add("a report arrives after a newer launch")
        core = target.core
        if core is None or not isinstance(body, Report):
            return
        if target.incarnation > 1 and core.is_coordinator:
            self.probes.add("a report after the coordinator's restart")
        if body.shard.generation in core.voids:
            self.probes.add("a report of what was given up")
        threshold = core.threshold
        if threshold is not None and threshold.generation == body.shard.generation:
            self.probes.add("a report of what is committed")
        if len(body.holders) < core.replicas:
            self.probes.add("a report is taken back")


def _launch_in(event: Event) -> tuple[int, int] | None:
    """Of which launch a node spoke."""
    if type(event) is Told:
        return event.envelope.launch.epoch, event.envelope.launch.nonce
    if type(event) is Begun:
        return event.session.launch.epoch, event.session.launch.nonce
    if type(event) is LinePut:
        return event.launch.epoch, event.launch.nonce
    return None


def _hear(machine: Machine, event: Event) -> None:
    kind = type(event)
    if kind is Told:
        machine.hear(event.envelope.launch, event.envelope.line)
    elif kind is PutAsked:
        machine.hear(event.put.launch, event.put.line)
    elif kind is Answered:
        machine.hear(event.answer.launch, event.answer.line)
    elif kind is Pushed:
        machine.hear(event.launch, event.line)
    elif kind is Begun:
        machine.hear(event.session.launch, None)
    elif kind is LinePut:
        machine.hear(event.launch, event.line)


def _state_of(core: AgentCore) -> tuple[object, ...]:
    """What no message of a dead launch may change."""
    return (
        core.session,
        core.line,
        core.records,
        frozenset(core.held),
        frozenset(core.voids),
        {shard: frozenset(nodes) for shard, nodes in core.acks.items() if nodes},
        tuple(g for g in core.committing.counted.generations if core.reported(g)),
    )


_EXECUTE: dict[type, Callable[[World, Machine, Any], None]] = {
    KeepSession: World._keep_session,
    KeepLine: World._keep_line,
    KeepRecord: World._keep_record,
    Release: World._release,
    Quarantine: World._quarantine,
    Grant: World._grant,
    RefuseBusy: World._refuse_busy,
    RefuseFenced: World._refuse_fenced,
    StartPush: World._push,
    Send: World._send,
    Notify: World._notify,
    Reply: World._nothing,
    Accept: World._nothing,
    Decline: World._nothing,
    Acknowledge: World._nothing,
}
