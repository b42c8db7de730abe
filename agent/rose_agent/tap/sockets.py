"""Packet sockets inside a serving pod's network namespace.

Traffic from outside the pod is on its ordinary interfaces, where a socket sees both directions
only with ETH_P_ALL. Traffic from inside the pod (to 127.0.0.1 and to the pod's own address) is on
``lo``, where every packet would show twice, so outgoing ones are ignored there. A socket stays in
the namespace it was opened in; the thread goes back at once.

Four sockets per interface, because their filters are locked (``bpf``): one passes every segment,
but those whose tokens the kernel counts (``kernel_program``); one a sample of the server's; one of
these two is read, the other is *mute*. The other two are bells. They pass what is urgent and are
read by nobody: they only say that the one that is read should be. One rings for requests, heads and
ends, the other for requests alone.
Where a namespace has many interfaces (a node's own, for pods on the host's network) one set hears
all of them, also those that come later. Next step: ``opener`` calls this, ``replica`` reads.
"""

from __future__ import annotations

import contextlib
import functools
import socket
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from rose_agent.os import bpf, kernel
from rose_agent.tap.kernel_program import Program

ETH_P_ALL = 3
SOL_PACKET, PACKET_STATISTICS, PACKET_IGNORE_OUTGOING = 263, 6, 23
PACKET_OUTGOING = 4
SO_TIMESTAMPNS = 35
SAMPLE_RATE = 8
ANY = ""
_BUFFER_BYTES = 8 * 1024 * 1024  # the kernel cuts it down to net.core.rmem_max
_MUTE_BYTES = 1  # the least there is: one segment waits, the kernel passes over all others
_MANY_INTERFACES = 16
PER_INTERFACE = 4  # sockets
_WHOLE = 2  # which of them
MOST_SOCKETS = PER_INTERFACE * _MANY_INTERFACES  # of one namespace
_STAMP = struct.Struct("qq")
_BRACKETS, _TIGHT_NS = 5, 5_000


@dataclass
class Taps:
    """The sockets of one interface (``ANY`` = all of them)."""

    interface: str
    bell: socket.socket
    request_bell: socket.socket
    unsampled: socket.socket
    sampled: socket.socket

    @property
    def all(self) -> tuple[socket.socket, ...]:
        """In the order of the fields."""
        return self.bell, self.request_bell, self.unsampled, self.sampled

    def close(self) -> None:
        """Close them."""
        for tap in self.all:
            with contextlib.suppress(OSError):
                tap.close()


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
    """Interfaces of the current namespace to listen on; unused tunnel devices are left out."""
    present = [name for _, name in socket.if_nameindex()]
    unused = ("sit", "tunl", "gre", "erspan", "ip6tnl", "ip_vti", "ip6_vti", "ip6gre", "gretap")
    chosen = wanted or tuple(name for name in present if not name.startswith(unused))
    found = [name for name in chosen if name in present]
    return [ANY] if len(found) > _MANY_INTERFACES else found


def _open(
    interface: str, attach: Callable[[socket.socket], None], *, muted: bool = False
) -> socket.socket:
    # Filter first, then the protocol: nothing unfiltered is queued. A socket that hears every
    # interface cannot be bound later, so it is emptied instead.
    protocol = socket.htons(ETH_P_ALL) if interface == ANY else 0
    tap = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK, protocol)
    try:
        attach(tap)
        if interface == ANY:
            discard(tap)
        mute(tap, muted=muted)
        tap.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
        if interface == "lo":
            tap.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
        if interface != ANY:
            tap.bind((interface, ETH_P_ALL))
    except BaseException:  # whatever it was, the socket must not stay open
        tap.close()
        raise
    return tap


def mute(tap: socket.socket, *, muted: bool) -> None:
    """Let hardly anything queue on a socket that nobody reads, or let it queue again."""
    size = _MUTE_BYTES if muted else _BUFFER_BYTES
    tap.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, size)


