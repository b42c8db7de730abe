"""The leader lock: one writer, and a term that grows with every change of leader.

The Lease object's ``leaseTransitions`` is the term. Time is judged by our own monotonic clock: a
foreign Lease has run out when *we* have seen the same record unchanged for its whole duration.
Our own right to write ends ``duration`` after the moment we *sent* the last renewal that
succeeded, minus a margin.

| state | may write, plan, grant | may renew grants | leaves to |
|---|---|---|---|
| Follower | no | no | Leader: the Lease is free, ours, or ran out |
| Leader | yes | yes | Offline: no renewal for ``duration``; Deposed: another holder |
| Offline | no | for ``offline_seconds`` | Leader: renewed, same term; Deposed |
| Deposed | no | no | end: the process exits and starts anew |

Credentials that are not accepted, though they were read anew, depose too.

A node that reports a term above ours was led by a Lease that has been lost since (a restored
etcd): a leader then raises its own term above it (``outbid``).
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import Protocol

from rose_operator.errors import UNAUTHORIZED, ApiRefused, ApiUnavailable, OperatorError
from rose_operator.kube.api import ObjectKind
from rose_operator.kube.object_cache import Raw
from rose_operator.metrics import LAPSES, LEADER_STATE, TERM

LOCK_NAME = "rose-operator"
_MARGIN = 0.2
# Parts of the duration between two looks at the Lease, and after a look that got no answer.
RENEWALS = 3
_TRIES = 12
# ``leaseTransitions`` has 32 bits; one wrong node must not use them up.
_MOST_TERMS = 2**30

_log = logging.getLogger(__name__)

_BEAT_SECONDS = 1.0
_RELEASE_SECONDS = 3.0


class LockApi(Protocol):
    """What the lock needs of the API server."""

    namespace: str

    async def get(self, kind: ObjectKind, name: str) -> Raw | None:
        """Read."""

    async def create(self, kind: ObjectKind, manifest: Raw) -> Raw:
        """Make."""

    async def replace(self, kind: ObjectKind, manifest: Raw) -> Raw:
        """Replace the version that was read."""


class LockState(StrEnum):
    """States of the lock; edges in the module's table."""

    FOLLOWER = "Follower"
    LEADER = "Leader"
    OFFLINE = "Offline"
    DEPOSED = "Deposed"


class LeaseStep(StrEnum):
    """What to do about the Lease as it was read."""

    CREATE = "Create"
    CLAIM = "Claim"
    RENEW = "Renew"
    WAIT = "Wait"
    YIELD = "Yield"


@dataclass(frozen=True)
class LeaseRecord:
    """The Lease as read: who holds it, in which term, for how long."""

    holder: str
    term: int
    duration: float
    version: str


def decide(
    record: LeaseRecord | None, identity: str, my_term: int, unchanged_seconds: float
) -> LeaseStep:
    """The next step, from what was read.

    Args:
        record: the Lease as read, None when there is none.
        identity: our own name as a holder.
        my_term: the term we hold or held, 0 for none.
        unchanged_seconds: how long we have seen exactly this record.
    """
    if record is None:
        return LeaseStep.CREATE
    if my_term and (record.holder != identity or record.term != my_term):
        return LeaseStep.YIELD
    if my_term:
        return LeaseStep.RENEW
    ours = record.holder in {"", identity}
    return LeaseStep.CLAIM if ours or unchanged_seconds >= record.duration else LeaseStep.WAIT


