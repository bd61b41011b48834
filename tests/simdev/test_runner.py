"""How tests on the simulated accelerator are run, and what their failures look like."""

from __future__ import annotations

import concurrent.futures
import ctypes
import os
import shlex

import pytest
import torch

from tests.simdev import build
from tests.simdev.runner import run_on_sim


def prints_its_arguments(*arguments):
    print(torch.accelerator.device_count(), arguments)


def test_a_function_and_a_snippet_run_on_sim():
    assert run_on_sim(prints_its_arguments, 3, "x") == "2 (3, 'x')\n"
    assert run_on_sim("import torch; print(torch.zeros(arguments[0], device='sim').device)", 2) == "sim:0\n"
    assert not torch.accelerator.is_available()  # here


def test_a_failure_shows_the_values_and_where():
    code = "import torch\nfound = torch.arange(3, device='sim').tolist()\nassert found == [7]\n"
    with pytest.raises(AssertionError, match=r"(?s)exit status 1.*line 3.*found = \[0, 1, 2\]"):
        run_on_sim(code)


def test_a_crash_shows_the_stack():
    with pytest.raises(AssertionError, match=r"(?s)killed by signal 11.*Segmentation fault.*<snippet>"):
        run_on_sim("import ctypes, torch; ctypes.string_at(torch.ones(9, device='sim').data_ptr(), 1)")


def test_a_hang_ends_at_the_deadline_and_shows_the_stacks():
    code = "import torch\nfrom tests import simdev\nsimdev.busy(1000)\ntorch.accelerator.synchronize()\n"
    with pytest.raises(AssertionError, match=r"(?s)not done within 4 s.*<snippet>\", line 4"):
        run_on_sim(code, timeout=4)


def test_the_library_is_built_once_by_those_who_need_it_at_once(tmp_path, monkeypatch):
    sources, builds, log = tmp_path / "sources", tmp_path / "builds", tmp_path / "log"
    sources.mkdir()
    (sources / "one.cpp").write_text('extern "C" int answer() { return 42; }\n')
    compiler = tmp_path / "compiler"
    real = shlex.split(os.environ.get("CXX", "g++"))
    compiler.write_text(f'#!/bin/sh\necho "$*" >> {shlex.quote(str(log))}\nexec {shlex.join(real)} "$@"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    # The lock is of the open file, so threads stand in its way just as processes do.
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        built = list(pool.map(lambda _: build.library(sources, builds), range(4)))
    assert len(set(built)) == 1
    assert ctypes.CDLL(str(built[0])).answer() == 42
    assert sum(" -c " in line for line in log.read_text().splitlines()) == 1
    (sources / "one.cpp").write_text("not C++\n")
    with pytest.raises(RuntimeError, match=r"(?s)building the simulated accelerator failed.*one\.cpp:1"):
        build.library(sources, builds)
    monkeypatch.setenv("CXX", str(tmp_path / "none"))
    with pytest.raises(RuntimeError, match="needs a C\\+\\+ compiler"):
        build.library(sources, builds)
