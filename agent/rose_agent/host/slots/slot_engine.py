"""What a slot runs: one engine, or two at different shares; callers need not know which.

| sibling | when |
|---|---|
| ``SingleEngine`` | always, but |
| ``dual_share.DualShareEngine`` | a pool gives a smaller share for busy serving (experimental) |

``engine_host.engine_for`` chooses. Next step: ``lifecycle`` runs each engine.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import msgspec

from rose_agent.host.enforcement.enforcer import EnforcedEngine
from rose_agent.host.slots.lifecycle import EngineLife
from rose_agent.host.slots.site import Site
from rose_core.guard.freezing import Activity
from rose_core.host_reasons import HostReason
from rose_core.wire.host import EngineStatus, EnsureEngine, Holder
from rose_engines.node import activity
from rose_engines.node.permit import Permit
from rose_engines.node.rundir import SlotDir, write_json


class RolloutEngine(Protocol):
    """What the host does with the engine, or the engines, of one slot; used from the event loop.

    Attributes:
        order: what the guard asked for last.
        folder: the slot's folder, with its permit in it.
    """

    order: EnsureEngine
    folder: SlotDir

    @property
    def folders(self) -> tuple[SlotDir, ...]:
        """A folder for each engine; the slot's own is the first."""

    @property
    def current(self) -> EngineLife:
        """The engine that may compute while the permit is open."""

    @property
    def lives(self) -> tuple[EngineLife, ...]:
        """Every engine of the slot."""

    def start(self) -> None:
        """Start every engine in the background."""

    def update(self, order: EnsureEngine) -> None:
        """Take over what may change under a running engine: token, weight source, room."""

    def hold(self, holder: Holder, *, hold: bool) -> None:
        """Add or remove a holder."""

    def stands_still_for(self, holder: Holder) -> bool:
        """Every tree stands still, and the last tick knew of this holder."""

    def set_dormant(self, *, dormant: bool) -> None:
        """Begin to release memory, or to take it back; ignored where the engine cannot."""

    def limit_memory(self, permille: int | None, held: int | None) -> None:
        """Set the budget of elastic memory.

        Args:
            permille: of the KV pool; None = no change.
            held: bytes that the driver says the slot holds of its GPU, where that is too much.
        """

    def status(self, endpoint: str) -> EngineStatus:
        """The slot's status; ``endpoint`` is where routers reach its data route."""

    async def end(self, *, seconds: float, reason: HostReason) -> bool:
        """Kill every tree and close the permit.

        Returns:
            False when something still lives after ``seconds``.
        """

    def detach(self) -> None:
        """Let go of what is mapped; nothing lives any more."""


class SingleEngine:
    """The one engine of a slot.

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
        self.current = life_of(order, folder, site, changed)

    @property
    def folders(self) -> tuple[SlotDir, ...]:
        """The slot's own."""
        return (self.folder,)

    @property
    def lives(self) -> tuple[EngineLife, ...]:
        """The one engine."""
        return (self.current,)

    def start(self) -> None:
        """Start it in the background."""
        self._site.enforcer.watch(self.current.watched)
        self.current.start()

    def update(self, order: EnsureEngine) -> None:
        """Take over what may change under a running engine: token, weight source, room."""
        self.order = order
        self.current.update(order)

    def hold(self, holder: Holder, *, hold: bool) -> None:
        """Add or remove a holder."""
        self.current.watched.hold(holder, hold=hold)

    def stands_still_for(self, holder: Holder) -> bool:
        """Its tree stands still, and the last tick knew of this holder."""
        return self.current.watched.stands_still_for(holder)

    def set_dormant(self, *, dormant: bool) -> None:
        """Begin to release its memory, or to take it back."""
        self.current.dormancy.order(dormant=dormant)

    def limit_memory(self, permille: int | None, held: int | None) -> None:
        """Set the budget of elastic memory, permille, and what the driver says it holds, bytes."""
        self.current.limit_memory(permille, held)

    def status(self, endpoint: str) -> EngineStatus:
        """The slot's status; ``endpoint`` is where routers reach its data route."""
        return self.current.status(endpoint)

    async def end(self, *, seconds: float, reason: HostReason) -> bool:
        """Kill its tree and close the permit.

        Returns:
            False when something still lives after ``seconds``.
        """
        return await self.current.end(seconds=seconds, reason=reason)

    def detach(self) -> None:
        """Nothing is mapped but by the engine's life, which has let go of it."""


def life_of(
    order: EnsureEngine, folder: SlotDir, site: Site, changed: Callable[[], None]
) -> EngineLife:
    """An engine that has not been started, with its order written down and its permit mapped.

    Raises:
        OSError: the folder cannot be written, or has no permit.
    """
    write_json(folder.slot, msgspec.to_builtins(order))
    watched = EnforcedEngine(
        order.slot_name,
        Permit.attach(folder.permit),
        own_permit=site.dedicated,
        activity=lambda: Activity(activity.read(folder.activity)),
    )
    return EngineLife(order, folder, site, watched, changed)
