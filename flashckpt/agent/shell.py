"""Connects the core to the real world: feeds it events, and carries out its effects, in order.

Crash-only (agent/succession.py): a decision that can't be made durable ends the process.

Failpoint: `mid_start` (shards are adopted, no call is answered yet).
"""

from __future__ import annotations

import gc
import logging
import threading
import time
from typing import TYPE_CHECKING, Any

from flashckpt.agent.flusher import Flusher
from flashckpt.agent.peers import Peers
from flashckpt.agent.process import SOCKET_NAME
from flashckpt.agent.retrieve import Retrieves
from flashckpt.agent.scrub import Scrubber
from flashckpt.agent.shard_files import ServedShard, ShardFiles
from flashckpt.agent.spare import missing_slots, why_no_room
from flashckpt.agent.status import describe
from flashckpt.agent.succession import Succession, die, owed
from flashckpt.agent.trainers import TrainerCalls
from flashckpt.agent.watch import Watch
from flashckpt.errors import ConfigError, FlashError, IncompatibleError, NoSpaceError, NotFoundError, PeerError
from flashckpt.failpoints import failpoint, is_testing
from flashckpt.protocol.core import AgentCore
from flashckpt.protocol.epochs import heard, named, why_refused
from flashckpt.protocol.events import (
    Begun,
    FlushWanted,
    Gone,
    Grant,
    HurryFlush,
    KeepLine,
    KeepRecord,
    KeepSession,
    Notify,
    NotifyFlushFailed,
    Quarantine,
    RefuseBusy,
    RefuseFenced,
    Release,
    Rotten,
    Send,
    ShardSealed,
    Started,
    StartFlush,
    StartPush,
    StopFlush,
    Tick,
)
from flashckpt.protocol.flush_spec import FlushSpec
from flashckpt.protocol.ledger import threshold
from flashckpt.protocol.line import by_head, launch_of
from flashckpt.protocol.node_inventory import Holding, NodeInventory
from flashckpt.protocol.replicate import Limits
from flashckpt.rpc.agent_server import AgentServer
from flashckpt.rpc.api import GenerationProgress
from flashckpt.types import Held, Level, ShardId, age_order

if TYPE_CHECKING:
    from flashckpt.agent.helper import Starter
    from flashckpt.agent.process import Options
    from flashckpt.protocol.events import Effect, Event
    from flashckpt.protocol.line import Line
    from flashckpt.protocol.verdict import Change
    from flashckpt.rpc.credentials import Bundle
    from flashckpt.store.slots import SlotStore
    from flashckpt.types import Generation, Launch, Session

__all__ = ["ServedShard", "Shell"]

_log = logging.getLogger(__name__)

# For work that only time makes due; events are handled when they arrive. Seldom, so that an idle agent uses no CPU
# time.
_TICK_SECONDS, _LEAST_TICK_SECONDS = 1.0, 0.2
_DRAIN_SECONDS = 0.05
_LEASES_SECONDS = 0.5
_SCAN_SECONDS = 2.0
_COUNT_SECONDS = 3.0


