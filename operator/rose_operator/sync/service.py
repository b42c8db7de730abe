"""``Sync``: agents bring telemetry and take grants away, without any request to the API server.

| lock | objects known | answer |
|---|---|---|
| Leader | all | complete: every grant of the node |
| Offline, inside its bound | all | complete: the same grants, renewed |
| Follower, Deposed, Offline past the bound | any | incomplete: what the node has lapses |
| any | not all yet | incomplete, no grants |
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import suppress

from rose_core.api import RolloutLease, RolloutSlot, ServingPool, TenantPolicy
from rose_core.wire.sync import Notice, NoticeRequest, PoolPolicy, SyncReply, SyncRequest
from rose_operator.kube.api import ObjectKind
from rose_operator.kube.leader import LeaderLock
from rose_operator.kube.object_cache import ObjectCache
from rose_operator.metrics import GRANTS, LISTENERS, SYNCS
from rose_operator.notices import Notices
from rose_operator.plan.telemetry import NodeTelemetry
from rose_operator.plan.typed_objects import TypedReader
from rose_operator.settings import Settings
from rose_operator.sync.grants import adapter_runs, grants_of, policy_of
from rose_operator.tenancy import tenancy_of
from rose_wire import tls
from rose_wire.certificates import names_node
from rose_wire.errors import Refused
from rose_wire.rpc import peer

_log = logging.getLogger(__name__)
_SYNCS_PER_SECOND = 250.0
_RENEWALS_PER_TTL = 6.0
# A file read for each of thousands of answers a second would be felt.
_AUTHORITY_SECONDS = 10.0
_LENT = (ObjectKind.SLOT, ObjectKind.POOL)
_OF_TENANCY = (ObjectKind.POLICY, ObjectKind.NAMESPACE)


class SyncService:
    """Answers agents from memory.

    Args:
        wake: called when a report changes what a plan may depend on.
    """

    def __init__(
        self,
        settings: Settings,
        stores: dict[ObjectKind, ObjectCache],
        telemetry: NodeTelemetry,
        lock: LeaderLock,
        *,
        clock: Callable[[], float],
        wake: Callable[[], None],
        notices: Notices | None = None,
    ) -> None:
        self._settings = settings
        self._stores = stores
        self._slot_reader = TypedReader(RolloutSlot, stores[ObjectKind.SLOT])
        self._pool_reader = TypedReader(ServingPool, stores[ObjectKind.POOL])
        self._notices = Notices() if notices is None else notices
        self._telemetry = telemetry
        self._lock = lock
        self._clock = clock
        self._wake = wake
        self._authority, self._authority_due = b"", float("-inf")
        self._lease_reader = TypedReader(RolloutLease, stores[ObjectKind.LEASE])
        # They say which runs leases may follow beside their first.
        self._following = (ObjectKind.LEASE, *(_OF_TENANCY if settings.tenancy else ()))
        self._policy_reader = (
            TypedReader(TenantPolicy, stores[ObjectKind.POLICY]) if settings.tenancy else None
        )
        self._others: Mapping[str, tuple[str, ...]] = {}
        self._followed: tuple[int, ...] = ()
        self._lent: tuple[int, ...] = ()
        self._slots: Mapping[str, Sequence[RolloutSlot]] = {}
        self._policies: tuple[PoolPolicy, ...] = ()

    async def sync(self, request: SyncRequest) -> SyncReply:
        """Take one report, answer with the node's grants.

        Raises:
            Refused: the caller's certificate names another node.
        """
        check_node(request.node, peer(), demanded=self._settings.tls_client_ca is not None)
        if request.node not in self._telemetry.nodes:
            _log.info("agent of node %s (%s) dialled in", request.node, request.agent_version)
        if self._telemetry.record(request, self._clock()):
            self._wake()
        if request.highest_term > self._lock.term:
            self._lock.outbid(request.highest_term)
        complete = self._complete(request.highest_term)
        SYNCS.labels("complete" if complete else "incomplete").inc()
        reply = self._full(request.node) if complete else self._empty()
        GRANTS.labels(request.node).set(len(reply.grants))
        return reply

    async def notices(self, request: NoticeRequest) -> AsyncIterator[Notice]:
        """Tell the node whenever its grants have changed, for as long as it listens.

        Raises:
            Refused: the caller's certificate names another node.
        """
        check_node(request.node, peer(), demanded=self._settings.tls_client_ca is not None)
        LISTENERS.inc()
        try:
            async for notice in self._notices.follow(request):
                yield notice
        finally:
            LISTENERS.dec()

    def _complete(self, highest_term: int) -> bool:
        known = all(self._stores[kind].complete for kind in (*_LENT, *self._following))
        return known and self._lock.may_renew and highest_term <= self._lock.term

    def _period(self) -> float:
        """Longer in a large fleet, so that renewals cost a bounded share of a core.

        A grant is still renewed several times before it lapses; news does not wait for the period.
        """
        by_size = len(self._telemetry.nodes) / _SYNCS_PER_SECOND
        most = self._settings.grant_seconds / _RENEWALS_PER_TTL
        return max(self._settings.sync_seconds, min(by_size, most))

    def _empty(self) -> SyncReply:
        period = self._period()
        return SyncReply(term=self._lock.term, complete=False, sync_period_seconds=period)

    def _full(self, node: str) -> SyncReply:
        self._derive()
        return SyncReply(
            term=self._lock.term,
            complete=True,
            grants=grants_of(
                node,
                self._slots.get(node, ()),
                self._lock.term,
                self._settings,
                self._routers_authority(),
                others=self._others,
            ),
            pools=self._policies,
            sync_period_seconds=self._period(),
            groups=self._telemetry.groups_on(node),
        )

    def _routers_authority(self) -> bytes:
        """Whom agents believe to be a router, read again now and then; empty without TLS."""
        folder, now = self._settings.router_authority, self._clock()
        if folder is not None and now >= self._authority_due:
            with suppress(OSError):  # it is being replaced: the next answer has the new one
                self._authority = tls.bundle_of(folder)
                self._authority_due = now + _AUTHORITY_SECONDS
        return self._authority

    def _derive(self) -> None:
        """Slots by node, pool policies and runs beside leases' first, each after a change alone."""
        if (lent := self._revisions(_LENT)) != self._lent:
            by_node: dict[str, list[RolloutSlot]] = defaultdict(list)
            for slot in self._slot_reader.read().good.values():
                by_node[slot.spec.member.node].append(slot)
            self._slots = by_node
            self._policies = tuple(map(policy_of, self._pool_reader.read().good.values()))
            self._lent = lent
        if (followed := self._revisions(self._following)) != self._followed:
            tenancy = tenancy_of(self._policy_reader, self._stores)
            leases = self._lease_reader.read().good.values()
            self._others = adapter_runs(leases, self._settings, tenancy)
            self._followed = followed

    def _revisions(self, kinds: tuple[ObjectKind, ...]) -> tuple[int, ...]:
        return tuple(self._stores[kind].revision for kind in kinds)


def check_node(node: str, names: Collection[str], *, demanded: bool) -> None:
    """Refuse a caller whose certificate does not name the node that its message speaks for.

    The installation's bearer token says that a caller is an agent, not which one. Where agents must
    have certificates (``--tls-client-ca``), one that has been taken over can neither report for
    other nodes nor read their grants.

    Args:
        node: that the message speaks for.
        names: of the caller's certificate, empty without one.
        demanded: certificates are asked for.

    Raises:
        Refused: the certificate names others; the message lists them.
    """
    if not demanded or names_node(node, names):
        return
    known = ", ".join(sorted(names)) or "nobody"
    message = f"the certificate names {known}, the message speaks for node {node}"
    raise Refused(message)
