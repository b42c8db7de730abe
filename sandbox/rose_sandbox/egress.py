"""The way out of a sandbox: a small HTTP proxy at ``127.0.0.1:3128`` of its network.

It listens inside the sandbox's network, or at a socket that something in the sandbox carries
connections to, and dials from the host's, so a sandbox has no network of its own. Only the hosts
that were allowed are dialled, and every request is told before it is sent.

A pattern is never enough for the node itself, its loopback, its link or where clouds serve a
machine's credentials, whatever a name resolves to: such an address must be allowed literally.

| bound | |
|---|---|
| requests at the same time | 16 |
| head of a request | 64 KiB |
| body and answer | 64 MiB each, 60 s |
"""

from __future__ import annotations

import asyncio
import fnmatch
import ipaddress
import os
import socket
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from urllib.parse import SplitResult, urlsplit

from rose_core.sandboxes.networks import Network, inner, may_reach
from rose_core.sandboxes.outside import EgressEffect
from rose_sandbox.runtimes import kernel
from rose_sandbox.runtimes.runtime import Facts
from rose_wire.local import stop_accepting

PORT = 3128
MOST = 16
HEAD_BYTES = 64 * 1024
BODY_BYTES = 64 * 1024 * 1024
SECONDS = 60.0

_OF_CLOUDS = tuple(
    ipaddress.ip_network(one)
    for one in (
        "100.100.100.200/32",  # Alibaba
        "168.63.129.16/32",  # Azure, beside the link's
        "192.0.0.192/32",  # Oracle, Compute Classic
        "fd00:ec2::/32",  # AWS: metadata, and the credentials of EKS pods
        "fd00:42::42/128",  # Scaleway
        "fd20:ce::254/128",  # Google
    )
)
"""Where clouds serve a machine what only it may know, other than at its link (169.254.0.0/16)."""

RecordEffect = Callable[[EgressEffect], Awaitable[None]]


