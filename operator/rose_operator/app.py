"""The operator process: tasks around one reconcile loop.

| task | does |
|---|---|
| lock | renews the leader Lease every third of its duration |
| watches | feed the stores (kopf for the three kinds, our own for routers) |
| loop | one pass when something changed, and every ``plan_seconds`` |
| Sync server | answers agents from memory |
| pages | ``/metrics``, ``/healthz`` (the loop turns), ``/readyz`` (leads, or renews offline) |
"""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from dataclasses import replace

from aiohttp import web
from lightkube import AsyncClient

from rose_core.lending import Policy
from rose_operator import metrics
from rose_operator.api import Api, Kind
from rose_operator.errors import ApiUnavailable, NotLeader, OperatorError
from rose_operator.leader import LeaderLock, State
from rose_operator.reconcile import Reconciler
from rose_operator.settings import Settings
from rose_operator.store import Store
from rose_operator.sync import SyncService
from rose_operator.telemetry import Telemetry
from rose_operator.watches import list_all, watch_kinds, watch_routers
from rose_wire.observability import pages
from rose_wire.rpc import Server
from rose_wire.services import SYNC

_log = logging.getLogger(__name__)

_RELIST_SECONDS = 120.0
_STUCK_SECONDS = 120.0
# After a start, wait at most this long for agents that had slots or replicas.
_PATIENCE_SECONDS = 30.0
_QUIET_SECONDS = 0.3