class Shell:
    """One agent's state: the core, its store, and the parts that serve calls."""

    def __init__(self, store: SlotStore, options: Options, starter: Starter | None = None) -> None:
        self.store = store
        self.options = options
        self._started_at = time.monotonic()
        limits = Limits(beat=options.beat_interval, peer_timeout=options.peer_timeout)
        self._core = AgentCore(options.node_id, limits, wall_offset=time.time() - time.monotonic())
        self._lock = threading.Lock()  # one event at a time, and its effects before the next
        self._files = ShardFiles(store, options.job)
        self._succession = Succession(store)
        self.trainers = TrainerCalls(self)
        self.peers = Peers(self)
        self.retrieves = Retrieves(self)
        self.flusher = Flusher(self.feed, starter)
        self._server: AgentServer | None = None
        self._scrubber = Scrubber(self._files.open, options.scrub_interval, self._files.note_verified)
        self._stop: threading.Event | None = None
        self._told_seconds: float | None = None  # for drain_seconds, given by the request to stop
        self._draining = False
        self._watch = Watch(store)
        self._counted_at, self._objects = float("-inf"), 0
        self._directory_epoch = 0  # the highest one in the directory at the start

    # --- life -----------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Adopt what lies in the directory, then answer calls."""
        reclaimed = self.store.reclaim()
        if reclaimed.files:
            _log.info("reclaimed %d slots (%d bytes) of processes that are gone", reclaimed.files, reclaimed.bytes)
        self.store.empty_fetched()
        held = tuple(self._files.adopt_all())
        failpoint("mid_start")
        session, base = self._succession.read()
        self._directory_epoch = max(self.store.highest_epoch(), 0 if session is None else session.launch.epoch)
        lines, records = self.store.read_lines(), self.store.read_records()
        lacking = owed(
            {one.shard for one in held},
            self._files.set_aside,
            threshold(records, session, lines[-1] if lines else None),
            session,
            self.options.node_id,
        )
        with self._lock:
            self._apply(Started(held + lacking, lines, records, session, base))
            for one in lacking:
                self._apply(Gone(one.shard))
        if session is not None and len(session.members) > 1:
            self._succession.listen_again(self.peers)
        self._succession.look_for_room()
        self._server = self._serve()
        _log.info("adopted %d shards; session: %s", len(held), "none" if session is None else session.launch)

    def _serve(self) -> AgentServer:
        while True:
            try:
                return AgentServer(self.trainers, self.store.socket_path(SOCKET_NAME))
            except FlashError as error:
                # A socket needs an inode. Its name is unused by now.
                if "No space left" not in error.message or not self.store.give_up_spare():
                    raise

    def serve_until(self, stop: threading.Event) -> None:
        self._stop = stop
        scan_at = leases_at = 0.0
        tick_seconds = max(_LEAST_TICK_SECONDS, min(_TICK_SECONDS, self.options.beat_interval / 3))
        while not stop.wait(tick_seconds):
            now = time.monotonic()
            self.feed(Tick())
            self._tell_changes()
            try:
                if now >= leases_at:
                    leases_at = now + _LEASES_SECONDS
                    self.trainers.end_dead()
                    self.trainers.tell_overtaken()
                    self.peers.drop_old()
                if now >= scan_at:
                    scan_at = now + _SCAN_SECONDS
                    self.rescan()
                    self._succession.look_for_room()
                    self._watch.keep_losses()
                self._scrub(now)
            except (FlashError, OSError) as error:
                _log.warning("a periodic check of the shards failed: %s; trying again", error)

    def drain(self) -> None:
        """Grant no new slots; let pushes and a flush finish."""
        self._draining = True
        self.trainers.close()
        try:
            self.rescan()  # trainers may have sealed shards without having reported them yet
        except (FlashError, OSError) as error:
            _log.warning("the last scan for shards failed: %s; shards that no trainer reported may be left out", error)
        self.want_flush_at_end("the agent stops")
        began = time.monotonic()
        while time.monotonic() < began + self._push_patience() and self._has_work():
            self.feed(Tick())
            time.sleep(_DRAIN_SECONDS)
        while time.monotonic() < began + self._flush_patience():
            self.feed(Tick())
            time.sleep(_DRAIN_SECONDS)

    def close(self) -> None:
        self._draining = True
        self.trainers.close()
        self.retrieves.close()
        if self._server is not None:
            self._server.close(0.5)
        self.flusher.stop()
        self.peers.close()
        self._scrubber.close()

    def idle_seconds(self) -> float | None:
        """Return the seconds since the last trainer left, or since the start; None while there is one."""
        since = self.trainers.idle_since
        return None if since is None else time.monotonic() - since

    def _has_work(self) -> bool:
        with self._lock:
            silent = self._core.silent(time.monotonic())
            waiting = any(node not in silent for _, node, _, _ in self._core.backlog())
        return waiting or self.peers.running > 0

    def want_flush_at_end(self, reason: str) -> None:
        """Ask for a flush of what is newer than the persistent tier: once the last trainer has left, it must not depend
        on memory alone."""
        with self._lock:
            session = self._core.session
            wanted = session is not None and session.persist is not None and session.persist.on_exit
        if wanted:
            self.feed(FlushWanted(None, reason))

    @property
    def drain_seconds(self) -> float:
        """Return the seconds that a drain takes at most: as the request to stop says, else by the agent's own
        settings."""
        if self._told_seconds is not None:
            return self._told_seconds
        with self._lock:
            session = self._core.session
        flush = 0.0 if session is None or session.persist is None else session.persist.drain_timeout
        return max(self.options.drain_timeout, flush)

    def _push_patience(self) -> float:
        return self.options.drain_timeout if self._told_seconds is None else self._told_seconds

    def _flush_patience(self) -> float:
        """Return the seconds that a drain may wait for a flush; 0 if none is due."""
        with self._lock:
            session, flushing = self._core.session, self._core.flushing
            if session is None or session.persist is None or not flushing.is_busy:
                return 0.0
            # A flush that has just failed would be tried again later than this process lives.
            if flushing.order is None and flushing.failures:
                return 0.0
            return session.persist.drain_timeout if self._told_seconds is None else self._told_seconds

    def _start_flush(self, effect: StartFlush) -> None:
        session = self._core.session
        if session is None or session.persist is None:
            return
        order = effect.order
        self.flusher.start(
            FlushSpec(
                job=self.options.job,
                memory_dir=self.options.memory_dir,
                node_id=self.options.node_id,
                generation=order.generation,
                world=session.world,
                writers=effect.writers,
                coordinates=effect.commits,
                attempt=order.token,
                reason=order.reason,
                settings=session.persist,
                known=self._persisted_step(session.persist.directory),
                urgent=order.urgent,
            )
        )

    def _remember_persisted(self, generation: Generation) -> None:
        """Note the step, in case persist_dir is empty one day because it is not mounted. A failure is only logged."""
        session = self._core.session
        if session is None or session.persist is None:
            return
        try:
            self.store.write_persisted(session.persist.directory, generation)
        except (FlashError, OSError) as error:
            _log.warning("that step %d is persisted could not be noted: %s", generation.step, error)

    def _persisted_step(self, persist_dir: str) -> int | None:
        """Return the newest step in persist_dir that this node remembers."""
        try:
            found = self.store.read_persisted()
        except (FlashError, OSError) as error:
            _log.warning("the note of the newest persisted step could not be read: %s", error)
            return None
        return found[1].step if found is not None and found[0] == persist_dir else None

    # --- the core -------------------------------------------------------------------------------------------

    def feed(self, event: Event) -> list[Effect]:
        """Pass an event to the core. Any thread may call it.

        Returns the effects; the caller acts on those that answer the event, all others have been carried out. Raises
        IncompatibleError if the event brings an epoch that no launch should have; nothing was changed.
        """
        with self._lock:
            self._check_epochs(heard(event))
            return self._apply(event)

    def check_epochs(self, launch: Launch | None, line: Line | None) -> None:
        """Raise IncompatibleError if no launch should have such an epoch. For values that the core is not given."""
        with self._lock:
            self._check_epochs(named(launch, line))

    def _check_epochs(self, epochs: tuple[tuple[str, int], ...]) -> None:
        if not epochs:
            return
        # IMPORTANT: never based on what other nodes say: each of them could raise the bound for the next one.
        session = self._core.session
        known = max(self._directory_epoch, 0 if session is None else session.launch.epoch)
        if reason := why_refused(epochs, known, time.time()):
            raise IncompatibleError(
                reason,
                hint="an epoch is a time, and a clock was wrong: check the clocks of the nodes. A job that has such "
                "an epoch continues with the memory directories that know it, or from persist_dir under another name "
                "(initial_load_path)",
            )

    def _apply(self, event: Event) -> list[Effect]:
        effects = self._core.handle(event, time.monotonic())
        try:
            for effect in effects:
                self._carry_out(effect)
        except Exception:
            _log.exception("a decision could not be carried out")
            die("an effect of the core failed, so that its state is wrong")
        return effects

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case KeepSession(session, base):
                self._succession.keep_session(session, base, self._core.held)
            case KeepLine(line):
                self._succession.keep_line(line)
            case KeepRecord(record):
                self._succession.keep_record(record)
            case Release(shard, reason):
                self._files.release(shard, reason)
            case Quarantine(shard, reason):
                self._files.quarantine(shard, reason)
            case StartPush(held, node_id, heals):
                self.peers.push(held, node_id, heals=heals)
            case Send(node_id, body):
                self.peers.send(node_id, body)
            case Grant(request_id) | RefuseBusy(request_id, _):
                self.trainers.answer(request_id, effect)
            case RefuseFenced(request_id, _) if request_id is not None:
                self.trainers.answer(request_id, effect)
            case StartFlush():
                self._start_flush(effect)
            case StopFlush():
                self.flusher.stop()
            case HurryFlush():
                self.flusher.hurry()
            case NotifyFlushFailed(generation, reason):
                self.trainers.notify(GenerationProgress(generation, Level.NONE, flush_problem=reason))
            case Notify(generation, level, reason):
                if level is Level.PERSISTED:
                    self._remember_persisted(generation)
                self.trainers.notify(GenerationProgress(generation, level, reason))
            case _:
                pass  # these answer the caller of feed()

    # --- shards ---------------------------------------------------------------------------------------------

    def hold(self, shard: ShardId) -> Held | None:
        """Return the shard that lies sealed under that name; None if there is none, or it is damaged."""
        return self._files.hold(shard)

    def note_sealed(self, shard: ShardId) -> None:
        """Note that this process has verified and sealed a replica."""
        self._files.note_sealed(shard)

    def open_shard(self, shard: ShardId) -> ServedShard:
        """Open a shard. Raise NotFoundError if it is gone; CorruptShardError if its header is bad."""
        return self._files.open(shard)

    def rescan(self) -> None:
        """Find shards that no trainer reported, and those that were removed, even with the memory directory."""
        found = {sealed.shard: sealed for sealed in self.store.scan()}
        with self._lock:
            held = set(self._core.held)
            self._succession.drop_past(held)
        for shard, sealed in found.items():
            if shard not in held and (one := self._files.adopt(sealed)) is not None:
                self.feed(ShardSealed(one))
        for shard in held - set(found):
            if self._files.forget_if_gone(shard):
                self.feed(Gone(shard))
        self.store.forget_unlinked()

    def _tell_changes(self) -> None:
        with self._lock:
            lines, changes = self._watch.look(self._core, time.monotonic())
        for line in lines:
            _log.warning("%s", line)
        for change in changes:
            self.trainers.notify(change)

    def _scrub(self, now: float) -> None:
        with self._lock:
            shards = list(self._core.held)
        found = self._scrubber.step(shards, now)
        if found is not None:
            self.feed(Rotten(*found))

    # --- what trainers and operators ask --------------------------------------------------------------------

    def begin(self, session: Session, credentials: Bundle | None) -> list[Effect]:
        """Begin a launch on this node, unless the core refuses it."""
        effects = self.feed(Begun(session))
        if any(isinstance(effect, RefuseFenced) for effect in effects):
            return effects  # the credentials of a refused launch change nothing
        # An agent that was restarted between listen() and begin() had no session that told it to listen. Listen before
        # the other credentials are kept: they are stored with the address that is listened at.
        if len(session.members) > 1 and not self.peers.address:
            self._succession.listen_again(self.peers)
        if credentials is not None:
            self.peers.use(credentials)
        return effects

    def inventory(self) -> NodeInventory:
        """Return what lies here now, including shards that a trainer sealed and died before it could report them."""
        self.rescan()
        quarantined = self.store.status().quarantined_files
        chosen = self.store.read_lines()  # a person may have written one: `flashckpt histories`
        with self._lock:
            committed = {record.generation for record in self._core.records}
            verified, everything = self._files.verified(), self._core.held
            return NodeInventory(
                self.options.node_id,
                tuple(
                    Holding(
                        held, Level.REPLICATED if shard.generation in committed else Level.SEALED, shard in verified
                    )
                    for shard, held in everything.items()
                ),
                tuple(by_head((*chosen, *self._core.lines)).values()),
                quarantined,
                self._files.damaged(everything),
                self._succession.past(self._core.session),
                len(self.store.damaged_lines()),
            )

    def held(self, shard: ShardId) -> Held | None:
        with self._lock:
            return self._core.held.get(shard)

    def stop(self, drain_timeout: float | None) -> None:
        """Drain for at most that long (None: by its own limits), even if it drains already. The last request counts."""
        self._told_seconds = drain_timeout
        if self._stop is not None:
            self._stop.set()

    def status(self) -> dict[str, Any]:
        now = time.monotonic()
        store = self.store.status()
        drain_seconds = self.drain_seconds
        with self._lock:
            found = describe(
                self._core,
                now,
                options=self.options,
                store=store,
                uptime=now - self._started_at,
                leases=self.trainers.leases(),
                address=self.peers.address,
                scrubbed=(self._scrubber.passes, self._scrubber.found),
                draining=self._draining,
                flushed_bytes=self.flusher.done_bytes,
            )
        found = {**found, "drain_seconds": drain_seconds, "read_only": self._succession.read_only}
        if is_testing():  # for the soak test; seldom, because tests ask often
            if now - self._counted_at > _COUNT_SECONDS:
                gc.collect()
                self._counted_at, self._objects = now, len(gc.get_objects())
            found["objects"] = self._objects
        return found

    # --- for the other modules of this package ----------------------------------------------------------------

    @property
    def line(self) -> Line | None:
        with self._lock:
            return self._core.line

    def current(self) -> tuple[Launch | None, Line | None]:
        """Return the newest launch known here, and the line in force."""
        with self._lock:
            return self._core.newest, self._core.line

    def session_and_line(self) -> tuple[Launch | None, Line | None]:
        """Return the launch that this node works for (None: none), and the line in force."""
        with self._lock:
            session = self._core.session
            return (None if session is None or self._core.is_fenced else session.launch), self._core.line

    def others(self) -> tuple[str, ...]:
        """Return the other nodes of the launch."""
        with self._lock:
            return tuple(self._core.peers)

    def ranks_of(self, node_id: str) -> tuple[int, ...]:
        """Return the ranks that the launch has on another node."""
        with self._lock:
            session = self._core.session
        members = () if session is None else session.members
        return next((member.ranks for member in members if member.node_id == node_id), ())

    def address_of(self, node_id: str) -> str:
        with self._lock:
            peer = self._core.peers.get(node_id)
        if peer is None or not peer.address:
            raise PeerError(f"{node_id}: expected an address, found none", peer=node_id)
        return peer.address

    def why_no_room(self, shard: ShardId, size_bytes: int) -> str | None:
        """Return why a copy that only heals is refused; None if there is room."""
        store = self.store.status()
        with self._lock:
            session, placement = self._core.session, self._core.placement
            if session is None or placement is None:
                return "this node has no launch"
            mine = sum(launch_of(one.generation) == session.launch for one in self._core.held)
        slots = mine + store.pool.files + store.writing.files
        missing = missing_slots(session, placement, self.options.node_id, slots)
        return why_no_room(shard, size_bytes, session.world, missing, store.room)

    def known_progress(self) -> list[GenerationProgress]:
        """Return the progress to tell a trainer that begins to watch."""
        with self._lock:
            voids = [GenerationProgress(g, Level.NONE, reason) for g, reason in self._core.voids.items()]
            records = [record.generation for record in self._core.records if record.replicas]
            persisted, failure = self._core.flushing.persisted, self._core.flushing.failure
        news = voids + [GenerationProgress(generation, Level.REPLICATED) for generation in records]
        if persisted is not None:
            news.append(GenerationProgress(persisted, Level.PERSISTED))
        if failure is not None:
            news.append(GenerationProgress(failure.generation, Level.NONE, flush_problem=failure.reason))
        return news

    def known_changes(self) -> list[Change]:
        """Return the problems to tell a trainer that begins to watch."""
        with self._lock:
            return self._watch.current

    def flush(self, generation: Generation | None, step: int | None, urgent: bool) -> Generation:
        """Ask for a flush; `urgent`: somebody waits for it.

        Raise NotFoundError if no generation in memory fits, ConfigError if there is no persist_dir.
        """
        with self._lock:
            session = self._core.session
            committed = [record.generation for record in self._core.records]
            held = {shard.generation for shard in self._core.held}
        if session is None or session.persist is None:
            raise ConfigError(
                f"job {self.options.job!r}: expected persist_dir to be set by its trainers, found memory only",
                hint="set CheckpointConfig(persist_dir=…)",
            )
        if generation is None:
            fitting = [g for g in committed if step is None or g.step == step]
            if not fitting:
                what = "no committed generation" if step is None else f"no committed generation of step {step}"
                raise NotFoundError(f"job {self.options.job!r}: {what} in memory; steps: {[g.step for g in committed]}")
            generation = max(fitting, key=age_order)
        if generation not in held:
            raise NotFoundError(f"{generation}: not in this node's memory any more", step=generation.step)
        self.feed(FlushWanted(generation, "it was asked for", urgent))
        return generation

    def raise_if_read_only(self) -> None:
        """Raise NoSpaceError if the decisions on a save could not be made durable."""
        if reason := self._succession.read_only:
            raise NoSpaceError(
                f"agent of job {self.options.job!r}: takes no saves until there is room for its own files: {reason}",
                hint="make room in the tmpfs, or enlarge it; saves then continue by themselves. Loads need no room",
            )

    def keep_bundle(self, bundle: Bundle, address: str) -> None:
        """Keep the credentials for this agent's successor."""
        self._succession.keep_bundle(bundle, address)
