from __future__ import annotations

import pytest

from tests.pure import one_process_and_no_clock


@pytest.fixture(autouse=True)
def _is_pure():
    with one_process_and_no_clock():
        yield
