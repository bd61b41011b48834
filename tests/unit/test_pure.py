"""The guard of this directory: a test that is not pure fails here, whatever the code under test catches."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import socket
import subprocess
import sys
import threading
import time

import pytest

from tests.pure import one_process_and_no_clock


def call_in_thread():
    thread = threading.Thread(target=sleep_and_catch)
    thread.start()
    thread.join()


def sleep_and_catch():
    with contextlib.suppress(BaseException):
        time.sleep(1)


def connect(address):
    with socket.socket() as one:
        one.connect(address)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        pytest.param(lambda: subprocess.run([sys.executable, "-c", ""]), "starts a process", id="subprocess"),
        pytest.param(lambda: os.fork() or os._exit(0), "starts a process", id="fork"),
        pytest.param(
            lambda: multiprocessing.get_context("spawn").Process(target=print).start(), "starts a process", id="spawn"
        ),
        pytest.param(lambda: time.sleep(0.5), r"sleeps for 0\.5 s", id="sleep"),
        pytest.param(sleep_and_catch, "sleeps for 1 s", id="caught"),
        pytest.param(call_in_thread, "sleeps for 1 s", id="in a thread"),
        pytest.param(lambda: connect(("192.0.2.1", 9)), r"connects to \('192\.0\.2\.1', 9\)", id="connect"),
    ],
)
def test_what_is_not_pure_fails(call, message):
    with (
        pytest.raises(pytest.fail.Exception, match=f"this test {message}: such a test belongs in"),
        one_process_and_no_clock(),
    ):
        call()


def test_what_is_pure_passes():
    here, there = socket.socketpair()
    with here, there, socket.create_server(("127.0.0.1", 0)) as listener, one_process_and_no_clock():
        connect(listener.getsockname())
        time.sleep(0.001)
