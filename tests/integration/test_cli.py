"""The command line as its users run it: a process of its own, on shards that a Checkpointer really saved."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import flashckpt

ROOT = Path(__file__).resolve().parents[2]
ESCAPE = "\x1b[31mred"


@pytest.fixture
def memory_dir():
    directory = Path("/dev/shm") / f"flashckpt-test-cli-{os.getpid()}-{secrets.token_hex(4)}"
    yield directory
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture
def saved(memory_dir):
    """Steps 10 and 20 of job run1."""
    config = flashckpt.CheckpointConfig(job="run1", memory_dir=str(memory_dir))
    state = {
        "model": {"weight": torch.arange(200_000, dtype=torch.float32).view(400, 500), "bias": torch.ones(3).half()},
        "noise": flashckpt.PerRank({"generator": torch.arange(16, dtype=torch.uint8)}),
        ESCAPE: f"value {ESCAPE}",
        "epoch": 3,
    }
    with flashckpt.Checkpointer(config) as checkpointer:
        for step in (10, 20):
            assert checkpointer.save(step, state, extra={"tokens": 1234}).outcome == "ok"
    return memory_dir


def run(*arguments, memory_dir=None, environment=None, code=0):
    command = [sys.executable, "-m", "flashckpt.cli", *map(str, arguments)]
    if memory_dir is not None:
        command += ["--memory-dir", str(memory_dir)]
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("FLASHCKPT_", "SLURM_"))}
    result = subprocess.run(
        command, cwd=ROOT, env={**inherited, **(environment or {})}, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == code, f"{result.stdout}\n{result.stderr}"
    assert "Traceback" not in result.stderr
    return result


def listing(directory):
    """Every path below with what a write would change: a look must leave it as it is."""
    return sorted(
        (str(path.relative_to(directory)), path.stat().st_ino, path.stat().st_size, path.stat().st_ctime_ns)
        for path in directory.rglob("*")
        if path.is_file()
    )


def shard_path(memory_dir, step):
    (path,) = (memory_dir / "run1" / "sealed").glob(f"e*-{step}-*.r0-1.*")
    return path


def test_ls_lists_newest_first(saved):
    result = run("ls", memory_dir=saved)
    header, newest, older = result.stdout.splitlines()
    assert header.split() == ["job", "step", "ranks", "state", "level", "size", "age", "reason"]
    assert newest.split()[:4] == ["run1", "20", "1/1", "complete"]
    assert older.split()[:4] == ["run1", "10", "1/1", "complete"]
    assert "run1: " in result.stderr


def test_ls_json(saved):
    found = json.loads(run("ls", "--json", "--job", "run1", memory_dir=saved).stdout)
    assert found["schema"] == "flashckpt.ls/v1"
    assert found["memory_dir"] == str(saved)
    (job,) = found["jobs"]
    assert job["job"] == "run1"
    # The first save of a launch says that it began with nothing.
    root = job["line"]["root"]
    assert job["line"] == {"history": root, "root": root, "from_step": None, "from_launch": None}
    newest, older = job["generations"]
    assert (newest["step"], newest["state"], newest["ranks"], newest["world"]) == (20, "complete", [0], 1)
    assert older["step"] == 10
    assert newest["size_bytes"] == shard_path(saved, 20).stat().st_size
    assert job["slots"]["sealed"] == {"files": 2, "size_bytes": newest["size_bytes"] + older["size_bytes"]}
    assert 0 <= newest["age_seconds"] < 600


def test_environment_names_directory_and_job(saved):
    environment = {"FLASHCKPT_MEMORY_DIR": str(saved), "FLASHCKPT_JOB": "run1"}
    assert "run1" in run("ls", environment=environment).stdout
    run("ls", environment={**environment, "FLASHCKPT_JOB": "other"}, code=3)
    # The argument beats the environment.
    run("ls", "--job", "run1", environment={**environment, "FLASHCKPT_JOB": "other"})


def test_an_incomplete_generation_is_dead_once_its_writers_are_gone(saved):
    sealed = shard_path(saved, 20)
    sealed.rename(sealed.with_name(sealed.name.replace(".r0-1.", ".r0-2.")))
    # This process wrote it and lives: the other rank may still come.
    newest = json.loads(run("ls", "--json", memory_dir=saved).stdout)["jobs"][0]["generations"][0]
    assert (newest["state"], newest["reason"]) == ("pending", "no shard of ranks [1]")
    for path in (saved / "run1" / "sealed").iterdir():
        path.rename(path.with_name(path.name.replace(f".w{os.getpid()}-", ".w1-")))
    newest, older = json.loads(run("ls", "--json", memory_dir=saved).stdout)["jobs"][0]["generations"]
    assert (newest["step"], newest["state"], newest["reason"]) == (20, "dead", "no shard of ranks [1]")
    assert (older["step"], older["state"]) == (10, "complete")


def test_inspect_json(saved):
    found = json.loads(run("inspect", 10, "--values", "--json", memory_dir=saved).stdout)
    assert found["schema"] == "flashckpt.inspect/v1"
    assert (found["job"], found["step"], found["state"], found["problems"]) == ("run1", 10, "complete", [])
    tensors = {one["key"]: one for one in found["tensors"]}
    assert set(tensors) == {"model.weight", "model.bias", "noise.generator"}
    weight = tensors["model.weight"]
    assert (weight["dtype"], weight["global_shape"], weight["size_bytes"]) == ("float32", [400, 500], 800_000)
    assert weight["regions"] == [{"rank": 0, "offsets": [0, 0], "sizes": [400, 500], "size_bytes": 800_000}]
    assert tensors["model.bias"]["dtype"] == "float16"
    assert (tensors["noise.generator"]["rank"], weight["rank"]) == (0, None)
    values = {one["key"]: one["value"] for one in found["values"]}
    assert values == {ESCAPE: repr(f"value {ESCAPE}"), "epoch": "3", "(extra)": "{'tokens': 1234}"}


def test_inspect_selects_tensors_and_defaults_to_the_newest(saved):
    found = json.loads(run("inspect", "--tensors", "*.bias", "--json", memory_dir=saved).stdout)
    assert found["step"] == 20
    assert [one["key"] for one in found["tensors"]] == ["model.bias"]
    assert found["values"] is None


def test_names_are_printed_without_escape_codes(saved):
    result = run("inspect", "--values", memory_dir=saved)
    assert "\x1b" not in result.stdout + result.stderr
    assert r"\x1b[31mred" in result.stdout
    assert "\x1b" not in run("inspect", "--values", "--json", memory_dir=saved).stdout


def test_no_colours_where_they_are_not_wanted(saved):
    environment = {"FORCE_COLOR": "1", "TERM": "xterm-256color"}
    coloured = run("ls", memory_dir=saved, environment=environment).stdout
    plain = run("ls", memory_dir=saved, environment={**environment, "NO_COLOR": "1"}).stdout
    # Rich keeps bold with NO_COLOR; what has to go is colour.
    assert "\x1b[3" not in plain
    assert "\x1b[" in coloured


def test_verify_good(saved):
    result = run("verify", memory_dir=saved)
    assert result.stdout.count(" ok") == 2
    assert "all good" in result.stderr
    found = json.loads(run("verify", 10, "--json", memory_dir=saved).stdout)
    assert (found["schema"], found["ok"]) == ("flashckpt.verify/v1", True)
    assert [(one["step"], one["rank"], one["ok"]) for one in found["verdicts"]] == [(10, 0, True)]


def test_verify_names_the_bad_shard(saved):
    path = shard_path(saved, 20)
    with path.open("r+b") as file:
        file.seek(4096 + 300_000)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))
    found = json.loads(run("verify", "--json", memory_dir=saved, code=5).stdout)
    assert found["ok"] is False
    verdicts = {one["step"]: one for one in found["verdicts"]}
    assert verdicts[10]["ok"] is True
    assert (verdicts[20]["ok"], verdicts[20]["code"]) == (False, "FC-FMT-001")
    assert "1 of 4 chunks" in verdicts[20]["reason"]
    assert "model.weight" in verdicts[20]["reason"]
    run("verify", 10, memory_dir=saved)
    assert "FC-FMT-001" in run("verify", 20, memory_dir=saved, code=5).stdout
    # Only a load sets a bad shard aside.
    assert path.exists()


@pytest.mark.parametrize("damage", ["truncated", "zeroed preamble", "header"])
def test_verify_refuses_a_torn_shard(saved, damage):
    path = shard_path(saved, 20)
    with path.open("r+b") as file:
        if damage == "truncated":
            file.truncate(path.stat().st_size - 4096)
        else:
            file.seek(0 if damage == "zeroed preamble" else 70)
            file.write(bytes(64))
    assert "FC-FMT-001" in run("verify", memory_dir=saved, code=5).stdout
    assert "FC-FMT-001" in run("inspect", 20, memory_dir=saved, code=5).stderr


def test_verify_refuses_a_good_shard_under_another_name(saved):
    sealed = shard_path(saved, 20)
    sealed.rename(sealed.with_name(sealed.name.replace(".r0-1.", ".r0-2.")))
    # The header says rank 0 of 1.
    found = json.loads(run("verify", 20, "--json", memory_dir=saved, code=5).stdout)
    assert [one["code"] for one in found["verdicts"]] == ["FC-FMT-002"]


def test_nothing_found(memory_dir):
    for command in ("ls", "inspect", "verify"):
        result = run(command, memory_dir=memory_dir, code=3)
        assert result.stdout == ""
        assert result.stderr.startswith("error FC-LOAD-001: ")
        assert "hint: " in result.stderr
    assert not memory_dir.exists()


def test_no_such_step(saved):
    assert "[10, 20]" in run("inspect", 11, memory_dir=saved, code=3).stderr
    run("verify", 11, memory_dir=saved, code=3)


def test_several_jobs_need_a_name_to_inspect(saved):
    config = flashckpt.CheckpointConfig(job="run/2 " + "x" * 240, memory_dir=str(saved))
    with flashckpt.Checkpointer(config) as checkpointer:
        checkpointer.save(7, {"epoch": 1})
    jobs = {one["job"] for one in json.loads(run("ls", "--json", memory_dir=saved).stdout)["jobs"]}
    assert jobs == {"run1", config.job}
    assert "--job" in run("inspect", memory_dir=saved, code=2).stderr
    run("inspect", "--job", config.job, memory_dir=saved)


def test_an_unsafe_directory_is_refused(saved):
    saved.chmod(0o755)
    result = run("ls", "--job", "run1", memory_dir=saved, code=1)
    assert result.stderr.startswith("error FC-DIR-001: ")


def test_looking_changes_nothing(saved):
    before = listing(saved)
    for command in (["ls"], ["inspect", "--values"], ["verify"]):
        run(*command, memory_dir=saved)
    assert listing(saved) == before


def test_wrong_usage():
    assert "No such command" in run("frobnicate", code=2).stderr
    run("inspect", "ten", code=2)
    assert "lose_at" in run("demo", "--lose-at", 10, code=2).stderr


@pytest.mark.parametrize("command", [["--help"], ["ls"], ["inspect", "--values"], ["verify"], ["demo", "--help"]])
def test_torch_and_numpy_are_not_imported(saved, command):
    code = (
        "import sys, flashckpt.cli\n"
        "sys.argv[0] = 'flashckpt'\n"
        "try:\n    flashckpt.cli.main()\n"
        "except SystemExit as exit:\n    assert not exit.code, exit.code\n"
        "print([name for name in ('torch', 'numpy', 'grpc') if name in sys.modules])\n"
        "print('rich' in sys.modules)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, *command],
        cwd=ROOT,
        env={**os.environ, "FLASHCKPT_MEMORY_DIR": str(saved)},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    *_, heavy, rich = result.stdout.splitlines()
    assert heavy == "[]"
    assert rich == str(command[0] in ("ls", "inspect", "verify"))
