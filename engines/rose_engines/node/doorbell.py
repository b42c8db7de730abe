"""Tells the engine host that a permit has just changed, so that it need not look all the time.

A permit is a word in shared memory: storing it wakes nobody. Whoever opens or closes one rings
afterwards. A ring that is lost costs time only, because the listener looks by itself at every
deadline and every few milliseconds besides. Next step: ``rose_agent.host.enforcement.enforcer``
listens.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import socket
from pathlib import Path


def ring(path: Path) -> None:
    """Wake the process that listens there; never waits, never fails, also when none does."""
    # A full queue wakes the listener without this one.
    with contextlib.suppress(OSError):
        _sender().sendto(b"\0", str(path))


@functools.cache
def _sender() -> socket.socket:
    """One for the whole process, because making it costs more than to send.

    It is bound to no listener, so that it finds the one that stands at a path now.
    """
    made = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
    atexit.register(made.close)
    return made


class Listener:
    """Waits for rings; one thread only.

    Args:
        path: a leftover there is replaced; only our user may ring.

    Raises:
        OSError: nothing can be bound there.
    """

    def __init__(self, path: Path) -> None:
        path.unlink(missing_ok=True)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(path))
        path.chmod(0o600)

    def wait(self, seconds: float) -> None:
        """Return at a ring, those that came meanwhile included, or after this long."""
        self._socket.settimeout(max(seconds, 0.001))
        with contextlib.suppress(OSError):
            self._socket.recv(1)
            self._socket.setblocking(False)
            while self._socket.recv(1):
                pass

    def close(self) -> None:
        """Listen no more."""
        self._socket.close()
