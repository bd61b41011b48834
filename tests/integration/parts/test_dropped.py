"""Checkpointers and managers that nobody closes: what is left of them, also in a forked child."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time

import pytest
import torch
from torch.optim.optimizer import _global_optimizer_pre_hooks

import flashckpt
from flashckpt.checkpointer import internals_of
from tests.unit.test_dropped import config, no_collector, training, wait_until

__all__ = ["config", "no_collector", "training"]  # the fixtures


def holdings():
    """Descriptors, threads, and hooks that torch's optimizers call."""
    return len(os.listdir("/proc/self/fd")), threading.active_count(), len(_global_optimizer_pre_hooks)


def test_a_checkpointer_that_is_dropped_leaves_nothing(config, no_collector, caplog):
    before = holdings()
    for step in range(1, 101):
        checkpointer = flashckpt.Checkpointer(config)
        checkpointer.load({"x": torch.zeros(1000)})
        handle = checkpointer.save(step, {"x": torch.full((1000,), float(step))}, overlap=step % 2 == 1)
        assert handle.wait("sealed", 20) == "ok"
        del checkpointer, handle
    wait_until(lambda: holdings() == before)
    assert any("dropped without close()" in one.message for one in caplog.records)
    with flashckpt.Checkpointer(config) as checkpointer:
        live = {"x": torch.zeros(1000)}
        assert checkpointer.load(live).step == 100
        assert live["x"][0] == 100


def test_a_manager_that_is_dropped_leaves_nothing(config, training, no_collector):
    model, optimizer = training
    before = holdings()
    handler = signal.getsignal(signal.SIGUSR1)
    for step in range(1, 101):
        manager = flashckpt.CheckpointManager(config, model=model, optimizer=optimizer)
        manager.install_signal_handlers([signal.SIGUSR1])
        manager.load()
        model(torch.ones(2, 64)).sum().backward()
        optimizer.step()
        assert manager.save(step, force=True).wait("sealed", 20) == "ok"
        del manager
    assert signal.getsignal(signal.SIGUSR1) == handler
    # The hook of the last one stays until the next manager comes.
    wait_until(lambda: holdings() == (before[0], before[1], before[2] + 1))
    with flashckpt.CheckpointManager(config, model=model, optimizer=optimizer) as manager:
        assert manager.load().step == 100
    assert holdings() == before


def in_child(leave):
    """Runs `leave` in a fork, and returns its exit code within ten seconds."""
    pid = os.fork()
    if pid == 0:
        try:
            leave()
        except SystemExit as exit_:
            os._exit(exit_.code)
        except BaseException as error:
            print(repr(error), file=sys.stderr, flush=True)
        os._exit(99)
    deadline = time.monotonic() + 10.0
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise AssertionError("the child hangs")
        time.sleep(0.02)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_that_leaves_the_block_touches_nothing(config, training):
    model, optimizer = training
    manager = flashckpt.CheckpointManager(config, model=model, optimizer=optimizer)
    with manager:
        manager.load()
        model(torch.ones(2, 64)).sum().backward()
        optimizer.step()
        assert manager.save(1, force=True).wait("sealed", 20) == "ok"

        def leave():
            with manager:
                pass
            with pytest.raises(flashckpt.ClosedError):
                manager.save(2)
            sys.exit(7)

        def use():
            for call in (
                lambda: manager.save(2),
                manager.load,
                manager.finalize,
                lambda: manager.checkpointer.status(),
            ):
                with pytest.raises(flashckpt.ConflictError, match="fork"):
                    call()
            manager.close()
            sys.exit(8)

        def drop():
            nonlocal manager
            manager = None
            gc.collect()
            sys.exit(9)

        assert [in_child(leave), in_child(use), in_child(drop)] == [7, 8, 9]
        assert manager.all_steps() == (1,)
        optimizer.step()
        assert manager.save(2, force=True).wait("sealed", 20) == "ok"
        assert internals_of(manager.checkpointer).store.check() == []
