"""Addresses in network namespaces of their own: which interface is chosen, and when there is none."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import flashckpt


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
