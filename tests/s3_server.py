"""An S3-compatible server of a test's own, on any free port."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import time
import urllib.request

_START_SECONDS = 120.0


@contextlib.contextmanager
def s3_server(log):
    """Its endpoint; it is gone when the block ends."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with open(log, "wb") as output:
        server = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)], stdout=output, stderr=output
        )
    try:
        endpoint = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + _START_SECONDS
        while True:
            try:
                urllib.request.urlopen(endpoint, timeout=5).close()
                break
            except OSError:
                assert server.poll() is None, log.read_text()
                assert time.monotonic() < deadline, log.read_text()
                time.sleep(0.2)
        yield endpoint
    finally:
        server.kill()
        server.wait()


def write_credentials(home, endpoint):
    """Where the libraries look by themselves: agents get nothing of a trainer's environment but HOME."""
    directory = home / ".aws"
    directory.mkdir(parents=True)
    (directory / "config").write_text(f"[default]\nregion = us-east-1\nendpoint_url = {endpoint}\n")
    (directory / "credentials").write_text("[default]\naws_access_key_id = testing\naws_secret_access_key = testing\n")
