"""The table of who may call what covers every method there is, and nothing else."""

from __future__ import annotations

import pytest

from flashckpt.rpc.guard import ROLES, Role, may_call
from flashckpt.v1 import agent_pb2, peer_pb2

METHODS = {
    f"/{service.full_name}/{method.name}"
    for module in (agent_pb2, peer_pb2)
    for service in module.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}
AGENT = {method for method in METHODS if method.startswith("/flashckpt.v1.Agent/")}


def test_every_method_has_a_row_and_every_row_a_method():
    assert set(ROLES) == METHODS
    assert len(AGENT) == 17
    assert all(ROLES.values())


@pytest.mark.parametrize("role", Role)
def test_an_unknown_method_is_nobodys(role):
    assert not may_call(role, "/flashckpt.v1.Agent/Delete")
    assert not may_call(role, "")


def test_other_nodes_reach_nothing_of_the_socket_and_the_other_way_round():
    for method in METHODS:
        assert may_call(Role.MEMBER, method) == (method not in AGENT)
        assert may_call(Role.TRAINER, method) == (method in AGENT)


def test_without_a_ticket_there_is_hello_flush_status_and_stop():
    allowed = {method.rpartition("/")[2] for method in METHODS if may_call(Role.OPERATOR, method)}
    assert allowed == {"Hello", "Flush", "Status", "Stop"}
