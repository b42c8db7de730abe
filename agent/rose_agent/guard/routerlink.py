"""What a router hears of a slot's engine, over a stream that begins with the first grant.

Next step: ``rose_agent.attach`` keeps the stream; ``rose_core.wire.routing`` has its messages.
"""

from __future__ import annotations

import asyncio

from rose_agent.attach import Attachment
from rose_core.wire.host import EngineState, EngineStatus
from rose_core.wire.routing import EngineKind, EngineUpdate
from rose_core.wire.sync import Grant


class RouterLink:
    """The slot's stream to the router that its grant names.

    Args:
        token: the installation's, for the router.

    Attributes:
        told: what the router was told last.
    """

    def __init__(self, token: str) -> None:
        self.told: EngineUpdate | None = None
        self._token = token
        self._attachment: Attachment | None = None
        self._task: asyncio.Task[None] | None = None

    def tell(self, address: str, update: EngineUpdate) -> None:
        """Say how the engine stands; the first word begins the stream."""
        if self._attachment is None:
            self._attachment = Attachment(address, self._token)
            self._task = asyncio.create_task(self._attachment.run())
        self.told = update
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
) -> EngineUpdate:
    """How the engine of a grant stands; ``token`` is what the router shows to the engine."""
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
        kv_tokens=grant.engine.kv_tokens,
        vocabulary=status.vocabulary if status else 0,
        context_tokens=grant.engine.context_tokens,
        reuses_kv=grant.engine.kv_policy == "Reuse",
        version=status.version if status and serving else "",
        digest=status.digest if status and serving else "",
        leaving=leaving,
    )
