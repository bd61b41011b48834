"""The agent's mind: a state machine without I/O, threads, clock or randomness.

`handle(event, now)` takes one event and returns what is to be done, in order. The gRPC shell and the simulator
are its two drivers; both must carry the effects of one list out in order, and one list before the next event.

What it guarantees (docs/protocol.md): a shard is reported only while enough other nodes hold it verified; a record
is written only when every rank's shard is reported, by the coordinator of the launch, once; a copy that was
acknowledged goes only when its generation is fenced, given up, or followed by a record of the same launch; and
nothing of an older launch has any effect once a newer one was seen. Healing (agent/healing.py) only ever adds copies.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from flashckpt.agent.ballot import Ballot
from flashckpt.agent.commit import abandoned_by, droppable, keeps, launch_of, missing_ranks, threshold
from flashckpt.agent.flush_policy import who_orders
from flashckpt.agent.flushing import Flushing
from flashckpt.agent.healing import Healing
from flashckpt.agent.messages import (
    Accept,
    Acknowledge,
    Answered,
    Begun,
    Decline,
    DeclineGet,
    Effect,
    Event,
    FencePut,
    Fetched,
    FlushEnded,
    FlushWanted,
    GaveUp,
    GetAsked,
    Gone,
    Grant,
    KeepFence,
    KeepRecord,
    KeepSession,
    LeaseEnded,
    Moved,
    Notify,
    Push,
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
    Sealed,
    Send,
    Serve,
    SlotWanted,
    Started,
    StopFlush,
    Tick,
    Told,
    Unreachable,
    WantDropped,
)
from flashckpt.agent.neighbours import Neighbours, Peer
from flashckpt.agent.transfers import Transfers, held_order
from flashckpt.placement import Placement, place
from flashckpt.types import Launch, Level, Record, age_order
from flashckpt.wire import (
    Announce,
    Answer,
    Beat,
    GetRefused,
    GiveUp,
    Holds,
    Lost,
    Persist,
    PutHave,
    PutRefused,
    Report,
    Want,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from flashckpt.types import Fence, Generation, Held, Member, Session, ShardId
    from flashckpt.wire import Body, Copy, Envelope, FlushOrder, Health

_KEPT_RECORDS = 4
_KEPT_VOIDS = 64


@dataclass(frozen=True, slots=True)
class Limits:
    """Times in seconds."""

    beat: float = 1.0  # between two messages to a node that has to hear from us
    retry_first: float = 0.1  # before a failed push is tried again; doubles
    retry_most: float = 5.0
    peer_timeout: float = 10.0  # a node that was not heard from for so long is called down
    pushes_per_node: int = 2  # at once


class AgentCore:
    """One node's agent. Every public attribute is for reading."""

    def __init__(self, node_id: str, limits: Limits | None = None, wall_offset: float = 0.0) -> None:
        self.node_id = node_id
        self.limits = limits or Limits()
        self._wall_offset = wall_offset  # of the wall clock against `now`, for people
        self.session: Session | None = None
        self.placement: Placement | None = None
        self.fence: Fence | None = None
        self.base: Generation | None = None  # what the present launch has loaded
        self.seen: Launch | None = None  # the newest launch that anybody spoke of
        self.records: tuple[Record, ...] = ()  # newest last
        self.held: dict[ShardId, Held] = {}
        self.acks: dict[ShardId, set[str]] = {}  # shards of this node's ranks → nodes that hold them, verified
        self.peers = Neighbours()
        self.voids: dict[Generation, str] = {}  # never to be committed, with the reason
        self._own_voids: dict[Generation, None] = {}  # given up here; the coordinator has to hear of it
        self._transfers = Transfers()
        self._wanted: dict[ShardId, bytes] = {}  # copies that turned out bad here; a holder pushes them back
        self._sources: dict[ShardId, set[str]] = {}  # of what is wanted for a rank of this node: who may have it
        self._ballot = Ballot()  # as the coordinator
        self.flushing = Flushing()
        self._healing: Healing | None = None
        self._hearsay: Generation | None = None  # other members have a record of it
        self._granted: dict[ShardId, SlotWanted] = {}
        self._waiting: dict[int, SlotWanted] = {}
        self._out: list[Effect] = []
        # The last answers, with what they were answers to.
        self._threshold: tuple[tuple[Record, ...], Session | None, Fence | None, Record | None] = ((), None, None, None)
        self._newest: tuple[Launch | None, Session | None, Fence | None, Launch | None] = (None, None, None, None)

    # --- what others ask ------------------------------------------------------------------------------------

    @property
    def is_coordinator(self) -> bool:
        return self.session is not None and self.session.coordinator == self.node_id

    @property
    def replicas(self) -> int:
        """Copies on other nodes that a shard of this launch gets."""
        return self.placement.replicas if self.placement is not None else 0

    @property
    def threshold(self) -> Record | None:
        # Asked many times an event, and changes rarely.
        records, session, fence, answer = self._threshold
        if records is not self.records or session is not self.session or fence is not self.fence:
            answer = threshold(self.records, self.session, self.fence)
            self._threshold = (self.records, self.session, self.fence, answer)
        return answer

    @property
    def kept(self) -> Generation | None:
        """What must not be lost: the newest committed generation of this launch, or before there is one what was
        loaded. Of which every shard is to have its copies at all times."""
        record, base = self.threshold, self.base
        if self.session is None or self._member(self.node_id) is None:
            return None
        # What this launch itself has saved counts once it is committed.
        if base is not None and (not launch_of(base).is_older_than(self.session.launch) or self._is_killed(base)):
            base = None
        known = (base, self._hearsay, record.generation if record is not None else None)
        return max((one for one in known if one is not None), key=age_order, default=None)

    @property
    def health(self) -> tuple[Health, float] | None:
        """How what is kept stands, and since when that is known: the healer's last word."""
        return self._healing.health if self._healing is not None else None

    @property
    def is_fenced(self) -> bool:
        """A newer launch was seen than the one that this node's trainers began."""
        return self.session is not None and self._is_older(self.session.launch)

    @property
    def newest(self) -> Launch | None:
        """The newest launch known here, by whatever sign."""
        seen, session, fence, answer = self._newest
        if seen is not self.seen or session is not self.session or fence is not self.fence:
            known = [self.session.launch] if self.session is not None else []
            known += [self.seen] if self.seen is not None else []
            known += [Launch(self.fence.epoch, self.fence.nonce)] if self.fence is not None else []
            answer = max(known, key=lambda launch: (launch.epoch, launch.nonce), default=None)
            self._newest = (self.seen, self.session, self.fence, answer)
        return answer

    def silent(self, now: float) -> dict[str, tuple[float, str]]:
        """Nodes that do not answer, or that the coordinator does not hear from: since when, and what went wrong."""
        return self.peers.silent(now, self.limits.peer_timeout, beats=self.is_coordinator)

    def healer(self, now: float) -> str:
        """The first member that answers this node."""
        silent = self.silent(now)
        members = self.session.members if self.session is not None else ()
        return next((member.node_id for member in members if member.node_id not in silent), self.node_id)

    def orderer(self, now: float) -> tuple[str, str]:
        """The node whose flush orders count here, and why it is that one."""
        if self.is_coordinator:  # which hears from all nodes, all the time
            return self.node_id, "the coordinator"
        return who_orders(self.session.members if self.session is not None else (), self.silent(now), self.node_id)

    def owns(self, shard: ShardId) -> bool:
        """Whether a rank of this node wrote it, in the present launch."""
        return self._owner_of(shard) == self.node_id

    def backlog(self) -> list[tuple[Held, str, bool, str]]:
        """Pushes that are not done: what, to whom, whether it runs, what went wrong last."""
        return [(one.held, one.node_id, one.running, one.problem) for one in self._transfers.values()]

    def reported(self, generation: Generation) -> dict[int, Report]:
        """As the coordinator: what is known of the ranks of a generation."""
        return self._ballot.reports(generation)

    def handle(self, event: Event, now: float) -> list[Effect]:
        self._out = []
        _HANDLERS[type(event)](self, event, now)
        self._flush(now)
        self._serve_waiting(now)
        return self._out

    # --- this node ------------------------------------------------------------------------------------------

    def _on_started(self, event: Started, now: float) -> None:
        self.held = {held.shard: held for held in event.held}
        self.fence = event.fence
        self.records = _newest_records(event.records)
        if event.session is not None:
            self._enter(event.session, now, event.base)
        self._collect()

    def _on_begun(self, event: Begun, now: float) -> None:
        session = event.session
        if self._is_older(session.launch):
            self._out.append(RefuseFenced(None, self._fenced_reason(session.launch)))
            return
        if session == self.session:
            return
        # The same launch with other members would be two sessions in one: the first one stays.
        if self.session is not None and self.session.launch == session.launch:
            self._out.append(RefuseFenced(None, "this launch began with other members or settings"))
            return
        self._out.append(KeepSession(session))
        if self.session is not None:
            self._notify_fenced(self.session, self._overtaken_by(session.launch, self.session.launch))
        self._enter(session, now)
        self._collect()

    def _enter(self, session: Session, now: float, base: Generation | None = None) -> None:
        self.session = session
        self.base = base
        self.placement = place(session.members, session.replicas, session.strategy)
        self._hearsay = None
        limits = self.limits
        self._healing = Healing(self.node_id, session, self.placement, limits.peer_timeout, limits.pushes_per_node)
        self._ballot = Ballot()
        self._transfers.clear()
        self._wanted.clear()
        self._sources.clear()
        self.acks.clear()
        self.voids.clear()
        self._own_voids.clear()
        self._out += self.flushing.enter(now)
        self.peers = Neighbours(
            (member.node_id, Peer(member.address, heard_at=now, beat_at=now))
            for member in session.members
            if member.node_id != self.node_id
        )
        for held in sorted(self.held.values(), key=held_order):
            self._consider(held, now)

    def _on_fence_put(self, event: FencePut, now: float) -> None:
        if self._is_older(event.launch):
            self._out.append(RefuseFenced(None, self._fenced_reason(event.launch)))
            return
        # Before the fence: what was loaded must not be taken for one of those that go.
        self._keep_base(event.base)
        self.flushing.loaded(event.base, now)
        self._learn(event.launch, event.fence)
        self._collect()

    def _keep_base(self, base: Generation | None) -> None:
        if base != self.base:
            self.base = base
            if self.session is not None:
                self._out.append(KeepSession(self.session, base))

    def _learn_base(self, base: Generation | None) -> None:
        """From another member: an agent that came back blank has nobody else to tell it what was loaded."""
        if base is None or self.session is None or self.fence is None or self.kept is not None:
            return
        decided = (self.fence.epoch, self.fence.nonce) == (self.session.launch.epoch, self.session.launch.nonce)
        # The answer may be late, to a question of the launch before: its base is another one.
        if decided and base.step == self.fence.step:
            self._keep_base(base)

    def _needs_hearsay(self, now: float) -> bool:
        """Whether the coordinator can't tell: it does not answer, or is this very node and came back blank."""
        if self.is_coordinator:
            return self.threshold is None
        return self.session is not None and self.healer(now) != self.session.coordinator

    def _learn_kept(self, generation: Generation, now: float) -> None:
        """A member says that it is committed. Only the coordinator's word licenses anything to go; but where the
        coordinator is gone, this is how those hear what has to be healed who missed its word."""
        if not self._needs_hearsay(now):
            self._hearsay = None
        elif self._is_of_this_launch(generation) and not self._is_settled(generation):
            known = self._hearsay
            self._hearsay = generation if known is None else max(known, generation, key=age_order)

    def _on_slot_wanted(self, event: SlotWanted, now: float) -> None:
        self._waiting[event.request_id] = event
        # A trainer writes one shard at a time. What it was granted before and neither sealed nor gave up, it gave up
        # without our hearing of it (we may have been paused): else that slot would be gone for as long as it lives.
        for shard, one in list(self._granted.items()):
            if one.lease_id == event.lease_id and shard.generation < event.shard.generation:
                del self._granted[shard]
                self._give_up(shard.generation, f"rank {shard.rank} went on to step {event.shard.generation.step}", now)

    def _on_want_dropped(self, event: WantDropped, now: float) -> None:
        self._waiting.pop(event.request_id, None)
        self._granted = {s: one for s, one in self._granted.items() if one.request_id != event.request_id}

    def _on_sealed(self, event: Sealed, now: float) -> None:
        self._granted.pop(event.held.shard, None)
        if event.held.shard in self.held:
            return
        self._wanted.pop(event.held.shard, None)
        self._sources.pop(event.held.shard, None)
        self.held[event.held.shard] = event.held
        self._consider(event.held, now)
        self._collect()

    def _is_split(self, held: Held) -> bool:
        """Ranks of a node store what they share once between them: with different tags they relied on each other
        for tensors that nobody stored. This shard is not reported yet, so that nothing was committed."""
        return self.owns(held.shard) and any(
            other.tag != held.tag
            for shard, other in self.held.items()
            if shard.generation == held.shard.generation and self.owns(shard)
        )

    def _on_gave_up(self, event: GaveUp, now: float) -> None:
        self._granted = {
            s: one for s, one in self._granted.items() if (s.generation, s.rank) != (event.generation, event.rank)
        }
        delivered = any(s.generation == event.generation and s.rank == event.rank for s in self.held)
        if not delivered:
            self._give_up(event.generation, f"rank {event.rank} gave it up", now)

    def _on_lease_ended(self, event: LeaseEnded, now: float) -> None:
        self._waiting = {i: one for i, one in self._waiting.items() if one.lease_id != event.lease_id}
        for shard, one in list(self._granted.items()):
            if one.lease_id == event.lease_id:
                del self._granted[shard]
                self._give_up(shard.generation, f"rank {shard.rank} ended while it was writing", now)

    def _on_rotten(self, event: Rotten, now: float) -> None:
        held = self.held.pop(event.shard, None)
        if held is None:
            return
        self._out.append(Quarantine(event.shard, event.reason))
        self._lost_own_copy(held, now)

    def _on_gone(self, event: Gone, now: float) -> None:
        held = self.held.pop(event.shard, None)
        if held is not None:
            self._lost_own_copy(held, now)

    def _lost_own_copy(self, held: Held, now: float) -> None:
        shard = held.shard
        self._transfers.drop(shard)
        owner = self._owner_of(shard)
        if owner is None or self._is_beside(shard.generation):
            return
        if owner != self.node_id:
            self._wanted[shard] = held.digest
            self._send(owner, Lost(shard), now)
            return
        self._wanted[shard] = held.digest
        # Also those that have not acknowledged it: an agent that was restarted forgot who had.
        sources = self._sources[shard] = self.acks.get(shard, set()) | set(self._buddies(shard.rank))
        # Not on its own node: that is one copy less than a report promises.
        self._tell_coordinator(Lost(shard), now)
        for node_id in sorted(sources) if shard in self._wanted else ():
            self._send(node_id, Want(shard, held.digest), now)
        self._without_source(shard, now)

    def _without_source(self, shard: ShardId, now: float) -> None:
        """Nobody can give an own shard back: its generation can't be completed, if it is not complete already.

        IMPORTANT: nothing is dropped before the coordinator has decided. It may have counted an earlier report, and
        have committed without this node having heard of it.
        """
        if self._sources.get(shard) or shard not in self._wanted or self._is_settled(shard.generation):
            return
        self._own_voids[shard.generation] = None
        if self.session is not None and not self.is_coordinator:
            self._send(self.session.coordinator, GiveUp(shard.generation), now)
        else:
            self._take_give_up(shard.generation, self.node_id, now)

    def _on_tick(self, event: Tick, now: float) -> None:
        if self.session is None or self.is_fenced:
            return
        self._start_transfers(now)
        if self._hearsay is not None and not self._needs_hearsay(now):
            self._hearsay = None
        healer, holds = self.healer(now), self._holds(now)
        self._heal(healer, holds, now)
        neighbours = self._neighbours(healer)
        for node_id in self.peers.due(now, self.limits.beat):
            news = [*self._news_for(node_id, now), *(holds if node_id == healer else ())]
            for body in news or ([Beat()] if node_id in neighbours else []):
                self._send(node_id, body, now)

    def _news_for(self, node_id: str, now: float) -> list[Body]:
        """What the node has to hear again, because nothing says that it has."""
        news: list[Body] = []
        if self.session is not None and node_id == self.session.coordinator:
            news += [GiveUp(g) for g in self._own_voids]
            news += [
                self._report_of(held) for held in self._own_shards() if not self._is_settled(held.shard.generation)
            ]
            news += map(Lost, self._sources)
        wanted = self.flushing.wanted
        if wanted is not None and node_id == self.orderer(now)[0]:
            news.append(Persist(wanted.generation, wanted.reason))
        for shard, digest in self._wanted.items():
            owner = self._owner_of(shard)
            if owner == self.node_id and node_id in self._sources.get(shard, ()):
                news.append(Want(shard, digest))
            elif owner == node_id:
                news.append(Lost(shard))
        return news

    def _neighbours(self, healer: str) -> set[str]:
        """Nodes that a beat goes to: those that keep replicas of ours, the coordinator, the healer, and whoever would
        be it if it answered."""
        if self.session is None or self.placement is None:
            return set()
        mine = self._member(self.node_id)
        nodes = {node for rank in mine.ranks for node in self.placement.buddies(rank)} if mine else set()
        members = (member.node_id for member in self.session.members)
        nodes |= {self.session.coordinator, healer, *takewhile(lambda node_id: node_id != healer, members)}
        return nodes - {self.node_id}

    # --- healing --------------------------------------------------------------------------------------------

    def _heal(self, healer: str, holds: list[Holds], now: float) -> None:
        healing = self._healing
        if healing is None:
            return
        if healer != self.node_id:
            healing.rest()
        for one in holds if healer == self.node_id else ():
            healing.look(one, now)
            self._make_copies(healing.copies_for(self.node_id), now)

    def _holds(self, now: float) -> list[Holds]:
        """What this node has of what is kept; nothing where nothing is."""
        kept = self.kept
        if kept is None or self._healing is None:
            return []
        committed = any(record.generation == kept for record in self.records)
        return [self._healing.holds(kept, self.held.values(), committed=committed, now=now)]

    def _say_holds(self, now: float) -> None:
        """At once, because it has changed: the next copies wait for it."""
        healer = self.healer(now)
        for holds in self._holds(now) if healer != self.node_id else ():
            self._send(healer, holds, now)

    def _make_copies(self, copies: tuple[Copy, ...], now: float) -> None:
        kept, healing = self.kept, self._healing
        mine = {shard.rank: held for shard, held in self.held.items() if shard.generation == kept}
        for copy in copies:
            held = mine.get(copy.rank) if copy.source == self.node_id and copy.target in self.peers else None
            if held is None or held.digest != copy.digest:
                continue
            if healing is not None and not healing.is_made(held.shard, copy.target, now):
                self._transfers.want(held, copy.target, now, heals=True)
        self._start_transfers(now)

    def _is_extra(self, shard: ShardId) -> bool:
        """A copy that this node would not have if all nodes were well."""
        is_ours = self.owns(shard) or (
            self._is_of_this_launch(shard.generation) and self.node_id in self._buddies(shard.rank)
        )
        return shard.generation == self.kept and not is_ours and shard not in self._wanted

    # --- slots ----------------------------------------------------------------------------------------------

    def _serve_waiting(self, now: float) -> None:
        for request in list(self._waiting.values()):
            answer = self._decide_slot(request, now)
            if answer is not None:
                del self._waiting[request.request_id]
                self._out.append(answer)
                if isinstance(answer, Grant):
                    self._granted[request.shard] = request

    def _decide_slot(self, request: SlotWanted, now: float) -> Effect | None:
        shard = request.shard
        launch = launch_of(shard.generation)
        if self.session is None or self.session.launch != launch or self.is_fenced:
            return RefuseFenced(request.request_id, self._fenced_reason(launch))
        # What is wanted back will need its slot again.
        known = (*self.held, *self._granted, *self._wanted)
        used = {s for s in known if s.rank == shard.rank and launch_of(s.generation) == launch}
        used -= {s for s in used if self._is_only_flushed(s.generation)}
        if len(used - {shard}) < self.session.slots_per_rank:
            return Grant(request.request_id)
        if request.may_wait and now < request.deadline:
            return None
        waits = "; ".join(self._why_pending(s) for s in sorted(used, key=lambda s: age_order(s.generation)))
        return RefuseBusy(request.request_id, f"{shard}: all {self.session.slots_per_rank} slots are needed: {waits}")

    def _why_pending(self, shard: ShardId) -> str:
        record = self.threshold
        step = shard.generation.step
        if shard in self._granted:
            return f"step {step} is being written"
        if record is not None and record.generation == shard.generation:
            return f"step {step} is the newest committed one"
        if record is not None and shard.generation in record.keeps:
            return f"step {step} is one of those that keep_memory keeps"
        lacking = self._transfers.of(shard)
        if lacking:
            return f"step {step} is not on " + ", ".join(
                f"{one.node_id}{f' ({one.problem})' if one.problem else ''}" for one in lacking
            )
        return f"step {step} waits for other ranks"

    # --- replication ----------------------------------------------------------------------------------------

    def _consider(self, held: Held, now: float) -> None:
        """Starts what a held shard needs: pushes to its buddies, and its report."""
        if not self.owns(held.shard):
            return
        if self._is_split(held):
            # Also what is found at a start: the agent before may have died between seeing this and dropping it.
            reason = f"ranks of {self.node_id} disagree on which plain tensors they share"
            self._give_up(held.shard.generation, reason, now)
        # Even of what is void, or lies on no other node yet: it tells how far the rank has got.
        if held.shard.generation in self.voids:
            self._tell_coordinator(Lost(held.shard), now)
            return
        self._report(held, now)
        for node_id in self._buddies(held.shard.rank):
            if node_id not in self.acks.get(held.shard, ()):
                self._transfers.want(held, node_id, now)
        self._start_transfers(now)

    def _buddies(self, rank: int) -> tuple[str, ...]:
        return self.placement.buddies(rank)[: self.replicas] if self.placement is not None else ()

    def _start_transfers(self, now: float) -> None:
        if self.is_fenced:
            return
        for one in self._transfers.start_due(now, self.limits.pushes_per_node):
            self.peers.ask(one.node_id, now)
            self._out.append(Push(one.held, one.node_id, one.heals))

    def _on_pushed(self, event: Pushed, now: float) -> None:
        if event.end is not PushEnd.FAILED:
            self.peers.hear(event.node_id, now)
        self._learn(event.launch, event.fence)
        # Only now: what was learned may have put an end to all transfers of this launch.
        one = self._transfers.get((event.shard, event.node_id))
        if one is None:
            self._collect()
            return
        one.running = False
        if event.end is PushEnd.ACKED and event.digest == one.held.digest:
            del self._transfers[event.shard, event.node_id]
            if self.owns(event.shard):
                self.acks.setdefault(event.shard, set()).add(event.node_id)
                if len(self.acks[event.shard]) >= self.replicas:
                    self._report(one.held, now)
            if one.heals and self._healing is not None:
                self._healing.note_made(event.shard, event.node_id, now)
                self._say_holds(now)
        elif one.heals:
            del self._transfers[event.shard, event.node_id]
            self._copy_failed(event, now)
        elif event.end is PushEnd.REFUSED:
            del self._transfers[event.shard, event.node_id]
        else:
            if event.end is PushEnd.FAILED:
                self.peers.miss(event.node_id, event.reason)
            reason = event.reason or "acknowledged other bytes"
            one.failed(reason, now, self.limits.retry_first, self.limits.retry_most)
        self._collect()
        self._start_transfers(now)

    def _copy_failed(self, event: Pushed, now: float) -> None:
        """The healer asks again. It has to know of a target that does not want to; of one that is gone it will hear."""
        if event.end is PushEnd.FAILED:
            self.peers.miss(event.node_id, event.reason)
        elif self._healing is not None:
            self._healing.note_refusal(event.shard, event.node_id, event.reason or "acknowledged other bytes", now)

    def _on_put_asked(self, event: PutAsked, now: float) -> None:
        put = event.put
        self.peers.hear(put.sender, now)
        self._learn(put.launch, put.fence)
        self._collect()
        held = self.held.get(put.shard)
        reason, retry = self._why_not(put.sender, put.launch, put.shard, put.digest, now)
        if reason:
            self._out.append(Decline(PutRefused(reason, retry, self.newest, self.fence)))
        elif held is not None and held.digest == put.digest:
            self._out.append(Decline(PutHave(held.digest)))
        elif held is not None:
            self._out.append(Decline(PutRefused("another content lies here under that name", False, None, None)))
        else:
            self._out.append(Accept(heals=self._is_extra(put.shard)))

    def _on_received(self, event: Received, now: float) -> None:
        self.peers.hear(event.sender, now)
        shard = event.held.shard
        asked_for = self._wanted.pop(shard, None) is not None
        self._sources.pop(shard, None)
        self.held[shard] = event.held
        # While it came in, a fence, a record or another launch may have made it needless: then it does not count.
        self._collect()
        counts = asked_for or self._is_of_this_launch(shard.generation) or shard.generation == self.kept
        is_present = self.session is not None and self.session.launch == event.launch and not self.is_fenced
        if shard in self.held and is_present and counts:
            self._out.append(Acknowledge())
            self._consider(event.held, now)
            if shard.generation == self.kept:
                self._say_holds(now)

    def _on_get_asked(self, event: GetAsked, now: float) -> None:
        get = event.get
        self.peers.hear(get.sender, now)
        self._learn(get.launch, get.fence)
        self._collect()
        held = self.held.get(get.shard)
        reason, retry = self._why_stranger(get.sender, get.launch)
        if not reason and held is None:
            reason = f"{self.node_id} does not hold {get.shard}"
        elif not reason and held is not None and held.digest != get.digest:
            reason = "another content lies here under that name"
        if reason or held is None:
            self._out.append(DeclineGet(GetRefused(reason, retry, self.newest, self.fence)))
        else:
            self._out.append(Serve(held))

    def _on_fetched(self, event: Fetched, now: float) -> None:
        self._on_sealed(Sealed(event.held), now)
        # While it came in, a fence or another launch may have made it needless.
        if event.held.shard in self.held:
            self._out.append(Acknowledge())

    def _why_stranger(self, sender: str, launch: Launch) -> tuple[str, bool]:
        """Why a node may neither bring nor take anything ("" = it may), and whether asking again later may help."""
        if self._is_older(launch):
            return self._fenced_reason(launch), False
        if self.session is None or self.session.launch != launch:
            return f"{self.node_id} has not begun this launch yet", True
        if self._member(sender) is None:
            return f"{sender} is no member of this launch", False
        return "", False

    def _why_not(self, sender: str, launch: Launch, shard: ShardId, digest: bytes, now: float) -> tuple[str, bool]:
        """Why a put is refused ("" = it is not), and whether asking again later may help."""
        reason, retry = self._why_stranger(sender, launch)
        member = self._member(sender)
        if reason or self.session is None or member is None:
            return reason, retry
        why = droppable(shard.generation, self.threshold, self.fence, self.voids, self.base)
        if why:
            return why, False
        if self._wanted.get(shard) is not None:
            return "", False
        # What is kept may come from any member that has it, and lie anywhere, where the healer has announced it.
        expected = self._healing is not None and self._healing.is_expected(shard, digest, now)
        if expected and shard.generation == self.kept:
            return "", False
        if launch_of(shard.generation) != launch or shard.rank not in member.ranks:
            return f"{shard} is not {sender}'s to give away", False
        if self.placement is None or self.node_id not in self.placement.buddies(shard.rank):
            return f"{self.node_id} keeps no replicas of rank {shard.rank}", False
        # A rank writes into slots_per_rank slots; one more for the moment between a commit here and there.
        kept = sum(
            s.rank == shard.rank and launch_of(s.generation) == launch and not self._is_only_flushed(s.generation)
            for s in self.held
            if s != shard
        )
        if kept > self.session.slots_per_rank:
            return f"{self.node_id} holds {kept} generations of rank {shard.rank} that are not committed", True
        return "", False

    # --- commit ---------------------------------------------------------------------------------------------

    def _report_of(self, held: Held) -> Report:
        """What to tell the coordinator of an own shard: where it lies now, be that enough or not."""
        return Report(held.shard, held.digest, tuple(sorted(self.acks.get(held.shard, ()))))

    def _report(self, held: Held, now: float) -> None:
        if not self._is_overtaken(held.shard.generation):
            self._tell_coordinator(self._report_of(held), now)

    def _tell_coordinator(self, body: Report | Lost, now: float) -> None:
        if self.session is None or self.is_fenced:
            return
        if self.is_coordinator:
            self._take(self.node_id, body, now)
        else:
            self._send(self.session.coordinator, body, now)

    def _take_report(self, sender: str, report: Report, now: float) -> None:
        """As the coordinator: commits once every rank's shard is where it should be."""
        generation, rank = report.shard.generation, report.shard.rank
        member = self._member(sender)
        if self.session is None or member is None or rank not in member.ranks:
            return
        if launch_of(generation) != self.session.launch or report.shard.world != self.session.world:
            return
        self._ballot.note_reached(report.shard, now)
        if not self._is_settled(generation):
            others = {node for node in report.holders if node != sender and self._member(node) is not None}
            view = self._ballot.take(report, now, enough=len(others) >= self.replicas)
            if not missing_ranks(view.reports, self.session.world):
                self._commit(generation, now)
        self._void_what_cannot_complete(now)

    def _take_back(self, shard: ShardId, now: float) -> None:
        """As the coordinator: the owner of a shard does not have it any more, or has given it up."""
        self._ballot.note_reached(shard, now)
        self._ballot.take_back(shard)
        self._void_what_cannot_complete(now)

    def _commit(self, generation: Generation, now: float) -> None:
        if self.session is None:
            return
        stay = keeps(generation, self.session.keep_memory, self.threshold, self.fence, self.base)
        record = Record(generation, self.session.world, self.replicas, now + self._wall_offset, stay)
        reports = self._ballot.reports(generation)
        self._take_record(record)
        if self._healing is not None and self.kept == generation:
            self._healing.note_commit(reports, now)
        self._announce(now)
        self._collect()

    def _announce(self, now: float) -> None:
        """Once, at once; whoever misses it finds the same in the answer to its next beat."""
        decided = (self.threshold, tuple(self.voids)) if self.is_coordinator else (None, ())
        news = Announce(*decided, self.flushing.order, self.flushing.persisted)
        for node_id in self.peers:
            self._send(node_id, news, now)

    def _void_what_cannot_complete(self, now: float) -> None:
        """A rank that delivered a later generation without an earlier one never will: others must not wait for it.

        IMPORTANT: here and wherever the coordinator gives a generation up, its own shards go before anybody hears of
        it. Voids are not kept on disk: without its own shards a coordinator that was restarted can't commit any more
        what others have dropped since.
        """
        news = False
        for generation, view in list(self._ballot.generations.items()):
            found = abandoned_by(generation, view.sealed, self._ballot.reached, self.limits.peer_timeout)
            if found is not None:
                step = self._ballot.reached[found].generation.step
                self._void(generation, f"rank {found} went on to step {step} without it")
                news = True
        if news:
            self._collect()
            self._announce(now)

    def _take_record(self, record: Record) -> None:
        """Adopts a record of the present launch. Only its coordinator makes them."""
        if self.session is None or launch_of(record.generation) != self.session.launch:
            return
        current = self.threshold
        if current is not None and age_order(record.generation) <= age_order(current.generation):
            return
        if self._is_killed(record.generation):
            return
        self._out.append(KeepRecord(record))
        kept = [one for one in self.records if one.generation != record.generation]
        self.records = _newest_records((*kept, record))
        if record.replicas > 0:
            # What it keeps was committed before: whoever missed that record hears of it now.
            heard = {g for one in kept for g in (one.generation, *one.keeps)}
            missed = [g for g in reversed(record.keeps) if self._is_of_this_launch(g) and g not in heard]
            self._out += [Notify(g, Level.REPLICATED) for g in (*missed, record.generation)]
        self._wanted = {s: digest for s, digest in self._wanted.items() if not self._is_beside(s.generation)}
        self._sources = {s: nodes for s, nodes in self._sources.items() if s in self._wanted}
        self._ballot.forget(self._is_overtaken)
        self.voids = {g: reason for g, reason in self.voids.items() if not self._is_overtaken(g)}
        self._own_voids = {g: None for g in self._own_voids if not self._is_overtaken(g)}

    def _give_up(self, generation: Generation, reason: str, now: float) -> None:
        """A rank of this node can't deliver its shard."""
        if not self._is_of_this_launch(generation) or self._is_settled(generation):
            return
        # IMPORTANT: void here before the coordinator has said so, which is safe only because the rank's shard is
        # not reported and never will be: without it nothing can be committed.
        self._own_voids[generation] = None
        self._void(generation, reason)
        self._collect()
        if self.session is not None and not self.is_coordinator:
            self._send(self.session.coordinator, GiveUp(generation), now)
        else:
            self._announce(now)

    def _void(self, generation: Generation, reason: str) -> None:
        if generation in self.voids:
            return
        self.voids[generation] = reason
        self.flushing.lost(generation)
        self._ballot.generations.pop(generation, None)
        self._out.append(Notify(generation, Level.NONE, reason))
        while len(self.voids) > _KEPT_VOIDS:
            oldest = min(self.voids, key=age_order)
            del self.voids[oldest]
            self._own_voids.pop(oldest, None)

    # --- other nodes ----------------------------------------------------------------------------------------

    def _on_told(self, event: Told, now: float) -> None:
        envelope = event.envelope
        self.peers.hear(envelope.sender, now)
        self._learn(envelope.launch, envelope.fence)
        refused = self._why_deaf(envelope)
        if not refused:
            self._take(envelope.sender, envelope.body, now)
        self._collect()
        answer = Answer(self.newest, self.fence, None, (), refused)
        if not refused:
            health: Health | None = None
            copies: tuple[Copy, ...] = ()
            if self._healing is not None and isinstance(envelope.body, Holds):
                health, copies = self._healing.answer_to(envelope.sender)
            speaks = self.orderer(now)[0] == self.node_id
            order, persisted = (self.flushing.order, self.flushing.persisted) if speaks else (None, None)
            answer = Answer(
                self.newest,
                self.fence,
                self.threshold,
                tuple(self.voids),
                flush=order,
                persisted=persisted,
                base=self.base,
                health=health,
                copies=copies,
            )
        self._out.append(Reply(answer))

    def _why_deaf(self, envelope: Envelope) -> str:
        if self._is_older(envelope.launch):
            return self._fenced_reason(envelope.launch)
        if self.session is None or self.session.launch != envelope.launch:
            return f"{self.node_id} has not begun this launch yet"
        if self._member(envelope.sender) is None:
            return f"{envelope.sender} is no member of this launch"
        return ""

    def _take(self, sender: str, body: Body, now: float) -> None:
        if self.session is None:
            return
        from_coordinator = sender == self.session.coordinator
        match body:
            case Report() if self.is_coordinator:
                self._take_report(sender, body, now)
            case GiveUp(generation) if self.is_coordinator and launch_of(generation) == self.session.launch:
                self._take_give_up(generation, sender, now)
            case Announce(record, voids, order, persisted):
                if from_coordinator:
                    self._take_news(record, voids)
                self._hear_flush(sender, order, persisted, now)
            case Persist(generation, reason) if self._is_of_this_launch(generation):
                if self.orderer(now)[0] == self.node_id:
                    self._out += self.flushing.want(generation, reason)
            case Lost(shard) if self.is_coordinator and self._owner_of(shard) == sender:
                self._take_back(shard, now)
            case Lost(shard) if self.owns(shard):
                self.acks.get(shard, set()).discard(sender)
                if shard in self.held:
                    self._consider(self.held[shard], now)
                elif shard in self._sources:
                    self._sources[shard].discard(sender)
                    self._without_source(shard, now)
            case Want(shard, digest) if shard in self.held and self.held[shard].digest == digest:
                held = self.held[shard]
                self._transfers.want(held, sender, now)
                self._start_transfers(now)
            case Want(shard):
                self._send(sender, Lost(shard), now)
            case Holds() if self._healing is not None:
                self._healing.take(sender, body, now)
                if body.committed:
                    self._learn_kept(body.generation, now)
            case _:
                pass

    def _take_give_up(self, generation: Generation, sender: str, now: float) -> None:
        """Commit or void, never both: the coordinator decides, once."""
        if self._is_settled(generation):
            return
        self._void(generation, f"a rank of {sender} gave it up")
        self._collect()
        self._announce(now)

    def _take_news(self, record: Record | None, voids: tuple[Generation, ...]) -> None:
        """What the coordinator decided."""
        for generation in voids:
            if self._is_of_this_launch(generation) and not self._is_settled(generation):
                self._void(generation, "a rank gave it up")
        if record is not None:
            self._take_record(record)

    def _on_answered(self, event: Answered, now: float) -> None:
        answer = event.answer
        self.peers.hear(event.node_id, now)
        self._learn(answer.launch, answer.fence)
        if not answer.refused and self.session is not None and event.node_id == self.session.coordinator:
            self._take_news(answer.record, answer.voids)
            self._own_voids = {g: None for g in self._own_voids if g not in answer.voids}
        if not answer.refused:
            self._hear_flush(event.node_id, answer.flush, answer.persisted, now)
            self._learn_base(answer.base)
            if answer.record is not None:
                self._learn_kept(answer.record.generation, now)
        # Only the healer says what is to be taken from whom.
        if event.node_id == self.healer(now):
            self._take_health(answer, now)
        self.peers.miss(event.node_id, answer.refused)
        self._collect()

    def _take_health(self, answer: Answer, now: float) -> None:
        if answer.health is not None and answer.health.committed:
            # The healer itself may know it from others only, and then has no record to show.
            self._learn_kept(answer.health.generation, now)
        if self._healing is None or answer.health is None or answer.health.generation != self.kept:
            return
        self._healing.health = (answer.health, now)
        self._healing.expect(answer.health.generation, answer.copies, now)
        self._make_copies(answer.copies, now)

    def _on_unreachable(self, event: Unreachable, now: float) -> None:
        self.peers.miss(event.node_id, event.reason)

    def _on_moved(self, event: Moved, now: float) -> None:
        self.peers.move(event.node_id, event.address)

    def _learn(self, launch: Launch | None, fence: Fence | None) -> None:
        """Adopts what is newer. A launch that is dead goes quiet, and its trainers hear of it."""
        was_fenced = self.is_fenced
        if launch is not None and (self.seen is None or self.seen.is_older_than(launch)):
            self.seen = launch
        # A fence of a launch that has been overtaken comes too late: the newer one has chosen, or is choosing, from
        # what lies here, and its own fence will say what is dead. The late one might kill the very thing it loads.
        late = fence is not None and self._is_older(Launch(fence.epoch, fence.nonce))
        if fence is not None and not late and (self.fence is None or self.fence.order < fence.order):
            self.fence = fence
            self._out.append(KeepFence(fence))
        if self.is_fenced and not was_fenced and self.session is not None:
            self._transfers.clear()
            self._ballot.generations.clear()
            self._out += [StopFlush()] if self.flushing.order is not None else []
            self.flushing.order = self.flushing.wanted = None
            self._notify_fenced(self.session, self._fenced_reason(self.session.launch))

    def _notify_fenced(self, session: Session, reason: str) -> None:
        """Trainers of a launch that is over wait for levels that its generations will never reach."""
        for generation in {s.generation for s in self.held if launch_of(s.generation) == session.launch}:
            if not self._is_overtaken(generation):
                self._out.append(Notify(generation, Level.NONE, reason))

    def _collect(self) -> None:
        """Releases what nobody needs any more."""
        known = {shard.generation for shard in (*self.held, *self.acks, *self._wanted)}
        known.update(shard.generation for shard, _ in self._transfers)
        record = self.threshold
        verdicts = {g: droppable(g, record, self.fence, self.voids, self.base) for g in known}
        reasons = {g: why for g, why in verdicts.items() if why and not self._is_only_flushed(g)}
        if not reasons:
            return
        # This node's own shards first: one that died between two releases must not report a generation again
        # whose replicas it has dropped.
        going = [shard for shard in self.held if shard.generation in reasons]
        for shard in sorted(going, key=lambda shard: not self.owns(shard)):
            del self.held[shard]
            self._out.append(Release(shard, reasons[shard.generation]))
        self.acks = {s: nodes for s, nodes in self.acks.items() if s.generation not in reasons}
        self._transfers.drop_generations(reasons)
        self._wanted = {s: digest for s, digest in self._wanted.items() if s.generation not in reasons}
        self._sources = {s: nodes for s, nodes in self._sources.items() if s in self._wanted}
        committed = {record.generation for record in self.records}
        for generation, why in reasons.items():
            if generation not in committed and self._is_of_this_launch(generation):
                # Trainers may wait for a level that this one will never reach.
                self._out.append(Notify(generation, Level.NONE, why))

    def _send(self, node_id: str, body: Body, now: float) -> None:
        if node_id == self.node_id or self.is_fenced:
            return
        self.peers.ask(node_id, now)
        self._out.append(Send(node_id, body))

    # --- the persistent tier --------------------------------------------------------------------------------

    def _flush(self, now: float) -> None:
        """Orders what is due, if that is this node's to do, and starts its part of what is ordered."""
        session, placement = self.session, self.placement
        if session is None or session.persist is None or placement is None or self.is_fenced:
            return
        flushing = self.flushing
        wanted = flushing.wanted.generation if flushing.wanted is not None else None
        if wanted is not None and self._is_overtaken(wanted) and not self._holds_own(wanted):
            flushing.lost(wanted)
            self._out.append(Notify(wanted, Level.NONE, "it is not in memory any more"))
        down = self.silent(now)
        if who_orders(session.members, down, self.node_id)[0] == self.node_id:
            self._out += flushing.without(down, self.node_id)
            # Where the coordinator is gone, its last record may be known to others only.
            committed = {*(record.generation for record in self.records), self._hearsay}
            kept = self.kept
            order = flushing.decide(
                session.persist,
                kept if kept is not None and self._is_of_this_launch(kept) else None,
                lambda g: g in committed and self._holds_own(g),
                down,
                now,
                self.node_id,
            )
            if order is not None:
                self._announce(now)
        self._out += flushing.start(session, placement, self.node_id, now)

    def _on_flush_wanted(self, event: FlushWanted, now: float) -> None:
        if self.session is None or self.session.persist is None or self.is_fenced:
            return
        newest, generation, orderer = self.threshold, event.generation, self.orderer(now)[0]
        if generation is None:
            self.flushing.ending = event.reason
            if newest is None or orderer == self.node_id:
                return
            generation = newest.generation
        if self._is_of_this_launch(generation):
            self._out += self.flushing.want(generation, event.reason)
            self._send(orderer, Persist(generation, event.reason), now)

    def _on_flush_ended(self, event: FlushEnded, now: float) -> None:
        self._out += self.flushing.ended(event, now, self.node_id)
        if self.orderer(now)[0] == self.node_id:
            self._announce(now)
        self._collect()

    def _hear_flush(self, giver: str, order: FlushOrder | None, persisted: Generation | None, now: float) -> None:
        if self.session is None or self.session.persist is None or giver != self.orderer(now)[0]:
            return
        if order is not None:
            self.flushing.lost(order.generation)
        self._out += self.flushing.hear(giver, order, persisted, now, self.session.persist.timeout)
        self._collect()

    def _is_only_flushed(self, generation: Generation) -> bool:
        """Nobody needs it in memory any more but the flush."""
        if not self.flushing.needs(generation) or generation in self.voids:
            return False
        if self.fence is not None and self.fence.kills(generation):
            return False
        return bool(droppable(generation, self.threshold, self.fence, self.voids, self.base))

    def _holds_own(self, generation: Generation) -> bool:
        mine = self._member(self.node_id)
        held = {shard.rank for shard in self.held if shard.generation == generation}
        return mine is not None and held >= set(mine.ranks)

    # --- small questions ------------------------------------------------------------------------------------

    def _member(self, node_id: str) -> Member | None:
        members = self.session.members if self.session is not None else ()
        return next((member for member in members if member.node_id == node_id), None)

    def _owner_of(self, shard: ShardId) -> str | None:
        """The node whose rank wrote it, if that was in the present launch."""
        if self.session is None or not self._is_of_this_launch(shard.generation):
            return None
        return next((m.node_id for m in self.session.members if shard.rank in m.ranks), None)

    def _is_older(self, launch: Launch) -> bool:
        newest = self.newest
        return newest is not None and launch.is_older_than(newest)

    def _is_killed(self, generation: Generation) -> bool:
        return self.fence is not None and self.fence.kills(generation)

    def _is_settled(self, generation: Generation) -> bool:
        """Committed, overtaken by a commit, or never to be committed."""
        return generation in self.voids or self._is_overtaken(generation)

    def _is_overtaken(self, generation: Generation) -> bool:
        record = self.threshold
        return record is not None and age_order(generation) <= age_order(record.generation)

    def _is_beside(self, generation: Generation) -> bool:
        """An older one that stays for now. Copies that it loses are not brought back: a newer one is safe."""
        return self.threshold is not None and generation in self.threshold.keeps

    def _is_of_this_launch(self, generation: Generation) -> bool:
        return self.session is not None and launch_of(generation) == self.session.launch

    def _own_shards(self) -> list[Held]:
        return sorted((held for held in self.held.values() if self.owns(held.shard)), key=held_order)

    def _fenced_reason(self, launch: Launch) -> str:
        newest = self.newest
        if newest is None or not launch.is_older_than(newest):
            return f"the launch of epoch {launch.epoch} has not begun on {self.node_id}"
        return self._overtaken_by(newest, launch)

    def _overtaken_by(self, newer: Launch, older: Launch) -> str:
        return f"a launch of epoch {newer.epoch} has taken over from that of epoch {older.epoch}"


