"""kopf brings changes of our kinds; a small watch of our own brings those of all others.

Both only feed the stores: handlers decide nothing, set no finalizer and write nothing. kopf does
not tell what was deleted while a watch was down: it lists again (events without a type) and goes
on. So the stores are also filled by our own full listings: at the start, after kopf has listed
again, during the minute after an outage of the API server, and now and then.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import kopf

from rose_core.api import GROUP, VERSION
from rose_operator.errors import OperatorError
from rose_operator.kube.api import Api, Kind
from rose_operator.kube.object_cache import ObjectCache, Raw

_log = logging.getLogger(__name__)
_PLURALS = {
    Kind.POOL: "servingpools",
    Kind.LEASE: "rolloutleases",
    Kind.SLOT: "rolloutslots",
    Kind.POLICY: "tenantpolicies",
}
HandOver = Callable[[kopf.RawEvent, ObjectCache], None]
# kopf is started again after this, and looks this often whether it should end.
_AGAIN_SECONDS = 1.0
_LOOK_SECONDS = 0.5
# Given, because kopf asks the system for the user's name otherwise, and an image may have none.
_IDENTITY = "rose-operator"
_LISTED = (*_PLURALS, Kind.DEPLOYMENT, Kind.SERVICE, Kind.NAMESPACE)


class _EndlessBackoff:
    """Back-offs without an end: an API server that is down must not end the operator."""

    def __iter__(self) -> Iterator[float]:
        yield from (0.5, 1.0, 2.0)
        while True:
            yield 3.0


async def list_all(api: Api, stores: dict[Kind, ObjectCache]) -> None:
    """Fill every store from full listings.

    Raises:
        ApiUnavailable, ApiRefused: a listing failed; the others may have been taken over.
    """
    for kind in filter(stores.__contains__, _LISTED):
        items, version = await api.list(kind)
        stores[kind].replace(items, version)


def registry(
    stores: dict[Kind, ObjectCache], namespace: str, hand_over: HandOver
) -> kopf.OperatorRegistry:
    """One event handler per kind."""
    handlers = kopf.OperatorRegistry()
    for kind, plural in _PLURALS.items():
        if kind not in stores:
            continue
        only = namespace if kind is Kind.SLOT else None
        _register(handlers, stores[kind], plural, only, hand_over)

    @kopf.on.login(registry=handlers)
    def login(**kwargs: Any) -> kopf.ConnectionInfo | None:  # noqa: ANN401  # kopf's own signature
        return kopf.login_with_service_account(**kwargs) or kopf.login_with_kubeconfig(**kwargs)

    return handlers


def _register(
    handlers: kopf.OperatorRegistry,
    store: ObjectCache,
    plural: str,
    namespace: str | None,
    hand_over: HandOver,
) -> None:
    @kopf.on.event(GROUP, VERSION, plural, registry=handlers, id=plural)
    async def changed(event: kopf.RawEvent, **_: Any) -> None:  # noqa: ANN401  # kopf's signature
        if namespace in {None, event["object"]["metadata"].get("namespace")}:
            hand_over(event, store)


def settings() -> kopf.OperatorSettings:
    """Kopf without anything that writes, scans or gives up."""
    chosen = kopf.OperatorSettings()
    chosen.posting.enabled = False
    chosen.scanning.disabled = True
    chosen.peering.standalone = True
    chosen.networking.error_backoffs = _EndlessBackoff()
    chosen.networking.connect_timeout = 5
    chosen.watching.server_timeout = 300
    chosen.watching.client_timeout = 330
    chosen.watching.reconnect_backoff = 0.5
    return chosen


async def watch_kinds(
    stores: dict[Kind, ObjectCache], namespace: str, listed: Callable[[], None]
) -> None:
    """Run kopf in a thread of its own until cancelled.

    In the main thread kopf takes the process's signals, and at its end it waits for every task of
    the loop, ours included. What it brings is handed over to the caller's loop.
    """
    loop = asyncio.get_running_loop()
    stop = threading.Event()

    def hand_over(event: kopf.RawEvent, store: ObjectCache) -> None:
        loop.call_soon_threadsafe(_take, event, store, listed)

    handlers = registry(stores, namespace, hand_over)
    thread = threading.Thread(target=_run_kopf, args=(handlers, stop), name="kopf", daemon=True)
    thread.start()
    try:
        await asyncio.Event().wait()
    finally:
        stop.set()


def _run_kopf(handlers: kopf.OperatorRegistry, stop: threading.Event) -> None:
    """Kopf until told to stop; started again if it fails."""
    while not stop.is_set():
        try:
            asyncio.run(_watch(handlers, stop))
        except Exception as error:  # noqa: BLE001  # whatever ended kopf, watching must go on
            _log.error("kopf ended: %r; starting it again", error)
        stop.wait(_AGAIN_SECONDS)


async def _watch(handlers: kopf.OperatorRegistry, stop: threading.Event) -> None:
    """One life of kopf.

    kopf waits for a flag of ``threading`` in a worker thread, and the loop does not close before
    that thread ends: a kopf that failed would never be started again, and only the listings would
    bring news. So it gets a flag of its own loop.
    """
    told = asyncio.Event()
    running = asyncio.create_task(
        kopf.operator(
            registry=handlers,
            settings=settings(),
            clusterwide=True,
            standalone=True,
            identity=_IDENTITY,  # type: ignore[arg-type]  # kopf names the type of it privately
            stop_flag=told,
        )
    )
    while not running.done():
        if stop.is_set():
            told.set()
        await asyncio.wait([running], timeout=_LOOK_SECONDS)
    await running


def _take(event: kopf.RawEvent, store: ObjectCache, listed: Callable[[], None]) -> None:
    raw: Raw = dict(event["object"])
    if event["type"] is None:
        listed()
    if event["type"] == "DELETED":
        store.remove(raw)
    else:
        store.put(raw)


async def watch_others(api: Api, stores: dict[Kind, ObjectCache], kind: Kind) -> None:
    """Follow the operator's Deployments or Services, or namespaces, for ever."""
    while True:
        try:
            items, version = await api.list(kind)
            stores[kind].replace(items, version)
            async for change, raw in api.watch(kind, version):
                if change == "DELETED":
                    stores[kind].remove(raw)
                else:
                    stores[kind].put(raw)
        except OperatorError as error:
            _log.info("watch of %s: %s", kind.value, error)
        await asyncio.sleep(2.0)
