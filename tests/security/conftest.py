from __future__ import annotations

import pytest

from tests.security.arena import Arena


@pytest.fixture(scope="session")
def shared_arena():
    with Arena() as arena:
        yield arena


@pytest.fixture
def arena(shared_arena, request):
    """One cluster for all attacks, so that what each of them leaves behind adds up. Looked at after each."""
    yield shared_arena
    shared_arena.check(request.node.name)
