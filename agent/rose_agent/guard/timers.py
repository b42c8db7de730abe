"""Timers that step a replica at the moment at which its verdict changes by itself.

A verdict says when that is (``Verdict.again_ns``): a period begins, a cool-down ends. Waiting for
the next tick would cost up to 65 ms. Next step: ``loop`` sets the timers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

_SOON_NS = 10_000_000


class Again:
    """At most one timer per replica.

    Args:
        step: called with the replica's uid.
    """

    def __init__(self, step: Callable[[str], None]) -> None:
        self._step = step
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._at_ns: dict[str, int] = {}

    def look(self, uid: str, at_ns: int, now_ns: int) -> None:
        """Step the replica at ``at_ns``, instead of any earlier plan; in the past = never."""
        self.forget(uid)
        if at_ns > now_ns:
            loop = asyncio.get_running_loop()
            self._timers[uid] = loop.call_later((at_ns - now_ns) / 1e9, self._step, uid)
            self._at_ns[uid] = at_ns

    def forget(self, uid: str) -> None:
        """Cancel the replica's timer, if it has one."""
        self._at_ns.pop(uid, None)
        timer = self._timers.pop(uid, None)
        if timer is not None:
            timer.cancel()

    def waiting(self, uid: str) -> bool:
        """A timer runs for this replica."""
        return uid in self._timers

    def soon(self, uid: str, now_ns: int) -> bool:
        """Its timer fires within 10 ms."""
        return 0 <= self._at_ns.get(uid, 0) - now_ns < _SOON_NS

    def close(self) -> None:
        """End every timer."""
        for uid in list(self._timers):
            self.forget(uid)
