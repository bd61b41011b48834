"""The address a node tells the others: the choice, its texts, and what real network namespaces answer."""

from __future__ import annotations

import ipaddress
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import flashckpt
from flashckpt.errors import ConfigError
from flashckpt.rpc.address import (
    Candidate,
    advertised_address,
    choose,
    format_address,
    is_loopback,
    local_candidates,
    parse_address,
    source_towards,
)

LO4, LO6 = Candidate("lo", "127.0.0.1"), Candidate("lo", "::1")
ETH4, ETH6 = Candidate("eth0", "10.0.0.5"), Candidate("eth0", "2001:db8::5")
IB4 = Candidate("ib0", "192.168.7.5")
SELF4 = Candidate("usb0", "169.254.3.3")


def pick(candidates, configured=None, resolved=None, towards=None, all_local=False):
    return choose(candidates, configured, resolved=resolved, towards_rendezvous=towards, all_local=all_local)


def test_the_way_to_the_rendezvous_host_wins():
    assert pick([LO4, ETH4, IB4], towards="192.168.7.5") == ("192.168.7.5", "it reaches the rendezvous host")
    assert pick([LO4, ETH4, ETH6], towards="2001:db8::5")[0] == "2001:db8::5"


@pytest.mark.parametrize("towards", [None, "127.0.0.1", "127.0.1.1", "::1", "fe80::1%eth0"])
def test_a_way_that_others_can_not_go_does_not_count(towards):
    host, reason = pick([LO4, ETH4, ETH6], towards=towards)
    assert (host, reason) == ("10.0.0.5", "the first address that is not a loopback one")


def test_ipv4_before_ipv6_and_link_local_last():
    assert pick([LO6, LO4, SELF4, ETH6, ETH4, IB4])[0] == "10.0.0.5"
    assert pick([LO6, LO4, SELF4, ETH6])[0] == "2001:db8::5"
    assert pick([LO6, LO4, SELF4])[0] == "169.254.3.3"


@pytest.mark.parametrize("candidates", [[], [LO4], [LO4, LO6]])
def test_loopback_is_never_an_accident(candidates):
    for towards in (None, "127.0.0.1"):
        with pytest.raises(ConfigError, match="found none but loopback") as caught:
            pick(candidates, towards=towards)
        assert "FLASHCKPT_ADVERTISE" in caught.value.hint


def test_loopback_where_all_nodes_are_here():
    assert pick([LO4, LO6, ETH4], all_local=True) == ("127.0.0.1", "all nodes are on this machine")
    assert pick([LO6, ETH6], all_local=True)[0] == "::1"
    assert pick([LO4, ETH4], towards="10.0.0.5", all_local=True)[0] == "127.0.0.1"


def test_configured_interface_address_or_host():
    assert pick([LO4, ETH4, IB4], "ib0", towards="10.0.0.5") == ("192.168.7.5", "configured")
    assert pick([LO4, ETH6, ETH4], "eth0")[0] == "10.0.0.5"
    assert pick([LO4, ETH4], "node5.cluster", resolved="172.16.0.9")[0] == "172.16.0.9"
    assert pick([LO4, ETH4], "eth0", all_local=True)[0] == "10.0.0.5"
    # An interface is meant even where a host has its name.
    assert pick([LO4, IB4], "ib0", resolved="203.0.113.1")[0] == "192.168.7.5"


def test_configured_nonsense_is_refused():
    with pytest.raises(ConfigError, match=r"expected a host, an address or an interface \(eth0, lo\), found 'eth7'"):
        pick([LO4, ETH4], "eth7")
    for everything in ("0.0.0.0", "::", "224.0.0.1"):
        with pytest.raises(ConfigError, match="expected the address of one machine"):
            pick([LO4, ETH4], everything, resolved=everything)


def test_configured_loopback_needs_all_nodes_here():
    for configured, resolved in (("lo", None), ("localhost", "127.0.0.1"), ("::1", "::1"), ("myself", "127.0.1.1")):
        with pytest.raises(ConfigError, match="which other machines can't reach") as caught:
            pick([LO4, ETH4], configured, resolved=resolved)
        assert caught.value.hint
        assert is_loopback(pick([LO4, ETH4], configured, resolved=resolved, all_local=True)[0])


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("127.1.2.3", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("localhost", True),
        ("10.0.0.1", False),
        ("::ffff:10.0.0.1", False),
        ("fe80::1%lo", False),
        ("node-5", False),
    ],
)
def test_what_is_a_loopback_address(host, expected):
    assert is_loopback(host) is expected


@given(st.one_of(st.ip_addresses(v=4), st.ip_addresses(v=6)), st.integers(0, 65535))
def test_addresses_come_back(address, port):
    text = format_address(str(address), port)
    assert parse_address(text) == (str(address), port)
    assert text.startswith("[") is (address.version == 6)


def test_names_and_scopes_come_back():
    assert parse_address("node-5.cluster:7000") == ("node-5.cluster", 7000)
    assert format_address("fe80::1%eth0", 1) == "[fe80::1%eth0]:1"
    assert parse_address("[fe80::1%eth0]:1") == ("fe80::1%eth0", 1)


@pytest.mark.parametrize(
    "text",
    [
        *("", ":", "host", "host:", ":1", "::1", "::1:80", "[::1]", "[::1]80", "[]:1", "[host]:1", "[::1:1"),
        *("host:65536", "host:-1", "host:+1", "host: 1", "host:1x", "host:٣", "host:000080", "host:" + "9" * 5000),
    ],
)
def test_other_texts_are_no_addresses(text):
    with pytest.raises(ConfigError, match="expected host:port"):
        parse_address(text)


