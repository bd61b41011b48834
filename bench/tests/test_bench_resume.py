"""A run that fails, is interrupted or killed loses one section at most, and goes on from there."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner

from bench import __main__ as program
from bench.run import Run, Section

if TYPE_CHECKING:
    from pathlib import Path

    from click.testing import Result


class Sections:
    """Sections that write down one figure each, and can be made to fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.measured: list[str] = []
        self.fails: dict[str, BaseException] = {}
        monkeypatch.setattr(program, "plan_sections", lambda _: [self._section(name) for name in ("a", "b", "c")])

    def _section(self, name: str) -> Section:
        def measure(run: Run) -> None:
            run.tell(name)
            (run.directory / "left").write_text("behind")
            run.samples.state_bytes[name] = 1
            run.samples.add(name, "flashckpt", "save", len(self.measured) + 1.0)
            if name in self.fails:
                raise self.fails[name]
            self.measured.append(name)
            run.clear()

        return Section(name, 1, measure)


@pytest.fixture
def sections(monkeypatch: pytest.MonkeyPatch) -> Sections:
    return Sections(monkeypatch)


def run(file: Path, *arguments: str) -> Result:
    return CliRunner().invoke(program.main, ["--size", "1M", "--wait", "0", "--json", str(file), *arguments])


def told(file: Path) -> dict[str, str]:
    return {one["section"]: one["problem"] for one in json.loads(file.read_text())["sections"]}


def test_a_section_that_fails_is_named_and_the_others_are_measured(sections: Sections, tmp_path: Path) -> None:
    sections.fails["b"] = ValueError("first line\nwhat went wrong")
    file = tmp_path / "a.json"
    result = run(file)
    assert result.exit_code == 2
    assert told(file) == {"a": "", "b": "what went wrong", "c": ""}
    assert "not complete b: what went wrong" in result.stdout

    sections.fails.clear()
    again = run(file, "--resume")
    assert again.exit_code == 0, again.output
    assert sections.measured == ["a", "c", "b"]
    assert told(file) == {"a": "", "b": "", "c": ""}
    # Of the section that was measured twice, the later figures count.
    values = {one["section"]: one["values"] for one in json.loads(file.read_text())["samples"]}
    assert values == {"a": [1.0], "b": [3.0], "c": [2.0]}
    assert run(file, "--resume").exit_code == 0
    assert sections.measured == ["a", "c", "b"]


def test_sections_are_chosen_by_names_with_commas_or_one_by_one(sections: Sections, tmp_path: Path) -> None:
    assert run(tmp_path / "a.json", "--only", "c,a").exit_code == 0
    assert run(tmp_path / "b.json", "--only", "b", "--only", "c").exit_code == 0
    assert sections.measured == ["a", "c", "b", "c"]


@pytest.mark.parametrize("end", [KeyboardInterrupt(), SystemExit(143)])
def test_what_was_measured_before_an_end_is_in_the_file(sections: Sections, tmp_path: Path, end: BaseException) -> None:
    sections.fails["b"] = end
    file = tmp_path / "a.json"
    run(file)
    assert told(file)["a"] == ""
    assert "c" not in told(file)
    sections.fails.clear()
    assert run(file, "--resume").exit_code == 0
    assert sections.measured == ["a", "b", "c"]


def test_results_of_other_options_are_not_mixed(sections: Sections, tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    run(file)
    result = run(file, "--resume", "--rounds", "3")
    assert result.exit_code == 2
    assert "expected the options of" in result.stderr
    assert CliRunner().invoke(program.main, ["--resume"]).exit_code == 2
