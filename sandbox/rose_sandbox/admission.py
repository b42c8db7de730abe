"""Which boundaries of a host save now: few at a time, in the order of ``rose_core``'s ``traffic``.

Next step: ``host`` enters a place for each boundary.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from rose_core.sandboxes.policy import HostPressure
from rose_core.sandboxes.traffic import PLACES, CheckpointRequest, admit, is_memory_short

_LOOK_SECONDS = 0.1
"""How often deferred checkpoints look at serving again: a burst's shortest pause."""


def memory_pressure() -> HostPressure:
    """What this machine's memory says; of serving it knows nothing."""
    fields = dict(
        line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines() if ":" in line
    )
    free = int(fields["MemAvailable"].split()[0]) / int(fields["MemTotal"].split()[0])
    return HostPressure(memory_short=is_memory_short(free))


class Admission:
    """Places for boundaries that save.

    Args:
        pressure: what else happens on the machine.
        clock: monotonic seconds.
    """

    def __init__(self, pressure: Callable[[], HostPressure], clock: Callable[[], float]) -> None:
        self._pressure, self._now = pressure, clock
        self._waiting: dict[str, tuple[CheckpointRequest, asyncio.Event]] = {}
        self._running = 0
        self._pumping: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def place(
        self, session: str, expected: float | None, unsaved_since: float | None = None
    ) -> AsyncIterator[None]:
        """Wait for a place and have it.

        Args:
            session: whose boundary this is.
            expected: when its reply is; None: not known.
            unsaved_since: when its first turn without a record began: one that missed its place at
                every turn would wait anew each time. None: now.
        """
        event = asyncio.Event()
        asked = self._now() if unsaved_since is None else unsaved_since
        self._waiting[session] = (CheckpointRequest(session, asked, expected), event)
        self._pump()
        try:
            await event.wait()
        except asyncio.CancelledError:
            if event.is_set():
                self._running -= 1
            raise
        finally:
            self._waiting.pop(session, None)
        try:
            yield
        finally:
            self._running -= 1
            self._pump()

    async def close(self) -> None:
        """Look no more."""
        if self._pumping is not None:
            self._pumping.cancel()
            with suppress(asyncio.CancelledError):
                await self._pumping

    def _pump(self) -> None:
        burns = self._pressure().serving_burns
        free = PLACES - self._running
        requests = [one for one, event in self._waiting.values() if not event.is_set()]
        for one in admit(requests, self._now(), free, serving_burns=burns):
            self._running += 1
            self._waiting[one.key][1].set()
        deferred = burns and bool(requests)
        if deferred and (self._pumping is None or self._pumping.done()):
            self._pumping = asyncio.create_task(self._look_again())

    async def _look_again(self) -> None:
        while self._pressure().serving_burns:  # noqa: ASYNC110 - the kernel and guards tell nobody
            await asyncio.sleep(_LOOK_SECONDS)
        self._pump()
