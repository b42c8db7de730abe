"""What the leases' routers say of their turns, gathered while this operator leads.

The operator dials each router (``DEMAND``) at the address that it gave the router itself, with the
token of its lease and, where there is TLS, its own certificate. So a router needs no right to speak
to the operator, speaks for no lease but its own, and is heard when no engine and so no node is
attached to it. A lease with several replicas is asked at each of them, and what they say is added
up.

Turns are written nowhere: ``snapshot`` hands them to the planner (``rose_core.lending.demand``).
What trainers reported of their trajectories comes into the lease's totals (``status.accounting``).
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import grpc

from rose_core import lending
from rose_core.api import RolloutLease
from rose_core.lending.demand import ReceivedNote, together
from rose_core.wire.routing import DemandNote, DemandRequest
from rose_operator.apply.routers import (
    ATTACH_PORT,
    attach_address,
    replicas_name,
    router_name,
)
from rose_operator.kube.backoff import ExponentialBackoff
from rose_operator.settings import AUTHORITY, Settings
from rose_wire import tls
from rose_wire.bearer import lease_token
from rose_wire.errors import WireError
from rose_wire.rpc import connect, receive
from rose_wire.services import DEMAND

_log = logging.getLogger(__name__)
_LOOK_SECONDS = 2.0
_LONGEST_SECONDS = 15.0  # between attempts to reach a router that does not answer
# A replica that has left is found out by its stream; one that has come, by the next look-up.
_RESOLVE_SECONDS = 10.0


@dataclass(frozen=True)
class RouterAddress:
    """Where one replica of a lease's router is dialled; ``name`` is in its certificate."""

    lease: str
    address: str
    name: str = ""


class Demands:
    """The routers' last words.

    Args:
        leases: those whose routers should be asked now.
        clock: monotonic seconds.
        wake: called when a lease begins to want slots, or no longer does.
        dial: where a lease's router is; the Services of routers by default.
    """

    def __init__(
        self,
        settings: Settings,
        leases: Callable[[], Iterable[RolloutLease]],
        *,
        clock: Callable[[], float],
        wake: Callable[[], None],
        dial: Callable[[RolloutLease], str] | None = None,
    ) -> None:
        self._settings, self._leases = settings, leases
        self._clock, self._wake = clock, wake
        self._dial = dial
        self._received: dict[RouterAddress, ReceivedNote] = {}
        self._streams: dict[RouterAddress, asyncio.Task[None]] = {}
        self._found: dict[str, tuple[float, tuple[RouterAddress, ...]]] = {}

    def total(self, lease: str) -> lending.Demand | None:
        """What all replicas of the lease's router say together; None before one was heard."""
        now = self._clock()
        return together([h for router, h in self._received.items() if router.lease == lease], now)

    def notes(self, lease: str) -> list[DemandNote]:
        """The last note of each replica of the lease's router."""
        return [
            received.note for router, received in self._received.items() if router.lease == lease
        ]

    async def run(self) -> None:
        """Ask the routers that there are, until cancelled."""
        try:
            while True:
                await self.refresh()
                await asyncio.sleep(_LOOK_SECONDS)
        finally:
            tasks = list(self._streams.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def refresh(self) -> None:
        """Begin to ask new routers, and stop asking those that are gone."""
        wanted = {router for lease in self._leases() for router in await self._routers(lease)}
        for router in self._streams.keys() - wanted:
            self._streams.pop(router).cancel()
            self._received.pop(router, None)
        for router in wanted - self._streams.keys():
            self._streams[router] = asyncio.create_task(self._follow(router))

    async def _routers(self, lease: RolloutLease) -> tuple[RouterAddress, ...]:
        key = lease.metadata.key
        name = router_name(lease.metadata.namespace, lease.metadata.name)
        address = self._dial(lease) if self._dial else attach_address(name, self._settings)
        if lease.spec.router.replicas == 1 or self._dial:
            return (RouterAddress(key, address),)
        at, found = self._found.get(key, (float("-inf"), ()))
        if self._clock() - at < _RESOLVE_SECONDS:
            return found
        host = f"{replicas_name(name)}.{self._settings.routers}.svc"
        scheme = tls.SCHEME if self._settings.tls_dir else ""
        certified = address.removeprefix(tls.SCHEME).rpartition(":")[0]
        made = tuple(
            RouterAddress(key, f"{scheme}{one}:{ATTACH_PORT}", certified)
            for one in await _resolve(host)
        )
        self._found[key] = self._clock(), made
        return made

    async def _follow(self, router: RouterAddress) -> None:
        """Listen to one replica, again and again."""
        request = DemandRequest(router.lease)
        token = lease_token(self._settings.token, router.lease)
        rest = ExponentialBackoff(1.0, _LONGEST_SECONDS)
        while True:
            try:
                channel = self._channel(router)
                try:
                    async for note in receive(channel, DEMAND, request, token=token):
                        self._take(router, note)
                        rest.reset()
                finally:
                    await channel.close()
            except (WireError, OSError) as error:
                _log.debug("router %s of lease %s: %s", router.address, router.lease, error)
            await asyncio.sleep(rest.next())

    def _take(self, router: RouterAddress, note: DemandNote) -> None:
        before = self._received.get(router)
        self._received[router] = ReceivedNote(note, self._clock())
        if before is None or bool(before.note.peak_turns) != bool(note.peak_turns):
            self._wake()

    def _channel(self, router: RouterAddress) -> grpc.aio.Channel:
        folder: Path | None = self._settings.tls_dir
        if folder is None:
            return connect(router.address)
        signed = self._settings.router_authority
        trust = folder / AUTHORITY if signed is None else tls.bundle_of(signed)
        credentials = tls.client_credentials(trust, folder)
        return connect(router.address, credentials=credentials, name=router.name)


async def _resolve(host: str) -> list[str]:
    """Addresses behind a name; none while it has none."""
    loop = asyncio.get_running_loop()
    with suppress(OSError):
        found = await loop.getaddrinfo(host, ATTACH_PORT, type=socket.SOCK_STREAM)
        return sorted({str(entry[4][0]) for entry in found})
    return []
