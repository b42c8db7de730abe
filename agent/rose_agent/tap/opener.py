"""The privileged half of the tap: opens packet sockets on request and never reads a packet.

It answers ``TapWatch`` messages of the parser on a socket pair with the sockets themselves
(SCM_RIGHTS) and what the parser must know of the namespace, or with the reason why not. It keeps
three capabilities (NET_RAW, SYS_ADMIN, SYS_PTRACE) and may make no socket that reaches the network.
In a pod (``rose tap --sidecar``) it keeps NET_RAW and opens sockets where it is, whatever it is
asked. With SYS_ADMIN it also loads the program that counts tokens (``kernel_program``). It ends
with the parser. Next step: ``sockets`` opens them, ``parser`` asks.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass

import msgspec

from rose_agent.errors import NoKernelCounts
from rose_agent.os import kernel, seccomp
from rose_agent.tap import kernel_program
from rose_agent.tap.frames import TapWatch
from rose_agent.tap.sockets import Taps, open_all
from rose_core.identity import PodUid

_CAPABILITIES = frozenset({kernel.NET_RAW, kernel.SYS_ADMIN, kernel.SYS_PTRACE})


class Opened(msgspec.Struct, frozen=True):
    """Answer to a ``TapWatch``: each interface's sockets in the order of the names, or an error.

    Attributes:
        addresses: of the namespace, hex digits.
        uncounted: why the kernel counts no tokens; empty = it does, and its map is the last
            descriptor.
    """

    replica: PodUid
    interfaces: tuple[str, ...] = ()
    addresses: frozenset[str] = frozenset()
    error: str = ""
    uncounted: str = ""


@dataclass
class Handles:
    """What one watch opened: sockets, and the map of the program where there is one."""

    taps: list[Taps]
    streams: int | None = None

    def descriptors(self) -> list[int]:
        """In the order of ``Opened``."""
        sockets = [tap.fileno() for taps in self.taps for tap in taps.all]
        return sockets if self.streams is None else [*sockets, self.streams]

    def close(self) -> None:
        """Close them here; a process that was handed them keeps its own."""
        for taps in self.taps:
            taps.close()
        if self.streams is not None:
            os.close(self.streams)


def answer(watch: TapWatch, *, count: bool) -> tuple[Opened, Handles]:
    """Open what one watch asks for; ``count`` tokens in the kernel where it lets us."""
    netns = watch.netns or (f"/proc/{watch.pid}/ns/net" if watch.pid else "")
    try:
        handles, addresses, uncounted = _open(netns, watch, count=count)
    except OSError as error:
        where = netns or "this namespace"
        problem = f"cannot tap port {watch.port} in {where}: {error}"
        return Opened(watch.replica, error=problem), Handles([])
    if not handles.taps:
        handles.close()
        problem = f"no interface to tap in {netns or 'here'}"
        return Opened(watch.replica, error=problem), Handles([])
    names = tuple(taps.interface for taps in handles.taps)
    return Opened(watch.replica, names, addresses, uncounted=uncounted), handles


def _open(netns: str, watch: TapWatch, *, count: bool) -> tuple[Handles, frozenset[str], str]:
    reason = "--tokens=packets"
    if count:
        try:
            with kernel_program.loaded(watch.port) as program:
                taps, addresses = open_all(netns, watch.port, watch.interfaces, program)
                return Handles(taps, os.dup(program.streams)), addresses, ""
        except NoKernelCounts as error:
            reason = str(error)
    taps, addresses = open_all(netns, watch.port, watch.interfaces)
    return Handles(taps), addresses, reason


def confine(*, own: bool) -> None:
    """Give up what opening sockets (in our ``own`` namespace only) does not need."""
    kernel.forbid_dumps()
    kernel.keep_capabilities(frozenset({kernel.NET_RAW}) if own else _CAPABILITIES)
    seccomp.confine(seccomp.OPENER, None)


def serve(channel: socket.socket, *, own: bool, count: bool) -> None:
    """Open sockets for the parser until it is gone.

    Args:
        channel: to the parser; each message is a ``TapWatch``.
        own: in this process's own network, whatever pod is asked for.
        count: tokens in the kernel, where it lets us.
    """
    while request := channel.recv(65536):
        watch = msgspec.msgpack.decode(request, type=TapWatch)
        asked = TapWatch(watch.replica, 0, watch.port) if own else watch
        reply, handles = answer(asked, count=count)
        try:
            socket.send_fds(channel, [msgspec.msgpack.encode(reply)], handles.descriptors())
        finally:
            handles.close()
