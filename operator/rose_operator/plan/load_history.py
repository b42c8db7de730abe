"""The load of pools over the day, for those that ask for a forecast.

Learned from the agents' reports at every pass, kept in the pool's status so that a restart forgets
at most an hour. The arithmetic is ``rose_core.lending.forecast``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rose_core.api import ServingPool
from rose_core.api.poollending import Forecast
from rose_core.api.poolstatus import LoadShape
from rose_core.lending import LoadOutlook
from rose_core.lending.forecast import UsualLoad, observe, outlook, restored, written
from rose_core.wire.sync import ReplicaReport

_WRITE_SECONDS = 3600.0
_PERMILLE_PER_PERCENT = 10
_SECONDS_PER_MINUTE = 60.0


class LoadHistory:
    """Shapes by pool key."""

    def __init__(self) -> None:
        self._shapes: dict[str, UsualLoad] = {}
        self._written_at: dict[str, float] = {}

    def observe(
        self,
        pools: Mapping[str, ServingPool],
        reports: Mapping[str, Sequence[ReplicaReport]],
        now: float,
    ) -> None:
        """Take in what the replicas of each forecast pool report now.

        Args:
            pools: all pools; those without a forecast are passed over.
            reports: fresh reports by pool.
            now: seconds since the epoch.
        """
        asked = {key: pool for key, pool in pools.items() if pool.spec.lending.forecast}
        self._shapes = {key: shape for key, shape in self._shapes.items() if key in asked}
        for key, pool in asked.items():
            if key not in self._shapes:
                kept = pool.status.load
                self._shapes[key] = restored(kept.busy_permille if kept else ())
                self._written_at[key] = now
            busy = [r.busy_permille for r in reports.get(key, ()) if r.busy_permille is not None]
            if busy:
                self._shapes[key] = observe(self._shapes[key], sum(busy) / len(busy), now)

    def outlook(self, key: str, forecast: Forecast | None, now: float) -> LoadOutlook | None:
        """What is coming, None where nobody asked."""
        if forecast is None:
            return None
        return outlook(
            self._shapes.get(key, UsualLoad()),
            now,
            forecast.lead_minutes * _SECONDS_PER_MINUTE,
            forecast.max_busy_percent * _PERMILLE_PER_PERCENT,
        )

    def shape(self, pool: ServingPool, now: float) -> LoadShape | None:
        """What the status says: the last word, renewed once an hour."""
        key = pool.metadata.key
        known = self._shapes.get(key)
        if known is None:
            return None
        if now - self._written_at.get(key, now) < _WRITE_SECONDS:
            return pool.status.load
        self._written_at[key] = now
        return LoadShape(busy_permille=written(known))
