"""Ports for processes that are told theirs."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from rose_wire.ports import free_port, free_ports


def test_ports_chosen_together_are_different_ones() -> None:
    assert len(set(free_ports(50))) == 50


def test_a_chosen_port_can_be_listened_on() -> None:
    with socket.create_server(("127.0.0.1", free_port())) as server:
        assert server.getsockname()[1] > 0


def test_ports_are_none_that_the_kernel_gives_to_connections() -> None:
    """An engine binds its port half a minute after the choice."""
    first, _ = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    if first < 32_768:
        pytest.skip("this machine gives its connections other ports")
    assert all(port < first for port in free_ports(50))
