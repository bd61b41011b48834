"""Checkpointers and managers that are dropped without close(), or left by a fork."""

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


@pytest.fixture
def config(memory_dir):
    return flashckpt.CheckpointConfig(job="run1", memory_dir=memory_dir, save_timeout=20.0)


@pytest.fixture
def training():
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64)
    return model, torch.optim.AdamW(model.parameters())


def holdings():
    """Descriptors, threads, and hooks that torch's optimizers call."""
    return len(os.listdir("/proc/self/fd")), threading.active_count(), len(_global_optimizer_pre_hooks)


def wait_until(condition, timeout=20.0):
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture
def no_collector():
    """What is dropped goes at once: not only when the garbage collector comes by."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


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


def test_a_copy_that_is_under_way_is_still_waited_for(config, training, no_collector):
    """The step that follows must not change what is being copied."""
    model, optimizer = training
    manager = flashckpt.CheckpointManager(config, model=model, optimizer=optimizer)
    manager.load()
    for step in range(1, 4):
        model(torch.ones(2, 64)).sum().backward()
        optimizer.step()
        handle = manager.save(step, force=True)
    saved = model.weight.detach().clone()
    del manager
    optimizer.step()
    assert not torch.equal(saved, model.weight)
    assert handle.wait("sealed", 20) == "ok"
    with flashckpt.CheckpointManager(config, model=model, optimizer=optimizer) as manager:
        assert manager.load().step == 3
        assert torch.equal(saved, model.weight)


def test_a_dropped_manager_does_not_swallow_signals(config, training):
    """Dropped in another thread, where no handler can be set."""
    received = []
    previous = signal.signal(signal.SIGUSR1, lambda *_: received.append(1))
    try:
        box = [flashckpt.CheckpointManager(config, model=training[0], optimizer=training[1])]
        box[0].install_signal_handlers([signal.SIGUSR1])
        thread = threading.Thread(target=box.clear)
        thread.start()
        thread.join()
        gc.collect()
        os.kill(os.getpid(), signal.SIGUSR1)
        wait_until(lambda: received)
    finally:
        signal.signal(signal.SIGUSR1, previous)


class Left(Exception):
    pass


def leave_broken(thing, store, error):
    """Leaves the block of `thing` with `error`, once its directory's descriptor is gone."""
    with thing:
        os.close(store._directory.fd)
        if error is not None:
            raise error


def test_what_close_raises_does_not_mask_the_exception_of_the_block(config, training):
    model, optimizer = training
    checkpointer = flashckpt.Checkpointer(config)
    with pytest.raises(Left):
        leave_broken(checkpointer, internals_of(checkpointer).store, Left())
    manager = flashckpt.CheckpointManager(config, model=model, optimizer=optimizer)
    with pytest.raises(Left):
        leave_broken(manager, internals_of(manager.checkpointer).store, Left())
    checkpointer = flashckpt.Checkpointer(config)
    with pytest.raises(OSError, match="Bad file descriptor"):
        leave_broken(checkpointer, internals_of(checkpointer).store, None)


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
