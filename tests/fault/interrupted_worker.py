"""A trainer with an agent, interrupted by alarms at random moments of its calls: memory directory, rounds."""

from __future__ import annotations

import contextlib
import json
import random
import signal
import sys
import time

import torch

import flashckpt

SIZE = 2000


def state(step):
    return {f"w{n}": torch.full((SIZE,), float(step)) for n in range(30)}


def step_of(live):
    (step,) = {int(value) for one in live.values() for value in one.unique().tolist()}
    return step


def ring(*_):
    raise KeyboardInterrupt


def make(memory_dir):
    config = flashckpt.CheckpointConfig(
        job="job", memory_dir=memory_dir, node_id="a", agent="auto", agent_linger=60.0, save_timeout=15.0
    )
    return flashckpt.Checkpointer(config)


def timed(call):
    began = time.monotonic()
    call()
    return time.monotonic() - began


def main(memory_dir, rounds):
    signal.signal(signal.SIGALRM, ring)
    checkpointer = make(memory_dir)
    step = promised = 1
    assert checkpointer.save(1, state(1)).outcome == "ok"
    opened = []

    def reopen():
        checkpointer.close()
        opened.append(make(memory_dir))

    calls = {
        "load": lambda: checkpointer.load(state(0)),
        "save": lambda: checkpointer.save(step, state(step)),
        "overlapped save": lambda: checkpointer.save(step, state(step), overlap=True).wait("sealed", 15.0),
        "reopen": reopen,
    }
    lengths = dict.fromkeys(calls, 0.05)
    hits = dict.fromkeys(calls, 0)
    slowest = 0.0
    for _ in range(rounds):
        for name, call in calls.items():
            step += 1
            try:
                signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-5, lengths[name]))
                lengths[name] = timed(call)
                signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                hits[name] += 1
            began = time.monotonic()
            if name == "reopen":
                checkpointer.close()
                checkpointer = opened.pop() if opened else make(memory_dir)
                live = state(0)
                found = checkpointer.load(live)
                assert found.step >= promised, (found, promised)
                assert step_of(live) == found.step
            step += 1
            handle = checkpointer.save(step, state(step))
            assert handle.outcome == "ok", handle
            promised = step
            live = state(0)
            assert checkpointer.load(live).step == step == step_of(live)
            slowest = max(slowest, time.monotonic() - began)
    print(json.dumps({"hits": hits, "slowest": slowest, "close": timed(checkpointer.close)}))


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):  # an alarm between two calls
        main(sys.argv[1], int(sys.argv[2]))
