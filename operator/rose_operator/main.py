"""``rose operator``: the process, as tasks around one reconcile loop.

| task | does |
|---|---|
| lock | renews the leader Lease every third of its duration, on a thread of its own |
| watches | feed the caches: kopf, for every kind but nodes |
| listings | full listings beside the passes, for what watches do not tell |
| demand | asks the leases' routers what turns they have, while this operator leads |
| cluster facts | nodes' zones and cordons, autoscalers of serving; all optional |
| loop | one pass when something changed, and every ``plan_seconds`` |
| Sync server | answers agents from memory |
| Enrol server | tells routers and, where there are certificates, nodes who they are |
| keys | reads the keys of callers' service accounts anew now and then |
| own secrets | renews the installation's own certificates, where nobody else makes them |
| pages | ``/metrics``, ``/healthz`` (the loop turns), ``/readyz`` (leads, renews, or stands by) |
"""

from __future__ import annotations

import argparse
import asyncio
import datetime as dt
import gc
import logging
import signal
import sys
import time
from collections.abc import Coroutine
from contextlib import AsyncExitStack, suppress

from aiohttp import web

from rose_core.api import RolloutLease
from rose_operator import metrics, own_secrets
from rose_operator.apply.routers import is_ready, router_name
from rose_operator.errors import (
    ApiRefused,
    ApiUnavailable,
    ConfigurationError,
    NotLeader,
    OperatorError,
)
from rose_operator.kube.api import FIELD_MANAGER, Api, ObjectKind
from rose_operator.kube.backoff import ExponentialBackoff
from rose_operator.kube.leader import LeaderLock, LockRenewal, LockState
from rose_operator.kube.object_cache import ObjectCache
from rose_operator.kube.watches import Relist, watch_kinds
from rose_operator.notices import Notices
from rose_operator.own_secrets import OwnSecrets
from rose_operator.plan.cluster_facts import ClusterFacts
from rose_operator.plan.telemetry import NodeTelemetry
from rose_operator.plan.typed_objects import TypedReader
from rose_operator.reconcile import Reconciler
from rose_operator.settings import AUTHORITY, Settings, parse
from rose_operator.sync.demand import Demands
from rose_operator.sync.enrolment import NodeAuthority, NodeEnrolment, RouterEnrolment, RouterTrust
from rose_operator.sync.service import SyncService
from rose_wire.api_server import ANSWER_SECONDS, ApiServer, find_access
from rose_wire.errors import NotConfigured
from rose_wire.observability import pages
from rose_wire.rpc import Server
from rose_wire.services import NOTICES, SYNC
from rose_wire.tls import server_credentials

_log = logging.getLogger(__name__)

# So many requests that get no answer fit into the duration of the Lease.
_LOCK_REQUESTS = 5
_STUCK_SECONDS = 120.0
# After a start, wait at most this long for agents that had slots or replicas.
_PATIENCE_SECONDS = 30.0
# Changes are joined for this long; what people ask for waits for the rest alone.
_QUIET_SECONDS = 0.3
# Work of passes is at most a third of the core: agents' calls share it.
_REST = 2.0
_MOST_QUIET_SECONDS = 2.0
_SOON_SECONDS = 1.0
# Keys change once in months; a token of a new one is refused for this long at most.
_KEYS_SECONDS = 60.0
# Kinds whose new objects and generations are people's requests.
_ASKED_FOR = frozenset({ObjectKind.POOL, ObjectKind.LEASE, ObjectKind.POLICY})
_OF_TENANCY = frozenset({ObjectKind.POLICY, ObjectKind.NAMESPACE})


