"""When the stores are filled from full listings, because watches do not tell everything.

| occasion | passes meanwhile |
|---|---|
| start | wait: nothing is planned on half of the objects |
| the API server was away: at once, and thrice in the minute after | wait: deletions went unheard |
| kopf has listed again (a watch was renewed) | go on |
| every two minutes | go on |

Stores take an older word never for a newer one, so a listing may run beside passes and watches.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from rose_operator.errors import OperatorError
from rose_operator.kube.api import Api, ObjectKind
from rose_operator.kube.object_cache import ObjectCache
from rose_operator.kube.watches import list_all

_log = logging.getLogger(__name__)
_EVERY_SECONDS = 120.0
_SOON_SECONDS = 1.0
# Watches come back a little later than the API server.
_AFTER_OUTAGE = (0.0, 5.0, 15.0, 45.0)


class Relist:
    """Keeps the times at which listings are due.

    Args:
        failures: number of looks at the API server that got no answer, from the leader lock.
        clock: monotonic seconds.

    Attributes:
        done: a full listing has been taken in.
    """

    def __init__(
        self,
        api: Api,
        stores: dict[ObjectKind, ObjectCache],
        *,
        failures: Callable[[], int],
        clock: Callable[[], float],
    ) -> None:
        self._api, self._stores = api, stores
        self._failures, self._clock = failures, clock
        self._failures_seen = 0
        self._must: list[float] = [clock()]
        self._soon = asyncio.Event()
        self.done = False

    async def list_if_due(self) -> None:
        """List now if a pass must not go on without.

        Raises:
            ApiUnavailable, ApiRefused: the listing failed and stays due.
        """
        now = self._clock()
        failures = self._failures()
        if failures != self._failures_seen:
            self._failures_seen = failures
            self._must += [now + delay for delay in _AFTER_OUTAGE]
        if any(due <= now for due in self._must):
            await list_all(self._api, self._stores)
            self._must = [due for due in self._must if due > now]
            self.done = True

    def request(self) -> None:
        """List soon: kopf has listed anew, and never tells what was deleted before that."""
        self._soon.set()

    async def keep(self) -> None:
        """List beside the passes, for ever."""
        while True:
            try:
                async with asyncio.timeout(_EVERY_SECONDS):
                    await self._soon.wait()
            except TimeoutError:
                pass
            await asyncio.sleep(_SOON_SECONDS)  # several watches are renewed together
            self._soon.clear()
            try:
                await list_all(self._api, self._stores)
            except OperatorError as error:
                _log.info("listing: %s", error)
