"""Learns from the operator who this router is (``--enrol``).

A router that the operator runs mounts no Secret. It has a token of its pod for an audience that
names its lease, shows it to the operator, and is given what it needs for that lease alone
(``rose_core.wire.enrolment``). What can be renewed while turns run is renewed:

| changed | then |
|---|---|
| certificate, at half of its life | a new key and certificate, read at the next handshake |
| keys of callers' service accounts, the lease's list of callers | they hold from now on |
| token of the lease, an authority | the router drains its turns and ends; its pod starts it anew |

Without the operator nothing changes: what was given before is used. Next step: ``main`` listens
with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace

from rose_core.wire.enrolment import EnrolRouterRequest, RouterIdentity
from rose_router.callers import NamedCallers
from rose_router.config import Enrolment, Settings
from rose_router.replicas.peers import Link
from rose_wire import certificates, rpc, tls
from rose_wire.errors import WireError
from rose_wire.service_accounts import ServiceAccounts
from rose_wire.services import ENROL_ROUTER

LOG = logging.getLogger(__name__)

ROUTERS, AGENTS, OPERATOR = "routers.crt", "agents.crt", "operator.crt"
"""Authorities beside the router's own pair."""
_RETRY_SECONDS = (0.5, 1.0, 2.0, 5.0, 15.0)


@dataclass
class Enrolled:
    """A router that knows who it is.

    Attributes:
        settings: with what it was given.
        outdated: set when it was given something that needs a new start.
    """

    settings: Settings
    outdated: asyncio.Event


@contextlib.asynccontextmanager
async def enrolled(settings: Settings) -> AsyncIterator[Enrolled]:
    """Ask until the operator has said who we are, and go on asking until the block ends.

    Raises:
        OSError: the folder for what is given cannot be written.
    """
    if settings.enrolment is None:
        yield Enrolled(settings, asyncio.Event())
        return
    asking = _Asking(settings, settings.enrolment)
    task = asyncio.create_task(asking.run())
    try:
        there = asyncio.create_task(asking.there.wait())
        await asyncio.wait({task, there}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            there.cancel()
            task.result()
        yield Enrolled(asking.settings, asking.outdated)
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


class _Asking:
    """Keeps what the router was given."""

    def __init__(self, settings: Settings, enrolment: Enrolment) -> None:
        self.settings = settings
        self.there, self.outdated = asyncio.Event(), asyncio.Event()
        self._enrolment = enrolment
        self._given: RouterIdentity | None = None
        self._accounts, self._callers = ServiceAccounts(), NamedCallers()

    async def run(self) -> None:
        attempt = 0
        while True:
            try:
                async for _ in self._asked():
                    attempt = 0
            except (WireError, ValueError) as error:
                LOG.warning("%s does not say who this is: %s", self._enrolment.address, error)
                await asyncio.sleep(_RETRY_SECONDS[min(attempt, len(_RETRY_SECONDS) - 1)])
                attempt += 1

    async def _asked(self) -> AsyncIterator[None]:
        """One stream; yields after each word that was taken in."""
        enrolment = self._enrolment
        secure = enrolment.address.startswith(tls.SCHEME)
        key, asked = certificates.request("rose-router") if secure else (b"", b"")
        proof = await asyncio.to_thread(enrolment.token_file.read_text)
        request = EnrolRouterRequest(self.settings.lease, proof.strip(), asked)
        # Shows no certificate: this is where it gets one.
        shown = tls.client_credentials(tls.trusted()) if secure else None
        channel = rpc.connect(enrolment.address, credentials=shown)
        try:
            async for identity in rpc.receive(channel, ENROL_ROUTER, request):
                self._take(identity, key)
                yield
        finally:
            await channel.close()

    def _take(self, identity: RouterIdentity, key: bytes) -> None:
        before = self._given
        if before is not None and _needs_a_start(before, identity):
            LOG.info("token or authorities have changed: leaving, to start anew with them")
            self.outdated.set()
            return
        if identity.certificate and (before is None or identity.certificate != before.certificate):
            certificates.window(identity.certificate)
            files = {tls.KEY: key, tls.CERTIFICATE: identity.certificate}
            authorities = {
                ROUTERS: identity.routers,
                AGENTS: identity.agents,
                OPERATOR: identity.operator,
            }
            certificates.keep(self._enrolment.folder, {**files, **authorities})
        self._accounts.renew([identity.account_keys.encode()] if identity.account_keys else [])
        self._callers.renew(identity.callers)
        self._given = identity
        if before is None:
            self.settings = self._settings_of(identity)
            self.there.set()

    def _settings_of(self, identity: RouterIdentity) -> Settings:
        settings, folder = self.settings, self._enrolment.folder
        known = identity.account_keys or settings.authenticate
        accounts = self._accounts if known else settings.accounts
        settings = replace(
            settings,
            attach_token=identity.token,
            accounts=accounts,
            callers=self._callers,
            batches_token=settings.batches_token or identity.batches,
            ingest_token=settings.ingest_token or identity.ingest,
        )
        if not identity.certificate:
            return settings
        link = None
        if settings.replicas is not None:
            link = Link(folder, folder / ROUTERS, self._enrolment.peer_name)
        return replace(
            settings,
            tls_dir=folder,
            tls_client_ca=folder / AGENTS if identity.agents else None,
            operator_ca=folder / OPERATOR if identity.operator else None,
            link=link,
        )


def _needs_a_start(before: RouterIdentity, now: RouterIdentity) -> bool:
    return any(
        getattr(before, name) != getattr(now, name)
        for name in ("token", "routers", "agents", "operator")
    )
