"""The opener waits for ever: it has loaded nothing that only the parser needs."""

from __future__ import annotations

import ipaddress
import socket
import subprocess
import sys

import psutil

from rose_agent.os import kernel

_HEAVY = (
    "asyncio",
    "aiohttp",
    "prometheus_client",
    "psutil",
    "grpc",
    "rose_core.telemetry.tracker",
)


def test_the_opener_has_loaded_no_library_of_the_parser() -> None:
    code = "import sys, rose_agent.tap.main; print(*sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert set(out.stdout.split()).isdisjoint(_HEAVY)


def test_addresses_are_those_that_others_see() -> None:
    entries = [entry for some in psutil.net_if_addrs().values() for entry in some]
    inet = (socket.AF_INET, socket.AF_INET6)
    plain = [entry.address.partition("%")[0] for entry in entries if entry.family in inet]
    assert kernel.addresses() == {ipaddress.ip_address(one).packed.hex() for one in plain}
