"""The privileged half of the tap: opens packet sockets on request and never reads a packet.

It answers ``Watch`` messages of the parser on a socket pair with the sockets themselves
(SCM_RIGHTS) and the interface names, or with the reason why not. It ends with the parser.
"""

from __future__ import annotations

import socket

import msgspec

from rose_agent.tap.frames import Watch
from rose_agent.tap.sockets import open_all


class Opened(msgspec.Struct, frozen=True):
    """Answer to a ``Watch``: interface names in the order of the sockets, or an error."""

    replica: str
    interfaces: tuple[str, ...] = ()
    error: str = ""


def answer(watch: Watch) -> tuple[Opened, list[socket.socket]]:
    """Open the sockets one watch asks for."""
    netns = watch.netns or (f"/proc/{watch.pid}/ns/net" if watch.pid else "")
    try:
        opened = open_all(netns, watch.port, watch.interfaces)
    except OSError as error:
        where = netns or "this namespace"
        return Opened(watch.replica, error=f"cannot tap port {watch.port} in {where}: {error}"), []
    if not opened:
        return Opened(watch.replica, error=f"no interface to tap in {netns or 'here'}"), []
    return Opened(watch.replica, tuple(name for name, _ in opened)), [tap for _, tap in opened]


def serve(channel: socket.socket) -> None:
    """Answer until the parser is gone."""
    while request := channel.recv(65536):
        reply, taps = answer(msgspec.msgpack.decode(request, type=Watch))
        try:
            socket.send_fds(
                channel, [msgspec.msgpack.encode(reply)], [tap.fileno() for tap in taps]
            )
        finally:
            for tap in taps:
                tap.close()
