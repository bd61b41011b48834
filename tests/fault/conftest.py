from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.conftest import environment


@dataclass
class Job:
    codes: list[int]
    outputs: list[str]

    def said(self, word):
        """For each rank the rest of the lines that begin with `word`."""
        return [[line.split()[1:] for line in out.splitlines() if line.startswith(word + " ")] for out in self.outputs]


class Nursery:
    def __init__(self):
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", str(Path(__file__).parent / "nursery.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment(GLOO_SOCKET_IFNAME="lo"),
        )

    def run(self, ranks, *, task="work", environment=None, **request):
        """Extra keys: only_rank, kill_after, timeout, spares (the others, if one is killed); all else is the task's."""
        known = ("only_rank", "kill_after", "timeout", "spares")
        options = {key: request.pop(key) for key in known if key in request}
        asked = {"ranks": ranks, "task": task, "environment": environment or {}, "arguments": request, **options}
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        return Job(**json.loads(self._process.stdout.readline()))

    def close(self):
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait(timeout=20)


@pytest.fixture(scope="session")
def nursery():
    nursery = Nursery()
    yield nursery
    nursery.close()
