"""The front door: sockets of callers, with limits that no caller can talk the router out of.

| a caller that | meets |
|---|---|
| opens more connections than all together may | closes the oldest that has sent no whole request |
| does so while each of them has | 503 with ``Retry-After``, closed |
| connects and sends no whole request head in time | the connection is closed |
| sends its body slower than ``body_seconds`` allow | 408 |
| reads its stream slower than ``write_seconds`` per event allow | is taken for gone |
| sends a head or a body above the limits | 431 or 400, 413 |

TLS is the listener's: a folder with ``tls.crt`` and ``tls.key``, looked at again for every new
connection, so a renewed certificate needs no restart.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import ssl
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from aiohttp import web

from rose_core.rollouts.router_size import MOST_CONNECTIONS
from rose_router import metrics
from rose_wire import tls
from rose_wire.tls import CERTIFICATE, KEY

HEAD_BYTES = 16 * 1024
_LOOK_SECONDS = 1.0
_BACKLOG = 512
"""Connections that libuv accepts in one go, which takes 30 us each, while everybody waits."""
_FULL_BODY = b'{"type":"Connections","code":503,"message":"too many connections"}'
_FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nConnection: close\r\n"
    b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(_FULL_BODY)
) + _FULL_BODY


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """What callers may take.

    Attributes:
        connections: open at one time.
        head_seconds: until the first whole request head.
        body_seconds: until a body is whole, without the time for which its sender was held back.
        write_seconds: until a caller has read enough to take the next event.
    """

    connections: int = MOST_CONNECTIONS
    head_seconds: float = 15.0
    body_seconds: float = 60.0
    write_seconds: float = 60.0


@dataclass(eq=False)
class LimitedConnection(asyncio.Protocol):
    """One connection: passes everything on to aiohttp's protocol, and counts.

    Attributes:
        make: aiohttp's protocol, which a connection without a word is not worth.
        opened: when it was made, on the clock of all doors.
        named: what the caller's certificate must name; empty = anything.
    """

    make: Callable[[], asyncio.Protocol]
    doors: ConnectionLimiter
    opened: float
    named: str = ""
    transport: asyncio.Transport | None = None
    inner: asyncio.Protocol | None = None
    refused: bool = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A caller has come."""
        # By its duties: uvloop's transports do not inherit from asyncio's.
        self.transport = cast("asyncio.Transport", transport)
        if self.named and self.named not in _names(self.transport):
            self.refused = True
            self.transport.abort()
            return
        if not self.doors.enter(self):
            self.refused = True
            self.transport.write(_FULL)
            self.transport.close()

    def data_received(self, data: bytes) -> None:
        """Bytes of the caller."""
        if self.refused or self.transport is None:
            return
        if self.inner is None:
            self.inner = self.make()
            self.inner.connection_made(self.transport)
        self.inner.data_received(data)

    def eof_received(self) -> bool | None:
        """The caller sends no more."""
        return None if self.inner is None else self.inner.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        """The caller is gone."""
        if not self.refused:
            self.doors.leave(self)
        if self.inner is not None:
            self.inner.connection_lost(exc)

    def pause_writing(self) -> None:
        """The caller reads too slowly."""
        if self.inner is not None:
            self.inner.pause_writing()

    def resume_writing(self) -> None:
        """It has caught up."""
        if self.inner is not None:
            self.inner.resume_writing()


def _names(transport: asyncio.Transport) -> set[str]:
    """The hosts and addresses that the other side's certificate names."""
    certificate = transport.get_extra_info("peercert") or {}
    return {str(name) for _, name in certificate.get("subjectAltName", ())}


