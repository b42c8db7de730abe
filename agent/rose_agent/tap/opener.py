"""The privileged half of the tap: opens packet sockets on request and never reads a packet.

It answers ``Watch`` messages of the parser on a socket pair with the sockets themselves
(SCM_RIGHTS) and what the parser must know of the namespace, or with the reason why not. It keeps
three capabilities (NET_RAW, SYS_ADMIN, SYS_PTRACE) and may make no socket that reaches the network.
In a pod (``rose tap --sidecar``) it keeps NET_RAW and opens sockets where it is, whatever it is
asked. It ends with the parser. Next step: ``sockets`` opens them, ``parser`` asks.
"""

from __future__ import annotations

import socket

import msgspec

from rose_agent.os import kernel, seccomp
from rose_agent.tap.frames import Watch
from rose_agent.tap.sockets import Taps, open_all
from rose_core.identity import PodUid

_CAPABILITIES = frozenset({kernel.NET_RAW, kernel.SYS_ADMIN, kernel.SYS_PTRACE})


class Opened(msgspec.Struct, frozen=True):
    """Answer to a ``Watch``: three sockets per interface in the order of the names, or an error.

    Attributes:
        addresses: of the namespace, hex digits.
    """

    replica: PodUid
    interfaces: tuple[str, ...] = ()
    addresses: frozenset[str] = frozenset()
    error: str = ""


def answer(watch: Watch) -> tuple[Opened, list[Taps]]:
    """Open the sockets one watch asks for."""
    netns = watch.netns or (f"/proc/{watch.pid}/ns/net" if watch.pid else "")
    try:
        taps, addresses = open_all(netns, watch.port, watch.interfaces)
    except OSError as error:
        where = netns or "this namespace"
        return Opened(watch.replica, error=f"cannot tap port {watch.port} in {where}: {error}"), []
    if not taps:
        return Opened(watch.replica, error=f"no interface to tap in {netns or 'here'}"), []
    return Opened(watch.replica, tuple(one.interface for one in taps), addresses), taps


def confine(*, own: bool) -> None:
    """Give up what opening sockets (in our ``own`` namespace only) does not need."""
    kernel.no_dumps()
    kernel.keep_capabilities(frozenset({kernel.NET_RAW}) if own else _CAPABILITIES)
    seccomp.confine(seccomp.OPENER)


def serve(channel: socket.socket, *, own: bool) -> None:
    """Answer until the parser is gone."""
    while request := channel.recv(65536):
        watch = msgspec.msgpack.decode(request, type=Watch)
        reply, taps = answer(Watch(watch.replica, 0, watch.port) if own else watch)
        try:
            descriptors = [tap.fileno() for one in taps for tap in one.all]
            socket.send_fds(channel, [msgspec.msgpack.encode(reply)], descriptors)
        finally:
            for one in taps:
                one.close()
