"""Somebody else fills the tmpfs, its bytes or its inodes: loads go on, and trainers hear of it soon."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from flashckpt.agent.process import Options
from flashckpt.agent.start import ensure_agent, stop_agent
from flashckpt.errors import AgentError
from flashckpt.store.slots import SlotStore
from flashckpt.testing import Cluster
from tests.fault.agents import JOB, MIB, World, wait_until

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(bool(Cluster.available("netns")), reason="needs root: a tmpfs for each node"),
]


def mount_of(world, index):
    return world.nodes[index].memory_dir.removesuffix("/memory")


def fill(world, index, what):
    """To the last one, in one step: the limit becomes what is used."""
    found = os.statvfs(mount_of(world, index))
    used_bytes, used_inodes = (found.f_blocks - found.f_bfree) * found.f_frsize, found.f_files - found.f_ffree
    limit = f"size={used_bytes}" if what == "bytes" else f"nr_inodes={used_inodes}"
    remount(world, index, limit)


def remount(world, index, limit):
    subprocess.run(["mount", "-o", f"remount,{limit}", mount_of(world, index)], check=True)


def end(launch, world):
    """Trainers and agents, as a crash of the whole job would."""
    launch.kill()
    for index in range(len(world.nodes)):
        world.kill_agent(index)


def relaunch(world, launch, generation):
    """Trainers and agents crash, and load `generation` again."""
    launch.kill()
    for index in range(len(world.nodes)):
        world.kill_agent(index)
    launch = world.launch()
    for rank in launch.ranks:
        levels = [one["level"] for one in rank.ask("inventory")["holdings"]]
        assert levels == ["replicated"] * 2
        rank.ask("line", step=1, base=generation)
    return launch


@pytest.mark.parametrize("what", ["bytes", "inodes"])
def test_a_relaunch_loads_from_a_full_tmpfs(what):
    """Again and again: what the agents keep for their successors has room made ahead."""
    with World(2, memory_bytes=64 * MIB) as world:
        launch = world.launch()
        launch.save(1)
        generation = launch.generation(1)
        for index in (0, 1):
            fill(world, index, what)
        for _ in range(4):
            launch = relaunch(world, launch, generation)
            for index in (0, 1):
                status = world.status(index)
                assert status["read_only"] == ""
                assert status["launch"]["epoch"] == launch.session.launch.epoch
        launch.kill()
        for index in (0, 1):
            world.kill_agent(index)
            world.start_agent(index)
            assert world.status(index)["launch"]["epoch"] == launch.session.launch.epoch, "it was kept"
            remount(world, index, "size=64m,nr_inodes=1000")
        again = world.launch()
        again.save(2)
        world.check()


@pytest.mark.parametrize("what", ["bytes", "inodes"])
def test_without_a_reserve_an_agent_serves_and_takes_no_saves(what):
    with World(2, memory_bytes=64 * MIB) as world:
        launch = world.launch()
        launch.save(1)
        generation = launch.generation(1)
        launch.kill()
        for index in (0, 1):
            world.kill_agent(index)
            for path in Path(world.nodes[index].memory_dir).glob("*/reserve"):
                shutil.rmtree(path)
            fill(world, index, what)
        launch = world.launch()
        for rank in launch.ranks:
            assert [one["level"] for one in rank.ask("inventory")["holdings"]] == ["replicated"] * 2
            rank.ask("line", step=1, base=generation)
        pids = [world.agent_pid(index) for index in (0, 1)]
        for failed in launch.save_nowait(2):
            assert (failed["outcome"], failed["code"]) == ("failed", "FC-MEM-001")
            assert "takes no saves until there is room" in failed["reason"]
            assert "free of" in failed["reason"], "the figures"
            assert failed["seconds"] < 3.0
        for index in (0, 1):
            assert "could not be kept" in world.status(index)["read_only"]
            remount(world, index, "size=64m,nr_inodes=1000")
            wait_until(lambda index=index: world.status(index)["read_only"] == "", "the agent to take saves")
        assert pids == [world.agent_pid(index) for index in (0, 1)]
        launch.save(3)
        world.check()


@pytest.mark.parametrize("where", ["here", "at the receiver"])
def test_saves_fail_soon_and_with_the_figures_while_it_is_full(where):
    """Neither the agents nor what is committed go, and saves go on when there is room."""
    with World(2, size_bytes=2 * MIB, memory_bytes=64 * MIB) as world:
        launch = world.launch(save_timeout=30.0)
        launch.save(1)
        if where != "here":
            launch.ranks[1].ask("prepare", size_bytes=world.size_bytes)
        pids = [world.agent_pid(index) for index in (0, 1)]
        fill(world, 1, "bytes")
        seconds = []
        for step in (2, 3, 4):
            results = launch.save_nowait(step)
            seconds.append(max(one["seconds"] for one in results))
            reasons = [one["reason"] for one in results if one["outcome"] == "failed"]
        assert any("free of" in reason for reason in reasons), reasons
        assert max(seconds) < 12.0, "not save_timeout"
        assert seconds[-1] < 4.0, "once it is known, at once"
        remount(world, 1, "size=64m")
        wait_until(lambda: {one["outcome"] for one in launch.save_nowait(step + 1)} == {"ok"}, "saves to go on")
        assert pids == [world.agent_pid(index) for index in (0, 1)]
        world.check()


def test_why_an_agent_does_not_run_is_in_the_trainers_error(tmp_path):
    """Also where its log has no room for it."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m,mode=0700", "tmpfs", tmp_path], check=True)
    try:
        SlotStore.open(tmp_path / "memory", JOB).close()
        with contextlib.suppress(OSError), (tmp_path / "junk").open("wb") as file:
            file.write(bytes(2 * MIB))
        with pytest.raises(AgentError, match=r"exit code 1 .*FC-MEM-001.*agent\.lock: expected room for a note"):
            ensure_agent(Options(job=JOB, memory_dir=f"{tmp_path}/memory", node_id="a"))
        (tmp_path / "junk").unlink()
        assert ensure_agent(Options(job=JOB, memory_dir=f"{tmp_path}/memory", node_id="a")).started
    finally:
        stop_agent(f"{tmp_path}/memory", JOB, 5.0, kill=True)
        subprocess.run(["umount", "-l", tmp_path], check=True)
