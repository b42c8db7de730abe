"""Writes of a pass: several at a time, each for itself, refused ones with back-off.

| answer | consequence |
|---|---|
| taken | the store has the object's new version before the watch tells it |
| refused | this object waits (``backoff``); the others go on |
| none, overloaded | writes that have begun end, no other begins, the pass ends |
| the lead is lost | no other begins, the pass ends |
| any, and something more urgent waits | no other begins; the next pass finds the difference again |
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from rose_operator.errors import ApiRefused, ApiUnavailable, NotLeader, OperatorError
from rose_operator.kube.api import KINDS_OF_ROUTERS, ObjectKind
from rose_operator.kube.backoff import KeyedBackoff
from rose_operator.kube.object_cache import ObjectCache, Raw, key_of
from rose_operator.metrics import WAITING_WRITES

_log = logging.getLogger(__name__)
ACCESS = logging.getLogger("rose_operator.access")
"""Who changed what, and how it ended: every write but statuses, which say nothing new."""

# The API server shares its own limits among clients; this many at once is a quarter of a default.
_AT_ONCE = 12


class WriteApi(Protocol):
    """What a pass needs of the API server."""

    async def apply(self, kind: ObjectKind, manifest: Raw) -> Raw:
        """Create or change."""

    async def apply_status(self, kind: ObjectKind, manifest: Raw) -> Raw:
        """Write a status."""

    async def delete(self, kind: ObjectKind, name: str) -> None:
        """Delete from the namespace of its kind."""

    async def create(self, kind: ObjectKind, manifest: Raw) -> Raw:
        """Create."""


@dataclass(frozen=True)
class Write:
    """One write.

    Attributes:
        key: whose write: ``Kind namespace/name``, then a word for status or deletion.
        verb: for people; empty = nothing that they would look for.
        attempt: content and version it is made for; another one waits for no back-off.
    """

    key: str
    attempt: str
    run: Callable[[], Awaitable[None]]
    verb: str = ""


class Writer:
    """Carries out writes while we lead.

    Args:
        namespace: ROSE's own.
        may_write: whether the leader lock is held, asked before every write.
        routers: namespace of the routers; empty = the same.
        identity: of this operator among its replicas, for the log.
    """

    def __init__(
        self,
        api: WriteApi,
        stores: dict[ObjectKind, ObjectCache],
        namespace: str,
        *,
        may_write: Callable[[], bool],
        clock: Callable[[], float],
        backoff: KeyedBackoff | None = None,
        routers: str = "",
        identity: str = "",
    ) -> None:
        self._api, self._stores, self._namespace = api, stores, namespace
        self._routers, self._identity = routers or namespace, identity
        self._may_write, self._clock = may_write, clock
        self._backoff = KeyedBackoff() if backoff is None else backoff

    def apply(self, kind: ObjectKind, manifest: Raw) -> Write:
        """Create or change an object of ours."""

        async def run() -> None:
            self._stores[kind].put(await self._api.apply(kind, manifest))

        verb = "apply" if self._stores[kind].get(key_of(manifest)) else "create"
        key = f"{kind.value} {key_of(manifest)}"
        return Write(key, self._attempt(kind, manifest), run, verb)

    def delete(self, kind: ObjectKind, name: str) -> Write:
        """Delete an object of ours."""
        place = self._routers if kind in KINDS_OF_ROUTERS else self._namespace
        key = f"{place}/{name}"

        async def run() -> None:
            await self._api.delete(kind, name)
            self._stores[kind].forget(key)

        return Write(f"{kind.value} {key} delete", "", run, "delete")

    def status(self, kind: ObjectKind, manifest: Raw, run: Callable[[], Awaitable[None]]) -> Write:
        """Write a status; ``run`` does it."""
        key = f"{kind.value} {key_of(manifest)} status"
        return Write(key, self._attempt(kind, manifest, _essence(manifest)), run)

    def _attempt(self, kind: ObjectKind, manifest: Raw, content: object = None) -> str:
        live = self._stores[kind].get(key_of(manifest))
        version = live["metadata"].get("generation", "") if live else ""
        text = json.dumps(content or manifest, sort_keys=True)
        return f"{version} {hashlib.sha256(text.encode()).hexdigest()[:16]}"

    async def run(self, writes: Iterable[Write], leave: Callable[[], bool] = lambda: False) -> bool:
        """Carry out what back-off allows.

        Args:
            writes: in the order in which they begin.
            leave: whether something more urgent waits; asked before every write.

        Returns:
            Whether every write has begun.

        Raises:
            ApiUnavailable: the API server does not answer or is overloaded.
            NotLeader: the lock was lost in between.
        """
        now = self._clock()
        due = [one for one in writes if self._backoff.allows(one.key, one.attempt, now)]
        queue = iter(due)
        ends: list[OperatorError] = []
        left = 0

        async def work() -> None:
            nonlocal left
            for one in queue:
                if ends:
                    return
                if leave():
                    left += 1
                    return
                try:
                    await self._one(one)
                except OperatorError as error:
                    ends.append(error)

        await asyncio.gather(*(work() for _ in range(min(_AT_ONCE, len(due)))))
        WAITING_WRITES.set(len(self._backoff))
        if ends:
            raise ends[0]
        return not left

    async def _one(self, write: Write) -> None:
        if not self._may_write():
            message = "the leader Lease was lost during a pass"
            raise NotLeader(message)
        try:
            await write.run()
        except ApiRefused as error:
            seconds = self._backoff.note_failure(write.key, write.attempt, self._clock())
            _log.warning("%s refused, again in %.0f s: %s", write.key, seconds, error)
            self._write_down(write, f"refused ({error.code})")
        except ApiUnavailable:
            self._write_down(write, "no answer")
            raise
        else:
            self._backoff.note_success(write.key)
            self._write_down(write, "done")

    def _write_down(self, write: Write, outcome: str) -> None:
        if write.verb:
            name = write.key.removesuffix(f" {write.verb}")
            ACCESS.info("%s %s by operator %s: %s", write.verb, name, self._identity, outcome)

    def keep(self, objects: set[str]) -> None:
        """Forget the back-off of objects (``Kind namespace/name``) that are gone."""
        self._backoff.keep(lambda key: " ".join(key.split(" ")[:2]) in objects)


def _essence(manifest: Raw) -> object:
    """What a status says, without times and counts: they move all the time and are no new try."""
    fields = ("type", "status", "reason")
    return [
        [one.get(field) for field in fields] for one in manifest["status"].get("conditions", ())
    ]
