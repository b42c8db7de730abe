"""Callers from outside the cluster: whom the lease names, known by the hash of a credential.

The RL team makes a credential (``rose caller grant``) and its hash into ``spec.router.callers`` of
its lease; the operator brings the list to the router (``enrolment``) and again whenever it changes,
so a caller that was taken off the list is not heard a second later. Whoever reads lease, list or
router learns no credential. Next step: ``http.bearer`` asks.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable

from rose_core.wire.enrolment import RouterCaller


class NamedCallers:
    """Who is on the lease's list now.

    Args:
        callers: of the list.
        now: Unix seconds, for those that expire.
    """

    def __init__(
        self, callers: Iterable[RouterCaller] = (), now: Callable[[], float] = time.time
    ) -> None:
        self._now = now
        self._by_hash: dict[str, RouterCaller] = {}
        self.renew(callers)

    def renew(self, callers: Iterable[RouterCaller]) -> None:
        """Know these from now on, and no others."""
        self._by_hash = {one.sha256: one for one in callers}

    def find(self, credential: str) -> RouterCaller | None:
        """Whose credential this is; ``None``: nobody's, or one that has expired."""
        shown = hashlib.sha256(credential.encode(errors="replace")).hexdigest()
        found = self._by_hash.get(shown)
        expired = found is not None and found.expires is not None and found.expires <= self._now()
        return None if expired else found