class LeaderLock:
    """Keeps the Lease, tells what is allowed now.

    Args:
        clock: monotonic seconds.
        duration: of the Lease; renewed every third of it.
        offline_seconds: bound on renewing grants without the API server.

    Attributes:
        term: the term we hold or held last, 0 for none.
        failures: looks at the Lease that got no answer; a sign of an outage.
    """

    def __init__(
        self,
        api: LockApi,
        *,
        identity: str,
        duration: float,
        offline_seconds: float,
        clock: Callable[[], float],
    ) -> None:
        self._api = api
        self._identity = identity
        self._duration = duration
        self._offline_seconds = offline_seconds
        self._clock = clock
        self._renewed_at = 0.0
        self._seen: LeaseRecord | None = None
        self._seen_at = 0.0
        self._outbid = 0
        self._deposed = False
        self.failures = 0
        self.term = 0

    @property
    def state(self) -> LockState:
        """Where the lock stands now."""
        if self._deposed:
            return LockState.DEPOSED
        if not self.term:
            return LockState.FOLLOWER
        held = self._clock() - self._renewed_at < self._duration * (1 - _MARGIN)
        return LockState.LEADER if held else LockState.OFFLINE

    @property
    def may_write(self) -> bool:
        """Whether planning and writes are allowed now."""
        return self.state is LockState.LEADER

    @property
    def may_renew(self) -> bool:
        """Whether existing grants may be renewed now."""
        if self.state is LockState.OFFLINE:
            return self._clock() - self._renewed_at < self._offline_seconds
        return self.state is LockState.LEADER

    def outbid(self, term: int) -> None:
        """A node obeys this higher term: raise ours above it at the next renewal."""
        if term >= _MOST_TERMS:
            _log.error("a node claims term %d, which no operator can have had", term)
        elif term > self.term:
            self._outbid = max(self._outbid, term)

    async def run(self, alive: Callable[[], bool] = lambda: True) -> None:
        """Renew until deposed; without ``alive`` nothing is renewed and the lead lapses."""
        while self.state is not LockState.DEPOSED:
            answered = await self.step() if alive() else False
            await asyncio.sleep(self._duration / (RENEWALS if answered else _TRIES))

    async def step(self) -> bool:
        """One look at the Lease and one write at most; failures leave the state to time.

        Returns:
            Whether the API server answered; without an answer the next look should be soon.
        """
        sent, answered = self._clock(), True
        try:
            found = await self._api.get(ObjectKind.LOCK, LOCK_NAME)
            await self._act(found, sent)
        except ApiUnavailable as error:
            self.failures += 1
            answered = False
            _log.warning("leader Lease: %s", error)
        except ApiRefused as error:
            _log.error("leader Lease: %s", error)  # the message says it all
            # The credentials were read anew before that (``ApiServer.request``).
            self._deposed = self._deposed or error.code == UNAUTHORIZED
        self._publish()
        return answered

    async def release(self) -> None:
        """Give the Lease back so that a successor need not wait."""
        if self.state is not LockState.LEADER:
            return
        found = await self._api.get(ObjectKind.LOCK, LOCK_NAME)
        record = _read(found)
        if found and record and record.holder == self._identity and record.term == self.term:
            await self._api.replace(ObjectKind.LOCK, self._manifest(found, self.term, holder=""))
        self._deposed = True

    async def _act(self, found: Raw | None, sent: float) -> None:
        record = _read(found)
        if record != self._seen:
            self._seen, self._seen_at = record, self._clock()
        step = decide(record, self._identity, self.term, self._clock() - self._seen_at)
        if step is LeaseStep.YIELD:
            _log.error("another operator holds the leader Lease: %s", record)
            self._deposed = True
        elif step is LeaseStep.CREATE:
            term = max(self.term, self._outbid) + 1
            await self._api.create(ObjectKind.LOCK, self._manifest(None, term))
            self._hold(term, sent)
        elif step is not LeaseStep.WAIT and record is not None:
            term = self._next_term(step, record)
            await self._api.replace(ObjectKind.LOCK, self._manifest(found, term))
            self._hold(term, sent)

    def _next_term(self, step: LeaseStep, record: LeaseRecord) -> int:
        if step is LeaseStep.CLAIM or self._outbid >= record.term:
            return max(record.term, self._outbid) + 1
        return record.term

    def _hold(self, term: int, sent: float) -> None:
        if term != self.term:
            _log.info("leading in term %d", term)
        elif self.state is LockState.OFFLINE:
            LAPSES.inc()
        self.term = term
        self._outbid = 0
        self._renewed_at = sent

    def _manifest(self, found: Raw | None, term: int, holder: str | None = None) -> Raw:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        before: Raw = (found or {}).get("spec") or {}
        kept = before.get("acquireTime") if before.get("leaseTransitions") == term else None
        manifest: Raw = {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {"name": LOCK_NAME, "namespace": self._api.namespace},
            "spec": {
                "holderIdentity": self._identity if holder is None else holder,
                "leaseDurationSeconds": max(1, round(self._duration)),
                "leaseTransitions": term,
                # The official client's election takes a Lease without this for free.
                "acquireTime": kept or now,
                "renewTime": now,
            },
        }
        if found is not None:
            manifest["metadata"]["resourceVersion"] = found["metadata"]["resourceVersion"]
        return manifest

    def _publish(self) -> None:
        TERM.set(self.term if self.may_renew else 0)
        for state in LockState:
            LEADER_STATE.labels(state.value).set(state is self.state)


