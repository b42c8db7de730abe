"""Rung 4 for one engine: it releases its memory, stays stopped, and takes the memory back.

| state | order | what happens | next |
|---|---|---|---|
| Serving | release | measure; cut its turns; errand; plugin releases; measure | Dormant |
| Serving | release | plugin refuses, nothing changed | Serving, ``can_dormant`` false |
| Serving | release | memory is not free, or no answer in time | ended, started anew |
| Dormant | activate | restored at a boundary under an open permit | Serving, no version |
| Dormant | activate | gate closed meanwhile | Dormant, ordered again |
| Dormant | activate | restore failed | ended, started anew |

The release runs in an *errand*: the tree may move for a few seconds although its permit is closed,
and the plugin, which waits for that permit, computes nothing. The errand ends by the enforcer's own
clock. What was attested is void from the first step on: weight-sync attests anew what is restored.
Next step: ``rose_engines.weights.memory`` releases and restores inside the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from rose_agent.devices.usage import MemoryMeter
from rose_agent.host import metrics
from rose_agent.host.enforcement.enforcer import EnforcedEngine
from rose_agent.host.slots.site import Site
from rose_core.devices.dormancy import Dormancy, judge
from rose_core.host_reasons import HostReason
from rose_core.wire.host import EngineState
from rose_engines.errors import CommitRefused, EngineUnavailable
from rose_engines.node.rundir import SlotDir
from rose_engines.weights.control import ControlClient

_log = logging.getLogger(__name__)

# The guard's ladder gives rung 4 five seconds.
ERRAND_SECONDS = 4.0
# An activation waits for an open permit and reads the model's weights.
ACTIVATION_SECONDS = 120.0
_BOUNDARY_SECONDS = 5.0
# Pages that were let go of are off the books a moment later.
_MEASURE_SECONDS = 0.5


class DormancySubject(Protocol):
    """What this needs of an engine's life."""

    folder: SlotDir
    watched: EnforcedEngine

    @property
    def state(self) -> EngineState:
        """State of the engine."""

    def held_bytes(self, meter: MemoryMeter) -> int | None:
        """Memory that the engine's processes hold; None = unknown."""

    def renew_weights(self) -> None:
        """Declare what was attested void, from this moment on."""

    def enter(self, state: EngineState, reason: HostReason) -> None:
        """Change the state."""

    def fail(self, reason: HostReason, message: str) -> None:
        """End the process and start anew."""


@dataclass
class EngineDormancy:
    """Releases the memory of one engine and takes it back.

    Attributes:
        refusal: why it cannot be dormant; forgotten with the process.
        residue_bytes: what it still holds while it is dormant.
        released_bytes: what it let go of.
    """

    subject: DormancySubject
    site: Site
    cut: Callable[[], None]
    refusal: str = ""
    residue_bytes: int | None = None
    released_bytes: int = 0
    _task: asyncio.Task[None] | None = field(default=None, repr=False)

    @property
    def is_possible(self) -> bool:
        """The engine serves or is dormant, and has not refused so far."""
        serving = self.subject.state in {EngineState.SERVING, EngineState.DORMANT}
        return serving and not self.refusal

    def order(self, *, dormant: bool) -> None:
        """Begin in the background, unless the engine is there already or on its way."""
        wanted = EngineState.SERVING if dormant else EngineState.DORMANT
        if self.subject.state is not wanted or (self._task is not None and not self._task.done()):
            return
        self._task = asyncio.create_task(self._release() if dormant else self._activate())

    async def forget(self) -> None:
        """The process has ended: drop what is under way and what is known about it."""
        task, self._task = self._task, None
        if task is not None and task is not asyncio.current_task():
            task.cancel()
            await asyncio.wait({task})
        self._residue(None)
        self.refusal = ""

    async def _release(self) -> None:
        began = time.monotonic()
        before = await self._held()
        self.cut()
        self.subject.renew_weights()
        try:
            claimed = await self._order_release()
        except CommitRefused as error:
            self._note_refusal(error)
            return
        except EngineUnavailable as error:
            self._count("NoAnswer")
            message = f"the engine did not release its memory: {error}"
            self.subject.fail(HostReason.DORMANCY_FAILED, message)
            return
        finally:
            self.subject.watched.grant_errand(0.0)
            self.site.enforcer.wake()
        verdict = await self._measured(before, claimed)
        self._count(verdict.refusal or "Dormant")
        metrics.RELEASE_SECONDS.observe(time.monotonic() - began)
        if not verdict.accepted:
            self.subject.fail(verdict.refusal, verdict.message)
            return
        self._residue(verdict.residue_bytes)
        self.released_bytes = verdict.released_bytes
        metrics.RELEASED_BYTES.inc(verdict.released_bytes)
        _log.info("%s: released %d bytes", self.subject.watched.name, verdict.released_bytes)
        self.subject.enter(EngineState.DORMANT, HostReason.MEMORY_RELEASED)

    async def _order_release(self) -> int:
        self.subject.watched.grant_errand(ERRAND_SECONDS)
        self.site.enforcer.wake()
        try:
            async with asyncio.timeout(ERRAND_SECONDS), await self._plugin() as plugin:
                return (await plugin.release(ERRAND_SECONDS / 2)).claimed_bytes
        except TimeoutError as error:
            raise EngineUnavailable(f"no answer in {ERRAND_SECONDS:.0f} s") from error

    async def _plugin(self) -> ControlClient:
        """Connect; an engine that has just become ready may open its socket a moment later."""
        while True:
            with contextlib.suppress(EngineUnavailable):
                return await ControlClient.connect(self.subject.folder.plugin_socket)
            await asyncio.sleep(0.05)

    async def _held(self) -> int | None:
        meter = self.site.meter
        return await self.site.ask(lambda: self.subject.held_bytes(meter))

    async def _measured(self, before: int | None, claimed: int) -> Dormancy:
        deadline = time.monotonic() + _MEASURE_SECONDS
        while True:
            verdict = judge(before, await self._held(), claimed)
            if verdict.accepted or time.monotonic() > deadline:
                return verdict
            await asyncio.sleep(0.05)

    def _note_refusal(self, error: CommitRefused) -> None:
        self._count(error.reason)
        if error.reason == "Broken":
            self.subject.fail(HostReason.BROKEN_WEIGHTS, error.message)
            return
        self.refusal = str(error)
        _log.warning("%s cannot be dormant: %s", self.subject.watched.name, error)

    async def _activate(self) -> None:
        began = time.monotonic()
        try:
            async with asyncio.timeout(ACTIVATION_SECONDS), await self._plugin() as plugin:
                await plugin.activate(_BOUNDARY_SECONDS)
        except CommitRefused as error:
            if error.reason != "Busy":
                self._count(error.reason)
                self.subject.fail(HostReason.BROKEN_WEIGHTS, error.message)
            return
        except (EngineUnavailable, TimeoutError) as error:
            # Stopped meanwhile, most likely: the guard orders again while there is slack.
            _log.info("%s: not activated yet: %s", self.subject.watched.name, error)
            return
        self._count("Activated")
        metrics.ACTIVATION_SECONDS.observe(time.monotonic() - began)
        self._residue(None)
        self.subject.renew_weights()
        self.subject.enter(EngineState.SERVING, HostReason.NONE)

    def _residue(self, held: int | None) -> None:
        metrics.RESIDUE_BYTES.inc((held or 0) - (self.residue_bytes or 0))
        self.residue_bytes = held
        self.released_bytes = 0

    @staticmethod
    def _count(outcome: str) -> None:
        metrics.DORMANCY.labels(outcome=outcome).inc()
