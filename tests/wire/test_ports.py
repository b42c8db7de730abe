"""Ports for processes that are told theirs."""

from __future__ import annotations

import socket

from rose_wire.ports import free_port, free_ports


def test_ports_chosen_together_are_different_ones() -> None:
    assert len(set(free_ports(50))) == 50


def test_a_chosen_port_can_be_listened_on() -> None:
    with socket.create_server(("127.0.0.1", free_port())) as server:
        assert server.getsockname()[1] > 0
