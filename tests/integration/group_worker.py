"""Two ranks whose process group is replaced under a manager, and that fork within its block. Prints DONE at the end."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import time

import torch
import torch.distributed as dist

import flashckpt


class Left(Exception):
    pass


def expect(kind, call):
    try:
        call()
    except kind as error:
        return error
    raise SystemExit(f"expected {kind.__name__} of {call}, found nothing")


def leave_in_child(manager, how):
    pid = os.fork()
    if pid == 0:
        faulthandler.dump_traceback_later(15.0)
        with manager:
            manager = None
            if how == "exit":
                sys.exit(7)
        sys.exit(7)
    deadline = time.monotonic() + 30.0
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            assert os.waitstatus_to_exitcode(status) == 7, status
            return
        time.sleep(0.02)
    os.kill(pid, signal.SIGKILL)
    raise SystemExit(f"the child hangs ({how})")


def make(config):
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    return flashckpt.CheckpointManager(config, model=model, optimizer=optimizer)


def main():
    config = flashckpt.CheckpointConfig(
        job="run1",
        memory_dir=os.environ["MEMORY"],
        node_id="a",
        agent=os.environ["AGENT"],
        replicas=0,
        save_timeout=30.0,
    )
    dist.init_process_group("gloo")
    manager = make(config)
    manager.load()
    assert manager.save(1, force=True).wait("sealed", 30) == "ok"
    for how in ("exit", "end"):
        leave_in_child(manager, how)
    assert manager.save(2, force=True).wait("sealed", 30) == "ok"

    dist.destroy_process_group()
    error = expect(flashckpt.ConflictError, manager.load)
    assert "destroyed" in error.message, error
    assert manager.save(3, force=True).wait("sealed", 30) == "ok"  # saves are local

    os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)
    store = dist.FileStore(os.environ["STORE"], 2)
    dist.init_process_group("gloo", store=store, rank=int(os.environ["RANK"]), world_size=2)
    for call in (manager.load, lambda: manager.save(4)):
        error = expect(flashckpt.ConflictError, call)
        assert "replaced" in error.message, error
        assert "init_process_group" in error.hint
    began = time.monotonic()

    def leave():
        with manager:
            raise Left

    expect(Left, leave)
    assert time.monotonic() - began < 20.0
    with make(config) as again:
        assert again.load().step == 3
        assert again.save(4, force=True).wait("sealed", 30) == "ok"
    dist.destroy_process_group()
    print(f"DONE {os.environ['RANK']}", flush=True)


if __name__ == "__main__":
    main()