def open_taps(interface: str, port: int, counting: Program | None = None) -> Taps:
    """Open filtered packet sockets in the current namespace.

    The kernel serves the newest socket first: when the bell rings, the segment lies in the others.

    Args:
        interface: to listen on.
        port: serving port.
        counting: filter of the whole, which counts tokens besides; None = the one that does not.

    Raises:
        OSError: without CAP_NET_RAW, or the interface is gone.
        NoKernelCounts: the kernel does not take that filter.
    """
    with contextlib.ExitStack() as opened:
        filters: list[Callable[[socket.socket], None]] = [
            functools.partial(bpf.attach, code=code)
            for code in (
                bpf.program(port, rate=0),
                bpf.program(port, rate=0, requests_alone=True),
                bpf.program(port, rate=1),
                bpf.program(port, rate=SAMPLE_RATE),
            )
        ]
        if counting is not None:
            filters[_WHOLE] = counting.attach
        made = [
            opened.enter_context(_open(interface, attach, muted=place != _WHOLE))
            for place, attach in enumerate(filters)
        ]
        opened.pop_all()
        return Taps(interface, *made)


def open_all(
    netns: str, port: int, wanted: tuple[str, ...], counting: Program | None = None
) -> tuple[list[Taps], frozenset[str]]:
    """The sockets of each interface of the namespace, and the namespace's addresses.

    Raises:
        OSError: the namespace or an interface is gone, or a capability is missing.
        NoKernelCounts: as ``open_taps``.
    """
    opened: list[Taps] = []
    try:
        with namespace(netns):
            opened.extend(open_taps(name, port, counting) for name in interfaces(wanted))
            return opened, kernel.addresses()
    except BaseException:  # whatever it was, no socket must stay open
        for taps in opened:
            taps.close()
        raise


def drops(tap: socket.socket) -> int:
    """Packets the kernel dropped since the last call (reading resets the counter).

    Raises:
        OSError: the socket is dead.
    """
    _, dropped = struct.unpack("II", tap.getsockopt(SOL_PACKET, PACKET_STATISTICS, 8))
    return int(dropped)


def discard(tap: socket.socket) -> int:
    """Empty the socket unread; returns how many packets were in it.

    Raises:
        OSError: the socket is dead.
    """
    byte, number = bytearray(1), 0
    try:
        while True:
            tap.recv_into(byte)
            number += 1
    except BlockingIOError:
        return number


def are_bound(taps: Taps) -> bool:
    """The sockets are still bound to an interface that exists and is up.

    A removed interface unbinds the socket; one that goes down leaves ENETDOWN on it.
    """
    if taps.unsampled.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
        return False
    try:
        return taps.interface == ANY or bool(taps.unsampled.getsockname()[0])
    except OSError:
        return False


def clock_offset() -> int:
    """Nanoseconds from the monotonic to the kernel's packet clock.

    A thread that is descheduled between the two readings is wrong by that long, and events would
    then change their order: so the tightest of a few brackets counts.
    """
    best, offset = 1 << 62, 0
    for _ in range(_BRACKETS):
        before, wall, after = time.monotonic_ns(), time.time_ns(), time.monotonic_ns()
        if after - before < best:
            best, offset = after - before, wall - (before + after) // 2
        if best < _TIGHT_NS:
            break
    return offset


def time_of(ancillary: list[tuple[int, int, bytes]], offset_ns: int) -> int:
    """When the kernel saw a packet, nanoseconds of CLOCK_MONOTONIC; now where it makes no sense.

    Args:
        ancillary: that came with the packet.
        offset_ns: from the monotonic to the kernel's packet clock (``clock_offset``).
    """
    now = time.monotonic_ns()
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == SO_TIMESTAMPNS:
            seconds, nanoseconds = _STAMP.unpack_from(data)
            stamp_ns = int(seconds) * 1_000_000_000 + int(nanoseconds) - offset_ns
            # A clock that was set between stamp and reading shows as a jump.
            return stamp_ns if now - 1_000_000_000 < stamp_ns <= now else now
    return now
