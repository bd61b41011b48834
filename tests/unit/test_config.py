from __future__ import annotations

import dataclasses
import inspect
import os
import pickle
import re

import pytest

from flashckpt.config import (
    CheckpointConfig,
    InitialLoad,
    Memory,
    Network,
    Persist,
    Replication,
    Saving,
    groups,
    resolve,
)
from flashckpt.config.table import GROUPS
from flashckpt.errors import ConfigError
from flashckpt.types import TRANSPORTS


def test_the_contract_example_is_accepted():
    config = CheckpointConfig(
        job="run1",
        memory_dir="/dev/shm/flashckpt",
        persist_dir="/data/run1",
        interval=10,
        persist_interval=500,
        replicas=1,
    )
    assert resolve(config, {}).job == "run1"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("interval", 0),
        ("interval", True),
        ("interval", 1.5),
        ("replicas", -1),
        ("slots_per_rank", 1),
        ("keep_memory", 0),
        ("keep_memory", True),
        ("keep_memory", 65),
        ("slots_per_rank", 2.0),
        ("interval", "10"),
        ("keep_latest_k", 1),
        ("keep_latest_k", -1),
        ("keep_every", 0),
        ("keep_steps", (-1,)),
        ("keep_steps", ("5",)),
        ("persist_dir", "relative/path"),
        ("persist_dir", ""),
        ("persist_interval", 10),  # without a directory
        ("persist_interval_minutes", 10),
        ("persist_max_mbps", 0),
        ("persist_max_mbps", float("nan")),
        ("persist_concurrency", 0),
        ("persist_concurrency", 257),
        ("persist_timeout", 0),
        ("persist_drain_timeout", -1),
        ("start_timeout", -1),
        ("peer_timeout", 0),
        ("agent", "maybe"),
        ("agent_linger", -1),
        ("replicate_max_mbps", 0),
        ("port", 65536),
        ("placement", "star"),
        ("async_mode", "sometimes"),
        ("fixed_steps", (-1,)),
        ("fixed_steps", 5),
        ("exclude_from_loading", "optimizer"),
        ("exclude_from_loading", ("model",)),
        ("exclude_from_loading", ("optimizer",)),
        ("initial_load_path", "relative"),
        ("overlap", "yes"),
        ("load_only", 1),
        ("threads", 0),
        ("memory_budget_bytes", -5),
        ("save_timeout", 0),
        ("on_busy", "explode"),
        ("on_save_error", ""),
        ("job", ""),
        ("job", "x" * 257),
    ],
)
def test_bad_values_are_refused_by_name(field, value):
    with pytest.raises(ConfigError, match=field):
        CheckpointConfig(**{field: value})


def test_what_is_kept_needs_its_slots_beside_the_one_that_is_written():
    assert CheckpointConfig().slots == 2
    assert CheckpointConfig(keep_memory=3).slots == 4
    assert CheckpointConfig(keep_memory=3, slots_per_rank=6).slots == 6
    with pytest.raises(ConfigError, match="slots_per_rank: expected at least 4, found 3"):
        CheckpointConfig(keep_memory=3, slots_per_rank=3)


def test_two_persist_intervals_are_refused():
    with pytest.raises(ConfigError, match="found both"):
        CheckpointConfig(persist_interval=5, persist_interval_minutes=5)


def test_unknown_settings_are_refused():
    with pytest.raises(ConfigError, match="'intervall'") as caught:
        CheckpointConfig.from_dict({"intervall": 5})
    assert "interval" in caught.value.hint


def test_argument_beats_environment_beats_default():
    environ = {"FLASHCKPT_JOB": "env", "FLASHCKPT_MEMORY_DIR": "/env", "FLASHCKPT_NODE_ID": "n7"}
    settings = resolve(CheckpointConfig(job="arg"), environ)
    assert (settings.job, settings.memory_dir, settings.node_id) == ("arg", "/env", "n7")
    assert resolve(CheckpointConfig(job="arg", memory_dir="/arg"), environ).memory_dir == "/arg"
    assert resolve(CheckpointConfig(job="arg"), {}).memory_dir == f"/dev/shm/flashckpt-{os.geteuid()}"


@pytest.mark.parametrize(
    ("environ", "job"),
    [
        ({"SLURM_JOB_ID": "42"}, "slurm-42"),
        ({"TORCHELASTIC_RUN_ID": "myrun"}, "torchelastic-myrun"),
        ({"SLURM_JOB_ID": "42", "FLASHCKPT_JOB": "named"}, "named"),
    ],
)
def test_job_from_the_launcher(environ, job):
    assert resolve(CheckpointConfig(), environ).job == job


@pytest.mark.parametrize("run_id", ["none", "", "5f3e8d1c-2d2b-4b59-9c3e-0f4b5a6c7d8e"])
def test_a_run_id_that_does_not_stick_is_no_job_name(run_id):
    with pytest.raises(ConfigError, match="no job name"):
        resolve(CheckpointConfig(), {"TORCHELASTIC_RUN_ID": run_id})


