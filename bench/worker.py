"""A contender in a process of its own, which takes commands over a pipe: `python -m bench.worker`.

It stays alive between commands, so that rounds of several contenders can be interleaved while the state, the
warm slots and the caches of each live on. One JSON object a line, in and out.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import resource
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.contenders import make_contender
from bench.errors import BenchError
from bench.spec import StateSpec
from bench.state import change, digest, make_again, make_state, spoil
from bench.training import Training

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TextIO

    from bench.contenders.base import Contender, Details
    from bench.state import StateDict

Reply = dict[str, Any]
_MANY_FILES = 1 << 18


class Session:
    """The commands. Each returns what is to be told; seconds are of the contender's call alone."""

    _contender: Contender
    _state: StateDict
    _expected: str = ""
    _training: Training | None = None

    def set_up(self, contender: str, tensors: int, tensor_bytes: int, directory: str) -> Reply:
        self._state = make_state(StateSpec(tensors, tensor_bytes))
        self._contender = make_contender(contender)
        return self._timed(lambda: self._contender.set_up(self._state, Path(directory)))

    def save(self, step: int) -> Reply:
        """`seconds` until the caller may change its state, `safe` until the checkpoint survives the process."""
        change(self._state, step)
        reply = self._timed(lambda: self._contender.save(step) | self._contender.gate())
        began = time.perf_counter()
        reply["details"] |= self._contender.finish()
        reply["safe"] = reply["seconds"] + time.perf_counter() - began
        reply["details"] |= self._contender.settle()
        return reply

    def isolate(self, step: int) -> Reply:
        """Whether the checkpoint is of the state as it was, though the state is overwritten as soon as it may be."""
        change(self._state, step)
        expected = digest(self._state)
        self._contender.save(step)
        self._contender.gate()
        spoil(self._state)
        self._contender.finish()
        self._contender.settle()
        self._contender.load()
        found = digest(self._state)
        make_again(self._state, step)
        return {"isolated": found == expected}

    def expect(self, digest_of_saved: str | None = None) -> Reply:
        """What loads are compared with: the given digest, or that of the state as it is now."""
        self._expected = digest_of_saved or digest(self._state)
        return {"digest": self._expected}

    def load(self) -> Reply:
        spoil(self._state)
        reply = self._timed(self._contender.load)
        found = digest(self._state)
        if found != self._expected:
            raise BenchError(f"load: expected a state with digest {self._expected}, found {found}")
        return reply

    def train(self, first: int, steps: int, interval: int, passes: int) -> Reply:
        """The seconds of the loop, saves included, and `blocked` of each save; what goes on behind its last step is
        waited for, but does not count. `passes`: of the small network, in one step.
        """
        if self._training is None:
            self._training = Training()
        blocked: list[float] = []
        gc.collect()
        began = time.perf_counter()
        for step in range(first, first + steps):
            for _ in range(passes):
                self._training.step()
            if blocked:  # forward and backward are done: this is where optimizer.step() changes the state
                waiting = time.perf_counter()
                self._contender.gate()
                blocked[-1] += time.perf_counter() - waiting
            change(self._state, step)
            if interval and (step - first) % interval == 0:
                saving = time.perf_counter()
                self._contender.save(step)
                blocked.append(time.perf_counter() - saving)
        seconds = time.perf_counter() - began
        if blocked:
            self._contender.finish()
            self._contender.settle()
        return {"seconds": seconds, "details": {"in save()": sum(blocked)}, "blocked": blocked}

    def close(self) -> Reply:
        self._contender.close()
        return {}

    def _timed(self, call: Callable[[], Details]) -> Reply:
        gc.collect()
        began = time.perf_counter()
        details = call()
        return {"seconds": time.perf_counter() - began, "details": dict(details)}


def main() -> None:
    replies = _keep_stdout_for_replies()
    _allow_many_files()
    # A contender's advice to its user is not this benchmark's output.
    warnings.simplefilter("ignore")
    session = Session()
    for line in sys.stdin:
        command: dict[str, Any] = json.loads(line)
        name = command.pop("do")
        try:
            reply = getattr(session, name)(**command)
        except Exception:  # whatever a contender raises is told to the parent, which ends the run
            reply = {"error": traceback.format_exc()}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()
        if name == "close":
            return


def _allow_many_files() -> None:
    """Some share one file a tensor, and would fail or hang for the limit of the shell."""
    for most in (_MANY_FILES, resource.getrlimit(resource.RLIMIT_NOFILE)[1]):
        with contextlib.suppress(ValueError, OSError):  # only root may have more than the hard limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
            return


def _keep_stdout_for_replies() -> TextIO:
    """What a library prints must not come between the replies: it goes where errors go."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    return os.fdopen(kept, "w")


if __name__ == "__main__":
    main()