class SigningKeys:
    """The keys by which routers know their callers, as the API server has them now."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._found = ""

    def current(self) -> str:
        """A JSON Web Key Set; empty before the first was read."""
        return self._found

    async def read(self) -> None:
        """Ask the API server.

        Raises:
            ApiUnavailable, ApiRefused: it does not say.
        """
        self._found = await self._api.signing_keys()

    async def keep(self) -> None:
        """Ask again now and then: keys are replaced while their last tokens still live."""
        while True:
            await asyncio.sleep(_KEYS_SECONDS)
            try:
                await self.read()
            except OperatorError as error:
                _log.warning("keys of the service accounts: %s; those known stay", error)


class Operator:
    """Everything of one operator process."""

    def __init__(self, settings: Settings, server: ApiServer, lock_server: ApiServer) -> None:
        self.settings = settings
        self._server = server
        self.changed = asyncio.Event()
        self.stop = asyncio.Event()
        self.api = Api(
            server,
            settings.namespace,
            lambda: self.lock.may_write,
            routers=settings.routers,
        )
        self.keys = SigningKeys(self.api)
        self.requested = asyncio.Event()
        self.stores = {
            kind: ObjectCache(
                self.changed.set, *([self.requested.set] if kind in _ASKED_FOR else [])
            )
            for kind in ObjectKind
            if (settings.tenancy or kind not in _OF_TENANCY)
            and (settings.gateway is not None or kind is not ObjectKind.ROUTE)
        }
        self.started = time.monotonic()
        self.telemetry = NodeTelemetry(self.started)
        self.cluster_facts = ClusterFacts(self.changed.set)
        self.notices = Notices()
        self.lock = LeaderLock(
            Api(lock_server, settings.namespace),
            identity=settings.identity,
            duration=settings.lock_seconds,
            offline_seconds=settings.offline_seconds,
            clock=time.monotonic,
        )
        self.renewing = LockRenewal(
            self.lock,
            lock_server.close,
            clock=time.monotonic,
            stuck_seconds=settings.lock_seconds,
        )
        self._lease_reader = TypedReader(RolloutLease, self.stores[ObjectKind.LEASE])
        self.demands = Demands(
            settings, self._asked_leases, clock=time.monotonic, wake=self.changed.set
        )
        self.reconciler = Reconciler(
            settings,
            self.api,
            self.stores,
            self.telemetry,
            may_write=lambda: self.lock.may_write,
            clock=time.monotonic,
            wall=time.time,
            policy=settings.lending,
            cluster_facts=self.cluster_facts,
            notices=self.notices,
            hurry=self.requested.is_set,
            demand=self.demands.total,
            notes=self.demands.notes,
        )
        self._outage = ExponentialBackoff(0.5, 15.0)
        self._turned_at = self.started
        self.listings = Relist(
            self.api,
            self.stores,
            failures=lambda: self.lock.failures,
            clock=time.monotonic,
        )
        self._remembered = False

    # The loop.

    async def loop(self) -> None:
        """Passes until stopped; failures wait for the next turn."""
        while not self.stop.is_set():
            try:
                await self._turn()
                self._outage.reset()
            except ApiUnavailable as error:
                _log.warning("pass ended early: %s", error)
                await self._sit_out(error)
            except NotLeader as error:
                _log.warning("pass ended early: %s", error)
            except OperatorError as error:
                _log.error("pass failed: %s", error)  # the message says it all
            except Exception:  # noqa: BLE001  # one bad pass must not end renewals of grants
                _log.exception("pass failed")
            self._turned_at = time.monotonic()
            await self._wait()

    async def _sit_out(self, error: ApiUnavailable) -> None:
        """Leave an API server that is down or overloaded alone for a while."""
        await asyncio.sleep(max(error.retry_after, self._outage.next()))

    async def _turn(self) -> None:
        if not self.lock.may_write:
            return
        await self.listings.list_if_due()
        if not self._remembered:
            self._remembered = True
            self.reconciler.remember_pools()
        if self._warming():
            return
        self.requested.clear()
        with metrics.PASS_SECONDS.time():
            await self.reconciler.run_pass()
        metrics.LAST_PASS.set_to_current_time()

    def _asked_leases(self) -> list[RolloutLease]:
        """Leases whose router is there to be asked."""
        if not self.lock.may_write:
            return []
        deployments = self.stores[ObjectKind.DEPLOYMENT]
        return [
            lease
            for lease in self._lease_reader.read().good.values()
            if is_ready(deployments.get(self._router_of(lease)))
        ]

    def _router_of(self, lease: RolloutLease) -> str:
        name = router_name(lease.metadata.namespace, lease.metadata.name)
        return f"{self.settings.routers}/{name}"

    def _warming(self) -> bool:
        """Judge nobody before the agents had time to come back: a restart must change nothing."""
        up = time.monotonic() - self.started
        if up < self.settings.warm_seconds:
            return True
        return up < _PATIENCE_SECONDS and not self.reconciler.agents_are_back()

    async def _wait(self) -> None:
        """Until something changed, not sooner than a moment, not later than the period."""
        rest = min(_MOST_QUIET_SECONDS, _REST * self.reconciler.worked_seconds)
        await asyncio.sleep(rest)
        await self._within(self.requested, max(0.0, _QUIET_SECONDS - rest))
        starting = time.monotonic() - self.started < _PATIENCE_SECONDS
        period = self.settings.plan_seconds
        if starting or self.reconciler.waiting:
            period = min(period, 0.5 if starting else _SOON_SECONDS)
        await self._within(self.changed, period)
        self.changed.clear()

    @staticmethod
    async def _within(event: asyncio.Event, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await event.wait()

    # The process.

    async def run(self) -> int:
        """Run until a signal or until deposed.

        Returns:
            Exit code: 0 after a signal, 1 when another operator leads or a task has failed.
        """
        async with AsyncExitStack() as listening:
            await self._listen(listening)
            self._on_signals()
            asked = await self._work()
        return 0 if asked else 1

    async def _listen(self, until: AsyncExitStack) -> None:
        """Open every port; what is opened is closed with the stack, in reverse."""
        syncing, sync_port = await self._syncing()
        until.push_async_callback(syncing.stop)
        enrolling = await self._enrolling()
        if enrolling is not None:
            until.push_async_callback(enrolling.stop)
        runner, http_port = await self._pages()
        until.push_async_callback(runner.cleanup)
        _log.info("Sync on port %d, pages on port %d", sync_port, http_port)
        print(f"rose operator: sync={sync_port} http={http_port}", flush=True)  # noqa: T201  # for whoever chose port 0

    async def _work(self) -> bool:
        """Every task until a signal, or until one of them ends.

        Returns:
            Whether it ended because it was asked to.
        """
        tasks = self._tasks()
        stopped = asyncio.create_task(self.stop.wait(), name="stop")
        await asyncio.wait([stopped, *tasks], return_when=asyncio.FIRST_COMPLETED)
        asked = self.stop.is_set() and self.lock.state is not LockState.DEPOSED
        self.stop.set()
        await self._end(tasks)
        return asked

    def _tasks(self) -> list[asyncio.Task[None]]:
        """The module's table, begun."""
        kinds = watch_kinds(
            self.stores, self.settings.namespace, self.listings.request, self.settings.routers
        )
        work: dict[str, Coroutine[None, None, None]] = {
            "lock": self.renewing.run(),
            "loop": self.loop(),
            "kopf": kinds,
            "listings": self.listings.keep(),
            "cluster facts": self.cluster_facts.keep_listing(self.api),
            "demand": self.demands.run(),
            "cordons": self.cluster_facts.watch_cordons(self.api),
        }
        if self.settings.router_authentication:
            work["keys"] = self.keys.keep()
        if self.settings.own_secrets is not None:
            # Not the leader's alone: each replica listens with what it holds.
            writing = Api(self._server, self.settings.namespace)
            work["own secrets"] = OwnSecrets(
                writing, self.settings.own_secrets, wall=time.time
            ).keep()
        return [asyncio.create_task(one, name=name) for name, one in work.items()]

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
        await self.renewing.release()

    async def _enrolling(self) -> Server | None:
        """Who asks has no certificate yet, hence a port of its own; a token proves him."""
        settings = self.settings
        if not settings.enrol_address:
            return None
        life = dt.timedelta(hours=settings.certificate_hours)
        routers = dt.timedelta(hours=settings.router_certificate_hours)
        account = "system:serviceaccount:"
        server = Server(credentials=server_credentials(settings.tls_dir))
        if settings.node_authority is not None:
            agents = f"{account}{settings.namespace}:{settings.agent_service_account}"
            NodeEnrolment(self.api, NodeAuthority(settings.node_authority, life), agents).serve_on(
                server
            )
        signing, folder = settings.router_authority, settings.tls_dir
        own = folder / AUTHORITY if folder is not None and settings.operator_authority else None
        trust = RouterTrust(
            settings.token,
            settings.routers,
            f"{account}{settings.routers}:{settings.router_service_account}",
            None if signing is None else NodeAuthority(signing, routers),
            settings.tls_client_ca,
            own,
        )
        RouterEnrolment(self.api, trust, self._lease, self.keys.current).serve_on(server)
        port = await server.start(settings.enrol_address)
        _log.info("identities of nodes and routers on port %d", port)
        return server

    def _lease(self, key: str) -> RolloutLease | None:
        return self._lease_reader.read().good.get(key)

    async def _syncing(self) -> tuple[Server, int]:
        credentials = server_credentials(self.settings.tls_dir, self.settings.tls_client_ca)
        server = Server(token=self.settings.token, credentials=credentials)
        service = self._sync_service()
        server.unary(SYNC, service.sync)
        server.server_stream(NOTICES, service.notices)
        return server, await server.start(self.settings.sync_address)

    def _sync_service(self) -> SyncService:
        return SyncService(
            self.settings,
            self.stores,
            self.telemetry,
            self.lock,
            clock=time.monotonic,
            wake=self.changed.set,
            notices=self.notices,
        )

    async def _pages(self) -> tuple[web.AppRunner, int]:
        async def ready(_request: web.Request) -> web.Response:
            # A follower is ready too: agents that reach it dial again until they find the leader,
            # and a rollout or a disruption budget may count on it.
            state = self.lock.state
            useful = self.lock.may_renew or state is LockState.FOLLOWER
            return web.Response(text=f"{state}\n", status=200 if useful else 503)

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


