"""The rows about replication come out right from figures, and the agent's log is read as it is written."""

from __future__ import annotations

import io
import logging
import os
import time
from pathlib import Path

import pytest
from rich.console import Console

from bench.agents import Agent, end_agents
from bench.errors import BenchError
from bench.machine import Machine, Quietness
from bench.report import show
from bench.result import Report
from bench.rows import make_rows
from bench.run import turn
from bench.samples import Samples
from bench.sections import Options, plan_sections
from bench.slowdown import Loop
from flashckpt.move.transports.grpc.send import Push
from flashckpt.move.transports.tcp.ends import LaneClient
from flashckpt.move.transports.tcp.policy import LanePolicy
from flashckpt.protocol.wire import PutOpen
from flashckpt.rpc.credentials import Bundle
from flashckpt.types import Generation, Launch, ShardId
from flashckpt.v1 import peer_pb2

OPTIONS = Options(size_bytes=1 << 30, rounds=3, first_rounds=2, small_tensors=100, loop=Loop(3.0, 2))
MACHINE = Machine("cpu", 2, 1 << 34, "6.1", "3.11", "2.13", "never", "never", "sse42", True, "abc")
REPLICATED = "flashckpt-replicated"


def samples_of(section: str, figures: dict[tuple[str, str], list[float]], state_bytes: int = 1 << 30) -> Samples:
    samples = Samples()
    samples.state_bytes[section] = state_bytes
    samples.saves[section] = 2
    for (contender, measure), values in figures.items():
        for value in values:
            samples.add(section, contender, measure, value)
    return samples


def test_replication_is_held_against_the_socket() -> None:
    samples = samples_of(
        "replicate",
        {
            (REPLICATED, "replicate"): [2.0, 3.0, 9.0],
            (REPLICATED, "push"): [1.9, 2.9, 8.9],
            ("socket", "replicate"): [0.5, 0.5, 0.6],
            ("socket-tls", "replicate"): [1.0, 1.45, 1.5],
            ("agent that sends", "cpu: replicate"): [1.2],
            ("agent that receives", "cpu: replicate"): [0.8],
        },
    )
    rows = {row.name: row for row in make_rows(samples)}
    whole = rows["replication of the state between two agents, from sealed to replicated, speed against a plain socket"]
    assert whole.value == pytest.approx(0.5 / 3)
    assert whole.best == pytest.approx(0.5 / 2)
    assert whole.numbers == "3,000 ms against 500 ms; 0.36 against 2.15 GB/s"
    push = "the push alone, until acknowledged, speed against a"
    assert rows[f"{push} plain socket"].value == pytest.approx(0.5 / 2.9)
    assert rows[f"{push} socket with mutual TLS"].value == pytest.approx(1.45 / 2.9)
    cpu = rows["CPU seconds of both agents for a GiB replicated"]
    assert cpu.value == pytest.approx(2.0)
    assert cpu.numbers == "sender 1.20 s, receiver 0.80 s"


def test_cpu_is_counted_by_the_gibibyte() -> None:
    figures = {(f"agent that {what}", "cpu: replicate"): [0.2] for what in ("sends", "receives")}
    (row,) = make_rows(samples_of("replicate", figures, state_bytes=1 << 28))
    assert row.value == pytest.approx(1.6)


def test_loops_are_compared_round_by_round() -> None:
    figures = {
        ("no saving", "loop"): [6.0, 12.0, 6.0],
        ("flashckpt-off", "loop"): [6.0, 12.0, 6.0],
        (REPLICATED, "loop"): [6.6, 13.2, 6.6],
    }
    rows = {row.name: row for row in make_rows(samples_of("slowdown", figures, state_bytes=1 << 29))}
    slower = rows["slowdown of a training loop by replicated saves, against none"]
    assert slower.value == pytest.approx(10.0)
    assert slower.numbers == "512 MiB every 3.0 s; 0.60 s of training lost for a GiB"
    assert rows["slowdown of a training loop by saves without replication, against none"].value == pytest.approx(0.0)
    assert rows["slowdown of a training loop by replication alone"].value == pytest.approx(10.0)


