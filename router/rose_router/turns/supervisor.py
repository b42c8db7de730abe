"""Ends legs that must not go on where they are, and keeps everything that depends on time moving.

Looks whenever the fleet changes and every ``TICK_SECONDS``. ``rose_core.rollouts.placement.watch``
decides.
"""

from __future__ import annotations

import asyncio

from rose_core.rollouts import versions
from rose_core.rollouts.placement.watch import LegView, MoveReason, judge, queues
from rose_core.wire.routing import EngineKind
from rose_router import metrics
from rose_router.engines.fleet import Engine, LiveLeg
from rose_router.turns.state import RouterParts

TICK_SECONDS = 0.25


class Supervisor:
    """The watch.

    Args:
        state: of the router.
    """

    def __init__(self, state: RouterParts) -> None:
        self._fleet, self._queue, self._fences = state.fleet, state.queue, state.fences
        self._prospects, self._clock = state.prospects, state.clock
        self._patience = state.settings.policies.patience
        self._forget_seconds = state.settings.forget_seconds

    async def run(self) -> None:
        """Watch until cancelled."""
        while True:
            self.look()
            try:
                async with asyncio.timeout(TICK_SECONDS):
                    await self._fleet.changed.wait()
            except TimeoutError:
                continue

    def look(self) -> None:
        """One round."""
        now = self._clock()
        self._fleet.forget(self._forget_seconds)
        self._prospects.note_head(self._fleet.head, now)
        for run, head in self._fleet.heads().items():
            self._prospects.note_head(head, now, run)
        self._prospects.infer_ends(now)
        self._prospects.forget_silent(now)
        spare = sum(engine.places for engine in self._fleet if engine.gate_open)
        for engine in self._fleet:
            if engine.legs and not self._at_ease(engine, now):
                spare -= self._judge(engine, spare)
        self._fences.deliver()
        self._queue.look()
        self._show()

    def _at_ease(self, engine: Engine, now: float) -> bool:
        """Whether no leg can be judged to end: all may go on, and all have spoken lately."""
        if not engine.gate_open or engine.excess:
            return False
        spoke = min(leg.last_event for leg in engine.legs.values())
        return now - spoke < self._patience.stall_seconds

    def _judge(self, engine: Engine, spare: int) -> int:
        now = self._clock()
        beyond = engine.beyond_cap() if engine.gate_open else frozenset()
        used = 0
        for leg in sorted(engine.legs.values(), key=lambda leg: -leg.began):
            over = leg.rid in beyond
            view = _view(engine, leg, over)
            verdict = judge(view, self._patience, over and used < spare and leg.can_move(), now)
            if verdict is not None:
                leg.end(verdict)
                used += verdict is MoveReason.CAP_CUT  # takes one place elsewhere
            elif leg.verdict is None and queues(view, self._patience, now):
                leg.queue(leg)
        return used

    def _show(self) -> None:
        counts = {(kind, gate): 0 for kind in EngineKind for gate in ("open", "closed")}
        live = dict.fromkeys(EngineKind, 0)
        metrics.TRAJECTORIES.set(len(self._prospects))
        metrics.BORROWED_SHARE.labels("all").set(self._prospects.shares.overall)
        for name, share in self._prospects.shares.by_stratum().items():
            metrics.BORROWED_SHARE.labels(name).set(share)
        metrics.LAG.clear()  # engines that have gone
        for engine in self._fleet:
            counts[engine.kind, "open" if engine.gate_open else "closed"] += 1
            live[engine.kind] += len(engine.legs)
            head = engine.head or self._fleet.head
            if engine.version and head:
                lag = versions.lag(engine.version, head)
                metrics.LAG.labels(engine.name).set(-1 if lag is None else lag)
        for (kind, gate), count in counts.items():
            metrics.ENGINES.labels(kind.value.lower(), gate).set(count)
            metrics.LIVE.labels(kind.value.lower()).set(live[kind])


def _view(engine: Engine, leg: LiveLeg, over: bool) -> LegView:
    return LegView(
        known=True,
        leaving=engine.update.leaving,
        gate_open=engine.gate_open,
        gate_since=engine.gate_since,
        last_event=leg.last_event,
        excess=over,
    )
