"""Connects the ranks of a launch with the agents of their nodes: leases → credentials → addresses.

No private key is sent over the process group: each node makes its own key, rank 0 signs the requests, and the
authority's key is dropped when this returns.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
from typing import TYPE_CHECKING, Any

from flashckpt.agent.link import AgentLink
from flashckpt.agent.process import SOCKET_NAME
from flashckpt.agent.start import ensure_agent, options_of, stage_timeout
from flashckpt.config import CheckpointConfig
from flashckpt.config.table import GROUPS
from flashckpt.errors import ConfigError, OtherRankError
from flashckpt.load.fetch_by_agent import AgentMemory
from flashckpt.load.holders import Holders
from flashckpt.protocol.placement import place
from flashckpt.rpc.address import advertised_address
from flashckpt.save.agent_slots import AgentSlots
from flashckpt.types import Member, PersistSettings, Session

if TYPE_CHECKING:
    import contextlib
    from collections.abc import Mapping

    from flashckpt.config import Settings
    from flashckpt.ranks.group import PrivateGroup
    from flashckpt.ranks.topology import Topology
    from flashckpt.rpc.credentials import Bundle
    from flashckpt.store.slots import SlotStore
    from flashckpt.types import Launch

log = logging.getLogger(__name__)

_FLAT = [field.name for field in dataclasses.fields(CheckpointConfig)]


def join(
    group: PrivateGroup,
    settings: Settings,
    topology: Topology,
    store: SlotStore,
    launch: Launch,
    undo: contextlib.ExitStack,
) -> tuple[AgentSlots, AgentMemory]:
    """Connects this rank with its node's running agent, and the agents with each other. Collective.

    `undo` gets callbacks that close what is open if it fails.
    """
    timeout = stage_timeout(settings.config.start_timeout)
    options = options_of(settings)
    link = _link(settings, topology, store)
    undo.callback(link.close)  # before open(): an exception may come at any moment
    group.together("connecting to the agents", lambda: link.open(timeout))
    bundle, addresses = _meet(group, settings, topology, link) if len(topology.nodes) > 1 else (None, [""])
    session = _session(settings, topology, launch, addresses)
    slots = AgentSlots(store, link, session, bundle, settings.config)
    into_tensors = settings.config.fetch == "tensors" and len(topology.nodes) > 1
    holders = (lambda: Holders(store, slots.session.members, options)) if into_tensors else None
    return slots, AgentMemory(link, store, holders)


def rejoin(settings: Settings, topology: Topology, store: SlotStore, session: Session, process: str) -> AgentSlots:
    """Connects another process that acts for a rank; `process` is the rank's own one. Local."""
    link = _link(settings, topology, store, process)
    try:
        link.open(settings.config.start_timeout)
        return AgentSlots(store, link, session, None, settings.config)
    except BaseException:
        link.close()
        raise


def _link(settings: Settings, topology: Topology, store: SlotStore, acts_for: str = "") -> AgentLink:
    options = options_of(settings)
    start = (lambda left: ensure_agent(options, left)) if topology.is_leader else None
    return AgentLink(store.socket_path(SOCKET_NAME), settings.job, topology.rank, start, acts_for)


def _session(settings: Settings, topology: Topology, launch: Launch, addresses: list[str]) -> Session:
    config = settings.config
    members = tuple(
        Member(node.node_id, address, node.domain, node.ranks)
        for node, address in zip(topology.nodes, addresses, strict=True)
    )
    placement = place(members, config.replicas, config.placement)
    if placement.reason and topology.rank == 0:
        say = log.warning if placement.replicas < config.replicas else log.info
        say("replication: %s", placement.reason)
    renamed = {"strategy": config.placement, "slots_per_rank": config.slots, "persist": _persist(config)}
    settings_of = _of_same_name(Session, {name: name for name in _FLAT}, config)
    return Session(launch=launch, world=topology.world, members=members, **settings_of | renamed)


