"""A pytest plugin (`-p tests.mutants.plugin`) that does what the environment says: FLASHCKPT_MUTANTS_LINES names a file
to which it appends, for each test, the lines of flashckpt that the test executed in this process, as JSON;
FLASHCKPT_MUTANTS_FAULT names a file with a module and the source to import it from. No file of the tree is changed."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from importlib.machinery import PathFinder, SourceFileLoader
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


class Plant:
    """Finds one module, and only that one, with another source than its file has."""

    def __init__(self, module, source):
        self._module, self._source, self._is_used = module, source, False

    def find_spec(self, name, path, target=None):
        spec = PathFinder.find_spec(name, path, target) if name == self._module else None
        if spec is not None:
            self._is_used = True
            code = compile(self._source, spec.origin, "exec", dont_inherit=True)
            spec.loader = SourceFileLoader(name, spec.origin)
            spec.loader.get_code = lambda name: code
        return spec

    def pytest_sessionfinish(self, session, exitstatus):
        if exitstatus == 0 and not self._is_used:
            session.exitstatus = 42  # it was imported before, or by no test


class Trace:
    def __init__(self):
        self._seen = {}  # module's file → lines
        self._passed = {}  # test → whether all its phases passed

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        self._seen.clear()
        began = time.perf_counter()
        threading.settrace(self._on_call)
        sys.settrace(self._on_call)
        try:
            return (yield)
        finally:
            sys.settrace(None)
            threading.settrace(None)
            lines = {os.path.relpath(name, ROOT): sorted(seen) for name, seen in list(self._seen.items())}
            told = {"test": item.nodeid, "seconds": round(time.perf_counter() - began, 3), "lines": lines}
            with open(os.environ["FLASHCKPT_MUTANTS_LINES"], "a", encoding="utf-8") as file:
                file.write(json.dumps({**told, "passed": self._passed.get(item.nodeid, False)}) + "\n")

    def pytest_runtest_logreport(self, report):
        self._passed[report.nodeid] = report.passed and self._passed.get(report.nodeid, True)

    def _on_call(self, frame, event, argument):
        if not frame.f_code.co_filename.startswith(f"{ROOT}/flashckpt/"):
            return None
        lines = self._seen.setdefault(frame.f_code.co_filename, set())

        def on_line(frame, event, argument):
            lines.add(frame.f_lineno)
            return on_line

        return on_line


def pytest_configure(config):
    if "FLASHCKPT_MUTANTS_LINES" in os.environ:
        config.pluginmanager.register(Trace())
    if "FLASHCKPT_MUTANTS_FAULT" in os.environ:
        plant = Plant(*json.loads(Path(os.environ["FLASHCKPT_MUTANTS_FAULT"]).read_text()))
        sys.meta_path.insert(0, plant)
        config.pluginmanager.register(plant)
