"""Launches on several nodes with other certificates, addresses and placements than the default ones."""

from __future__ import annotations

import os

import pytest

from flashckpt.rpc.credentials import Authority, make_request
from flashckpt.store.slots import SlotStore
from flashckpt.testing import Cluster

JOB = "cluster"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def replicate(cluster, **config):
    """Two steps, the second of which is then the only one; every rank's shard lies where it should."""
    trainers = cluster.trainers(config={"job": JOB, "agent": "auto", "replicas": 1, **config}, mebibytes=1)
    trainers.wait_started()
    for step in (1, 2):
        assert {one["outcome"] for one in trainers.save(step, "replicated", timeout=60).values()} == {"ok"}
    assert cluster.check(timeout=20.0) == []
    return trainers


def ranks_on(node):
    with SlotStore.open(node.memory_dir, JOB, create=False) as store:
        return {sealed.shard.rank for sealed in store.scan()}


def test_the_operators_certificates(tmp_path):
    authority = Authority.create(JOB)
    with Cluster(nodes=2, job=JOB) as cluster:
        for node in cluster.nodes:
            key, request = make_request(JOB, node.name)
            files = {
                "CERT": authority.sign(request, JOB, node.name),
                "KEY": key,
                "CA": authority.certificate_pem,
            }
            for name, content in files.items():
                path = tmp_path / f"{node.name}-{name}"
                fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
                os.write(fd, content)
                os.close(fd)
                node.set_environment(**{f"FLASHCKPT_TLS_{name}": str(path)})
        trainers = replicate(cluster)
        assert {(one["step"], one["matches"]) for one in trainers.load().values()} == {(2, True)}


def test_ipv6():
    with Cluster(nodes=2, job=JOB) as cluster:
        for node in cluster.nodes:
            node.set_environment(FLASHCKPT_ADVERTISE="::1")
        replicate(cluster)


def test_groups_keep_replicas_out_of_the_same_rack():
    with Cluster(nodes=4, job=JOB, domains=["rack1", "rack1", "rack2", "rack2"]) as cluster:
        replicate(cluster, placement="group")
        for node in cluster.nodes:
            (kept,) = ranks_on(node) - {node.index}
            assert cluster[kept].domain != node.domain