def _newest_records(records: Iterable[Record]) -> tuple[Record, ...]:
    """The newest ones, newest last, by launch first: after a step back the records of the launch before have higher
    steps, and must not push the present one's out."""
    return tuple(sorted(records, key=lambda record: record.generation)[-_KEPT_RECORDS:])


_HANDLERS: dict[type, Callable[[AgentCore, Any, float], None]] = {
    Started: AgentCore._on_started,
    Begun: AgentCore._on_begun,
    FencePut: AgentCore._on_fence_put,
    SlotWanted: AgentCore._on_slot_wanted,
    WantDropped: AgentCore._on_want_dropped,
    Sealed: AgentCore._on_sealed,
    GaveUp: AgentCore._on_gave_up,
    LeaseEnded: AgentCore._on_lease_ended,
    Rotten: AgentCore._on_rotten,
    Gone: AgentCore._on_gone,
    FlushWanted: AgentCore._on_flush_wanted,
    FlushEnded: AgentCore._on_flush_ended,
    Tick: AgentCore._on_tick,
    Told: AgentCore._on_told,
    Answered: AgentCore._on_answered,
    Unreachable: AgentCore._on_unreachable,
    PutAsked: AgentCore._on_put_asked,
    Received: AgentCore._on_received,
    GetAsked: AgentCore._on_get_asked,
    Fetched: AgentCore._on_fetched,
    Pushed: AgentCore._on_pushed,
    Moved: AgentCore._on_moved,
}