def main(argv: list[str]) -> int:
    """Run the operator until a signal.

    Returns:
        0 after a signal, 1 when another operator took the lead or the API server does not give the
        keys of its service accounts or lets it fill its own Secrets, 2 when a flag is wrong.
    """
    own = own_secrets.options(argv)
    if own is not None and (code := asyncio.run(_make(own, argv))):
        return code
    try:
        settings = parse(argv)
    except ConfigurationError as error:
        sys.stderr.write(f"rose operator: {error}\n")
        return 2
    logging.basicConfig(
        level=settings.log_level, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    # kopf tells every failed attempt of every watch; the leader lock already tells the outage.
    logging.getLogger("kopf").setLevel(logging.CRITICAL)
    _spare_collections()
    return asyncio.run(_run(settings))


async def _make(own: own_secrets.SecretOptions, argv: list[str]) -> int:
    """What the other flags name may be what is made here, so it comes before they are read."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--namespace", default="rose-system")
    namespace: str = parser.parse_known_args(argv)[0].namespace
    try:
        server = await _server()
    except NotConfigured as error:
        return _no_cluster(error)
    try:
        await own_secrets.OwnSecrets(Api(server, namespace), own, wall=time.time).make()
    except (ApiRefused, OSError) as error:
        sys.stderr.write(f"rose operator: own secrets: {error}\n")
        return 1
    finally:
        await server.close()
    return 0


async def _server(seconds: float = ANSWER_SECONDS) -> ApiServer:
    return ApiServer(await find_access(), seconds=seconds, field_manager=FIELD_MANAGER)


def _no_cluster(error: NotConfigured) -> int:
    text = f"no cluster: {error}; run it in a pod, or set KUBECONFIG"
    sys.stderr.write(f"rose operator: {text}\n")
    return 2


def _spare_collections() -> None:
    """Let the cycle collector look less often: a pass over a large fleet makes few cycles.

    Reports and passes make tens of thousands of objects that their reference counts free; at the
    usual threshold each few hundred of them have those that stay walked again.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 10)


async def _run(settings: Settings) -> int:
    try:
        server = await _server()
        # The lock's requests must fail while there is still time for another try.
        lock_server = await _server(settings.lock_seconds / _LOCK_REQUESTS)
    except NotConfigured as error:
        return _no_cluster(error)
    try:
        operator = Operator(settings, server, lock_server)
        if settings.router_authentication:
            await operator.keys.read()
        return await operator.run()
    except (ApiRefused, ApiUnavailable) as error:
        sys.stderr.write(
            f"rose operator: the keys of this cluster's service accounts, by which routers know "
            f"their callers: {error}. Service accounts may read /openid/v1/jwks by the ClusterRole "
            "system:service-account-issuer-discovery; without it set the chart's value "
            "router.authentication=false\n"
        )
        return 1
    finally:
        await server.close()
