"""The engine's side of the permit: wait, asleep, until computing is allowed.

The permit's file may be replaced while the engine is stopped (the engine host was restarted and
made a new one); the gate notices by its inode and attaches to the new file. Every doubt is closed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

from rose_engines.node.permit import BadPermit, Permit

log = logging.getLogger(__name__)

# How often a stopped engine looks at its permit: the price of a first token after opening.
POLL_SECONDS = 0.002
# How often it looks whether the file is another one by now.
_REATTACH_SECONDS = 0.5


class PermitGate:
    """Waits for one permit.

    Args:
        path: the permit's file.
        clock: CLOCK_MONOTONIC nanoseconds.
        sleep: pauses the calling thread.

    Raises:
        OSError, BadPermit: there is no permit; the engine must not start.
    """

    def __init__(
        self,
        path: Path,
        clock: Callable[[], int] = time.monotonic_ns,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._path = path
        self._clock = clock
        self._sleep = sleep
        self._inode = path.stat().st_ino
        self._permit = Permit.attach(path, writable=False)

    def is_open(self) -> bool:
        """Whether computing is allowed now."""
        return self._permit.is_open(self._clock())

    @property
    def chunk_divisor(self) -> int:
        """What prefill chunks are divided by now."""
        return self._permit.chunk_divisor

    def wait(
        self,
        meanwhile: Callable[[], None] = lambda: None,
        *,
        resting: Callable[[bool], None] = lambda _: None,
    ) -> float:
        """Return when the permit is open; seconds waited.

        Args:
            meanwhile: called at every look; it must compute nothing.
            resting: called with True before each sleep, and with False after it.
        """
        if self.is_open():
            return 0.0
        started = looked = self._clock()
        while not self.is_open():
            resting(True)
            self._sleep(POLL_SECONDS)
            resting(False)
            meanwhile()
            if self._clock() - looked > _REATTACH_SECONDS * 1e9:
                looked = self._clock()
                self._reattach()
        return (self._clock() - started) / 1e9

    def _reattach(self) -> None:
        try:
            inode = self._path.stat().st_ino
            if inode != self._inode:
                permit = Permit.attach(self._path, writable=False)
                self._permit.detach()
                self._permit, self._inode = permit, inode
                log.warning("rose: the permit was replaced; attached to the new one")
        except (OSError, BadPermit) as error:
            log.debug("rose: no permit to attach to: %s", error)
