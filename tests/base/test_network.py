"""Where masters and ranks listen.

pytest tests/base/test_network.py
"""

import random
import socket
from pathlib import Path

import pytest

from elastic.base import network
from elastic.base.errors import ElasticError
from elastic.base.network import PORTS, bind_address, free_ports, interfaces, listens

CLIENTS_GET = Path("/proc/sys/net/ipv4/ip_local_port_range")


def test_ports_are_none_that_the_kernel_gives_to_clients_meanwhile():
    lowest = int(CLIENTS_GET.read_text().split()[0])
    assert PORTS.start > 1023
    assert PORTS.stop <= max(lowest, 32_000)
    ports = free_ports("127.0.0.1", 5)
    assert len(set(ports)) == 5
    assert all(port in network.PORTS for port in ports)


def test_a_port_that_somebody_listens_on_is_not_free(monkeypatch):
    taken, free = free_ports("127.0.0.1", 2)
    monkeypatch.setattr("random.Random.sample", lambda *_: [taken, free])
    with socket.create_server(("127.0.0.1", taken)):
        assert listens("127.0.0.1", taken)
        assert free_ports("127.0.0.1") == [free]


def test_ports_do_not_follow_the_seed_of_a_run():
    """Two sessions of tests that had built a model of one seed drew the same ports."""
    found = []
    for _ in range(2):
        random.seed(0)
        found.append(free_ports("127.0.0.1", 4))
    assert found[0] != found[1]


def test_a_site_names_the_interface_on_which_ranks_meet():
    assert interfaces()["lo"] == "127.0.0.1"
    assert bind_address("lo", "10.1.2.3", "sync.bind") == "127.0.0.1"
    assert bind_address("10.9.8.7", "10.1.2.3", "sync.bind") == "10.9.8.7"
    with pytest.raises(ElasticError, match="sync.bind = 'ib9' is no IPv4 address") as told:
        bind_address("ib9", "10.1.2.3", "sync.bind")
    assert "lo (127.0.0.1)" in str(told.value.hint)
