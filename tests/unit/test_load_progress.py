from __future__ import annotations

import logging
import os
import re
import select

import pytest

from flashckpt.load import progress as module
from flashckpt.load.progress import Progress


def test_lines_where_nobody_looks(monkeypatch, caplog):
    monkeypatch.setattr(module.sys, "stderr", open(os.devnull, "w"))  # noqa: SIM115
    monkeypatch.setattr(module, "_LINE_SECONDS", 0.0)
    with caplog.at_level(logging.INFO, "flashckpt.load.progress"), Progress("fetching step 7") as progress:
        progress.update(16 << 20, 64 << 20)
        progress.update(64 << 20, 64 << 20)
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 3
    assert re.fullmatch(r"fetching step 7: 16 of 64 MiB in .* s, .* MB/s", told[0])
    assert told[-1].startswith("fetching step 7: 64 of 64 MiB")
    module.sys.stderr.close()


def test_a_failed_retrieval_is_not_called_done(caplog):
    caplog.set_level(logging.INFO, "flashckpt.load.progress")
    with pytest.raises(OSError, match="gone"), Progress("fetching"):
        raise OSError("gone")
    assert caplog.records == []


def test_a_bar_on_a_terminal(monkeypatch):
    ours, theirs = os.openpty()
    with os.fdopen(ours, "rb", buffering=0) as screen, os.fdopen(theirs, "w") as terminal:
        monkeypatch.setattr(module.sys, "stderr", terminal)
        monkeypatch.setenv("TERM", "xterm")
        with Progress("fetching step 7") as progress:
            progress.update(32 << 20, 64 << 20)
            progress._bar.refresh()
        terminal.flush()
        shown = ""
        while select.select([screen], [], [], 0.2)[0]:
            shown += screen.read(1 << 16).decode()
    assert "fetching step 7" in shown
    assert "33.6/67.1 MB" in shown
