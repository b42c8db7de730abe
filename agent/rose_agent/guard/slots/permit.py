"""The guard's end of a slot's permit.

The engine host creates the permit file; the guard maps it, and maps it anew when the host has
created another. After a change that the host's enforcer cannot foresee, the guard rings its bell.
Next step: ``slot`` opens and closes the permit as ``rose_core.guard.slot`` says.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from rose_engines.node.permit import BadPermit, Permit

_LOOK_NS = 100_000_000


class SlotPermit:
    """Holds at most one mapped permit.

    Args:
        path: where the host puts it.
        ring: tells the host's enforcer of a change.
    """

    def __init__(self, path: Path, ring: Callable[[], None]) -> None:
        self._path, self._ring = path, ring
        self._inode = 0
        self._looked_ns = 0
        self.mapped: Permit | None = None
        self.complaint = ""

    def look(self, now_ns: int) -> bool:
        """Map the permit that exists now; True when it is another one than before."""
        if self.mapped is not None and now_ns - self._looked_ns < _LOOK_NS:
            return False
        self._looked_ns, self.complaint = now_ns, ""
        try:
            inode = os.stat(self._path).st_ino  # noqa: PTH116  # hot path
        except OSError:
            self.drop()
            return False
        if self.mapped is not None and inode == self._inode:
            return False
        self.drop()
        try:
            self.mapped = Permit.attach(self._path)
        except (OSError, BadPermit) as error:
            self.complaint = str(error)
            return False
        self._inode = inode
        self.mapped.close_now()
        return True

    def drop(self) -> None:
        """Close it and let go of it."""
        if self.mapped is not None:
            self.mapped.close_now()
            self.mapped.detach()
            self.mapped = None

    def extend(self, until_ns: int, lane: int, chunk_divisor: int = 1) -> None:
        """Extend the permit for one of the slot's engines, for prefill chunks so much shorter.

        When the right to compute moves to the other engine, the permit stays closed until the next
        step, so that the two never compute at once.
        """
        if self.mapped is None:
            return
        before = self.mapped.until_ns
        # The enforcer knows when to look next from the deadline that it has seen.
        must_ring = before <= time.monotonic_ns() or until_ns < before
        self.mapped.divide_chunks(chunk_divisor)  # first: nobody computes long ones meanwhile
        if self.mapped.lane == lane:
            self.mapped.extend(until_ns)
        else:
            # The engine under way ends its iteration until the next step.
            self.mapped.close_now()
            self.mapped.choose(lane)
            must_ring = True
        if must_ring:
            self._ring()

    def close(self) -> bool:
        """Close it and ring the bell; False when it had been closed or had lapsed already."""
        if self.mapped is None or not self.mapped.until_ns:
            return False
        lapsed = self.mapped.until_ns <= time.monotonic_ns()
        self.mapped.close_now()
        if not lapsed:  # else the enforcer has looked when it ended
            self._ring()
        return not lapsed
