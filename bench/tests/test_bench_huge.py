"""A mount with huge pages that is gone afterwards, or a reason why there is none."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest

from bench import huge, scratch
from bench.errors import BenchError
from bench.huge import huge_pages
from bench.machine import Quietness
from bench.run import Run
from bench.samples import Samples
from bench.sections import on_huge_pages
from bench.spec import StateSpec

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts")


@needs_root
def test_it_is_there_while_it_is_needed(tmp_path: Path) -> None:
    point = tmp_path / "huge"
    with contextlib.suppress(ZeroDivisionError), huge_pages(point) as path:
        assert os.path.ismount(path)
        (line,) = [line for line in Path("/proc/mounts").read_text().splitlines() if f" {path} " in line]
        assert "huge=always" in line
        (path / "a").write_bytes(b"x")
        raise ZeroDivisionError  # of the section
    assert not point.exists()


@needs_root
def test_the_next_run_unmounts_what_a_killed_one_left(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(scratch, "TMPFS", tmp_path)
    left = tmp_path / "flashckpt-bench.1.1"  # a process 1 that is long gone
    (left / "huge").mkdir(parents=True)
    huge._run("mount", "-t", "tmpfs", "flashckpt-bench", str(left / "huge"))
    try:
        (left / "huge" / "a").write_bytes(b"x")
        with scratch.scratch_directory():
            assert not left.exists()
    finally:
        if (left / "huge").exists():
            huge.unmount(left / "huge")


def test_without_root_the_section_is_left_out_with_the_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(*command: str) -> None:
        raise BenchError("mount: must be superuser")

    monkeypatch.setattr(huge, "_run", refuse)
    run = Run(tmp_path, Samples(), Quietness(), lambda _: None)
    on_huge_pages(run, "huge pages", StateSpec(1, 4096), 1)
    (reason,) = set(run.samples.left_out.values())
    assert "takes root" in reason
    assert "must be superuser" in reason
    assert list(tmp_path.iterdir()) == []
