"""What an agent keeps beside the slots: session, commit records, secrets, socket and lock."""

from __future__ import annotations

import os
import shutil
import socket
import stat
import tempfile
from pathlib import Path

import pytest

from flashckpt.errors import ClosedError, ConfigError, UnsafeDirectoryError
from flashckpt.protocol.line import from_fence
from flashckpt.store.names import Draft, draft_name, parse_draft_name, parse_record_name, record_name
from flashckpt.store.owner import Owner
from flashckpt.store.slots import SlotStore
from flashckpt.store.small_files import MAX_PAYLOAD_BYTES, frame, unframe
from flashckpt.types import Generation, Launch, Record


def record(step, *, epoch=1000, nonce=7, seq=1):
    return Record(Generation(epoch, nonce, step, seq), 4, 1, 1234.5)


@pytest.fixture
def memory_dir():
    path = Path(tempfile.mkdtemp(prefix="flashckpt-test-", dir="/dev/shm"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def store(memory_dir):
    with SlotStore.open(memory_dir, "job") as store:
        yield store


@pytest.fixture
def other(memory_dir):
    with SlotStore.open(memory_dir, "other job") as store:
        yield store


def test_every_damaged_frame_is_refused():
    content = frame(b"MAGIC678", b"payload", "job")
    assert unframe(b"MAGIC678", content, "job", paged=False) == b"payload"
    assert unframe(b"MAGIC678", content + bytes(100), "job", paged=True) == b"payload"
    assert unframe(b"MAGIC678", content + b"\0", "job", paged=False) is None
    assert unframe(b"MAGIC679", content, "job", paged=False) is None
    assert unframe(b"MAGIC678", content, "job2", paged=False) is None
    for paged in (False, True):
        for length in range(len(content)):
            assert unframe(b"MAGIC678", content[:length], "job", paged=paged) is None
        for bit in range(8 * len(content)):
            damaged = bytearray(content)
            damaged[bit // 8] ^= 1 << bit % 8
            assert unframe(b"MAGIC678", bytes(damaged), "job", paged=paged) is None
    with pytest.raises(ConfigError, match="at most 16777216 bytes"):
        frame(b"MAGIC678", bytes(MAX_PAYLOAD_BYTES + 1), "job")


# --- session


def test_sessions_of_earlier_launches(store):
    assert store.read_past_sessions() == ()
    launches = [Launch(epoch, (1 << 64) - epoch) for epoch in (3, 1, 10, 2, 20, 4)]
    for number, launch in enumerate(launches):
        store.write_past_session(launch, b"%d" % number)
    # The newest four, newest last.
    assert store.read_past_sessions() == tuple((launches[i], b"%d" % i) for i in (0, 5, 2, 4))
    assert store.check() == []
    assert store.status().foreign_names == 0
    assert store.remove_past_session(launches[2])
    assert not store.remove_past_session(launches[2])
    assert [launch.epoch for launch, _ in store.read_past_sessions()] == [3, 4, 20]
    assert store.read_session() is None


def damage_torn(path, other):
    path.write_bytes(path.read_bytes()[:20])


def damage_foreign(path, other):
    path.write_bytes(other.read_bytes())


def damage_link(path, other):
    path.unlink()
    path.symlink_to(other)


def damage_mode(path, other):
    path.chmod(0o644)


DAMAGES = [damage_torn, damage_foreign, damage_link, damage_mode]


@pytest.mark.parametrize("damage", DAMAGES)
def test_bad_session_is_ignored_with_a_line_and_can_be_replaced(store, other, caplog, damage):
    store.write_session(b"ours")
    other.write_session(b"theirs")
    damage(store.path / "session", other.path / "session")
    assert store.read_session() is None
    assert "ignored" in caplog.text
    store.write_session(b"again")
    assert store.read_session() == b"again"


# --- records


def test_records_newest_first_and_four_are_kept(store):
    assert store.read_records() == ()
    for step in (3, 1, 5, 2, 4, 6):
        store.write_record(record(step))
    assert [one.generation.step for one in store.read_records()] == [6, 5, 4, 3]
    assert store.read_records()[0] == record(6)
    store.write_record(record(5))  # told again
    store.write_record(record(1))  # too old to be kept
    assert [one.generation.step for one in store.read_records()] == [6, 5, 4, 3]
    store.write_record(record(1, epoch=2000))
    assert [one.generation[::2] for one in store.read_records()] == [(2000, 1), (1000, 6), (1000, 5), (1000, 4)]
    assert store.status().records == 4
    assert store.check() == []


def test_records_that_the_line_kills_go_first(store):
    for step in (10, 20, 30, 40):
        store.write_record(record(step))
    store.write_line(from_fence(step=10, epoch=2000, nonce=1))
    for step in (11, 12, 13):
        store.write_record(record(step, epoch=2000, nonce=1))
    assert [one.generation.step for one in store.read_records()] == [13, 12, 11, 10]


def test_drop_records(store):
    for one in (record(1), record(2), record(9, epoch=500), record(3)):
        store.write_record(one)
    assert store.drop_records(record(2).generation) == 2
    assert store.read_records() == (record(3), record(2))
    assert store.drop_records(record(2).generation) == 0


@pytest.mark.parametrize("damage", DAMAGES)
def test_bad_record_is_ignored_with_a_line_and_can_be_replaced(store, other, caplog, damage):
    for step in (1, 2):
        store.write_record(record(step))
    other.write_record(record(2))
    name = record_name(record(2).generation)
    damage(store.path / name, other.path / name)
    assert store.read_records() == (record(1),)
    assert "ignored" in caplog.text
    store.write_record(record(2))
    assert store.read_records() == (record(2), record(1))


def test_record_under_another_ones_name_is_ignored(store):
    store.write_record(record(1))
    old = store.path / record_name(record(1).generation)
    old.rename(store.path / record_name(record(9).generation))
    assert store.read_records() == ()


@pytest.mark.parametrize(
    "bad", [Record(Generation(1, 2, 3, 4), -1, 1, 0.0), Record(Generation(1, 2, 3, 4), 1, 1 << 32, 0.0)]
)
def test_record_with_numbers_that_do_not_fit(store, bad):
    with pytest.raises(ConfigError, match="commit record of step 3"):
        store.write_record(bad)
    assert store.read_records() == ()


def test_a_record_says_what_stays_beside_it(store):
    kept = Record(Generation(1, 2, 30, 4), 4, 1, 1234.5, (Generation(1, 2, 20, 4), Generation(1, 2, 10, 4)))
    store.write_record(kept)
    assert store.read_records() == (kept,)
    path = store.path / record_name(kept.generation)
    path.write_bytes(path.read_bytes()[:-8])
    assert store.read_records() == ()


def test_names_of_records_and_drafts():
    generation = Generation(5, 0xABC, 7, 9)
    assert record_name(generation) == "record-5-0000000000000abc-7-9"
    assert parse_record_name(record_name(generation)) == generation
    for name in ("record", "record-5-abc-7-9", "record-05-0000000000000abc-7-9", "record-5-0000000000000abc-7"):
        assert parse_record_name(name) is None
    owner = Owner.current()
    for kind in Draft:
        draft = parse_draft_name(draft_name(kind, owner, 5))
        assert (draft.kind, draft.writer) == (kind, owner)
    assert parse_draft_name(draft_name(Draft.LINE, owner, 5).replace("line", "other")) is None


# --- secrets


def test_secrets(store):
    assert store.read_secret("key.pem") is None
    assert not (store.path / "tls").exists(), "looking makes nothing"
    assert not store.remove_secret("key.pem")
    store.write_secret("key.pem", b"-----BEGIN")
    store.write_secret("ca.pem", b"other")
    store.write_secret("key.pem", b"renewed")
    assert store.read_secret("key.pem") == b"renewed"
    assert store.read_secret("cert.pem") is None
    folder = store.path / "tls"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {
        "key.pem": 0o600,
        "ca.pem": 0o600,
    }
    assert store.check() == []
    assert store.remove_secret("ca.pem")
    assert store.read_secret("ca.pem") is None
    shutil.rmtree(folder)
    assert store.read_secret("key.pem") is None
    store.write_secret("key.pem", b"in a new folder")
    assert store.read_secret("key.pem") == b"in a new folder"


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../key", "a/b", "Key", "key.", ".key", "a" * 42, "key\0", "a-draft-b", "-a"]
)
def test_names_that_are_no_file_of_ours(store, name):
    for call in (
        lambda: store.write_secret(name, b"x"),
        lambda: store.read_secret(name),
        lambda: store.socket_path(name),
    ):
        with pytest.raises(ConfigError, match="file name"):
            call()


@pytest.mark.parametrize("damage", [damage_link, damage_mode])
def test_key_that_was_open_to_others_is_an_error(store, other, damage):
    store.write_secret("key.pem", b"ours")
    other.write_secret("key.pem", b"theirs")
    damage(store.path / "tls" / "key.pem", other.path / "tls" / "key.pem")
    with pytest.raises(UnsafeDirectoryError):
        store.read_secret("key.pem")


@pytest.mark.parametrize("damage", [damage_torn, damage_foreign])
def test_key_that_is_torn_or_foreign_is_none(store, other, caplog, damage):
    store.write_secret("key.pem", b"ours")
    other.write_secret("key.pem", b"theirs")
    damage(store.path / "tls" / "key.pem", other.path / "tls" / "key.pem")
    assert store.read_secret("key.pem") is None
    assert "ignored" in caplog.text


@pytest.mark.parametrize("kind", ["open to others", "a link"])
def test_folder_that_is_not_ours_alone(store, tmp_path, kind):
    folder = store.path / "tls"
    if kind == "a link":
        folder.symlink_to(tmp_path)
    else:
        folder.mkdir(mode=0o700)
        folder.chmod(0o755)
    with pytest.raises(UnsafeDirectoryError):
        store.write_secret("key.pem", b"secret")
    assert not list(tmp_path.iterdir())


# --- socket


def test_socket_path_serves_to_bind_and_to_connect_however_deep_it_lies(memory_dir):
    deep = memory_dir / ("d" * 100) / ("e" * 100)
    deep.mkdir(parents=True)
    with SlotStore.open(deep / "m", "job" * 50) as store:
        path = store.socket_path("agent.sock")
        assert path == f"/proc/self/fd/{store.job_dirfd}/agent.sock"
        with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as client:
            server.bind(path)
            server.listen()
            client.settimeout(5)
            client.connect(path)
        assert (store.path / "agent.sock").is_socket()
        assert store.check() == []


def test_closed_store(memory_dir):
    store = SlotStore.open(memory_dir, "job")
    store.write_secret("key.pem", b"x")
    descriptors = len(os.listdir("/proc/self/fd"))
    store.close()
    assert len(os.listdir("/proc/self/fd")) == descriptors - 7
    for call in (store.read_session, store.read_records, lambda: store.socket_path("agent.sock"), store.voids):
        with pytest.raises(ClosedError):
            call()


# --- looking at it
