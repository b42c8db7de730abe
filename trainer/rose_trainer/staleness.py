"""How old a trajectory's weights are when the trainer consumes it, counted in publishes.

The trainer's steps are no measure: a trainer that resumed from an older checkpoint counts them
again. Versions are counted in the order in which they were published, across incarnations.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rose_core.identity import WeightVersion
from rose_core.rollouts.versions import age


@dataclass(frozen=True)
class Consumed:
    """A trajectory at the moment it is used.

    Attributes:
        version: the oldest version that sampled one of its tokens.
        age: publishes since that version; 0 = the newest, None = a version nobody remembers.
            Version 0 is one publish older than the first of the run's first incarnation.
        fresh: the age is known and at most what was asked for.
    """

    version: WeightVersion
    age: int | None
    fresh: bool


class Order:
    """Versions of a run in the order of their publishes."""

    def __init__(self, known: Iterable[WeightVersion] = ()) -> None:
        self._number: dict[WeightVersion, int] = {}
        for version in known:
            self.add(version)

    def add(self, version: WeightVersion) -> None:
        """The next version was taken."""
        self._number.setdefault(version, len(self._number))

    def consume(self, version: WeightVersion, most: int | None) -> Consumed:
        """Age of a version now.

        Args:
            version: what the trajectory was sampled with.
            most: largest age that is fresh; None = any known age.
        """
        found = self._age(version)
        if found is None:
            return Consumed(version, None, fresh=False)
        return Consumed(version, found, fresh=most is None or found <= most)

    def _age(self, version: WeightVersion) -> int | None:
        if version.is_base:
            newest = next(reversed(self._number), None)
            return 0 if newest is None else age(version, newest)
        number = self._number.get(version)
        return None if number is None else len(self._number) - 1 - number
