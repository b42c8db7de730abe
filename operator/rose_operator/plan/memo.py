"""What was made of objects that have not changed since, so that a pass pays for changes alone.

A reader makes every typed object once per version, and a node's essence is the same object for as
long as its agent says the same; so identity tells cheaply whether the source is the one of the last
pass. Everything else that goes into the result is compared by value. ``snapshot`` uses it; the
result is that of making everything anew.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

MadeT = TypeVar("MadeT")


class Memo(Generic[MadeT]):
    """Results by name, for as long as every pass asks for them.

    Attributes:
        computed_count: how many were made; tests count it.
    """

    def __init__(self) -> None:
        self.computed_count = 0
        self._before: dict[str, tuple[object, object, MadeT]] = {}
        self._now: dict[str, tuple[object, object, MadeT]] = {}

    def begin_pass(self) -> None:
        """Begin a pass, and forget what the last one did not ask for."""
        self._before, self._now = self._now, {}

    def get(self, name: str, source: object, values: object, make: Callable[[], MadeT]) -> MadeT:
        """The result for this source and these values, made anew if either is another one.

        Args:
            name: of the thing, unique among those that are kept here.
            source: compared by identity; it must never be changed in place.
            values: whatever else the result depends on, compared by value.
            make: makes the result of nothing but source and values.
        """
        found = self._before.get(name)
        if found is None or found[0] is not source or found[1] != values:
            found = source, values, make()
            self.computed_count += 1
        self._now[name] = found
        return found[2]
