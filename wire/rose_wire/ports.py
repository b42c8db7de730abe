"""Free TCP ports on loopback, for processes that must be told their port before they listen.

Where a process can listen on port 0 and report what it got, prefer that: between the choice made
here and the moment the process listens, another process may take the port. An engine listens half a
minute after the choice, or later. So ports are chosen where the kernel looks for none itself: it
gives those above 32,767 to any connection that begins meanwhile.
"""

from __future__ import annotations

import errno
import random
import socket
from contextlib import ExitStack

_CHOICE = range(10_000, 30_000)
"""Below what Linux gives to connections, and below Kubernetes' node ports."""
_DICE = random.SystemRandom()  # forked processes would draw alike from a seeded one


def free_ports(count: int) -> list[int]:
    """So many different ports that nobody uses at the moment."""
    ports: list[int] = []
    with ExitStack() as stack:
        while len(ports) < count:
            port = _DICE.choice(_CHOICE)
            try:
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
            else:
                ports.append(port)
    return ports


def free_port() -> int:
    """A port that nobody uses at the moment."""
    return free_ports(1)[0]
