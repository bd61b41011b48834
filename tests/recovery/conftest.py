from __future__ import annotations

import json

import pytest

from flashckpt.testing import Cluster
from tests.once import once
from tests.recovery.job import LAST_STEP, Job


@pytest.fixture(scope="session")
def uninterrupted(tmp_path_factory):
    """(layout, world) → {(rank, step): digests} of a run without checkpoints that nothing ever happens to."""
    known = {}

    def run(layout, world):
        def train(directory):
            with Cluster(1, ranks_per_node=world) as cluster:
                job = Job(cluster, tmp_path_factory.mktemp("uninterrupted"), layout)
                job.launch(LAST_STEP, checkpoints=False, direct=True).finish()
                states = [(rank, step, one) for (step, _), all in job.states().items() for rank, one in all.items()]
            (directory / "states").write_text(json.dumps(states))

        if (layout, world) not in known:
            made = once(tmp_path_factory, f"uninterrupted-{layout}-{world}", train)
            told = json.loads((made / "states").read_text())
            states = {(rank, step): tuple(one) if isinstance(one, list) else one for rank, step, one in told}
            assert len(states) == world * LAST_STEP
            assert len({own for own, _ in states.values()}) > LAST_STEP, "every step changes the state"
            known[layout, world] = states
        return known[layout, world]

    return run
