"""Reports a slot's engine to its router: gate, cap, attested version; a stream for each engine.

It begins with the first grant. The newest update replaces the one before, so a slow router never
sees a stale queue. A closed gate is sent at once. The stream connects again by itself; while it is
down the router treats the gate as closed. Next step: ``rose_core.wire.routing`` has its messages.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator

import grpc.aio
import msgspec

from rose_agent.guard import metrics
from rose_core.wire.host import EngineState, EngineStatus
from rose_core.wire.routing import AdapterVersion, EngineKind, EngineUpdate
from rose_core.wire.sync import Grant, RouterProof
from rose_wire import rpc, tls
from rose_wire.errors import WireError
from rose_wire.services import ATTACH

_log = logging.getLogger(__name__)
_NONE = RouterProof()
_RETRY_SECONDS = (0.1, 0.2, 0.5, 1.0, 2.0)


class Attachment:
    """The stream of one engine.

    Args:
        router: ``host:port``.
        token: the installation's bearer token, for a router that knows no other.

    Attributes:
        proof: by what this router and we know each other; the newest grant's.
    """

    def __init__(self, router: str, token: str, proof: RouterProof = _NONE) -> None:
        self._router = router
        self._token = token
        self.proof = proof
        self._update: EngineUpdate | None = None
        self._changed = asyncio.Event()

    def set(self, update: EngineUpdate) -> None:
        """Send this as soon as possible; an equal update is not sent again."""
        if update != self._update:
            self._update = update
            self._changed.set()

    def leave(self) -> None:
        """The engine will not come back: close its gate and say so."""
        if self._update is not None:
            self.set(msgspec.structs.replace(self._update, gate_open=False, leaving=True))

    async def run(self) -> None:
        """Stay attached until cancelled."""
        attempt = 0
        proof, channel = self.proof, self._connect()
        try:
            while True:
                token = proof.token or self._token
                try:
                    async for _ in rpc.converse(channel, ATTACH, self._updates(), token=token):
                        attempt = 0
                    outcome = "ended"
                except WireError as error:
                    outcome = "failed"
                    _log.debug("router %s: %s", self._router, error)
                metrics.ATTACHES.labels(outcome).inc()
                await asyncio.sleep(_RETRY_SECONDS[min(attempt, len(_RETRY_SECONDS) - 1)])
                attempt += 1
                # After a failure, too: with the node's newest certificate.
                if outcome == "failed" or self.proof != proof:
                    await channel.close()
                    proof, channel = self.proof, self._connect()
        finally:
            await channel.close()

    def _connect(self) -> grpc.aio.Channel:
        authority = self.proof.authority
        if not authority or not self._router.startswith(tls.SCHEME):
            return rpc.connect(self._router)
        shown = tls.client_credentials(authority, tls.own_identity())
        return rpc.connect(self._router, credentials=shown)

    async def _updates(self) -> AsyncIterator[EngineUpdate]:
        sent: EngineUpdate | None = None
        while True:
            self._changed.clear()
            if self._update is not None and self._update != sent:
                sent = self._update
                yield sent
                continue
            await self._changed.wait()


class RouterLink:
    """The slot's stream to the router that its grant names.

    Args:
        token: the installation's, for a router whose grant brings none.

    Attributes:
        last_update: what the router was sent last.
    """

    def __init__(self, token: str) -> None:
        self.last_update: EngineUpdate | None = None
        self._token = token
        self._attachment: Attachment | None = None
        self._task: asyncio.Task[None] | None = None

    def publish(self, grant: Grant, update: EngineUpdate) -> None:
        """Publish how the engine stands; the first update begins the stream."""
        if self._attachment is None:
            self._attachment = Attachment(grant.router, self._token, grant.proof)
            self._task = asyncio.create_task(self._attachment.run())
        self.last_update = update
        self._attachment.proof = grant.proof
        self._attachment.set(update)

    def leave(self) -> None:
        """The engine leaves, if it was ever there."""
        if self._attachment is not None:
            self._attachment.leave()

    def close(self) -> asyncio.Task[None] | None:
        """End the stream; returns its task, if it ever began, to be awaited."""
        if self._task is not None:
            self._task.cancel()
        return self._task


def update_of(
    grant: Grant,
    status: EngineStatus | None,
    token: str,
    *,
    gate_open: bool,
    leaving: bool,
    cap: int,
    device_class: str = "",
    slowdown: float = 0.0,
    certificates: tuple[str, ...] = (),
) -> EngineUpdate:
    """What a router learns of the engine of a grant.

    Args:
        grant: names slot, lease, pool and what the engine was ordered with.
        status: the host's last; None = it lists no engine.
        token: what the router shows to the engine.
        gate_open: turns may be sent; true only while the engine serves.
        leaving: the engine is being taken back for good.
        cap: most turns at a time.
        device_class: kind of its GPU, for the router's estimates.
        slowdown: of serving beside it, as measured; 0 = unknown.
        certificates: SHA-256 of each that the data route may show, hex.
    """
    serving = status is not None and status.state is EngineState.SERVING
    return EngineUpdate(
        engine=grant.slot_name,
        kind=EngineKind.BORROWED,
        lease=grant.lease,
        url=status.endpoint if status else "",
        token=token,
        pool=grant.pool,
        gate_open=gate_open and serving,
        cap=cap,
        device_class=device_class,
        slowdown=slowdown,
        kv_tokens=grant.engine.kv_tokens,
        vocabulary=status.vocabulary if status else 0,
        context_tokens=grant.engine.context_tokens,
        tokenizer=status.tokenizer if status else "",
        reuses_kv=grant.engine.kv_policy == "Reuse",
        drafts=status.drafts if status else False,
        refuses=status.refuses if status else (),
        version=status.version if status and serving else "",
        digest=status.digest if status and serving else "",
        # Also before the engine has it: from then on nobody begins a turn with what is older.
        head=status.head if status else "",
        leaving=leaving,
        certificates=certificates,
        adapters=status.adapters if status else _runs_of(grant),
    )


def _runs_of(grant: Grant) -> tuple[AdapterVersion, ...]:
    """Runs whose adapters the engine will hold: its host has reported nothing of them yet."""
    if not grant.engine.shares_adapters:
        return ()
    return tuple(map(AdapterVersion, grant.weights.runs))
