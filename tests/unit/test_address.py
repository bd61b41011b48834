"""The address a node tells the others: the choice, its texts, and what real network namespaces answer."""

from __future__ import annotations

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

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
