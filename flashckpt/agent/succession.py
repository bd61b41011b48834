"""Keeps what an agent leaves to its successor in the directory, and reads what its predecessor has left.

Crash-only: if a decision (record, line, session) can't be made durable, the process ends at once, and its successor
starts from what lies in the directory. A core whose decisions are not in the directory would give false answers.

The exception is lack of room: the process does not end, because loads need it. It is read-only then: it grants no slot
for a save, so that nothing new comes to depend on it, and writes what is owed as soon as there is room again.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
from typing import TYPE_CHECKING, NoReturn

from flashckpt.agent.bundle_file import read_bundle, write_bundle
from flashckpt.errors import CorruptShardError, FlashError, NoSpaceError
from flashckpt.protocol.line import launch_of
from flashckpt.protocol.placement import place
from flashckpt.rpc.session import decode_base, decode_session, encode_session
from flashckpt.store.session import KEPT_PAST
from flashckpt.types import Held, ShardId

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from flashckpt.agent.peers import Peers
    from flashckpt.protocol.line import Line
    from flashckpt.rpc.credentials import Bundle
    from flashckpt.store.slots import SlotStore
    from flashckpt.types import Generation, Launch, Record, Session

_log = logging.getLogger(__name__)

_MOST_UNWRITTEN = 16
_FATAL = 75  # exit code: a decision could not be made durable


def die(why: str) -> NoReturn:
    _log.critical("ending: %s", why)
    os._exit(_FATAL)


class Succession:
    """The predecessor's state and the successor's, in the small files of one store. The caller lets in one thread at a
    time."""

    def __init__(self, store: SlotStore) -> None:
        self._store = store
        self._kept: Session | None = None  # the session as it lies in the directory
        self._past: dict[Launch, Session] = {}  # of earlier launches of which shards are left
        self._writing = threading.Lock()  # protects what follows
        self._unwritten: dict[str, Callable[[], object]] = {}  # for lack of room; the newest of each kind
        self._was_short = False
        self.read_only = ""  # why no save is accepted; "" = they are

    # --- what is left ---------------------------------------------------------------------------------------

    def keep_session(self, session: Session, base: Generation | None, held: Collection[ShardId]) -> None:
        self._keep_past(session, held)
        self._durably("the session", lambda: self._store.write_session(encode_session(session, base)))

    def keep_line(self, line: Line) -> None:
        self._durably("the line", lambda: self._store.write_line(line))

    def keep_record(self, record: Record) -> None:
        self._durably(f"the record of {record.generation}", lambda: self._store.write_record(record))
        _log.debug("%s is committed with %d replicas", record.generation, record.replicas)

    def keep_bundle(self, bundle: Bundle, address: str) -> None:
        """Write the credentials. Any thread may call it."""
        self._durably("the credentials", lambda: write_bundle(self._store, bundle, address))

    def _durably(self, what: str, write: Callable[[], object]) -> None:
        with self._writing:
            self._unwritten.pop(what, None)
            try:
                write()
            except (FlashError, OSError) as error:
                if not _is_shortage(error):
                    die(f"{what} could not be kept: {error}")
                self._unwritten[what] = write
                while len(self._unwritten) > _MOST_UNWRITTEN:
                    del self._unwritten[next(iter(self._unwritten))]
                if not self.read_only:
                    _log.error("read-only until there is room: %s could not be kept: %s", what, error)
                self.read_only = f"{what} could not be kept: {getattr(error, 'message', error)}"

    def look_for_room(self) -> None:
        """Complete the reserve, and write what is owed, if there is room by now. Any thread may call it."""
        with self._writing:
            shortage = self._store.fill_reserve()
            if shortage and not self._unwritten and not self._was_short:
                _log.warning("no reserve for records, sessions and credentials: %s", shortage)
            self._was_short = bool(shortage)
            try:
                for what, write in list(self._unwritten.items()):
                    write()
                    del self._unwritten[what]
            except (FlashError, OSError) as error:
                if not _is_shortage(error):
                    die(f"what was owed could not be kept: {error}")
                return
            if self.read_only:
                _log.warning("there is room again, saves are taken")
                self.read_only = ""

    # --- sessions of earlier launches -----------------------------------------------------------------------

    def past(self, present: Session | None) -> tuple[Session, ...]:
        """Return the sessions other than the present launch's, newest last."""
        return tuple(one for one in self._past.values() if present is None or one.launch != present.launch)

    def _keep_past(self, session: Session, held: Collection[ShardId]) -> None:
        """Copy the session in the directory before another launch's replaces it.

        It only tells which nodes should have a missing shard: if there is no room for it, the launch begins all the
        same.
        """
        old, self._kept = self._kept, session
        if old is None or old.launch == session.launch:
            return
        self._past[old.launch] = old
        try:
            self._store.write_past_session(old.launch, encode_session(old))
        except (FlashError, OSError) as error:
            _log.warning("the session of %s could not be kept: %s", old.launch, error)
        self.drop_past(held)

    def drop_past(self, held: Collection[ShardId]) -> None:
        """Remove the sessions of launches of which no shard is left, and all but the newest few."""
        launches = {launch_of(shard.generation) for shard in held}
        needless = [launch for launch in self._past if launch not in launches]
        needless += list(self._past)[:-KEPT_PAST]
        for launch in needless:
            if self._past.pop(launch, None) is not None:
                self._store.remove_past_session(launch)

    # --- what is found --------------------------------------------------------------------------------------

    def read(self) -> tuple[Session | None, Generation | None]:
        """Return the predecessor's session, and the generation that its launch has loaded."""
        self._kept, base = self._read_session()
        self._past = self._read_past()
        return self._kept, base

    def listen_again(self, peers: Peers) -> None:
        """Listen at the predecessor's address, or else at another one, which hellos then spread."""
        from flashckpt.rpc.address import parse_address

        kept = read_bundle(self._store)
        if kept is None:
            _log.warning("no credentials: no messages to other nodes until a trainer brings some")
            return
        bundle, address = kept
        host, port = parse_address(address)
        try:
            peers.listen(bundle, host, port)
        except (FlashError, OSError) as error:
            _log.warning("can't listen at %s any more: %s; using another port", address, error)
            peers.listen(bundle, host, 0)
            peers.greet()

    def _read_past(self) -> dict[Launch, Session]:
        found = {}
        for launch, data in self._store.read_past_sessions():
            session = _decode(data)
            if session is not None and session.launch == launch:
                found[launch] = session
        return found

    def _read_session(self) -> tuple[Session | None, Generation | None]:
        data = self._store.read_session()
        session = None if data is None else _decode(data)
        if data is None or session is None:
            return None, None
        try:
            return session, decode_base(data)
        except CorruptShardError as error:
            _log.warning("the generation that the session has loaded can't be read and is ignored: %s", error)
            return session, None