def _read(found: Raw | None) -> LeaseRecord | None:
    if found is None:
        return None
    spec = found.get("spec") or {}
    return LeaseRecord(
        holder=spec.get("holderIdentity") or "",
        term=int(spec.get("leaseTransitions") or 0),
        duration=float(spec.get("leaseDurationSeconds") or 0),
        version=found["metadata"]["resourceVersion"],
    )


class LockRenewal:
    """Renews the lock on a thread of its own, so that no renewal waits for a busy loop.

    Passes, agents' calls and watches share the main loop. On an overloaded machine a renewal that
    queued behind them came too late: the lead lapsed in the middle of a pass, and no lease was
    served until the load was gone. The thread has its own loop and its own connections.

    A thread that renews whatever happens would let a hung operator lead for ever. So the main loop
    beats once a second. Without a beat for ``stuck_seconds`` nothing is renewed: another replica
    takes the lead, and grants go on.

    Args:
        lock: its state may be read from anywhere; everything else happens in the thread.
        close: ends the connections of the lock's client, in the thread.
        clock: monotonic seconds.
        stuck_seconds: without a beat for so long, nothing is renewed.
    """

    def __init__(
        self,
        lock: LeaderLock,
        close: Callable[[], Awaitable[None]],
        *,
        clock: Callable[[], float],
        stuck_seconds: float,
    ) -> None:
        self._lock, self._close, self._clock = lock, close, clock
        self._stuck_seconds = stuck_seconds
        self._beat_at = clock()
        self._stop = threading.Event()
        self._ended = asyncio.Event()

    async def run(self) -> None:
        """Renew until deposed; cancelled, it leaves the lock to ``release``."""
        loop = asyncio.get_running_loop()

        def work() -> None:
            try:
                asyncio.run(self._renew())
            finally:
                loop.call_soon_threadsafe(self._ended.set)

        threading.Thread(target=work, name="leader-lock", daemon=True).start()
        while not self._ended.is_set():
            self.beat()
            try:
                async with asyncio.timeout(_BEAT_SECONDS):
                    await self._ended.wait()
            except TimeoutError:
                continue

    def beat(self) -> None:
        """The main loop turns."""
        self._beat_at = self._clock()

    def is_alive(self) -> bool:
        """Whether the main loop has turned lately; asked before every renewal."""
        silent = self._clock() - self._beat_at
        if silent > self._stuck_seconds:
            _log.error("the loop has not turned for %.0f s: the lead is left to another", silent)
        return silent <= self._stuck_seconds

    async def release(self) -> None:
        """Give the lead back; call it when nothing writes any more."""
        self._stop.set()
        try:
            async with asyncio.timeout(2 * _RELEASE_SECONDS):
                await self._ended.wait()
        except TimeoutError:
            _log.warning("the leader lock does not end")

    async def _renew(self) -> None:
        renewing = asyncio.create_task(self._lock.run(self.is_alive))
        asked = asyncio.create_task(asyncio.to_thread(self._stop.wait))
        await asyncio.wait([renewing, asked], return_when=asyncio.FIRST_COMPLETED)
        try:
            if renewing.done():
                await renewing
            else:
                await self._give_back(renewing)
        finally:
            self._stop.set()
            await self._close()

    async def _give_back(self, renewing: asyncio.Task[None]) -> None:
        renewing.cancel()
        await asyncio.gather(renewing, return_exceptions=True)
        try:
            async with asyncio.timeout(_RELEASE_SECONDS):
                await self._lock.release()
        except (OperatorError, TimeoutError) as error:
            _log.warning("leader Lease not given back: %s", error)
