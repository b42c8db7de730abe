"""The other replicas of the lease: who they are, what they must know, what belongs to them.

Replicas find each other by name (``--replicas-dns``, a headless Service). An engine's owner dials
one of them; that one passes its engines' updates on to the others, over the same ATTACH the owner
used, so gates close everywhere at the same moment. A trajectory has its home on one replica; a
request that arrives at another is passed on, streams and all. There is no leader and no database: a
replica that dies takes its live turns along, whose callers ask again; the rest is found anew.

With a ``Link`` both go over TLS on which each side shows a certificate of the installation.

Next: ``forward`` is the HTTP side, ``peer_health`` notices those that hang.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import grpc
import msgspec

from rose_core.rollouts.capacity.replicas import home_of, part_of_cap
from rose_core.wire.routing import EngineUpdate
from rose_router import metrics
from rose_router.engines.fleet import Engine, Fleet
from rose_router.listener import Certificate
from rose_router.replicas.peer_health import BEAT_SECONDS, PeerHealth
from rose_wire import tls
from rose_wire.errors import Refused, Unavailable
from rose_wire.rpc import connect, converse
from rose_wire.services import ATTACH

LOG = logging.getLogger(__name__)
LOOK_SECONDS = 2.0
AGAIN_SECONDS = 0.5
RELAY_BEAT_SECONDS = 1.0
"""After which an update is passed on again although nothing has changed (``attach`` counts)."""
_LOOK_AGAIN_SECONDS = 0.05


@dataclass(frozen=True, slots=True, order=True)
class Peer:
    """A replica.

    Attributes:
        name: the same wherever it is seen from; its address, usually.
        http, attach: where callers and owners reach it.
    """

    name: str
    http: str
    attach: str


@dataclass(frozen=True)
class Link:
    """What replicas show each other: one certificate each, of one authority, for one name.

    Attributes:
        folder: this replica's ``tls.crt`` and ``tls.key``, for both directions.
        authority: file with the authority that the others' certificates must be of.
        name: what they must name; addresses of pods are in no certificate.
    """

    folder: Path
    authority: Path
    name: str

    @cached_property
    def _dialling(self) -> Certificate:
        return Certificate(self.folder, self.authority, dials=True)

    def http(self) -> dict[str, Any]:
        """What a request of aiohttp to a peer must be given."""
        self._dialling.refresh()
        return {"ssl": self._dialling.context, "server_hostname": self.name}

    def grpc(self) -> grpc.ChannelCredentials:
        """What a channel to a peer must be given, read again each time."""
        return tls.client_credentials(self.authority, self.folder)


Resolve = Callable[[], Awaitable[list[Peer]]]


def by_dns(names: str, http_port: int, attach_port: int, *, secure: bool = False) -> Resolve:
    """Replicas behind a headless Service: one per address that the name, or names, have.

    Args:
        names: separated by commas.
        http_port: for requests, the same on every replica.
        attach_port: for updates of engines, likewise.
        secure: they speak TLS.
    """
    http, attach = ("https://", tls.SCHEME) if secure else ("http://", "")

    async def resolve() -> list[Peer]:
        loop = asyncio.get_running_loop()
        found = [
            await loop.getaddrinfo(name, http_port, type=socket.SOCK_STREAM)
            for name in names.split(",")
        ]
        addresses = sorted({str(entry[4][0]) for entries in found for entry in entries})
        hosts = [f"[{one}]" if ":" in one else one for one in addresses]
        return [
            Peer(address, f"{http}{host}:{http_port}", f"{attach}{host}:{attach_port}")
            for address, host in zip(addresses, hosts, strict=True)
        ]

    return resolve


class Peers:
    """The replicas as this one sees them.

    Args:
        me: this replica's name; alone, it never appears in what ``resolve`` finds.
        fleet: its engines.
        resolve: finds all replicas, this one among them.
        token: of ATTACH.
        leaving: whether this replica takes no new turns any more.
        link: how they prove themselves to each other; ``None`` = plain text.
        ask: whether a replica answers; ``None`` = nobody is asked, only connections tell.

    Attributes:
        pulse: who of them answers.
        loops: what looks at them, from ``start`` to ``close``.
    """

    def __init__(
        self,
        me: str,
        fleet: Fleet,
        resolve: Resolve,
        token: str,
        *,
        leaving: Callable[[], bool] = lambda: False,
        link: Link | None = None,
        ask: Callable[[Peer, dict[str, Any]], Awaitable[bool]] | None = None,
    ) -> None:
        self.me = me
        self._link = link
        self._ask = ask
        self.pulse = PeerHealth(self._answers)
        self._leaving = leaving
        self._fleet = fleet
        self._resolve = resolve
        self._token = token
        self._peers: dict[str, Peer] = {}
        self._down: dict[str, float] = {}
        self._relays: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._passed_on = 0
        self.loops: list[asyncio.Task[None]] = []

    def http(self) -> dict[str, Any]:
        """What a request of aiohttp to a replica must be given."""
        return self._link.http() if self._link else {}

    @property
    def others(self) -> list[Peer]:
        """Every replica but this one."""
        return [peer for name, peer in self._peers.items() if name != self.me]

    @property
    def leaving(self) -> bool:
        """Whether this replica takes no new turns of the others any more."""
        return self._leaving()

    def home(self, key: str) -> Peer | None:
        """The replica that a turn belongs to; ``None`` when it is this one.

        Args:
            key: of its trajectory; without one the turn stays, unless this replica is leaving.
        """
        now = asyncio.get_running_loop().time()
        up = {name for name in self._peers if self._up(name, now)} | {self.me}
        if self.leaving:
            up.discard(self.me)
        elif not key:
            return None
        name = home_of(key, up)
        return None if name in {self.me, ""} else self._peers[name]

    def _up(self, name: str, now: float) -> bool:
        return self._down.get(name, 0.0) <= now and not self.pulse.silent(name)

    def mark_lost(self, peer: Peer) -> None:
        """Give its trajectories to others until it answers again."""
        self._down[peer.name] = asyncio.get_running_loop().time() + LOOK_SECONDS

    async def start(self) -> None:
        """Look once, then keep looking."""
        await self._look()
        self.loops = [asyncio.create_task(self._run())]
        if self._ask is not None:
            self.loops.append(asyncio.create_task(self._beat()))

    @contextlib.contextmanager
    def passing_on(self) -> Iterator[None]:
        """A request of a caller of this replica is another's in here."""
        self._passed_on += 1
        try:
            yield
        finally:
            self._passed_on -= 1

    async def finish(self) -> None:
        """Return when all that was passed on has been answered."""
        while self._passed_on:  # noqa: ASYNC110  # once, at the end
            await asyncio.sleep(_LOOK_AGAIN_SECONDS)

    async def close(self) -> None:
        """Let go of the others; callers who still wait for one are told to ask again."""
        self.pulse.end()
        tasks = [*self._relays.values(), *self.loops]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time() + LOOK_SECONDS
        while True:
            self._relay_all()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(due):
                    await self._fleet.changed.wait()
            if loop.time() >= due:
                await self._look()
                due = loop.time() + LOOK_SECONDS

    async def _beat(self) -> None:
        while True:
            await self.pulse.beat([peer.name for peer in self.others])
            await asyncio.sleep(BEAT_SECONDS)

    async def _answers(self, name: str) -> bool:
        peer = self._peers.get(name)
        return peer is None or self._ask is None or await self._ask(peer, self.http())

    async def _look(self) -> None:
        try:
            found = await self._resolve()
        except OSError as error:
            LOG.warning("replicas cannot be looked up, those known stay: %s", error)
            return
        peers = {peer.name: peer for peer in found}
        if peers.keys() != self._peers.keys():
            LOG.info("replicas: %s", sorted(peers))
        self._peers = peers
        names = sorted({*peers, self.me})
        metrics.REPLICAS.set(len(names))
        self._fleet.share_caps(lambda cap: part_of_cap(cap, self.me, names))

    def _relay_all(self) -> None:
        wanted = {
            (peer.name, engine.name): peer
            for peer in self.others
            for engine in self._fleet
            if not engine.update.relayed and engine.detached_at is None
        }
        for key in [key for key in self._relays if key not in wanted]:
            self._relays.pop(key).cancel()
        for key, peer in wanted.items():
            if key not in self._relays or self._relays[key].done():
                self._relays[key] = asyncio.create_task(self._relay(peer, key[1]))

    async def _relay(self, peer: Peer, engine: str) -> None:
        """Play the engine's owner towards a peer; the end of this closes the gate there."""
        while True:
            channel, knows_adapters = self._channel(peer), asyncio.Event()
            try:
                async for note in converse(
                    channel, ATTACH, self._updates(engine, knows_adapters), token=self._token
                ):
                    if note.adapters:
                        knows_adapters.set()
            except (Unavailable, Refused) as error:
                LOG.info("replica %s does not take engine %s: %s", peer.name, engine, error)
            finally:
                await channel.close()
            await asyncio.sleep(AGAIN_SECONDS)

    def _channel(self, peer: Peer) -> grpc.aio.Channel:
        if self._link is None:
            return connect(peer.attach)
        return connect(peer.attach, credentials=self._link.grpc(), name=self._link.name)

    async def _updates(
        self, name: str, knows_adapters: asyncio.Event
    ) -> AsyncIterator[EngineUpdate]:
        while (engine := self._fleet.get(name)) is not None:
            if engine.update.run:
                # A replica of before would place turns of any run on it: an update rolls over them.
                await knows_adapters.wait()
                if (engine := self._fleet.get(name)) is None:
                    return
            yield msgspec.structs.replace(engine.update, gate_open=engine.gate_open, relayed=True)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RELAY_BEAT_SECONDS):
                    await self._change(engine)

    async def _change(self, engine: Engine) -> None:
        """Wait until there is something else to say of the engine."""
        sent = engine.update, engine.gate_open
        while (engine.update, engine.gate_open) == sent and self._fleet.get(engine.name) is engine:
            await self._fleet.changed.wait()