def test_persist_dir_names_the_job_at_last():
    a, b = (resolve(CheckpointConfig(persist_dir=path), {}).job for path in ("/data/a", "/data/b"))
    assert a != b
    assert a.startswith("dir-")


def test_disable_wins_over_everything():
    assert resolve(CheckpointConfig(job="x"), {"FLASHCKPT_DISABLE": "1"}).disabled
    assert not resolve(CheckpointConfig(job="x"), {"FLASHCKPT_DISABLE": "0"}).disabled


FLAT = {field.name: field for field in dataclasses.fields(CheckpointConfig)}


@pytest.mark.parametrize("argument", GROUPS)
def test_a_group_has_the_types_and_defaults_of_the_flat_settings(argument):
    row = GROUPS[argument]
    fields = {field.name: field for field in dataclasses.fields(getattr(groups, row.cls))}
    assert fields.keys() == row.names.keys()
    for name, flat in row.names.items():
        assert (fields[name].type, fields[name].default) == (FLAT[flat].type, FLAT[flat].default)


def test_no_setting_is_in_two_groups():
    flat = [name for row in GROUPS.values() for name in row.names.values()]
    assert len(set(flat)) == len(flat)
    assert set(flat) < FLAT.keys()


def test_groups_are_the_flat_settings():
    grouped = CheckpointConfig(
        job="run1",
        memory=Memory(dir="/m", keep=2),
        replication=Replication(replicas=2, placement="group", max_mbps=100),
        network=Network(transport="grpc", port=7000),
        persist=Persist(dir="/data/run1", interval=500, keep_latest_k=3),
        saving=Saving(on_error="raise", timeout=5.0),
        initial_load=InitialLoad(path="/start"),
    )
    flat = CheckpointConfig(
        job="run1",
        memory_dir="/m",
        keep_memory=2,
        replicas=2,
        placement="group",
        replicate_max_mbps=100,
        transport="grpc",
        port=7000,
        persist_dir="/data/run1",
        persist_interval=500,
        keep_latest_k=3,
        on_save_error="raise",
        save_timeout=5.0,
        initial_load_path="/start",
    )
    assert grouped == flat
    assert repr(grouped) == repr(flat)
    assert pickle.loads(pickle.dumps(grouped)) == flat
    assert dataclasses.replace(grouped, job="run2") == dataclasses.replace(flat, job="run2")


@pytest.mark.parametrize("value", [5, None])
def test_a_setting_in_both_ways_is_refused(value):
    """Also with the default, in either way: one of the two would not be what the caller wrote."""
    with pytest.raises(ConfigError, match=r"persist_interval and persist=Persist\(interval=…\): expected one of them"):
        CheckpointConfig(persist_dir="/data", persist_interval=value, persist=Persist(interval=7))
    with pytest.raises(ConfigError, match=r"persist_interval and persist=Persist\(interval=…\): expected one of them"):
        CheckpointConfig(persist_dir="/data", persist_interval=7, persist=Persist(interval=value))
    assert CheckpointConfig(persist_dir="/data", persist=Persist(interval=7)).persist_interval == 7


def test_a_group_in_the_wrong_place_is_refused():
    with pytest.raises(ConfigError, match=r"persist: expected Persist\(…\) or None, found Network"):
        CheckpointConfig(persist=Network())
    with pytest.raises(TypeError, match="intervall"):
        Persist(intervall=5)


def test_bad_values_in_a_group_are_refused_by_their_flat_name():
    with pytest.raises(ConfigError, match="persist_concurrency: expected 1 to 256, found 0"):
        CheckpointConfig(persist=Persist(dir="/data", concurrency=0))


def test_groups_in_a_dict():
    found = CheckpointConfig.from_dict({"job": "run1", "persist": {"dir": "/data", "interval": 5}})
    assert found == CheckpointConfig(job="run1", persist_dir="/data", persist_interval=5)
    with pytest.raises(ConfigError, match=r"'persist\.intervall'"):
        CheckpointConfig.from_dict({"persist": {"intervall": 5}})


def test_signatures_name_every_setting():
    """For help() and editors."""
    assert set(inspect.signature(CheckpointConfig).parameters) == FLAT.keys() | GROUPS.keys()
    assert list(inspect.signature(Persist).parameters) == list(GROUPS["persist"].names)


def test_the_transports_of_a_job_are_those_of_its_agents():
    assert [CheckpointConfig(transport=name).transport for name in TRANSPORTS] == list(TRANSPORTS)
    with pytest.raises(ConfigError, match=re.escape(f"transport: expected one of {TRANSPORTS}, found 'smoke'")):
        CheckpointConfig(transport="smoke")
