"""Which differences of a status are written now, and which may wait for others to join them.

Conditions that change their status are written at once. Counts, messages and states on the way to
somewhere may wait: within a few seconds most of them change again, and one write then says it all.
"""

from __future__ import annotations


class StatusDeferral:
    """Since when each object's status differs from what it should be."""

    def __init__(self) -> None:
        self._since: dict[str, float] = {}

    def due(self, key: str, patience_seconds: float, now: float) -> bool:
        """Whether a difference that may wait for ``patience_seconds`` is written now."""
        return now - self._since.setdefault(key, now) >= patience_seconds

    def settle(self, key: str) -> None:
        """Stop waiting: the object's status is as it should be, or has just been written."""
        self._since.pop(key, None)

    def waits(self, key: str) -> bool:
        """Whether a difference of this object waits for its time."""
        return key in self._since

    @property
    def waiting(self) -> bool:
        """Whether any difference waits."""
        return bool(self._since)

    def keep(self, keys: set[str]) -> None:
        """Forget objects that are gone."""
        self._since = {key: since for key, since in self._since.items() if key in keys}
