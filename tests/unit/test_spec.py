"""The protocol model and what runs it agree on its mutants. tests/integration/parts plays a small configuration."""

from __future__ import annotations

import re
from pathlib import Path

SPEC = Path(__file__).resolve().parents[2] / "spec"


def test_every_mutant_of_the_model_is_run():
    in_model = set(re.findall(r"(?:MUTANT|mutant)\(\"([a-z-]+)\"\)", (SPEC / "commit.pml").read_text()))
    run_by_name = set(re.findall(r"\"([a-z]+(?:-[a-z]+)+)\"", (SPEC / "run").read_text()))
    assert in_model == run_by_name
