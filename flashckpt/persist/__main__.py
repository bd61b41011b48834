"""Runs the flusher, a helper process of the agent: `python -I -m flashckpt.persist`.

It reads one line of JSON from stdin and writes lines of JSON to stdout: the progress, then the outcome. It ends when
stdin is closed, because that is the end of its agent.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import threading
import time
from typing import Any

from flashckpt.errors import FlashError
from flashckpt.persist.hints import hint_of
from flashckpt.persist.storage import open_storage
from flashckpt.persist.tenancy import enter
from flashckpt.protocol.flush_spec import decode_spec

_ORPHANED = 77
_PROGRESS_SECONDS = 0.5


def main() -> int:
    """Run one flush. Returns the exit code: 0 if the last line reports success."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # stdout is for the answers: what a library prints goes to the log
    logging.basicConfig(format="flusher: %(message)s", level=logging.INFO, stream=sys.stderr)
    line = sys.stdin.buffer.readline()
    threading.Thread(target=_end_with_the_agent, name="stdin", daemon=True).start()
    _go_first_when_memory_is_short()
    lock = threading.Lock()
    done = [0, 0.0]  # bytes when the last progress was sent, and when that was

    def say(**content: Any) -> None:
        answers.write(json.dumps(content) + "\n")

    def progress(count: int) -> None:
        with lock:
            done[0] += count
            now = time.monotonic()
            if now - done[1] >= _PROGRESS_SECONDS:
                done[1] = now
                say(state="writing", done_bytes=done[0])

    try:
        spec = decode_spec(line)
        # Problems that can be seen beforehand are reported before torch is imported, which takes seconds.
        enter(open_storage(spec.settings.directory), spec)
        import torch

        from flashckpt.persist.flush import flush

        torch.set_num_threads(1)  # leave the cores to the training
        say(state="begun")
        told = flush(spec, progress)
    except FlashError as error:
        say(state="failed", reason=f"[{error.code}] {error.message}", hint=error.hint, shard=_shard_of(error))
        return 1
    except Exception as error:
        if not isinstance(error, OSError):
            logging.getLogger(__name__).exception("flush failed")
        say(state="failed", reason=f"{type(error).__name__}: {error}", hint=hint_of(error), shard=None)
        return 1
    say(state="done", **told)
    return 0


def _go_first_when_memory_is_short() -> None:
    """Undo the protection from the OOM killer that was inherited from the agent: a flusher can be started again."""
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
        file.write("500")


def _end_with_the_agent() -> None:
    while sys.stdin.buffer.read(1 << 10):
        pass
    os._exit(_ORPHANED)


def _shard_of(error: FlashError) -> int | None:
    """Return the rank whose shard is bad, or None."""
    shard = error.fields.get("shard")
    return None if shard is None else int(shard.rank)


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    # Skips the interpreter's shutdown: the thread that reads stdin cannot be joined.
    os._exit(code)