def test_what_the_agent_adds_is_a_difference() -> None:
    figures = {("flashckpt", "save"): [0.052], ("flashckpt-off", "save"): [0.05], (REPLICATED, "save"): [0.06]}
    (row,) = make_rows(samples_of("agent", figures))
    assert row.value == pytest.approx(2.0)
    assert row.numbers == "52.0 ms against 50.0 ms without; of two nodes 60.0 ms"


def test_the_report_shows_no_throughput_of_a_loop() -> None:
    samples = samples_of("slowdown", {(name, "loop"): [6.0] for name in ("no saving", "flashckpt-off", REPLICATED)})
    text = io.StringIO()
    show(Report(MACHINE, OPTIONS, "today", 1.0, 0.0, samples, make_rows(samples)), Console(file=text, width=140))
    (line,) = [line for line in text.getvalue().splitlines() if "no saving" in line and "6,000 ms" in line]
    assert line.split("│")[-3].strip() == ""


def test_every_section_of_replication_is_part_of_a_run() -> None:
    names = [section.name for section in plan_sections(OPTIONS)]
    assert {"agent", "agent, tiny state", "replicate", "replicate 64 MiB", "slowdown"} <= set(names)
    assert len(names) == len(set(names))


def test_turns_rotate() -> None:
    assert [turn("abc", number) for number in range(4)] == [list("abc"), list("bca"), list("cab"), list("abc")]


class OneChunk:
    head_bytes, chunk_bytes, chunks = 4096, 4, 1

    def read_head(self, offset: int, limit: int) -> bytes:
        return bytes(limit)

    def read_chunk(self, index: int) -> bytes:
        return b"data"


class Nobody:
    def expect(self, timeout: float) -> None: ...

    def relax(self) -> None: ...


def test_the_time_of_a_push_is_found_in_the_log_of_an_agent(tmp_path, caplog) -> None:
    shard = ShardId(Generation(1, 2, step=7, seq=1), 0, 2)
    opening = PutOpen("node0", Launch(1, 2), None, shard, 0, b"d" * 16, 4100, 4096)
    no_lanes = LaneClient("127.0.0.1:1", Bundle(b"", b"", b""), "node1", LanePolicy("grpc"), 1.0)
    push = Push(opening, OneChunk(), "node1", None, no_lanes)
    sealed = peer_pb2.PutResponse(sealed=peer_pb2.PutSealed(digest=opening.digest)).SerializeToString()
    ready = peer_pb2.PutResponse(ready=peer_pb2.PutReady(next_head_offset=0, next_chunk=0)).SerializeToString()
    with caplog.at_level(logging.DEBUG, "flashckpt.move.transports.grpc.send"):
        push.follow([ready, sealed], Nobody(), 1.0, 1.0, None)
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "agent.log").write_text(caplog.text)
    agent = Agent(tmp_path, os.getpid())
    assert 0 <= agent.push_seconds(rank=0, step=7) < 1
    with pytest.raises(BenchError, match="expected the push of step 8"):
        agent.push_seconds(rank=0, step=8)


def test_cpu_time_of_a_process_is_seen() -> None:
    agent = Agent(memory_dir=None, pid=os.getpid())
    before, began = agent.cpu_seconds(), time.process_time()
    while time.process_time() - began < 0.1:
        sum(range(1000))
    assert agent.cpu_seconds() - before == pytest.approx(0.1, abs=0.05)


def test_time_of_agents_is_not_called_other_processes() -> None:
    first_line, quietness = Path("/proc/stat").read_text().splitlines()[0], Quietness()
    while Path("/proc/stat").read_text().splitlines()[0] == first_line:
        pass  # until the kernel has counted again
    quietness.add_own(1e9)
    assert quietness.others_share() == 0.0


def test_where_no_agent_is_none_is_ended(tmp_path) -> None:
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "agent.lock").write_text("")
    assert end_agents(tmp_path) == 0.0
