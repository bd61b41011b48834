"""What every kind of storage promises to the persistent tier: a path, fsspec's memory, and a real S3 server."""

from __future__ import annotations

import json
import os
import uuid

import pytest

from flashckpt.errors import ConfigError
from flashckpt.persist.names import LATEST, META_JSON, METADATA
from flashckpt.persist.storage import open_storage

pytest.importorskip("fsspec")


@pytest.fixture(params=["local", "memory", "s3"])
def url(request, tmp_path, monkeypatch):
    if request.param == "local":
        return str(tmp_path / "deep" / "out")
    if request.param == "memory":
        return f"memory://{uuid.uuid4().hex}/out"
    endpoint = request.getfixturevalue("s3_endpoint")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    import fsspec

    bucket = f"bucket-{uuid.uuid4().hex[:12]}"
    fsspec.filesystem("s3", skip_instance_cache=True).mkdir(bucket)
    return f"s3://{bucket}/out"


def write(storage, stage, name, content):
    with storage.open_write(f"{stage.place}/{name}") as file:
        for start in range(0, len(content), 1000):
            assert file.write(memoryview(content)[start : start + 1000]) == len(content[start : start + 1000])


def test_nothing_is_none(url):
    storage = open_storage(url)
    assert storage.list() in (None, {})
    assert storage.list("step-1") is None or storage.list("step-1") == {}
    assert storage.read("step-1/a") is None
    assert storage.latest() is None
    storage.remove("step-1")


def test_a_step_appears_with_its_commit(url):
    storage = open_storage(url)
    stage = storage.stage(7, "00000000000000aa")
    content = bytes(range(256)) * 20
    name = f"data{stage.suffix}"
    write(storage, stage, name, content)
    storage.put(f"{stage.place}/{META_JSON}", b"{}")
    assert METADATA not in (storage.list("step-7") or {})
    storage.commit(stage, 7, b"marker")
    found = storage.list("step-7")
    assert {name, METADATA, META_JSON} == set(found)
    assert found[name].size_bytes == len(content)
    assert [one for one in storage.list() if one.startswith("step-")] == ["step-7"]
    assert storage.list()["step-7"].is_directory
    assert storage.read(f"step-7/{name}") == content
    assert storage.read(f"step-7/{name}", 100, 50) == content[100:150]
    assert storage.read(f"step-7/{name}", len(content) - 3, 50) == content[-3:]
    assert storage.read(f"step-7/{METADATA}") == b"marker"


def test_latest_names_what_it_was_pointed_to(url):
    storage = open_storage(url)
    for step in (1, 2):
        stage = storage.stage(step, f"{step:016x}")
        write(storage, stage, f"data{stage.suffix}", b"x" * step)
        storage.commit(stage, step, b"m")
        storage.point_latest(f"step-{step}")
        storage.point_latest(f"step-{step}")
        assert storage.latest() == f"step-{step}"
    # Another opener, as a reader on another machine would.
    assert open_storage(url).latest() == "step-2"


def test_a_second_attempt_replaces_the_first_as_a_whole(url):
    storage = open_storage(url)
    for attempt, content in (("00000000000000aa", b"old"), ("00000000000000bb", b"new!")):
        stage = storage.stage(3, attempt)
        write(storage, stage, f"data{stage.suffix}", content)
        if attempt.endswith("bb"):
            # Until the commit, the first one is whole.
            names = [name for name in storage.list("step-3") if name.startswith("data") and "bb" not in name]
            assert storage.read(f"step-3/{names[0]}") == b"old"
            assert storage.read(f"step-3/{METADATA}") == b"00000000000000aa"
        storage.commit(stage, 3, attempt.encode())
    left = [name for name in storage.list("step-3") if name.startswith("data")]
    assert len(left) == 1
    assert storage.read(f"step-3/{left[0]}") == b"new!"
    assert storage.read(f"step-3/{METADATA}") == b"00000000000000bb"


def test_what_is_removed_is_gone(url):
    storage = open_storage(url)
    stage = storage.stage(3, "00000000000000aa")
    write(storage, stage, f"data{stage.suffix}", b"x" * 5000)
    storage.commit(stage, 3, b"m")
    storage.put("note", b"1")
    storage.put("note", b"2")
    assert storage.read("note") == b"2"
    storage.remove("note")
    storage.remove("step-3")
    storage.remove("step-3")
    assert not storage.list("step-3")
    assert storage.read("note") is None
    assert not [name for name in storage.list() or {} if "step-3" in name]


def test_a_writer_that_fails_leaves_no_file(url):
    storage = open_storage(url)
    stage = storage.stage(3, "00000000000000aa")

    def fail():
        with storage.open_write(f"{stage.place}/data{stage.suffix}") as file:
            file.write(b"half")
            raise KeyError("the disk")

    with pytest.raises(KeyError):
        fail()
    assert f"data{stage.suffix}" not in (storage.list(stage.place) or {})


def test_paths_that_no_storage_has():
    with pytest.raises(ConfigError, match="absolute path"):
        open_storage("relative/path")
    with pytest.raises(ConfigError, match="fsspec can open"):
        open_storage("nosuchprotocol://x")


def test_a_local_latest_is_a_relative_link(tmp_path):
    storage = open_storage(str(tmp_path))
    (tmp_path / "step-1").mkdir()
    storage.point_latest("step-1")
    assert os.readlink(tmp_path / LATEST) == "step-1"
    assert json.dumps(sorted(os.listdir(tmp_path))) == '["latest", "step-1"]'
