"""Who may call what. A method without a row may be called by nobody."""

from __future__ import annotations

import enum


class Role(enum.Enum):
    OPERATOR = "operator"  # can open the agent's socket: the job's user
    TRAINER = "trainer"  # the same, with the ticket of a live lease
    MEMBER = "member"  # another node with a certificate of the job


_LOCAL = frozenset({Role.OPERATOR, Role.TRAINER})
_LEASED = frozenset({Role.TRAINER})
_REMOTE = frozenset({Role.MEMBER})

# Nobody deletes through a call, and other nodes reach nothing but the four calls of their own service.
ROLES: dict[str, frozenset[Role]] = {
    "/flashckpt.v1.Agent/Hello": _LOCAL,
    "/flashckpt.v1.Agent/Listen": _LEASED,
    "/flashckpt.v1.Agent/Claimants": _LEASED,
    "/flashckpt.v1.Agent/Begin": _LEASED,
    "/flashckpt.v1.Agent/PutLine": _LEASED,
    "/flashckpt.v1.Agent/Acquire": _LEASED,
    "/flashckpt.v1.Agent/Prepare": _LEASED,
    "/flashckpt.v1.Agent/Sealed": _LEASED,
    "/flashckpt.v1.Agent/Flush": _LOCAL,
    "/flashckpt.v1.Agent/Void": _LEASED,
    "/flashckpt.v1.Agent/Watch": _LEASED,
    "/flashckpt.v1.Agent/Inventory": _LEASED,
    "/flashckpt.v1.Agent/Retrieve": _LEASED,
    "/flashckpt.v1.Agent/Trainers": _LEASED,
    "/flashckpt.v1.Agent/Bye": _LEASED,
    "/flashckpt.v1.Agent/Status": _LOCAL,
    "/flashckpt.v1.Agent/Stop": _LOCAL,
    "/flashckpt.v1.Peer/Hello": _REMOTE,
    "/flashckpt.v1.Peer/Tell": _REMOTE,
    "/flashckpt.v1.Peer/Put": _REMOTE,
    "/flashckpt.v1.Peer/Get": _REMOTE,
}


def may_call(role: Role, method: str) -> bool:
    return role in ROLES.get(method, frozenset())