class ConnectionLimiter:
    """All connections of callers.

    Args:
        limits: see there.

    Attributes:
        clock: seconds in which the router had time to listen: when it is behind, what callers sent
            lies unread, and their silence is its own.
    """

    def __init__(self, limits: ConnectionLimits) -> None:
        self._limits = limits
        self.clock = 0.0
        self._open: dict[asyncio.Transport, LimitedConnection] = {}
        self._silent: dict[asyncio.Transport, LimitedConnection] = {}  # the oldest first

    def __len__(self) -> int:
        return len(self._open)

    def enter(self, door: LimitedConnection) -> bool:
        """Whether there is room for one more; the oldest that has said nothing gives way."""
        if door.transport is None or not self._room():
            metrics.REFUSED.labels("Connections").inc()
            return False
        self._open[door.transport] = self._silent[door.transport] = door
        metrics.CONNECTIONS.set(len(self._open))
        return True

    def _room(self) -> bool:
        if len(self._open) < self._limits.connections:
            return True
        oldest = next(iter(self._silent), None)
        if oldest is None:
            return False
        self._forget(oldest)
        oldest.abort()
        return True

    def leave(self, door: LimitedConnection) -> None:
        """It has ended."""
        if door.transport is not None:
            self._forget(door.transport)
        metrics.CONNECTIONS.set(len(self._open))

    def _forget(self, transport: asyncio.Transport) -> None:
        self._open.pop(transport, None)
        self._silent.pop(transport, None)

    def note_head(self, transport: asyncio.BaseTransport | None) -> None:
        """A whole request head has come over it: from now on aiohttp's keep-alive watches it."""
        self._silent.pop(cast("asyncio.Transport", transport), None)

    def close_silent(self, opened_before: float = math.inf) -> None:
        """Close those that sent no whole request head: aiohttp knows only of the others."""
        late = itertools.takewhile(lambda one: one[1].opened < opened_before, self._silent.items())
        for transport, _ in list(late):
            transport.abort()

    async def watch(self) -> None:
        """Close those that are silent for too long until cancelled."""
        step = min(1.0, self._limits.head_seconds / 4)
        while True:
            await asyncio.sleep(step)
            self.clock += step
            self.close_silent(opened_before=self.clock - self._limits.head_seconds)


class Certificate:
    """A TLS context whose certificate follows its folder.

    Args:
        folder: with certificate and key.
        trust: authority of the other side, which then must have a certificate too.
        dials: for connections that are made, not taken.

    Raises:
        OSError: certificate or key cannot be read.
        ssl.SSLError: they do not belong together.
    """

    def __init__(self, folder: Path, trust: Path | None = None, *, dials: bool = False) -> None:
        self._folder = folder
        self._seen = self._mark()
        self._looked = time.monotonic()
        purpose = ssl.Purpose.SERVER_AUTH if dials else ssl.Purpose.CLIENT_AUTH
        self.context = ssl.create_default_context(purpose, cafile=trust)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2
        if trust is not None:
            self.context.verify_mode = ssl.CERT_REQUIRED
        tls.check_pair(folder)
        self._load()

    def refresh(self) -> None:
        """Load it again when it was renewed."""
        now = time.monotonic()
        if now - self._looked < _LOOK_SECONDS:
            return
        self._looked = now
        with contextlib.suppress(OSError, ssl.SSLError):  # it is being replaced; look again later
            seen = self._mark()
            if seen != self._seen:
                self._load()
                self._seen = seen

    def _mark(self) -> tuple[int, int]:
        parts = (self._folder / CERTIFICATE, self._folder / KEY)
        return (parts[0].stat().st_mtime_ns, parts[1].stat().st_mtime_ns)

    def _load(self) -> None:
        self.context.load_cert_chain(self._folder / CERTIFICATE, self._folder / KEY)


@contextlib.asynccontextmanager
async def listening(
    server: web.Server,
    doors: ConnectionLimiter,
    address: str,
    tls_dir: Path | None = None,
    client_ca: Path | None = None,
    *,
    named: str = "",
) -> AsyncIterator[int]:
    """Take callers until the block ends.

    Args:
        server: aiohttp's.
        doors: counts connections.
        address: ``host:port``; port 0 picks one.
        tls_dir: folder of certificate and key; without it the port is plain text.
        client_ca: authority of the certificates that callers then must have.
        named: what these must name, too: one authority signs for the routers of all leases.

    Yields:
        The port.

    Raises:
        OSError: the port is taken, or the certificate cannot be read.
    """
    certificate = Certificate(tls_dir, client_ca) if tls_dir else None

    def door() -> LimitedConnection:
        if certificate is not None:
            certificate.refresh()
        return LimitedConnection(server, doors, doors.clock, named)

    host, port = address.rsplit(":", 1)
    loop = asyncio.get_running_loop()
    listener = await loop.create_server(
        door,
        host.strip("[]"),
        int(port),
        backlog=_BACKLOG,
        ssl=certificate.context if certificate else None,
        ssl_handshake_timeout=10.0 if certificate else None,
    )
    watch = asyncio.create_task(doors.watch())
    try:
        yield int(listener.sockets[0].getsockname()[1])
    finally:
        watch.cancel()
        listener.close()
        doors.close_silent()
