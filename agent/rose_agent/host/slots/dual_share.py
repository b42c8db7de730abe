"""A slot with two engines at two shares, of which the permit names the one that may compute.

Experimental: no GPU has run it. MPS fixes a share when a process starts, so a slot that wants
another share while serving is busy keeps a second engine for it, loaded and parked at its permit.
Each has its own processes, cgroup, memory, weights and user; they share the permit's memory, in
which one word says whose it is.

| moment | what happens |
|---|---|
| order | both start; each checks for its own memory and share |
| the permit names the other engine | turns of the first are cut, their callers go on at the other |
| status, data route | those of the engine that the permit names |
| hold, stop, end | both |
| rung 4 | refused: under memory pressure both are ended |

Next step: ``slot_engine`` has its sibling for one engine, ``lifecycle`` runs each of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable

import msgspec

from rose_agent.host.slots.lifecycle import EngineLife
from rose_agent.host.slots.site import Site
from rose_agent.host.slots.slot_engine import life_of
from rose_core.devices.memory import overrun
from rose_core.host_reasons import HostReason
from rose_core.identity import SlotUid
from rose_core.wire.host import EngineState, EngineStatus, EnsureEngine, Holder
from rose_engines.node.permit import BUSY_LANE, FIRST_LANE, Permit
from rose_engines.node.rundir import SlotDir

# How soon turns of the engine that was parked are cut.
_LOOK_SECONDS = 0.02


class DualShareEngine:
    """The two engines of one slot.

    Args:
        order: what the guard asked for; its busy share is above zero.
        folder: the slot's folder, with its permit in it.
        changed: called after every change of state.
    """

    def __init__(
        self, order: EnsureEngine, folder: SlotDir, site: Site, changed: Callable[[], None]
    ) -> None:
        self.order = order
        self.folder = folder
        self._site = site
        self._permit = Permit.attach(folder.permit)
        self._lives = {
            FIRST_LANE: life_of(order, folder, site, changed),
            BUSY_LANE: life_of(at_busy_share(order), _linked(folder), site, changed),
        }
        self._watching: asyncio.Task[None] | None = None

    @property
    def folders(self) -> tuple[SlotDir, ...]:
        """The slot's own, and the second engine's."""
        return (self.folder, self.folder.twin)

    @property
    def current(self) -> EngineLife:
        """The engine that the permit names."""
        return self._lives.get(self._permit.lane, self._lives[FIRST_LANE])

    @property
    def lives(self) -> tuple[EngineLife, ...]:
        """Both engines, that of the whole share first."""
        return tuple(self._lives.values())

    def start(self) -> None:
        """Start both in the background."""
        for life in self.lives:
            self._site.enforcer.watch(life.watched)
            life.start()
        name = f"lane of {self.order.slot_name}"
        self._watching = asyncio.create_task(self._look(), name=name)

    def update(self, order: EnsureEngine) -> None:
        """Take over what may change under running engines."""
        self.order = order
        self._lives[FIRST_LANE].update(order)
        self._lives[BUSY_LANE].update(at_busy_share(order))

    def hold(self, holder: Holder, *, hold: bool) -> None:
        """Add or remove a holder."""
        for life in self.lives:
            life.watched.hold(holder, hold=hold)

    def stands_still_for(self, holder: Holder) -> bool:
        """Both trees stand still, and the last tick knew of this holder."""
        return all(life.watched.stands_still_for(holder) for life in self.lives)

    def set_dormant(self, *, dormant: bool) -> None:
        """Change nothing: a slot with two engines has no rung 4."""

    def limit_memory(self, permille: int | None, held: int | None) -> None:
        """Set the budget of elastic memory of each; ``held`` is what they hold together, bytes."""
        both = sum(life.device_bytes for life in self.lives)
        for life in self.lives:
            # Nobody knows which holds what: only what is too much together is anyone's.
            others = both - life.device_bytes
            over = held is not None and bool(overrun(both, held))
            life.limit_memory(permille, held - others if over and held is not None else None)

    def status(self, endpoint: str) -> EngineStatus:
        """The slot's status: that of the engine which the permit names, with sums over both."""
        every = [life.status(endpoint) for life in self.lives]
        serving = (lane for lane, life in self._lives.items() if life.state is EngineState.SERVING)
        return msgspec.structs.replace(
            every[self.lives.index(self.current)],
            pids=tuple(pid for status in every for pid in status.pids),
            generated_tokens=sum(status.generated_tokens for status in every),
            weight_bytes=sum(status.weight_bytes for status in every),
            restarts=sum(status.restarts for status in every),
            can_dormant=False,
            device_bytes=sum(status.device_bytes for status in every),
            # One that finds too little fails alone, and the other serves.
            needs_bytes=min(
                (status.needs_bytes for status in every if status.needs_bytes), default=None
            ),
            measuring=False,
            lanes=tuple(serving),
        )

    async def end(self, *, seconds: float, reason: HostReason) -> bool:
        """Kill both trees and close the permit.

        Returns:
            False when something still lives after ``seconds``.
        """
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait({self._watching})
        ended = await asyncio.gather(
            *(life.end(seconds=seconds, reason=reason) for life in self.lives)
        )
        if all(ended):
            self._permit.choose(FIRST_LANE)
        return all(ended)

    def detach(self) -> None:
        """Unmap the permit; nothing lives any more."""
        self._permit.detach()

    async def _look(self) -> None:
        lane = self._permit.lane
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            if self._permit.lane != lane:
                lane = self._permit.lane
                self._site.cut(SlotUid(self.folder.uid))


def at_busy_share(order: EnsureEngine) -> EnsureEngine:
    """The order of the second engine."""
    sharing = order.engine.sharing
    share = msgspec.structs.replace(sharing, percent=sharing.busy_percent, busy_percent=0)
    return msgspec.structs.replace(
        order,
        slot_name=f"{order.slot_name} (busy share)",
        engine=msgspec.structs.replace(order.engine, sharing=share),
    )


def _linked(folder: SlotDir) -> SlotDir:
    """Folder of the second engine; its permit is a link to the same memory."""
    twin = folder.twin.create()
    with contextlib.suppress(FileNotFoundError):
        twin.permit.unlink()
    os.link(folder.permit, twin.permit)
    return twin
