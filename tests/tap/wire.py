"""A bad network between two namespaces: delay, loss, reordering, partition, packet by packet.

What ``tc netem`` does, for kernels that have no netem: a thread takes each frame from one end and
gives it to the other, late, out of order, or not at all.
"""

from __future__ import annotations

import array
import fcntl
import heapq
import itertools
import random
import select
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rose_agent.tap import sockets
from tests.tap.net import Namespace, namespace

_ANY = 0x0003
_SIOCETHTOOL = 0x8946
# Checksums and segments are to be made before a frame is taken, not by a card that is not there.
_OFFLOADS = (0x17, 0x19, 0x1F, 0x24, 0x2C)


@dataclass
class Weather:
    """How the network is; seconds and shares. Jitter above the gap of packets reorders them."""

    delay: float = 0.0
    jitter: float = 0.0
    loss: float = 0.0
    cut: bool = False


class BadWire(threading.Thread):
    """Carries frames between two interfaces of this namespace until closed."""

    def __init__(self, middle: Namespace, ends: tuple[str, str], seed: int) -> None:
        super().__init__(daemon=True)
        self.weather = Weather()
        self.seen: Counter[str] = Counter()
        self._chance = random.Random(seed)
        self._ending = False
        self._order = itertools.count()
        self._late: list[tuple[float, int, int, bytes]] = []
        self._sockets = []
        for end in ends:
            with sockets.namespace(middle.path):
                one = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ANY))
            one.bind((end, _ANY))
            self._sockets.append(one)

    def run(self) -> None:
        number = {one.fileno(): index for index, one in enumerate(self._sockets)}
        while not self._ending:
            pause = max(0.0, self._late[0][0] - time.monotonic()) if self._late else 0.05
            ready, _, _ = select.select(self._sockets, [], [], min(pause, 0.05))
            for one in ready:
                frame, address = one.recvfrom(65536)
                if address[2] != socket.PACKET_OUTGOING:
                    self._take(1 - number[one.fileno()], frame)
            self._give()

    def _take(self, to: int, frame: bytes) -> None:
        now = self.weather
        if now.cut or self._chance.random() < now.loss:
            self.seen["lost"] += 1
            return
        due = time.monotonic() + now.delay + self._chance.uniform(0, now.jitter)
        if any(other[0] > due and other[2] == to for other in self._late):
            self.seen["reordered"] += 1
        heapq.heappush(self._late, (due, next(self._order), to, frame))

    def _give(self) -> None:
        while self._late and self._late[0][0] <= time.monotonic():
            _, _, to, frame = heapq.heappop(self._late)
            if self.weather.cut:
                self.seen["lost"] += 1
                continue
            self.seen["carried"] += 1
            self._sockets[to].send(frame)

    def close(self) -> None:
        self._ending = True
        self.join(10)
        for one in self._sockets:
            one.close()


def _plain(inside: Namespace) -> None:
    """Frames of ``eth0`` carry their checksums and are no longer than the link allows."""
    with sockets.namespace(inside.path), socket.socket() as asked:
        for offload in _OFFLOADS:
            value = array.array("B", struct.pack("II", offload, 0))
            request = struct.pack("16sP", b"eth0", value.buffer_info()[0])
            try:
                fcntl.ioctl(asked, _SIOCETHTOOL, request)
            except OSError:
                continue  # this kernel's veth has no such offload


@contextmanager
def bad_wire(near: Namespace, far: Namespace, seed: int) -> Iterator[BadWire]:
    """Join two namespaces by ``eth0``: 10.78.0.1 and 10.78.0.2."""
    with namespace() as middle:
        for number, one in enumerate((near, far), start=1):
            end = ("peer", "name", f"end{number}", "netns", str(middle.holder.pid))
            one.ip("link", "add", "eth0", "type", "veth", *end)
            one.ip("addr", "add", f"10.78.0.{number}/24", "dev", "eth0")
            one.ip("link", "set", "eth0", "up")
            middle.ip("link", "set", f"end{number}", "up")
            _plain(one)
        wire = BadWire(middle, ("end1", "end2"), seed)
        wire.start()
        try:
            yield wire
        finally:
            wire.close()
