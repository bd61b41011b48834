"""Whoever comes with a ticket finds a place among connections that have shown none, however many there are."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashckpt.move.transports.tcp.strangers import MAX_OF_NETWORK, MAX_STRANGERS, Stranger, network_of, whom_to_refuse

networks = st.sampled_from([f"10.0.0.{i}" for i in range(8)])
expectations = st.dictionaries(networks, st.integers(0, 40), max_size=4)


@given(st.lists(networks, max_size=300), expectations)
def test_places_are_bounded_and_members_have_their_own(arrivals, expected):
    strangers = []
    for at, network in enumerate(arrivals):
        newcomer = Stranger(network, float(at))
        strangers.append(newcomer)
        index = whom_to_refuse(strangers, expected)
        if index is not None:
            of_network = sum(one.network == strangers[index].network for one in strangers)
            assert of_network > expected.get(strangers[index].network, 0), "members in their own places stay"
            assert all(one.network != strangers[index].network for one in strangers[:index]), "the oldest goes first"
            del strangers[index]
        counts = Counter(one.network for one in strangers)
        assert len(strangers) <= MAX_STRANGERS + sum(expected.values())
        assert all(count <= MAX_OF_NETWORK + expected.get(one, 0) for one, count in counts.items())


def test_no_connections():
    assert whom_to_refuse((), {}) is None


@pytest.mark.parametrize(
    ("address", "network"),
    [
        ("10.1.2.3", "10.1.2.3"),
        ("::ffff:10.1.2.3", "10.1.2.3"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("unix", ""),
        ("", ""),
    ],
)
def test_a_host_has_one_network_whatever_address_it_takes(address, network):
    assert network_of(address) == network
