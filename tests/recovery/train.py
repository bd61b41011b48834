"""Run by torchrun, a rank a process: trains a small transformer, saves every step, resumes by itself.

What happened goes to DIRECTORY/rank<N>.jsonl, an event a line:

| event | fields |
|---|---|
| started | pid, world, node |
| loaded | step (null: nothing was saved yet), source, saved_world, stepped_over, own, whole |
| refused | type, code, message of what load() raised; the rank ends with code 3 |
| step | step, loss, own, whole |
| saved | step, outcome, level, reason |
| holding | step, world; the rank goes on when DIRECTORY/go-<step> is there |
| done | |

`own` is a digest of every bit of this rank's state, random generator included; `whole` one of the state of all ranks
put together, which does not depend on how many they are.
"""

import argparse
import hashlib
import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as functional
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor

import flashckpt
from flashckpt.testing.trainer import Journal

sys.path.insert(0, os.path.dirname(__file__))
from model import LAYOUTS, batch, build

HOLD_SECONDS = 300.0


class Training:
    """Model, optimizer, schedule and the random generator: all that has to come back."""

    def __init__(self, layout):
        self.model, self._part, self._parts = build(layout)
        # Not foreach: some parameters lie on two mesh dimensions and some on one.
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, foreach=False)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.9)
        torch.manual_seed(100 + self._part)
        # The first look at an optimizer's state makes it: torch takes a step without gradients, which counts. Every
        # run does so before its first step, whether it has something to load or not.
        self.capture()

    def step(self, step):
        tokens, wanted = batch(step, self._part, self._parts)
        loss = functional.cross_entropy(self.model(tokens).flatten(0, 1), wanted.flatten())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()
        return loss.item()

    def capture(self):
        weights, moments = get_state_dict(self.model, self.optimizer)
        return {
            "model": weights,
            "optimizer": moments,
            "schedule": self.schedule.state_dict(),
            "rng": flashckpt.PerRank(torch.get_rng_state()),
        }

    def restore(self, state):
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        torch.set_rng_state(state["rng"].value)

    def digests(self):
        """Collective: `whole` gathers every tensor."""
        state = self.capture()
        own, whole = hashlib.blake2b(digest_size=8), hashlib.blake2b(digest_size=8)
        for name, value in leaves({key: state[key] for key in ("model", "optimizer", "schedule")}):
            own.update(name.encode() + raw(value.to_local() if isinstance(value, DTensor) else value))
            whole.update(name.encode() + raw(value.full_tensor() if isinstance(value, DTensor) else value))
        own.update(raw(torch.get_rng_state()))
        return {"own": own.hexdigest(), "whole": whole.hexdigest()}


def leaves(state, prefix=""):
    items = state.items() if isinstance(state, dict) else enumerate(state)
    for key, value in sorted(items, key=lambda item: str(item[0])):
        if isinstance(value, (dict, list)):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def raw(value):
    return value.contiguous().numpy().tobytes() if isinstance(value, torch.Tensor) else repr(value).encode()


def main():
    options = parse_arguments()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    journal = Journal(options.directory / f"rank{dist.get_rank()}.jsonl", dist.get_rank())
    journal.tell("started", pid=os.getpid(), world=dist.get_world_size(), node=os.environ.get("FLASHCKPT_NODE_ID"))
    training = Training(options.layout)
    if options.config is None:
        for step in range(1, options.until + 1):
            told(journal, training, step)
    else:
        config = flashckpt.CheckpointConfig.from_dict(json.loads(options.config))
        with flashckpt.Checkpointer(config) as checkpointer:
            run(options, journal, training, checkpointer)
    dist.barrier()
    journal.tell("done")
    dist.destroy_process_group()


def told(journal, training, step):
    loss = training.step(step)
    journal.tell("step", step=step, world=dist.get_world_size(), loss=loss, **training.digests())


def run(options, journal, training, checkpointer):
    resumed = resume(options, journal, training, checkpointer)
    if options.hold_loaded:
        hold(options.directory, journal, resumed.step if resumed else 0)
    for step in range(resumed.step + 1 if resumed else 1, options.until + 1):
        told(journal, training, step)
        if step in options.hold_unsaved:
            hold(options.directory, journal, step)
        if step % options.every == 0:
            save(options, journal, checkpointer, step, training.capture())
        if step in options.hold:
            hold(options.directory, journal, step)


def resume(options, journal, training, checkpointer):
    state = training.capture()
    try:
        resumed = checkpointer.load(state, options.load_step, allow_fresh=options.allow_fresh, history=options.history)
    except flashckpt.FlashError as error:
        journal.tell("refused", type=type(error).__name__, code=error.code, message=str(error))
        dist.barrier()  # else a launcher that sees one rank end would end others before they have spoken
        sys.exit(3)
    if resumed is None:
        journal.tell("loaded", step=None, source=None, world=dist.get_world_size())
        return None
    training.restore(state)
    journal.tell(
        "loaded",
        step=resumed.step,
        source=resumed.source,
        world=dist.get_world_size(),
        saved_world=resumed.saved_world_size,
        stepped_over=resumed.stepped_over,
        **training.digests(),
    )
    return resumed


def save(options, journal, checkpointer, step, state):
    handle = checkpointer.save(step, state)
    outcome = handle.outcome
    # Steps above that are only sealed: a fault is about to strike one of them.
    if options.level and step <= options.level_until:
        outcome = handle.wait(options.level, timeout=120)
    journal.tell("saved", step=step, outcome=outcome, level=handle.level.name.lower(), reason=handle.reason)


def hold(directory, journal, step):
    journal.tell("holding", step=step, world=dist.get_world_size())
    deadline = time.monotonic() + HOLD_SECONDS
    while not (directory / f"go-{step}").exists():
        if time.monotonic() > deadline:
            sys.exit(f"held at step {step} for {HOLD_SECONDS} s: expected to be told to go on")
        time.sleep(0.01)


def numbers(text):
    return tuple(int(part) for part in text.split(",") if part)


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--layout", choices=LAYOUTS, default="fsdp")
    parser.add_argument("--until", type=int, required=True, help="the last step")
    parser.add_argument("--every", type=int, default=1, help="steps between saves")
    parser.add_argument("--config", help="fields of CheckpointConfig, as JSON; without it nothing is saved or loaded")
    parser.add_argument("--level", default="", help="to wait for after each save")
    parser.add_argument("--level-until", type=int, default=1 << 30, help="the last step that waits")
    parser.add_argument("--hold", type=numbers, default=(), help="steps to wait after, with commas between")
    parser.add_argument("--hold-unsaved", type=numbers, default=(), help="steps to wait before saving of")
    parser.add_argument("--hold-loaded", action="store_true", help="wait after the load")
    parser.add_argument("--load-step", type=int)
    parser.add_argument("--allow-fresh", action="store_true")
    parser.add_argument("--history")
    return parser.parse_args()


if __name__ == "__main__":
    main()
