"""Environments of contenders: what is missing is named, and is not tried again and again."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from bench import environments
from bench.contenders import CONTENDERS
from bench.environments import LOCKS, Ready, Unavailable, prepare, why_pip_failed

if TYPE_CHECKING:
    from pathlib import Path


def test_the_cause_is_found_in_what_pip_says() -> None:
    output = (
        "Collecting x\n error: subprocess-exited-with-error\n fatal: unable to access y\nERROR: Failed building wheel"
    )
    assert why_pip_failed(output) == "fatal: unable to access y"
    assert why_pip_failed("") == "pip said nothing"


def test_every_lock_pins_everything_and_is_somebodys() -> None:
    named = {about.environment for about in CONTENDERS.values()} - {None}
    assert {path.stem for path in LOCKS.iterdir()} == named
    for path in LOCKS.iterdir():
        lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
        assert lines
        assert all("==" in line for line in lines), path


@pytest.mark.slow
def test_an_environment_is_made_once_and_a_failure_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(environments.CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setattr(environments, "LOCKS", tmp_path)
    (tmp_path / "nothing.txt").write_text("# nothing\n")
    (tmp_path / "missing.txt").write_text("flashckpt-has-no-such-contender==1\n")
    made = prepare("nothing")
    assert isinstance(made, Ready)
    marker = made.python.parent.parent / "marker"
    marker.touch()
    assert prepare("nothing") == made
    assert marker.exists()
    failed = prepare("missing")
    assert isinstance(failed, Unavailable)
    assert "flashckpt-has-no-such-contender" in failed.reason
    kept = tmp_path / "cache" / "missing" / "marker"
    kept.touch()
    assert prepare("missing") == failed
    assert kept.exists()
