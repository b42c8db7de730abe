"""The guard's end of ``host.sock``: the engine host's list of engines, and orders to it.

Next step: ``rose_agent.host.slots.engine_host`` answers; ``slot`` orders.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from pathlib import Path

from rose_core.identity import SlotKey, SlotUid
from rose_core.wire.host import (
    Accepted,
    EngineState,
    EngineStatus,
    EnsureEngine,
    HoldEngine,
    Holder,
    HostStatusRequest,
    LimitMemory,
    SetDormant,
    StopEngine,
)
from rose_core.wire.sync import NodeModel
from rose_engines.node import doorbell
from rose_engines.node.rundir import RunDir
from rose_wire import rpc
from rose_wire.errors import WireError
from rose_wire.services import DORMANT, ENSURE, HOLD, LIMIT, STATUS, STOP

_log = logging.getLogger(__name__)
_STATUS_SECONDS, _SETTLED_SECONDS = 0.5, 1.0
_SETTLED = frozenset({EngineState.SERVING, EngineState.DORMANT, EngineState.GONE})
_CALL_SECONDS = 2.0
ALIVE_NS = 2_500_000_000


class HostLink:
    """Connection to the engine host.

    Args:
        path: ``host.sock``.
        on_status: called after every answered status call.
    """

    def __init__(self, path: Path, on_status: Callable[[], None]) -> None:
        self._path = path
        self._channel = rpc.connect(f"local:{path}")
        self._bell = RunDir(path.parent).enforcer_bell
        self._on_status = on_status
        self._kick = asyncio.Event()
        self._rings_soon = False
        self.engines: dict[SlotUid, EngineStatus] = {}
        self.capabilities: dict[str, str] = {}
        self.certificates: tuple[str, ...] = ()
        self.models: tuple[NodeModel, ...] | None = None
        self.answered_ns = 0
        self.asked_ns = 0

    def is_alive(self, now_ns: int) -> bool:
        """The host has answered lately."""
        return bool(self.answered_ns) and now_ns - self.answered_ns < ALIVE_NS

    def ring(self) -> None:
        """A permit has been opened or closed: the host's enforcer looks now."""
        doorbell.ring(self._bell)

    def ring_soon(self) -> None:
        """Permits have been opened, perhaps several: ring once, when this step is over."""
        if not self._rings_soon:
            self._rings_soon = True
            asyncio.get_running_loop().call_soon(self._ring_once)

    def _ring_once(self) -> None:
        self._rings_soon = False
        self.ring()

    def ask_soon(self) -> None:
        """Ask for the status without waiting for the next turn."""
        self._kick.set()

    async def run(self) -> None:
        """Poll the status until cancelled."""
        try:
            while True:
                answered = await self._poll()
                try:
                    # Not `wait_for`: Python 3.11's can lose a cancellation that meets the event.
                    async with asyncio.timeout(self._pause(answered=answered)):
                        await self._kick.wait()
                except TimeoutError:
                    continue
                self._kick.clear()
                await asyncio.sleep(0.01)  # several wishes, one question
        finally:
            await self._channel.close()

    def _pause(self, *, answered: bool) -> float:
        """Seconds until the next question, which costs 3 ms of CPU: fewer while all is settled."""
        settled = all(engine.state in _SETTLED for engine in self.engines.values())
        return _SETTLED_SECONDS if answered and settled else _STATUS_SECONDS

    async def _poll(self) -> bool:
        asked_ns = time.monotonic_ns()
        try:
            status = await rpc.call(
                self._channel, STATUS, HostStatusRequest(), timeout=_CALL_SECONDS
            )
        except WireError as error:
            _log.debug("engine host: %s", error)
            return False
        self.engines = {engine.slot.uid: engine for engine in status.engines}
        self.capabilities = status.capabilities
        self.models = status.models
        self.certificates = status.certificates
        # What the list says was true at some moment after it was asked for.
        self.asked_ns, self.answered_ns = asked_ns, time.monotonic_ns()
        self._on_status()
        return True

    async def ensure(self, order: EnsureEngine) -> None:
        """Ask for an engine; the effect shows in the status.

        Raises:
            WireError: the host refused or did not answer.
        """
        await rpc.call(self._channel, ENSURE, order, timeout=_CALL_SECONDS)
        self.ask_soon()

    async def stop(self, slot: SlotKey, reason: str) -> None:
        """Ask for an engine's end.

        Raises:
            WireError: the host refused or did not answer.
        """
        order = StopEngine(slot, reason)
        await rpc.call(self._channel, STOP, order, timeout=order.deadline_seconds + _CALL_SECONDS)
        self.ask_soon()

    async def set_dormant(self, slot: SlotKey, *, dormant: bool) -> None:
        """Ask for rung 4, or for the way back; the effect shows in the status.

        Raises:
            WireError: the host refused or did not answer.
        """
        await rpc.call(self._channel, DORMANT, SetDormant(slot, dormant), timeout=_CALL_SECONDS)
        self.ask_soon()

    async def limit_memory(self, slot: SlotKey, permille: int | None, held: int | None) -> None:
        """Send the budget of elastic memory, and what the engine holds by the driver's count.

        Raises:
            WireError: the host refused or did not answer.
        """
        order = LimitMemory(slot, permille, held)
        await rpc.call(self._channel, LIMIT, order, timeout=_CALL_SECONDS)
        self.ask_soon()

    async def hold(self, slot: SlotKey, *, hold: bool) -> Accepted:
        """Hold or let go for the guard.

        Raises:
            WireError: the host refused or did not answer.
        """
        order = HoldEngine(slot, Holder.GUARD, hold)
        return await rpc.call(self._channel, HOLD, order, timeout=_CALL_SECONDS)
