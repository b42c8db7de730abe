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
from collections.abc import Callable

from rose_core.api import RolloutSlot, ServingPool
from rose_core.wire.sync import SyncReply, SyncRequest
from rose_operator.admission import parse
from rose_operator.api import Kind
from rose_operator.grants import grants_of, policy_of
from rose_operator.leader import LeaderLock
from rose_operator.metrics import GRANTS, SYNCS
from rose_operator.settings import Settings
from rose_operator.store import Store
from rose_operator.telemetry import Telemetry

_log = logging.getLogger(__name__)


class SyncService:
    """Answers agents from memory.

    Args:
        wake: called when a report changes what a plan may depend on.
    """

    def __init__(
        self,
        settings: Settings,
        stores: dict[Kind, Store],
        telemetry: Telemetry,
        lock: LeaderLock,
        *,
        clock: Callable[[], float],
        wake: Callable[[], None],
    ) -> None:
        self._settings = settings
        self._stores = stores
        self._telemetry = telemetry
        self._lock = lock
        self._clock = clock
        self._wake = wake

    async def sync(self, request: SyncRequest) -> SyncReply:
        """Take one report, answer with the node's grants."""
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

    def _complete(self, highest_term: int) -> bool:
        known = all(self._stores[kind].complete for kind in (Kind.POOL, Kind.LEASE, Kind.SLOT))
        return known and self._lock.may_renew and highest_term <= self._lock.term

    def _empty(self) -> SyncReply:
        period = self._settings.sync_seconds
        return SyncReply(term=self._lock.term, complete=False, sync_period_seconds=period)

    def _full(self, node: str) -> SyncReply:
        slots = parse(RolloutSlot, self._stores[Kind.SLOT].all())
        pools = parse(ServingPool, self._stores[Kind.POOL].all())
        return SyncReply(
            term=self._lock.term,
            complete=True,
            grants=grants_of(node, slots.good.values(), self._lock.term, self._settings),
            pools=tuple(policy_of(pool) for pool in pools.good.values()),
            sync_period_seconds=self._settings.sync_seconds,
        )
