"""Tidies up behind the head: folds old versions and sweeps what nobody needs, in the background.

One round at a time; what a publish meanwhile leaves behind is the next round's. A round that fails
changes nothing that was reachable, and the next publish begins another one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable

from rose_core.delta import DeltaError
from rose_core.identity import WeightVersion
from rose_weights import metrics
from rose_weights.errors import WeightsError
from rose_weights.store import retention
from rose_weights.store.planning import FetchPlanner
from rose_weights.store.store import Store

LOG = logging.getLogger(__name__)

LEASE_SECONDS = 600.0
"""A receiver that has not asked again for this long is gone; it then gets the full state."""


class Leases:
    """Versions that receivers work with, which the janitor leaves alone.

    Held in memory: after a restart of the store receivers ask again.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._held: dict[tuple[str, str], tuple[float, frozenset[WeightVersion]]] = {}

    def take(self, holder: str, run: str, versions: Iterable[WeightVersion | None]) -> None:
        """Replace what a holder holds of a run."""
        wanted = frozenset(version for version in versions if version is not None)
        self._held[holder, run] = (self._clock() + LEASE_SECONDS, wanted)

    def held(self, run: str) -> set[WeightVersion]:
        """Versions of a run under a lease now."""
        now = self._clock()
        self._held = {key: value for key, value in self._held.items() if value[0] > now}
        return {
            version
            for (_, of), (_, versions) in self._held.items()
            if of == run
            for version in versions
        }


class Janitor:
    """Rounds over one store.

    Args:
        store: what is tidied up.
        planner: whose cached merges are spared.
        leases: versions that receivers work with stay.
        window: versions kept behind the head.
        grace_seconds: blocks younger than this are never swept.
    """

    def __init__(
        self, store: Store, planner: FetchPlanner, leases: Leases, window: int, grace_seconds: float
    ) -> None:
        self._store = store
        self._planner = planner
        self._leases = leases
        self._window = window
        self._grace = grace_seconds
        self._round: asyncio.Task[None] | None = None

    def schedule(self, run: str) -> None:
        """Tidy a run up soon: a version of it was published."""
        if self._round is None or self._round.done():
            self._round = asyncio.create_task(self._tidy(run))

    async def close(self) -> None:
        """Wait for the round that is going on."""
        if self._round is not None:
            await self._round

    async def _tidy(self, run: str) -> None:
        try:
            leased = self._leases.held(run)
            folded, freed = await asyncio.to_thread(self._fold_and_sweep, run, leased)
        except (WeightsError, DeltaError, OSError):
            LOG.exception("run %s: old versions were not folded; they stay", run)
            return
        if folded:
            metrics.FREED_BYTES.inc(freed)
            LOG.info("run %s: %d versions folded, %d bytes freed", run, folded, freed)

    def _fold_and_sweep(self, run: str, leased: Collection[WeightVersion]) -> tuple[int, int]:
        """Versions folded and bytes set free."""
        folded = retention.fold(self._store, run, window=self._window, leased=leased)
        if not folded:
            return 0, 0
        spare = self._planner.cached_blocks()
        return folded, retention.sweep(self._store, spare=spare, grace_seconds=self._grace)