class Operator:
    """Everything of one operator process."""

    def __init__(self, settings: Settings, client: AsyncClient) -> None:
        self.settings = settings
        self.changed = asyncio.Event()
        self.stop = asyncio.Event()
        self.api = Api(client, settings.namespace)
        self.stores = {kind: Store(self.changed.set) for kind in Kind}
        self.started = time.monotonic()
        self.telemetry = Telemetry(self.started)
        self.lock = LeaderLock(
            self.api,
            identity=settings.identity,
            duration=settings.lock_seconds,
            offline_seconds=settings.offline_seconds,
            clock=time.monotonic,
        )
        self.reconciler = Reconciler(
            settings,
            self.api,
            self.stores,
            self.telemetry,
            may_write=lambda: self.lock.may_write,
            clock=time.monotonic,
            wall=time.time,
            policy=replace(
                Policy(), settle_seconds=settings.settle_seconds, cool_seconds=settings.cool_seconds
            ),
        )
        self._turned_at = self.started
        self._listings = [self.started]
        self._listed = False
        self._failures_seen = 0

    # The loop.

    async def loop(self) -> None:
        """Passes until told to stop; failures wait for the next turn."""
        while not self.stop.is_set():
            try:
                await self._turn()
            except (ApiUnavailable, NotLeader) as error:
                _log.warning("pass ended early: %s", error)
            except OperatorError as error:
                _log.error("pass failed: %s", error)  # the message says it all
            except Exception:  # noqa: BLE001  # one bad pass must not end renewals of grants
                _log.exception("pass failed")
            self._turned_at = time.monotonic()
            await self._wait()

    async def _turn(self) -> None:
        if not self.lock.may_write:
            return
        await self._list_if_needed()
        if self._warming():
            return
        started = time.monotonic()
        await self.reconciler.run_pass()
        metrics.PLAN_SECONDS.observe(time.monotonic() - started)
        metrics.LAST_PASS.set_to_current_time()

    def _warming(self) -> bool:
        """Judge nobody before the agents had time to come back: a restart must change nothing."""
        up = time.monotonic() - self.started
        if up < self.settings.warm_seconds:
            return True
        return up < _PATIENCE_SECONDS and not self.reconciler.agents_are_back()

    async def _list_if_needed(self) -> None:
        """Full listings whenever deletions may have gone unheard, and now and then."""
        now = time.monotonic()
        if self.lock.failures != self._failures_seen:
            self._failures_seen = self.lock.failures
            # Watches come back a little later than the API server.
            self._listings += [now + delay for delay in (0.0, 5.0, 15.0, 45.0)]
        if not any(due <= now for due in self._listings):
            return
        await list_all(self.api, self.stores)
        if not self._listed:
            self._listed = True
            self.reconciler.remember_pools()
        self._listings = [due for due in self._listings if due > now] or [now + _RELIST_SECONDS]

    def _kopf_listed(self) -> None:
        """Kopf has listed: what was deleted before that, it will never tell."""
        soon = time.monotonic() + 1.0
        if not any(due <= soon for due in self._listings):
            self._listings.append(soon)

    async def _wait(self) -> None:
        """Until something changed, not sooner than a moment, not later than the period."""
        await asyncio.sleep(_QUIET_SECONDS)
        starting = time.monotonic() - self.started < _PATIENCE_SECONDS
        period = min(self.settings.plan_seconds, 0.5 if starting else self.settings.plan_seconds)
        try:
            async with asyncio.timeout(period):
                await self.changed.wait()
        except TimeoutError:
            pass
        self.changed.clear()

    # The process.

    async def run(self) -> int:
        """Run until a signal or until deposed.

        Returns:
            Exit code: 0 after a signal, 1 when another operator leads or a task has failed.
        """
        server = Server(token=self.settings.token)
        server.unary(SYNC, self._sync_service().sync)
        port = await server.start(self.settings.sync_address)
        runner, http_port = await self._pages()
        _log.info("Sync on port %d, pages on port %d", port, http_port)
        print(f"rose operator: sync={port} http={http_port}", flush=True)  # noqa: T201  # for whoever chose port 0
        tasks = [
            asyncio.create_task(self.lock.run(), name="lock"),
            asyncio.create_task(self.loop(), name="loop"),
            asyncio.create_task(
                watch_kinds(self.stores, self.settings.namespace, self._kopf_listed),
                name="kopf",
            ),
            *(
                asyncio.create_task(watch_routers(self.api, self.stores, kind), name=kind.value)
                for kind in (Kind.DEPLOYMENT, Kind.SERVICE)
            ),
        ]
        stopped = asyncio.create_task(self.stop.wait(), name="stop")
        self._on_signals()
        await asyncio.wait([stopped, *tasks], return_when=asyncio.FIRST_COMPLETED)
        asked = self.stop.is_set() and self.lock.state is not State.DEPOSED
        self.stop.set()
        await self._end(tasks)
        await server.stop()
        await runner.cleanup()
        return 0 if asked else 1

    def _on_signals(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self.stop.set)

    async def _end(self, tasks: list[asyncio.Task[None]]) -> None:
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        for result in results:
            if isinstance(result, Exception):
                _log.error("task ended with %r", result)
        try:
            async with asyncio.timeout(3):
                await self.lock.release()
        except (OperatorError, TimeoutError) as error:
            _log.warning("leader Lease not given back: %s", error)

    def _sync_service(self) -> SyncService:
        return SyncService(
            self.settings,
            self.stores,
            self.telemetry,
            self.lock,
            clock=time.monotonic,
            wake=self.changed.set,
        )

    async def _pages(self) -> tuple[web.AppRunner, int]:
        async def ready(_request: web.Request) -> web.Response:
            state = self.lock.state
            return web.Response(text=f"{state}\n", status=200 if self.lock.may_renew else 503)

        app = web.Application()
        app.add_routes([*pages(metrics.REGISTRY, self.health), web.get("/readyz", ready)])
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, self.settings.http_host, self.settings.http_port)
        await site.start()
        port: int = runner.addresses[0][1]
        return runner, port

    def health(self) -> str:
        """Why the process is not healthy, or nothing; an absent API server is no reason."""
        stuck = time.monotonic() - self._turned_at
        return f"the loop has not turned for {stuck:.0f} s" if stuck > _STUCK_SECONDS else ""