def owed(
    held: Collection[ShardId],
    set_aside: Collection[ShardId],
    record: Record | None,
    session: Session | None,
    node_id: str,
) -> tuple[Held, ...]:
    """Return the replicas that others count on and that are missing here. Their owners can't know, and have to be told.

    Of the newest record, they are missing because the predecessor died while it set a bad one aside, or because they
    were removed; of any generation, because they were found damaged just now.
    """
    if session is None or all(one.node_id != node_id for one in session.members):
        return ()  # under another name than its predecessor's, this node keeps its shards and owes nobody any
    hosted = place(session.members, session.replicas, session.strategy).held_by(node_id)
    expected = {shard for shard in set_aside if shard.rank in hosted}
    if record is not None:
        expected |= {ShardId(record.generation, rank, record.world) for rank in hosted}
    return tuple(Held(shard, b"", 0, 0) for shard in sorted(expected - set(held), key=lambda shard: shard.rank))


def _is_shortage(error: Exception) -> bool:
    """Return True if the only cause of the error is lack of room."""
    return isinstance(error, NoSpaceError) or (
        isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM)
    )


def _decode(data: bytes) -> Session | None:
    try:
        return decode_session(data)
    except CorruptShardError as error:
        _log.warning("the session in the directory can't be read and is ignored: %s", error)
        return None
