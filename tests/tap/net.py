"""Network namespaces for tests, with sockets of this process inside them.

A child holds the namespace; this process enters it for as long as a socket takes to open. Needs
root; links between two namespaces need ``ip`` too.
"""

from __future__ import annotations

import functools
import itertools
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import pytest

from rose_agent.tap import kernel_counts, kernel_program, sockets
from rose_agent.tap.frames import TapWatch
from rose_agent.tap.replica import TappedReplica
from rose_core.identity import PodUid
from rose_core.telemetry.book import Book, FinishedRequest
from rose_core.telemetry.events import Health, TapEvent
from tests.tap.kernel import refusal as kernel_refusal

PORT = 30000
_HOLD = (
    "import sys; from rose_agent.os import kernel; from tests.tap.inside import loopback_up; "
    "kernel.leave_network(); loopback_up(); print('ready', flush=True); sys.stdin.read()"
)


@functools.cache
def refusal() -> str:
    """Why no namespace can be made here; empty when one can."""
    probe = subprocess.run(
        [sys.executable, "-c", "from rose_agent.os import kernel; kernel.leave_network()"],
        capture_output=True,
        text=True,
        check=False,
    )
    if probe.returncode == 0:
        return ""
    # Only the kernel's own refusal is a reason to skip; a mistake of ours is not.
    assert "PermissionError" in probe.stderr, probe.stderr
    return "network namespaces need root: " + probe.stderr[-80:]


READERS = [
    pytest.param(False, id="packets"),
    pytest.param(
        True,
        id="kernel",
        marks=pytest.mark.skipif(bool(kernel_refusal()), reason=kernel_refusal() or "can count"),
    ),
]
"""Who counts tokens, for fixtures of namespaces."""


def link_refusal() -> str:
    """Why namespaces cannot be linked here; empty when they can."""
    return refusal() or ("" if shutil.which("ip") else "links need the command ip")


@dataclass
class Namespace:
    """A network namespace, held by a child of this process.

    Attributes:
        counting: the kernel counts tokens for a tap that follows it.
    """

    holder: subprocess.Popen[str]
    counting: bool = False

    @property
    def path(self) -> str:
        return f"/proc/{self.holder.pid}/ns/net"

    def ip(self, *words: str) -> None:
        with sockets.namespace(self.path):
            subprocess.run(["ip", *words], check=True, capture_output=True)

    def listen(self, address: str = "127.0.0.1", port: int = PORT) -> socket.socket:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with sockets.namespace(self.path):
            server = socket.socket(family)
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind((address, port))
        server.listen(1024)
        return server

    def connect(self, address: str = "127.0.0.1", port: int = PORT) -> socket.socket:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with sockets.namespace(self.path):
            client = socket.socket(family)
        client.settimeout(20)
        client.connect((address, port))
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return client


@contextmanager
def namespace(*, counting: bool = False) -> Iterator[Namespace]:
    """A new namespace with loopback only."""
    holder = subprocess.Popen(
        [sys.executable, "-c", _HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "ready\n"
        yield Namespace(holder, counting)
    finally:
        holder.communicate()


_links = itertools.count()


def link(near: Namespace, far: Namespace, number: int) -> tuple[str, str]:
    """Join two namespaces by ``eth0``; returns their addresses."""
    left, right = f"t{number}a{next(_links)}", f"t{number}b{next(_links)}"
    near.ip("link", "add", left, "type", "veth", "peer", "name", right)
    near.ip("link", "set", right, "netns", str(far.holder.pid), "name", "eth0")
    near.ip("link", "set", left, "name", "eth0")
    addresses = f"10.77.{number}.1", f"10.77.{number}.2"
    for one, address in zip((near, far), addresses, strict=True):
        one.ip("addr", "add", f"{address}/24", "dev", "eth0")
        one.ip("link", "set", "eth0", "up")
    return addresses


@dataclass
class Tapped:
    """A replica that is followed without a loop: ``look`` reads whatever has passed."""

    replica: TappedReplica
    book: Book = field(default_factory=lambda: Book(0))
    events: list[TapEvent] = field(default_factory=list)
    done: list[FinishedRequest] = field(default_factory=list)

    def look(self) -> Health:
        seen = self.replica.beat()
        self.events += seen
        self.done += [f for e in seen if isinstance(f := self.book.apply(e, 0), FinishedRequest)]
        last = seen[-1]
        assert isinstance(last, Health)
        return last


@contextmanager
def tapped(inside: Namespace, port: int = PORT) -> Iterator[Tapped]:
    """Follow a port of the namespace."""
    with ExitStack() as stack:
        program = stack.enter_context(kernel_program.loaded(port)) if inside.counting else None
        taps, addresses = sockets.open_all(inside.path, port, (), program)
        for one in taps:
            stack.callback(one.close)
        numbers = itertools.count(1)
        watch = TapWatch(PodUid("replica"), inside.holder.pid, port)
        streams = kernel_counts.streams(os.dup(program.streams)) if program else None
        if streams is not None:
            stack.callback(streams.close)
        replica = TappedReplica(
            *(watch, taps, addresses, lambda: next(numbers), 0), streams=streams
        )
        yield Tapped(replica)


class Wire:
    """One connection, both of whose ends are ours, and the tap that is looked at beside it."""

    def __init__(self, inside: Namespace, tap: Tapped, address: str = "127.0.0.1") -> None:
        self.tap = tap
        with inside.listen(address) as server:
            self.client = inside.connect(address)
            self.server, _ = server.accept()
        self.server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, *pieces: bytes) -> None:
        """Send each piece as a segment of its own; it has been taken when the next one goes."""
        self._pass(self.client, self.server, pieces)

    def answer(self, *pieces: bytes) -> None:
        self._pass(self.server, self.client, pieces)

    @staticmethod
    def _pass(sender: socket.socket, taker: socket.socket, pieces: tuple[bytes, ...]) -> None:
        for piece in pieces:
            sender.sendall(piece)
            left = len(piece)
            while left:
                left -= len(taker.recv(left))

    def close(self) -> None:
        self.client.close()
        self.server.close()
