"""A dedicated engine: same host, no guard; the permit is held open by the host itself.

The host orders one engine from a file, and attaches it to the lease's router as
``EngineKind.DEDICATED``. What the router may use is what weight-sync has attested
(``weights.json``); until then the update carries no version and gets no turns.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator

import grpc.aio

from rose_agent.host.options.dedicated_file import DedicatedFile
from rose_agent.host.slots.engine_host import EngineHost
from rose_core.wire.host import EngineState, EnsureEngine, HostStatusRequest
from rose_core.wire.routing import EngineKind, EngineUpdate
from rose_wire import flags
from rose_wire.errors import WireError
from rose_wire.rpc import connect, converse
from rose_wire.services import ATTACH

_log = logging.getLogger(__name__)

# How often the engine's state is looked at; it is sent when it changed, and every second.
_LOOK_SECONDS = 0.1
_SEND_SECONDS = 1.0
_RETRY_SECONDS = 1.0


class DedicatedAttachment:
    """Keeps the router informed about one engine until ``leave``."""

    def __init__(
        self, host: EngineHost, file: DedicatedFile, order: EnsureEngine, lease: str
    ) -> None:
        self._host = host
        self._file = file
        self._order = order
        self._lease = lease
        self._leaving = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self, router: str, token: str) -> None:
        """Dial the router; returns at once."""
        self._task = asyncio.create_task(self._attach(router, token), name="attach")

    async def leave(self) -> None:
        """Tell the router that the engine will not come back, and hang up."""
        self._leaving.set()
        if self._task is not None:
            await asyncio.wait({self._task}, timeout=2.0)
            self._task.cancel()
            await asyncio.wait({self._task})

    async def update(self) -> EngineUpdate:
        """What the router must know now."""
        status = await self._host.status(HostStatusRequest())
        ours = next((engine for engine in status.engines if engine.slot == self._order.slot), None)
        serving = ours is not None and ours.state is EngineState.SERVING
        stopped = ours is None or bool(ours.reason)
        return EngineUpdate(
            engine=self._file.name,
            kind=EngineKind.DEDICATED,
            lease=self._lease,
            url=self._host.endpoint_of(self._order.slot.uid),
            token=self._order.token,
            gate_open=serving and not stopped and not self._leaving.is_set(),
            cap=self._file.cap or self._file.max_running,
            kv_tokens=self._file.kv_tokens,
            vocabulary=ours.vocabulary if ours is not None else 0,
            context_tokens=self._order.engine.context_tokens,
            tokenizer=ours.tokenizer if ours is not None else "",
            drafts=ours.drafts if ours is not None else False,
            refuses=ours.refuses if ours is not None else (),
            version=ours.version if ours is not None else "",
            digest=ours.digest if ours is not None else "",
            head=ours.head if ours is not None else "",
            leaving=self._leaving.is_set(),
            certificates=status.certificates,
            adapters=ours.adapters if ours is not None else (),
        )

    async def _updates(self) -> AsyncIterator[EngineUpdate]:
        """The present state, again when it changed, and every second."""
        loop = asyncio.get_running_loop()
        last: EngineUpdate | None = None
        due = 0.0
        while last is None or not last.leaving:
            update = await self.update()
            if update != last or loop.time() >= due:
                last, due = update, loop.time() + _SEND_SECONDS
                yield update
            await asyncio.sleep(_LOOK_SECONDS)

    async def _attach(self, router: str, token: str) -> None:
        while True:
            channel: grpc.aio.Channel = connect(router)
            try:
                async for _note in converse(channel, ATTACH, self._updates(), token=token):
                    pass
            except WireError as error:
                _log.warning("router %s: %s", router, error)
            finally:
                await channel.close()
            if self._leaving.is_set():
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_RETRY_SECONDS):
                    await self._leaving.wait()


async def begin(arguments: argparse.Namespace, host: EngineHost) -> DedicatedAttachment:
    """Order the engine of ``--dedicated`` and attach it.

    Raises:
        BadInput: the file is wrong.
        Refused: the host cannot run it.
    """
    file = DedicatedFile.load(arguments.dedicated)
    order = file.order()
    await host.ensure(order)
    attachment = DedicatedAttachment(host, file, order, arguments.lease)
    attachment.start(arguments.router, flags.token(arguments.token_file))
    return attachment
