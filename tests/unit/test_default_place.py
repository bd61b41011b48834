"""The default memory directory: one per user, and the shared one of earlier versions where it holds the job."""

from __future__ import annotations

import os

import pytest
from click.testing import CliRunner

from flashckpt.cli.entry import group
from flashckpt.store.default_place import default_memory_dir, other_place


@pytest.fixture
def shm(tmp_path):
    return str(tmp_path)


def make(shm, name, *jobs, mode=0o700):
    for path in (f"{shm}/{name}", *(f"{shm}/{name}/{job}" for job in jobs)):
        os.makedirs(path, exist_ok=True)
        os.chmod(path, 0o700)
    os.chmod(f"{shm}/{name}", mode)


def test_each_user_has_a_directory(shm):
    assert default_memory_dir("run1", shm) == default_memory_dir(None, shm) == f"{shm}/flashckpt-{os.geteuid()}"


def test_a_job_in_the_shared_directory_of_earlier_versions_is_found(shm):
    own, shared = f"flashckpt-{os.geteuid()}", "flashckpt"
    make(shm, shared, "run1", "run%2F2", "sub-ranks-0-1-of-4")
    for job in ("run1", "run/2", "sub", None):
        assert default_memory_dir(job, shm) == f"{shm}/{shared}"
    assert default_memory_dir("run", shm) == f"{shm}/{own}"
    assert other_place(f"{shm}/{own}", shm) == f"{shm}/{shared}"
    make(shm, own, "run1")
    assert default_memory_dir("run1", shm) == default_memory_dir(None, shm) == f"{shm}/{own}"
    assert default_memory_dir("run/2", shm) == f"{shm}/{shared}"
    assert other_place(f"{shm}/{shared}", shm) == f"{shm}/{own}"
    assert other_place(f"{shm}/elsewhere", shm) is None


@pytest.mark.skipif(os.geteuid() != 0, reason="makes a directory of another user")
def test_what_is_not_ours_is_not_looked_into(shm):
    make(shm, "flashckpt", "run1")
    os.chown(f"{shm}/flashckpt", 12345, 12345)
    assert default_memory_dir("run1", shm) == f"{shm}/flashckpt-0"


@pytest.mark.parametrize("change", ["mode", "link"])
def test_what_is_open_or_a_link_is_not_taken(shm, change):
    if change == "mode":
        make(shm, "flashckpt", "run1", mode=0o755)
    else:
        make(shm, "elsewhere", "run1")
        os.symlink(f"{shm}/elsewhere", f"{shm}/flashckpt")
    assert default_memory_dir("run1", shm) == f"{shm}/flashckpt-{os.geteuid()}"


def test_doctor_and_status_look_there(monkeypatch):
    monkeypatch.delenv("FLASHCKPT_MEMORY_DIR", raising=False)
    own = f"/dev/shm/flashckpt-{os.geteuid()}"
    assert own in CliRunner().invoke(group, ["doctor", "--job", "no-such-job", "--json"]).stdout
    status = CliRunner().invoke(group, ["status", "--job", "no-such-job"])
    assert own in status.output + str(status.exception)
