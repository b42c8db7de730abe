"""Packet sockets inside a serving pod's network namespace.

Traffic from outside the pod is on its ordinary interfaces, where a socket sees both directions
only with ETH_P_ALL. Traffic from inside the pod (to 127.0.0.1 and to the pod's own address) is on
``lo``, where every packet would show twice, so outgoing ones are ignored there. A socket stays in
the namespace it was opened in; the thread goes back at once.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

from rose_agent.tap import bpf, kernel

ETH_P_ALL = 3
SOL_PACKET, PACKET_STATISTICS, PACKET_IGNORE_OUTGOING = 263, 6, 23
SO_TIMESTAMPNS = 35
SO_RCVBUFFORCE = 33
SO_LOCK_FILTER = 44
_BUFFER_BYTES = 8 * 1024 * 1024


@contextlib.contextmanager
def namespace(path: str) -> Iterator[None]:
    """Enter the network namespace at ``path`` ('' = stay) and come back.

    Raises:
        OSError: it is gone or may not be entered (CAP_SYS_ADMIN, for another pod CAP_SYS_PTRACE).
    """
    if not path:
        yield
        return
    with Path("/proc/thread-self/ns/net").open("rb") as home, Path(path).open("rb") as target:
        kernel.setns(target.fileno())
        try:
            yield
        finally:
            kernel.setns(home.fileno())


def interfaces(wanted: tuple[str, ...]) -> list[str]:
    """Interfaces of the current namespace to listen on; tunnels' stand-ins are left out."""
    present = [name for _, name in socket.if_nameindex()]
    unused = ("sit", "tunl", "gre", "erspan", "ip6tnl", "ip_vti", "ip6_vti", "ip6gre", "gretap")
    chosen = wanted or tuple(name for name in present if not name.startswith(unused))
    return [name for name in chosen if name in present]


def open_one(interface: str, port: int) -> socket.socket:
    """Open a filtered packet socket in the current namespace.

    Raises:
        OSError: without CAP_NET_RAW, or the interface is gone.
    """
    tap = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK, 0)
    try:
        # Filter first, then the protocol: nothing unfiltered is ever queued.
        bpf.attach(tap, bpf.program(port))
        with contextlib.suppress(OSError):  # the larger buffer needs CAP_NET_ADMIN
            tap.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, _BUFFER_BYTES)
        tap.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)
        tap.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
        if interface == "lo":
            tap.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
        tap.bind((interface, ETH_P_ALL))
    except BaseException:  # whatever it was, the socket must not stay open
        tap.close()
        raise
    return tap


def open_all(netns: str, port: int, wanted: tuple[str, ...]) -> list[tuple[str, socket.socket]]:
    """One socket per interface of the namespace.

    Raises:
        OSError: the namespace or an interface is gone, or a capability is missing.
    """
    opened: list[tuple[str, socket.socket]] = []
    try:
        with namespace(netns):
            opened.extend((name, open_one(name, port)) for name in interfaces(wanted))
    except BaseException:  # whatever it was, no socket must stay open
        for _, tap in opened:
            tap.close()
        raise
    return opened


def drops(tap: socket.socket) -> int:
    """Packets the kernel dropped since the last call (reading resets the counter).

    Raises:
        OSError: the socket is dead.
    """
    _, dropped = struct.unpack("II", tap.getsockopt(SOL_PACKET, PACKET_STATISTICS, 8))
    return int(dropped)


def alive(tap: socket.socket) -> bool:
    """The socket is still bound to an interface that exists and is up.

    A removed interface unbinds the socket; one that goes down leaves ENETDOWN on it.
    """
    if tap.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
        return False
    try:
        return bool(tap.getsockname()[0])
    except OSError:
        return False
