"""The examples as a user runs them: under torchrun, killed, and run again."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path

import pytest

from flashckpt.demo.run import Run, parse
from flashckpt.testing import Cluster, processes

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
LIMIT = 400  # seconds; a machine under load is no failure
STEPS, EVERY = 40, 4
# The rank stands still in its fourth save: however late it is killed, it has not come to the end.
HALTED = {"FLASHCKPT_TESTING": "1", "FLASHCKPT_FAILPOINTS": "before_seal=stop@4"}


class Torchrun:
    """torchrun with the example on one node, and a log of each rank."""

    def __init__(self, node, directory, *options, **environment):
        self.directory = directory
        self.process = node.start(
            [
                *(sys.executable, "-m", "torch.distributed.run", *options, "--redirects=3", f"--log-dir={directory}"),
                *(str(EXAMPLES / "train_fsdp.py"), f"--steps={STEPS}", f"--every={EVERY}"),
            ],
            environment=environment,
        )

    @property
    def run(self):
        told = Run(2)
        for log in sorted(self.directory.rglob("stdout.log")):
            whole = log.read_text().rpartition("\n")[0]
            told.said += [said for line in whole.splitlines() if (said := parse(line, 0.0)) is not None]
        return told

    @property
    def words(self):
        errors = [log.read_text()[-3000:] for log in self.directory.rglob("stderr.log")]
        return "\n".join([self.process.tail, *errors])

    def wait_for_step(self, step):
        while self.run.furthest < step:
            assert self.process.returncode is None, self.words
            time.sleep(0.05)

    def wait(self):
        assert self.process.wait(LIMIT) == 0, self.words
        return self.run


@pytest.mark.slow
@pytest.mark.timeout(LIMIT)
def test_the_example_goes_on_where_it_was_killed(tmp_path):
    with Cluster(1, ranks_per_node=2, job="example") as cluster:
        here = ("--standalone", "--nproc-per-node=2")
        whole = Torchrun(cluster[0], tmp_path / "whole", *here, FLASHCKPT_DISABLE="1").wait()
        assert sorted(whole.losses(0)) == list(range(1, STEPS + 1))
        assert whole.losses(0) == whole.losses(1)

        first = Torchrun(cluster[0], tmp_path / "first", *here, **HALTED)
        first.wait_for_step(2 * EVERY + 1)
        agent = cluster[0].agent_pid()
        # Stopped before, so that it comes at one stroke: nobody notices that another is gone.
        for pid in cluster[0].pause("trainers"):
            processes.signal_to(pid, signal.SIGKILL)
        first.process.wait(60)
        killed = first.run
        assert killed.furthest < STEPS
        assert cluster[0].agent_pid() == agent

        again = Torchrun(cluster[0], tmp_path / "again", *here).wait()
    bases = {rank: again.resumed(rank) for rank in range(2)}
    assert {(one.step, one.source) for one in bases.values()} == {(bases[0].step, "memory")}
    assert EVERY <= bases[0].step <= killed.furthest
    for rank in range(2):
        assert sorted(again.losses(rank)) == list(range(bases[rank].step + 1, STEPS + 1))
        assert killed.losses(rank).items() <= whole.losses(rank).items()
        assert again.losses(rank).items() <= whole.losses(rank).items()
    assert again.digests() == whole.digests()
    assert len(again.digests()) == 2


@pytest.mark.slow
@pytest.mark.timeout(LIMIT)
def test_a_blank_node_joins_the_torchrun_that_went_on(tmp_path):
    with Cluster(2, job="example") as cluster:
        endpoint = f"{cluster[0].host.rendezvous_address(0)}:{cluster[0].host.free_port()}"

        def start(node, name, **environment):
            options = (
                *("--nnodes=2", "--nproc-per-node=1", "--max-restarts=3", "--rdzv-backend=c10d", "--rdzv-id=example"),
                *(f"--rdzv-endpoint={endpoint}", f"--rdzv-conf=is_host={int(node is cluster[0])}"),
                f"--local-addr={node.host.rendezvous_address(node.index)}",
            )
            return Torchrun(node, tmp_path / name, *options, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1", **environment)

        kept, lost = start(cluster[0], "kept"), start(cluster[1], "lost", **HALTED)
        kept.wait_for_step(2 * EVERY + 1)
        cluster[1].replace("blank")
        assert kept.process.returncode is None
        joined = start(cluster[1], "joined").wait()
        stayed = kept.wait()
    before = lost.run
    assert before.furthest < STEPS
    (there,), (here,) = joined.of("resumed"), stayed.of("resumed")
    assert (there.source, here.source) == ("peer", "memory")
    assert here.step == there.step >= EVERY
    assert joined.losses(there.rank) == {
        step: loss for step, loss in stayed.losses(here.rank).items() if step > here.step
    }
    # What was done twice came out the same.
    twice = joined.losses(there.rank).keys() & before.losses(there.rank).keys()
    assert {step: joined.losses(there.rank)[step] for step in twice} == {
        step: before.losses(there.rank)[step] for step in twice
    }
    assert max(joined.losses(there.rank)) == STEPS


def test_the_example_is_short_enough_to_be_read():
    assert len((EXAMPLES / "train_fsdp.py").read_text().splitlines()) < 120
