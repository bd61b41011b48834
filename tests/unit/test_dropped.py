"""Checkpointers and managers that are dropped without close()."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time

import pytest
import torch

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
