from __future__ import annotations

import threading

import pytest

from flashckpt.errors import DeadlineError, NoSpaceError
from flashckpt.save.handle import SaveHandle
from flashckpt.types import Generation, Level, Outcome

GENERATION = Generation(epoch=1, nonce=2, step=3, seq=4)


def test_a_wait_ends_when_the_level_is_reached():
    handle = SaveHandle(3, GENERATION, Level.SEALED)
    outcomes = []
    waiter = threading.Thread(target=lambda: outcomes.append(handle.wait("sealed", timeout=60)))
    waiter.start()
    handle.advance(Level.STAGED)
    assert handle.staging_completion.done()
    assert not handle.upload_completion.done()
    handle.advance(Level.SEALED)
    waiter.join(timeout=60)
    assert outcomes == ["ok"]
    assert handle.outcome is None  # reached, but not ended yet


def test_a_wait_ends_at_its_deadline_and_says_how_far_it_got():
    handle = SaveHandle(3, GENERATION, Level.SEALED)
    handle.advance(Level.STAGED)
    with pytest.raises(DeadlineError, match=r"step 3: expected level sealed within 0\.01 s, found staged"):
        handle.wait("sealed", timeout=0.01)


def test_levels_do_not_fall():
    handle = SaveHandle(3, GENERATION, Level.SEALED)
    handle.advance(Level.SEALED)
    handle.advance(Level.STAGED)
    assert handle.level is Level.SEALED


def test_a_failure_ends_every_wait_and_reaches_the_futures():
    handle = SaveHandle(3, GENERATION, Level.SEALED)
    outcomes = []
    waiter = threading.Thread(target=lambda: outcomes.append(handle.wait("sealed", timeout=60)))
    waiter.start()
    handle.finish(Outcome.FAILED, "full", NoSpaceError("full"))
    waiter.join(timeout=60)
    assert outcomes == ["failed"]
    for future in (handle.staging_completion, handle.upload_completion):
        with pytest.raises(NoSpaceError):
            future.result()
    assert repr(handle) == "<SaveHandle step 3: none, failed, full>"
