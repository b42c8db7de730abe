"""Which engine a session's last turn ran on, and how much of its context is cached there."""

from __future__ import annotations

from collections import OrderedDict

import msgspec


class Home(msgspec.Struct, frozen=True, gc=False):
    """The engine, the tokens it has keys for, and the cache key (weight version) of these."""

    engine: str
    tokens: int
    version: str


class Sessions:
    """The most recently used sessions.

    Args:
        most: sessions remembered; forgetting one costs a prefill, never correctness.
    """

    def __init__(self, most: int = 65536) -> None:
        self._most = most
        self._homes: OrderedDict[str, Home] = OrderedDict()

    def __len__(self) -> int:
        return len(self._homes)

    def home(self, session: str) -> Home | None:
        """Where the session's last turn ran."""
        return self._homes.get(session) if session else None

    def settle(self, session: str, home: Home) -> None:
        """A turn of the session has ended there."""
        if not session:
            return
        homes = self._homes
        if session in homes:
            homes.move_to_end(session)
        homes[session] = home
        if len(homes) > self._most:
            homes.popitem(last=False)
