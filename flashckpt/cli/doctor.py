"""Implements `flashckpt doctor`: checks whether this node is fit for saving, and says what to do if it is not. No
torch.
"""

from __future__ import annotations

import dataclasses
import re
import sys
from typing import TYPE_CHECKING, Any

import click

from flashckpt.cli.entry import FAILED, OK
from flashckpt.cli.memory import find_jobs, memory_dir_of, named_job, open_store
from flashckpt.cli.options import where
from flashckpt.cli.output import note, print_json, print_table, printable
from flashckpt.config import CheckpointConfig, resolve
from flashckpt.errors import FlashError, NotFoundError

if TYPE_CHECKING:
    from flashckpt.config import Settings
    from flashckpt.doctor.finding import Finding

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?", re.IGNORECASE)


class _Size(click.ParamType[int]):
    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        match = _SIZE.fullmatch(str(value).strip())
        if match is None:
            self.fail(f"{value!r}: expected bytes, e.g. 84G or 80GiB", param, ctx)
        base = 1024 if match[3] else 1000
        return int(float(match[1]) * base ** " kmgt".index(match[2].lower() or " "))


@click.command("doctor")
@click.option("--size", type=_Size(), metavar="SIZE", help="State of all ranks of this node together, e.g. 84G.")
@click.option(
    "--replicas", type=click.IntRange(0), default=1, show_default=True, help="Replicas, as in the configuration."
)
@click.option("--keep-memory", type=click.IntRange(1), default=1, show_default=True, help="As in the configuration.")
@click.option(
    "--nodes",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Number of nodes, for the size of a checkpoint.",
)
@click.option("--persist-dir", metavar="DIR", help="Path or URL. Default: that of this node's agent.")
@click.option(
    "--keep-latest-k", type=click.IntRange(0), default=2, show_default=True, help="Number of checkpoints kept there."
)
@click.option("--timeout", type=float, default=2.0, show_default=True, help="Seconds to wait for an agent's answer.")
@click.option("--strict", is_flag=True, help="Warnings count as failures.")
@where
def command(
    size: int | None,
    replicas: int,
    keep_memory: int,
    nodes: int,
    persist_dir: str | None,
    keep_latest_k: int,
    timeout: float,
    strict: bool,
    job: str | None,
    memory_dir: str | None,
    as_json: bool,
) -> None:
    """Check this node: memory, limits, clock, native core, torch, agent, network, certificates, persist_dir.

    Exit code 0 if nothing fails, 1 if something does. Writes only a small file in persist_dir, and removes it.
    """
    from flashckpt.doctor.disk import judge_disk, look_at_disk
    from flashckpt.doctor.finding import Grade, worst
    from flashckpt.doctor.host import judge_host, look_at_host
    from flashckpt.doctor.memory import MemoryWish, judge_memory, look_at_memory
    from flashckpt.doctor.network import judge_network, look_at_network

    settings = _settings(job, memory_dir, persist_dir)
    network = look_at_network(settings, timeout)
    told = (network.agent.status or {}).get("persist") or {}
    directory = persist_dir or told.get("directory")
    wish = MemoryWish(size, replicas, keep_memory, persists=directory is not None)
    findings: list[Finding] = [
        *judge_memory(look_at_memory(settings.memory_dir, held_bytes=_held(settings)), wish),
        *judge_host(look_at_host()),
        *judge_network(network),
        *judge_disk(
            None if directory is None else look_at_disk(directory, settings.memory_dir),
            None if size is None else size * nodes,
            max(2, keep_latest_k),
        ),
    ]
    found = worst(findings)
    failed = found is Grade.FAIL or (strict and found is Grade.WARN)
    if as_json:
        content = {"state": found.value, "job": settings.job, "memory_dir": settings.memory_dir}
        print_json("doctor/v1", {**content, "findings": [dataclasses.asdict(one) for one in findings]})
    else:
        print_table(["check", "", "found"], [[one.check, one.state.value, printable(one.found)] for one in findings])
        for one in findings:
            if one.advice:
                note(f"{one.state.value} {one.check}: {one.advice}")
    sys.exit(FAILED if failed else OK)


def _settings(job: str | None, memory_dir: str | None, persist_dir: str | None) -> Settings:
    """Resolve the settings as a trainer would. Before the first one has run, no job need be named."""
    here = memory_dir_of(memory_dir, job)
    name = named_job(job)
    if name is None and persist_dir is None:
        try:
            jobs = find_jobs(here)
        except NotFoundError:
            jobs = []
        name = jobs[0] if len(jobs) == 1 else "-"
        if len(jobs) > 1:
            note(f"{len(jobs)} jobs in {here}: name one with --job to look at its agent")
    # load_only: persist_dir can be checked without an agent.
    return resolve(CheckpointConfig(job=name, memory_dir=memory_dir, persist_dir=persist_dir, load_only=True))


def _held(settings: Settings) -> int:
    """Return the bytes of the job's slots: they are reused, not needed twice."""
    try:
        with open_store(settings.memory_dir, settings.job) as store:
            return store.status().total_bytes
    except (FlashError, OSError):
        return 0
