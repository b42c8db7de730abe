"""A slot with two engines at two shares, of which the permit names the one that may compute.

MPS fixes a share when a process starts, so a slot that wants another share while serving is busy
keeps a second engine for it, loaded and parked at its permit. Each has its own processes, cgroup,
memory, weights and user; they share the permit's memory, in which one word says whose it is.

| moment | what happens |
|---|---|
| order | both start; each checks for its own memory and share |
| the permit names the other engine | turns of the first are cut, their callers go on at the other |
| status, data route | those of the engine that the permit names |
| hold, stop, end | both |
| rung 4 | refused: under memory pressure both are ended |

Next step: ``lifecycle`` runs each of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable

import msgspec

from rose_agent.host.enforcement.enforcer import EnforcedEngine
from rose_agent.host.slots.lifecycle import EngineLife
from rose_agent.host.slots.site import Site
from rose_core.devices.memory import overrun
from rose_core.guard.freezing import Activity
from rose_core.host_reasons import HostReason
from rose_core.identity import SlotUid
from rose_core.wire.host import EngineState, EngineStatus, EnsureEngine, Holder
from rose_engines.node import activity
from rose_engines.node.permit import BUSY_LANE, FIRST_LANE, Permit
from rose_engines.node.rundir import SlotDir, write_json

# How soon turns of the engine that was parked are cut.
_LOOK_SECONDS = 0.02


class DualShareEngine:
    """The engines of one slot: one, or two at different shares.

    Args:
        order: what the guard asked for.
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
        self._changed = changed
        self._lives = {FIRST_LANE: self._make(order, folder)}
        if order.engine.sharing.busy_percent:
            self._lives[BUSY_LANE] = self._make(at_busy_share(order), _linked(folder))
        self._looking: asyncio.Task[None] | None = None

    @property
    def current(self) -> EngineLife:
        """The engine that the permit names."""
        return self._lives.get(self._permit.lane, self._lives[FIRST_LANE])

    @property
    def lives(self) -> tuple[EngineLife, ...]:
        """Every engine of the slot."""
        return tuple(self._lives.values())

    def start(self) -> None:
        """Start every engine in the background."""
        for life in self.lives:
            self._site.enforcer.watch(life.watched)
            life.start()
        if len(self._lives) > 1:
            name = f"lane of {self.order.slot_name}"
            self._looking = asyncio.create_task(self._look(), name=name)

    def update(self, order: EnsureEngine) -> None:
        """Take over what may change under running engines."""
        self.order = order
        self._lives[FIRST_LANE].update(order)
        if BUSY_LANE in self._lives:
            self._lives[BUSY_LANE].update(at_busy_share(order))

    def hold(self, holder: Holder, *, hold: bool) -> None:
        """Add or remove a holder."""
        for life in self.lives:
            life.watched.hold(holder, hold=hold)

    def stands_still_for(self, holder: Holder) -> bool:
        """Every tree stands still, and the last tick knew of this holder."""
        return all(life.watched.stands_still_for(holder) for life in self.lives)

    def set_dormant(self, *, dormant: bool) -> None:
        """Make the engine dormant, or wake it; a slot with two engines does neither."""
        if len(self._lives) == 1:
            self.current.rest.order(dormant=dormant)

    def limit_memory(self, permille: int | None, held: int | None) -> None:
        """Set the budget of elastic memory of each; ``held`` is what they hold together."""
        together = sum(life.device_bytes for life in self.lives)
        alone = len(self._lives) == 1
        for life in self.lives:
            # Of two nobody knows which holds what: only what is too much together is anyone's.
            beside = together - life.device_bytes
            over = held is not None and (alone or bool(overrun(together, held)))
            life.limit_memory(permille, held - beside if over and held is not None else None)

    def status(self, endpoint: str) -> EngineStatus:
        """The slot's status: that of the engine which the permit names, with sums over both."""
        every = [life.status(endpoint) for life in self.lives]
        told = every[self.lives.index(self.current)]
        if len(every) == 1:
            return told
        serving = (lane for lane, life in self._lives.items() if life.state is EngineState.SERVING)
        return msgspec.structs.replace(
            told,
            pids=tuple(pid for one in every for pid in one.pids),
            generated_tokens=sum(one.generated_tokens for one in every),
            weight_bytes=sum(one.weight_bytes for one in every),
            restarts=sum(one.restarts for one in every),
            can_dormant=False,
            device_bytes=sum(one.device_bytes for one in every),
            # One that finds too little fails alone, and the other serves.
            needs_bytes=min((one.needs_bytes for one in every if one.needs_bytes), default=None),
            measuring=False,
            lanes=tuple(serving),
        )

    async def end(self, *, seconds: float, reason: HostReason) -> bool:
        """Kill every tree and close the permit.

        Returns:
            False when something still lives after ``seconds``.
        """
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.wait({self._looking})
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

    def _make(self, order: EnsureEngine, folder: SlotDir) -> EngineLife:
        write_json(folder.slot, msgspec.to_builtins(order))
        permit = Permit.attach(folder.permit)
        watched = EnforcedEngine(
            order.slot_name,
            permit,
            own_permit=self._site.dedicated,
            activity=lambda: Activity(activity.read(folder.activity)),
        )
        return EngineLife(order, folder, self._site, watched, self._changed)


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
