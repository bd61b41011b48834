"""The default memory directory where two users of a machine share it."""

from __future__ import annotations

import os

import pytest

from tests.unit.test_default_place import shm

__all__ = ["shm"]  # the fixture


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes other users")
def test_two_users_of_a_machine_do_not_lock_each_other_out(run_python):
    code = (
        "import codecs, ctypes, os, sys\n"
        "from flashckpt.config import CheckpointConfig, resolve\n"
        "from flashckpt.store.slots import SlotStore\n"
        "codecs.lookup('ascii')  # the interpreter is not readable to others\n"
        "os.setresuid(*[int(sys.argv[1])] * 3)\n"
        "ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # or /proc/self stays root's\n"
        "place = resolve(CheckpointConfig(job='run1'), {}).memory_dir\n"
        "SlotStore.open(place, 'run1').close()\n"
        "print(place)\n"
    )
    try:
        for uid in (64001, 64002):
            told = run_python(code, str(uid))
            assert told.stdout.split() == [f"/dev/shm/flashckpt-{uid}"], told.stderr
    finally:
        run_python(
            "import shutil, sys\nfor one in sys.argv[1:]: shutil.rmtree(f'/dev/shm/flashckpt-{one}')", "64001", "64002"
        )