def _persist(config: CheckpointConfig) -> PersistSettings | None:
    if config.persist_dir is None:
        return None
    minutes = config.persist_interval_minutes
    return PersistSettings(
        directory=config.persist_dir,
        interval_seconds=None if minutes is None else minutes * 60,
        **_of_same_name(PersistSettings, GROUPS["persist"].names, config),
    )


def _of_same_name(
    cls: type[Session | PersistSettings], names: Mapping[str, str], config: CheckpointConfig
) -> dict[str, Any]:
    """Return the fields of `cls` that stand for a setting: `names` are name there → flat name."""
    known = names.keys() & {field.name for field in dataclasses.fields(cls)}
    values = {name: getattr(config, names[name]) for name in known}
    return {name: tuple(value) if isinstance(value, (list, set)) else value for name, value in values.items()}


def _meet(
    group: PrivateGroup, settings: Settings, topology: Topology, link: AgentLink
) -> tuple[Bundle | None, list[str]]:
    """Returns credentials for the agent (None except on the node's leader), and the address of each agent.
    Collective."""
    bundle = _operator_bundle(group, settings, topology) if settings.tls_files else _issue(group, settings, topology)
    here = [json.loads(one) for one in group.gather(json.dumps(_machine()).encode(), "comparing machines")]
    on_one_machine = all(one == here[0] for one in here)

    def listen() -> str:
        if bundle is None:
            return ""
        host = advertised_address(settings.advertise, all_local=on_one_machine)
        return link.call(
            lambda client, ticket, _: client.listen(ticket, bundle, host, settings.port),
            stage_timeout(settings.config.start_timeout),
            "listening for nodes",
        )

    mine = group.together("listening for other nodes", listen)
    gathered = group.gather(mine.encode(), "gathering the agents' addresses")
    return bundle, [gathered[node.ranks[0]].decode() for node in topology.nodes]


def _operator_bundle(group: PrivateGroup, settings: Settings, topology: Topology) -> Bundle | None:
    from flashckpt.rpc.credentials import identity, load_operator_bundle

    def load() -> Bundle | None:
        if not topology.is_leader or settings.tls_files is None:
            return None
        bundle = load_operator_bundle(*settings.tls_files)
        found = identity(bundle.certificate_pem)
        if (found.job, found.node_id) != (settings.job, settings.node_id):
            raise ConfigError(
                f"{settings.tls_files[0]}: expected a certificate of job {settings.job!r}, node {settings.node_id!r}, "
                f"found one of job {found.job!r}, node {found.node_id!r}",
                hint="issue one certificate per node; its identity is described in docs/operations.md",
            )
        return bundle

    return group.together("reading certificates", load)


def _issue(group: PrivateGroup, settings: Settings, topology: Topology) -> Bundle | None:
    """Returns a bundle that rank 0 has signed. Two gathers: requests, then certificates. Both are public."""
    from flashckpt.rpc.credentials import Authority, Bundle, make_request

    key = request = b""
    if topology.is_leader:
        key, request = make_request(settings.job, settings.node_id)
    requests = group.gather(request, "asking for certificates")
    signed = b""
    if topology.rank == 0:
        authority = Authority.create(settings.job)
        certificates = {
            node.node_id: authority.sign(requests[node.ranks[0]], settings.job, node.node_id).decode()
            for node in topology.nodes
        }
        signed = json.dumps([authority.certificate_pem.decode(), certificates]).encode()
    answer = group.gather(signed, "handing out certificates")[0]
    if not answer:
        raise OtherRankError("rank 0 signed no certificates; see its log", ranks=[0])
    if not topology.is_leader:
        return None
    ca, certificates = json.loads(answer)
    return Bundle(certificates[settings.node_id].encode(), key, ca.encode())


def _machine() -> list[str]:
    """Returns the same for processes that can reach each other by loopback."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return [file.read().strip(), os.readlink("/proc/self/ns/net")]
