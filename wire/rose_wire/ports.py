"""Free TCP ports on loopback, for processes that must be told their port before they listen.

Where a process can listen on port 0 and report what it got, prefer that: between the choice made
here and the moment the process listens, another process may take the port.
"""

from __future__ import annotations

import socket
from contextlib import ExitStack


def free_ports(count: int) -> list[int]:
    """So many different ports that nobody uses at the moment."""
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]


def free_port() -> int:
    """A port that nobody uses at the moment."""
    return free_ports(1)[0]
