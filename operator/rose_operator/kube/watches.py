"""kopf watches every kind that the operator keeps, and feeds the caches with what changed.

Handlers decide nothing, set no finalizer and write nothing: the planner needs all objects at once,
and no single one decides (decision 0165). kopf runs thrice, because one run watches
either the whole cluster or some namespaces, and the operator may read slots in its own namespace
alone, and Deployments and Services in the routers' alone.

kopf does not tell what was deleted while a watch was down: it lists again (events without a type)
and goes on. So the caches are also filled by our own full listings: at the start, after kopf has
listed again, during the minute after an outage of the API server, and now and then.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import kopf

from rose_operator.errors import OperatorError
from rose_operator.kube.api import (
    KINDS_OF_ROUTERS,
    MANAGED_SELECTOR,
    RESOURCES,
    Api,
    ObjectKind,
)
from rose_operator.kube.object_cache import ObjectCache, Raw
from rose_wire.api_server import ANSWER_SECONDS, WATCH_SECONDS

_log = logging.getLogger(__name__)
# Of cluster scope or in all namespaces, in ROSE's own, in the routers'. Other people's objects of
# the routers' kinds are none of the operator's business.
_CLUSTER = (ObjectKind.POOL, ObjectKind.LEASE, ObjectKind.POLICY, ObjectKind.NAMESPACE)
_NAMESPACED = (ObjectKind.SLOT,)
_LISTED = (*_CLUSTER, *_NAMESPACED, *KINDS_OF_ROUTERS)
HandOver = Callable[[kopf.RawEvent, ObjectCache], None]
# kopf is started again after this, and looks this often whether it should end.
_AGAIN_SECONDS = 1.0
_LOOK_SECONDS = 0.5
# Given, because kopf asks the system for the user's name otherwise, and an image may have none.
_IDENTITY = "rose-operator"

_EVERY_SECONDS = 120.0
_SOON_SECONDS = 1.0
# Watches come back a little later than the API server.
_AFTER_OUTAGE = (0.0, 5.0, 15.0, 45.0)


class _EndlessBackoff:
    """Back-offs without an end: an API server that is down must not end the operator."""

    def __iter__(self) -> Iterator[float]:
        yield from (0.5, 1.0, 2.0)
        while True:
            yield 3.0


async def list_all(api: Api, caches: Mapping[ObjectKind, ObjectCache]) -> None:
    """Fill every cache from full listings.

    Raises:
        ApiUnavailable, ApiRefused: a listing failed; the others may have been taken over.
    """
    for kind in filter(caches.__contains__, _LISTED):
        items, version = await api.list(kind)
        caches[kind].replace(items, version)


def registry(
    caches: Mapping[ObjectKind, ObjectCache],
    kinds: Iterable[ObjectKind],
    hand_over: HandOver,
) -> kopf.OperatorRegistry:
    """One event handler per kind that has a cache."""
    handlers = kopf.OperatorRegistry()
    for kind in filter(caches.__contains__, kinds):
        _register(handlers, caches[kind], _selector(kind), hand_over)

    @kopf.on.login(registry=handlers)
    def login(**kwargs: Any) -> kopf.ConnectionInfo | None:  # noqa: ANN401  # kopf's own signature
        return kopf.login_with_service_account(**kwargs) or kopf.login_with_kubeconfig(**kwargs)

    return handlers


def _selector(kind: ObjectKind) -> tuple[str, str, str]:
    resource = RESOURCES[kind]
    return resource.group, resource.version, resource.plural


def _register(
    handlers: kopf.OperatorRegistry,
    cache: ObjectCache,
    resource: tuple[str, str, str],
    hand_over: HandOver,
) -> None:
    @kopf.on.event(*resource, registry=handlers, id=resource[-1])
    async def changed(event: kopf.RawEvent, **_: Any) -> None:  # noqa: ANN401  # kopf's signature
        hand_over(event, cache)


def settings() -> kopf.OperatorSettings:
    """Kopf without anything that writes, scans or gives up."""
    chosen = kopf.OperatorSettings()
    chosen.posting.enabled = False
    chosen.scanning.disabled = True
    chosen.peering.standalone = True
    chosen.networking.error_backoffs = _EndlessBackoff()
    chosen.networking.connect_timeout = 5
    # A connection that died unseen is given up after a minute, and the watch goes on from what it
    # brought last: nothing is listed for that.
    chosen.watching.server_timeout = WATCH_SECONDS
    chosen.watching.client_timeout = WATCH_SECONDS + ANSWER_SECONDS
    chosen.watching.reconnect_backoff = 0.5
    for kind in KINDS_OF_ROUTERS:
        chosen.watching.label_selectors[_selector(kind)] = MANAGED_SELECTOR
    return chosen


async def watch_kinds(
    caches: Mapping[ObjectKind, ObjectCache],
    namespace: str,
    listed: Callable[[], None],
    routers: str = "",
) -> None:
    """Run kopf in threads of its own until cancelled; ``routers`` is their namespace, if another.

    In the main thread kopf takes the process's signals, and at its end it waits for every task of
    the loop, ours included. What it brings is handed over to the caller's loop.
    """
    loop = asyncio.get_running_loop()
    stop = threading.Event()

    def hand_over(event: kopf.RawEvent, cache: ObjectCache) -> None:
        loop.call_soon_threadsafe(_take, event, cache, listed)

    for name, kinds, namespaces in (
        ("kopf-cluster", _CLUSTER, ()),
        ("kopf-slots", _NAMESPACED, (namespace,)),
        ("kopf-routers", KINDS_OF_ROUTERS, (routers or namespace,)),
    ):
        handlers = registry(caches, kinds, hand_over)
        args = (handlers, stop, namespaces)
        threading.Thread(target=_run_kopf, args=args, name=name, daemon=True).start()
    try:
        await asyncio.Event().wait()
    finally:
        stop.set()


def _run_kopf(
    handlers: kopf.OperatorRegistry, stop: threading.Event, namespaces: Sequence[str] = ()
) -> None:
    """Run kopf until stopped; started again if it fails."""
    while not stop.is_set():
        try:
            asyncio.run(_watch(handlers, stop, namespaces))
        except Exception as error:  # noqa: BLE001  # whatever ended kopf, watching must go on
            _log.error("kopf ended: %r; starting it again", error)
        stop.wait(_AGAIN_SECONDS)


async def _watch(
    handlers: kopf.OperatorRegistry, stop: threading.Event, namespaces: Sequence[str]
) -> None:
    """One life of kopf, in the whole cluster or in some namespaces.

    kopf waits for a flag of ``threading`` in a worker thread, and the loop does not close before
    that thread ends: a kopf that failed would never be started again, and only the listings would
    bring news. So it gets a flag of its own loop.
    """
    changed = asyncio.Event()
    running = asyncio.create_task(
        kopf.operator(
            registry=handlers,
            settings=settings(),
            clusterwide=not namespaces,
            namespaces=namespaces,
            standalone=True,
            identity=_IDENTITY,  # type: ignore[arg-type]  # kopf names the type of it privately
            stop_flag=changed,
        )
    )
    while not running.done():
        if stop.is_set():
            changed.set()
        await asyncio.wait([running], timeout=_LOOK_SECONDS)
    await running


def _take(event: kopf.RawEvent, cache: ObjectCache, listed: Callable[[], None]) -> None:
    raw: Raw = dict(event["object"])
    if event["type"] is None:
        listed()
    if event["type"] == "DELETED":
        cache.remove(raw)
    else:
        cache.put(raw)


class Relist:
    """Fills the caches from full listings, because watches do not report everything.

    | occasion | passes meanwhile |
    |---|---|
    | start | wait: nothing is planned on half of the objects |
    | the API server was away: at once, thrice in the minute after | wait: deletions were missed |
    | kopf has listed again (a watch was renewed) | go on |
    | every two minutes | go on |

    A cache never replaces an object by an older version of it, so a listing may run beside passes
    and watches.

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