class Egress:
    """The proxy of one sandbox.

    Args:
        allowed: hosts as shell patterns.
        record: is told each request before it is sent; what it raises keeps the request in.
        networks: where addresses must lie, too; None: anywhere.
        connected: entered for as long as the sandbox has a connection.
    """

    def __init__(
        self,
        allowed: Sequence[str],
        record: RecordEffect,
        networks: Sequence[Network] | None = None,
        connected: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._connected = connected
        self._allowed, self._record, self._networks = tuple(allowed), record, networks
        self._server: asyncio.Server | None = None
        self._free = asyncio.Semaphore(MOST)
        self._running: set[asyncio.Task[None]] = set()

    async def open(self, facts: Facts) -> None:
        """Listen where a sandbox of these facts finds it.

        Raises:
            OSError: it is gone, or something listens there.
        """
        if facts.door is not None:
            await self.listen_at(facts.door)
        elif facts.init is not None:
            await self.listen(facts.init)

    async def listen(self, pid: int, port: int = PORT) -> None:
        """Listen in the network of a process.

        Raises:
            OSError: it is gone, or something listens there.
        """
        made: list[socket.socket] = []
        failed: list[OSError] = []

        def enter() -> None:
            try:
                made.append(kernel.socket_of(pid))
            except OSError as error:
                failed.append(error)

        thread = threading.Thread(target=enter)  # entering spoils a thread: one of its own
        thread.start()
        await asyncio.to_thread(thread.join)
        if failed:
            raise failed[0]
        made[0].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made[0].bind(("127.0.0.1", port))
        await self.serve(made[0])

    async def listen_at(self, door: Path) -> None:
        """Listen at a path that the sandbox's root may connect to.

        Raises:
            OSError: it cannot be made.
        """
        door.unlink(missing_ok=True)  # noqa: ASYNC240 - microseconds
        self._server = await asyncio.start_unix_server(self._met, door, limit=HEAD_BYTES)
        os.chown(door, kernel.FIRST_ID, kernel.FIRST_ID)
        door.chmod(0o600)  # noqa: ASYNC240 - as above

    async def serve(self, listener: socket.socket) -> None:
        """Answer at a socket that is bound."""
        self._server = await asyncio.start_server(self._met, sock=listener, limit=HEAD_BYTES)

    async def close(self) -> None:
        """Hang up; a connection that lives on would keep the sandbox from being saved."""
        if self._server is not None:
            await stop_accepting(self._server)
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    async def _met(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 - a handler is a task
        self._running.add(task)
        try:
            with self._connected():
                async with self._free, asyncio.timeout(SECONDS):
                    await self._answer(reader, writer)
        except (OSError, TimeoutError, ValueError, asyncio.IncompleteReadError):
            pass  # the sandbox sees a connection that ends
        finally:
            self._running.discard(task)
            writer.close()

    async def _reachable(self, host: str, port: int) -> list[str]:
        """The addresses of a host that is allowed.

        Raises:
            _Refused: it is not; or one is the node's, its link's or its cloud's, and was not
                allowed literally; or none lies where the sandbox may reach.
            OSError: the name is not known.
        """
        if not any(fnmatch.fnmatchcase(host, one) for one in self._allowed):
            raise _Refused(
                403, f"host {host!r} is not allowed; start the host with --egress for it"
            )
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        addresses = list(dict.fromkeys(str(entry[4][0]) for entry in found))
        for one in addresses:
            if one not in self._allowed and is_near(one):
                raise _Refused(
                    403,
                    f"host {host!r} is {one}, the node's own, its link's or its cloud's; start "
                    f"the host with --egress {one} if sandboxes ought to reach it",
                )
        if self._networks is None:
            return addresses
        kept = [one for one in addresses if may_reach(self._networks, one, port)]
        if not kept:
            raise _Refused(
                403,
                f"host {host!r} is {', '.join(addresses)}, to whose port {port} the sandbox's "
                "template does not let it",
            )
        return kept

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            request = await _read_request(reader)
            addresses = await self._reachable(request.host, request.port)
            length = request.body_bytes()
            await self._record_effect(request)
        except _Refused as refused:
            return await _respond(writer, refused.status, str(refused))
        there, out = await _dialled(addresses, request.port)
        try:
            if request.tunnels:
                writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
                await asyncio.gather(_copy(reader, out), _copy(there, writer))
                return None
            out.write(request.forwarded_head())
            if length:
                out.write(await reader.readexactly(length))
            await out.drain()
            await _copy(there, writer)
        finally:
            out.close()
        return None

    async def _record_effect(self, request: _Request) -> None:
        effect = EgressEffect(
            0, request.method, request.shown, keyed="idempotency-key" in request.fields
        )
        try:
            await self._record(effect)
        except Exception as error:  # whatever it is, nothing unrecorded goes out
            raise _Refused(503, f"the effect cannot be recorded: {error}") from error


class _Refused(Exception):
    """A request that goes nowhere; the text is its answer's body.

    Attributes:
        status: of the answer.
    """

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


@dataclass(frozen=True)
class _Request:
    """The head of a proxied request.

    Attributes:
        method: ``CONNECT`` for a tunnel.
        url: of the target; that of a tunnel has a host and a port alone.
        lines: header lines as they came.
    """

    method: str
    url: SplitResult
    lines: tuple[str, ...]

    @property
    def tunnels(self) -> bool:
        return self.method == "CONNECT"

    @property
    def host(self) -> str:
        return self.url.hostname or ""

    @property
    def port(self) -> int:
        return self.url.port or (443 if self.tunnels else 80)

    @property
    def path(self) -> str:
        return self.url.path or "/"

    @property
    def shown(self) -> str:
        """What is recorded of the target: no query, which may hold a secret."""
        return f"{self.host}:{self.port}" + ("" if self.tunnels else self.path)

    @cached_property
    def fields(self) -> Mapping[str, str]:
        parts = (line.partition(":") for line in self.lines if line)
        return {name.strip().lower(): value.strip() for name, _, value in parts}

    def body_bytes(self) -> int:
        """Length of the body that follows.

        Raises:
            _Refused: it has no length that is known, or is too long.
            ValueError: the length is no number.
        """
        if "transfer-encoding" in self.fields:
            raise _Refused(411, "send a Content-Length")
        length = int(self.fields.get("content-length", "0"))
        if not 0 <= length <= BODY_BYTES:
            raise _Refused(413, "the body is over 64 MiB")
        return length

    def forwarded_head(self) -> bytes:
        """The head as the server gets it: without what is between the caller and this proxy."""
        query = f"?{self.url.query}" if self.url.query else ""
        kept = [line for line in self.lines if line and not _of_the_hop(line)]
        # The host that was allowed, not another one behind the same address.
        own = [f"Host: {self.url.netloc.rpartition('@')[2]}", "Connection: close"]
        text = "\r\n".join([f"{self.method} {self.path}{query} HTTP/1.1", *own, *kept])
        return f"{text}\r\n\r\n".encode("latin-1")


async def _read_request(reader: asyncio.StreamReader) -> _Request:
    """The head of the next request.

    Raises:
        _Refused: it is too long, or where it ends or its body does is ambiguous.
        ValueError: its target is no URL.
    """
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.LimitOverrunError:
        raise _Refused(431, "the request's head is over 64 KiB") from None
    line, *lines = head.decode("latin-1").split("\r\n")
    parts = line.split(" ")
    if len(parts) != 3:
        raise _Refused(400, "no request line")
    if any(mark in one for one in (line, *lines) for mark in "\r\n\0"):
        # Servers that take one for an end of line would see a request that was never recorded.
        raise _Refused(400, "a control character in the request's head")
    if sum(one.partition(":")[0].strip().lower() == "content-length" for one in lines) > 1:
        raise _Refused(400, "two lengths: where this request ends is not sure")
    method, target, _ = parts
    url = urlsplit(f"//{target}" if method == "CONNECT" else target)
    return _Request(method, url, tuple(lines))


async def _dialled(
    addresses: Sequence[str], port: int
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection to the first address that answers; the name is not resolved a second time."""
    for address in addresses[:-1]:
        with suppress(OSError):
            return await asyncio.open_connection(address, port)
    return await asyncio.open_connection(addresses[-1], port)


def is_near(address: str) -> bool:
    """Whether an address is the node's own, of its loopback, link or cloud, or of nobody at all.

    The node's own are those of the network that this process is in: in a pod the pod's.
    """
    found = ipaddress.ip_address(address.partition("%")[0])
    # Whatever way an IPv4 address is written in, it is that address which is dialled.
    if (within := inner(found)) is not None and is_near(str(within)):
        return True
    if found.is_loopback or found.is_link_local or found.is_multicast or found.is_unspecified:
        return True
    if any(found in one for one in _OF_CLOUDS):
        return True
    family = socket.AF_INET if found.version == 4 else socket.AF_INET6
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((str(found), 0))  # the kernel lets only its own addresses be bound
        except OSError:
            return False
    return True


def _of_the_hop(line: str) -> bool:
    name = line.partition(":")[0].strip().lower()
    return name in {"host", "connection", "proxy-connection", "proxy-authorization", "keep-alive"}


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    left = BODY_BYTES
    while left > 0 and (data := await reader.read(min(left, 64 * 1024))):
        writer.write(data)
        await writer.drain()
        left -= len(data)
    with suppress(OSError):
        writer.write_eof()


async def _respond(writer: asyncio.StreamWriter, status: int, text: str) -> None:
    body = f"{text}\n".encode()
    head = f"HTTP/1.1 {status} ROSE\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    writer.write(head.encode() + body)
    await writer.drain()