@given(st.text(max_size=40))
def test_any_text_is_an_address_or_refused(text):
    try:
        host, port = parse_address(text)
    except ConfigError:
        return
    assert host
    assert 0 <= port < 1 << 16
    assert parse_address(format_address(host, port)) == (host, port)


def test_this_machine_answers():
    candidates = local_candidates()
    assert LO4 in candidates or LO6 in candidates
    for one in candidates:
        assert ipaddress.ip_address(one.host)
    versions = [":" in one.host for one in candidates]
    assert versions == sorted(versions), "IPv4 comes first"
    assert is_loopback(source_towards("localhost"))
    assert is_loopback(advertised_address(None, all_local=True))


@pytest.mark.parametrize("host", ["", "a" * 300, "..", "a..b", "x\0y", "\udc80"])
def test_hosts_that_can_not_be_are_no_way(host):
    if host:
        assert source_towards(host) is None
        with pytest.raises(ConfigError, match="expected a host, an address or an interface"):
            advertised_address(host, all_local=True)
    else:
        assert advertised_address(host, all_local=True), "an empty setting is none"


# Network namespaces: machines with other interfaces than this one.


def in_namespace(setup, code, **environ):
    """Runs Python code in a network namespace of its own, in which the shell commands have made the interfaces."""
    script = "set -e; " + "; ".join(["ip link set lo up", *setup]) + '; exec "$0" -c "$1"'
    prologue = "from flashckpt.rpc.address import *\nfrom flashckpt.errors import ConfigError\n"
    done = subprocess.run(
        ["unshare", "--net", "sh", "-c", script, sys.executable, prologue + code],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(Path(flashckpt.__file__).parent.parent), **environ},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def can_make_namespaces():
    if os.geteuid() != 0 or not shutil.which("unshare") or not shutil.which("ip"):
        return False
    return subprocess.run(["unshare", "--net", "ip", "link"], capture_output=True, check=False).returncode == 0


namespaces = pytest.mark.skipif(not can_make_namespaces(), reason="needs root: makes network namespaces")

# A pair of interfaces connected with each other stands for two networks that this machine is on.
PAIR = ["ip link add net0 type veth peer name net1", "ip link set net0 up", "ip link set net1 up"]
NET0_V4 = ["ip addr add 10.1.0.5/24 dev net0"]
NET1_V4 = ["ip addr add 10.2.0.5/24 dev net1"]
# nodad: detection of duplicates would hold these back for a second or two.
NET0_V6 = ["ip addr add 2001:db8:1::5/64 dev net0 nodad"]
NET1_V6 = ["ip addr add 2001:db8:2::5/64 dev net1 nodad"]
TELL = "print(advertised_address(None, all_local=False))"


@pytest.mark.root
@namespaces
def test_namespace_without_a_network_has_no_address_for_others():
    code = f"try:\n    {TELL}\nexcept ConfigError as error:\n    print('none but loopback' in error.message)"
    assert in_namespace([], code) == ["True"]
    assert in_namespace([], code, MASTER_ADDR="127.0.0.1") == ["True"]
    assert in_namespace([], "print(advertised_address(None, all_local=True))") == ["127.0.0.1"]


@pytest.mark.root
@namespaces
def test_namespace_with_two_networks_tells_the_one_that_leads_to_the_rendezvous():
    setup = [*PAIR, *NET0_V4, *NET1_V4]
    assert in_namespace(setup, TELL, MASTER_ADDR="10.1.0.99") == ["10.1.0.5"]
    assert in_namespace(setup, TELL, MASTER_ADDR="10.2.0.99") == ["10.2.0.5"]
    # The rendezvous is here: the address by which the others find it is one that they reach.
    assert in_namespace(setup, TELL, MASTER_ADDR="10.2.0.5") == ["10.2.0.5"]
    assert in_namespace(setup, "print(advertised_address('net0', all_local=False))", MASTER_ADDR="10.2.0.9") == [
        "10.1.0.5"
    ]


@pytest.mark.root
@namespaces
def test_namespace_with_ipv6_only():
    setup = [*PAIR, *NET0_V6, *NET1_V6]
    assert in_namespace(setup, TELL, MASTER_ADDR="2001:db8:2::99") == ["2001:db8:2::5"]
    assert in_namespace(setup, "print(advertised_address('net0', all_local=False))") == ["2001:db8:1::5"]
    assert in_namespace(setup, "print(format_address(advertised_address('net1', all_local=False), 7))") == [
        "[2001:db8:2::5]:7"
    ]
    assert in_namespace(setup, "print(*(one.host for one in local_candidates() if 'fe80' in one.host))") == []


@pytest.mark.root
@namespaces
def test_namespace_prefers_the_default_route_to_other_interfaces():
    for outward, gateway, expected in (("net0", "10.1.0.1", "10.1.0.5"), ("net1", "10.2.0.1", "10.2.0.5")):
        setup = [*PAIR, *NET0_V4, *NET1_V4, f"ip route add default via {gateway} dev {outward}"]
        assert in_namespace(setup, TELL) == [expected]


@pytest.mark.root
@namespaces
def test_namespace_ignores_interfaces_that_are_down():
    setup = [*PAIR, *NET0_V4, *NET1_V4, *NET0_V6, "ip link set net0 down"]
    found = in_namespace(setup, "print(*(one.host for one in local_candidates()))")
    assert "10.2.0.5" in found
    assert not {"10.1.0.5", "2001:db8:1::5"} & set(found)
