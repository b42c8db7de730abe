"""Which versions receivers are working with, so that retention leaves them alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from rose_core.identity import WeightVersion

LEASE_SECONDS = 600.0
"""A receiver that has not asked again for this long is gone; it then gets the full state."""


class Leases:
    """Held in memory: after a restart of the store receivers ask again.

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
