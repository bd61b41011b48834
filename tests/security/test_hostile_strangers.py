"""Whoever has no certificate of the job for the name that it uses, gets nothing from an agent."""

from __future__ import annotations

import grpc
import pytest

from flashckpt.protocol.line import from_fence
from flashckpt.rpc import convert
from flashckpt.rpc.credentials import Authority, Bundle, make_request
from flashckpt.rpc.guard import ROLES
from flashckpt.v1 import peer_pb2
from tests.fault.agents import JOB
from tests.security.arena import ATTEMPT, Push, code_of, tell

REFUSED_IN_HANDSHAKE = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED}


def other_jobs(arena):
    """Of an authority of its own, which it also shows to the server."""
    authority = Authority.create("another")
    key, request = make_request("another", arena.node(arena.rank))
    return Bundle(authority.sign(request, "another", arena.node(arena.rank)), key, authority.certificate_pem)


STRANGERS = {
    "no certificate": lambda arena: None,
    "self-signed": lambda arena: arena.self_signed(arena.node(arena.rank)),
    "another job's authority": other_jobs,
    "expired": lambda arena: arena.expired(arena.node(arena.rank)),
}


def hello(arena, **changes):
    values = {"version": 1, "job": JOB, "node_id": arena.node(arena.rank), "receiver": arena.node(0), **changes}
    return peer_pb2.PeerHello(**values).SerializeToString()


def attempts(arena, channel):
    """Everything that the service of the other nodes has."""
    yield lambda: channel.unary_unary("/flashckpt.v1.Peer/Hello")(hello(arena), timeout=ATTEMPT)
    yield lambda: tell(channel, arena.tell_request())

    def push():
        stream = Push(channel, arena.opening())
        try:
            stream.answer()
        finally:
            stream.close()

    yield push


@pytest.mark.parametrize("who", STRANGERS)
def test_strangers_end_in_the_handshake(arena, who):
    with arena.channel(STRANGERS[who](arena)) as channel:
        found = {code_of(attempt) for attempt in attempts(arena, channel)}
    assert found <= REFUSED_IN_HANDSHAKE
    arena.save()


def test_without_tls(arena):
    with grpc.insecure_channel(arena.address) as channel:
        assert {code_of(attempt) for attempt in attempts(arena, channel)} <= REFUSED_IN_HANDSHAKE


def test_the_same_authority_for_another_job(arena):
    """An operator's authority may serve many jobs."""
    with arena.channel(arena.certified(arena.node(arena.rank), job="another")) as channel:
        found = {code_of(attempt) for attempt in attempts(arena, channel)}
    assert found == {grpc.StatusCode.PERMISSION_DENIED}


GUESTS = ["guest", "node0", "\x1b[31mred\x1b[0m", "two\nlines", "../../etc", "nul\0", "x" * 256]


def test_a_certificate_is_not_a_membership(arena):
    """Signed by the launch's authority, but no node of the launch; or with the very name of the one it talks to."""
    line, launch = arena.status()["line"], arena.launch.launch
    for name in GUESTS:
        with arena.channel(arena.guest(name)) as channel:
            request = arena.tell_request(sender=name)
            request.line.CopyFrom(convert.to_line(from_fence(step=-1, epoch=launch.epoch, nonce=launch.nonce)))
            answer = tell(channel, request)
            assert "no member of this launch" in answer.refused
            assert not answer.HasField("record")
            push = Push(channel, arena.opening(sender=name))
            assert "no member of this launch" in push.answer().refused.reason
            push.close()
    assert arena.status()["line"] == line, "learned from somebody who has no say"
    assert "\x1b" not in arena.log()
    assert not [line for line in arena.log().splitlines() if line.startswith("lines")]


def test_method_by_role_over_tcp(arena):
    """Default deny: members reach the four calls of their service; the agent's own are not there at all."""
    with arena.channel(arena.traitor()) as channel:

        def call(method):
            return code_of(lambda: channel.unary_unary(method)(b"", timeout=ATTEMPT))

        for method in ROLES:
            expected = (
                grpc.StatusCode.FAILED_PRECONDITION
                if "/flashckpt.v1.Peer/" in method
                else grpc.StatusCode.UNIMPLEMENTED
            )
            assert call(method) is expected, method
        for method in (
            "/flashckpt.v1.Peer/Delete",
            "/flashckpt.v1.Agent/Reset",
            "/grpc.health.v1.Health/Check",
            "/x/y",
        ):
            assert call(method) is grpc.StatusCode.PERMISSION_DENIED, method
        reflection = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
        assert call(reflection) is grpc.StatusCode.PERMISSION_DENIED
