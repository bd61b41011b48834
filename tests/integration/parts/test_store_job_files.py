"""Files beside the slots on a small file system, and where processes die."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from flashckpt.errors import NoSpaceError
from flashckpt.store.names import Draft, draft_name
from flashckpt.store.owner import Owner
from flashckpt.store.slots import SlotStore
from tests.unit.test_store_job_files import memory_dir, record, store

__all__ = ["memory_dir", "store"]  # the fixtures

ROOT = Path(__file__).parents[3]


def test_session(store, memory_dir):
    assert store.read_session() is None
    for payload in (b"", b"first", os.urandom(100_000), b"last"):
        store.write_session(payload)
        assert store.read_session() == payload
    code = (
        "import sys\nfrom flashckpt.store.slots import SlotStore\n"
        "print(SlotStore.open(sys.argv[1], 'job').read_session())"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, str(memory_dir)], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert result.stdout == "b'last'\n"
    assert store.check() == []
    assert store.status().job_files.files == 1


def test_no_space_for_a_session(store, tmp_path):
    if os.geteuid() != 0:
        pytest.skip("needs root: mounts")
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k,nr_inodes=20", "none", tmp_path], check=True)
    try:
        with SlotStore.open(tmp_path / "m", "job") as small:
            small.write_session(b"kept")
            with pytest.raises(NoSpaceError):
                small.write_session(bytes(1 << 20))
            assert small.read_session() == b"kept"
            assert small.check() == []
    finally:
        subprocess.run(["umount", "-l", tmp_path], check=True)


def test_check_sees_what_is_wrong_beside_the_slots(store, memory_dir):
    store.write_session(b"s")
    store.write_record(record(1))
    store.write_secret("key.pem", b"k")
    (store.path / "agent.lock").touch(mode=0o600)
    (store.path / "agent.log").touch(mode=0o600)
    assert store.check() == []
    assert store.status().foreign_names == 0
    (store.path / "notes.txt").write_text("x")
    (store.path / "tls" / "Odd").write_text("x")
    (store.path / "session").chmod(0o640)
    dead = subprocess.run(
        [sys.executable, "-c", "from flashckpt.store.owner import Owner\nprint(repr(Owner.current()))"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    owner = eval(dead.stdout, {"Owner": Owner})
    for folder, kind in ((store.path, Draft.RECORD), (store.path / "tls", Draft.SECRET)):
        (folder / draft_name(kind, owner, 1)).touch(mode=0o600)
    problems = "\n".join(store.check())
    for expected in (
        "notes.txt: not a name of flashckpt",
        "tls/Odd: not a name of flashckpt",
        "session: ",
        "mode 0640",
        "leaked draft of a record",
        "leaked draft of a secret",
    ):
        assert expected in problems
    assert len(problems.splitlines()) == 5
    assert store.status().foreign_names == 2
    assert store.reclaim().dropped_files == 2
    assert "leaked" not in "\n".join(store.check())
