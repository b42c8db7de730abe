"""Replicas over several nodes: whom this node's guard follows, and who follows it.

| a pod of a group is here, and | then |
|---|---|
| it leads | other nodes' guards are answered (``leading``) |
| it follows, a slot is granted beside it, the operator has named its leader | that one is asked |
| it follows, else | its gate is closed, ``LeaderSilent`` |
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import grpc.aio

from rose_agent.guard import metrics
from rose_agent.guard.groups.leading import Leading
from rose_agent.guard.replicas.replica import GuardedReplica
from rose_agent.guard.slots.slot import GuardedSlot
from rose_core.guard.following import ASK_NS, LeaderLease
from rose_core.identity import PodUid, SlotUid
from rose_core.wire.leading import LeaderQuestion, LeaderUpdate
from rose_core.wire.sync import ReplicaGroup
from rose_wire import rpc, tls
from rose_wire.errors import WireError
from rose_wire.services import FOLLOW

_SILENT = LeaderLease()

_log = logging.getLogger(__name__)
_SILENT_SECONDS = 1.0
_REDIAL_SECONDS = 0.1


@dataclass(frozen=True)
class FollowerLoad:
    """What runs beside the follower: see ``LeaderQuestion``."""

    lent: bool
    computing: bool


class FollowerLink:
    """Follows one leader for one pod of this node: asks its guard, and hears when it closes.

    It asks while a slot is granted beside the follower. A stream on which nothing was heard for a
    second is given up for a new one, so that a healed network is used at once. The gate has long
    been closed by then. ``rose_core.guard.following`` decides what an answer is good for.

    Args:
        group: whom to follow.
        pod: of this node.
        name: the pod's, for people.
        load: asked with every question.
        on_update: called after each update, with when a request has closed the leader's gate, or 0.
        token: the installation's.
        identity: folder with this node's certificate, and the authority of nodes' certificates.

    Attributes:
        state: the lease that the leader's updates gave.
    """

    def __init__(
        self,
        group: ReplicaGroup,
        pod: PodUid,
        *,
        name: str,
        load: Callable[[], FollowerLoad],
        on_update: Callable[[int], None],
        token: str,
        identity: Path,
    ) -> None:
        self.group, self.pod = group, pod
        self.state = LeaderLease(next_number=1 + secrets.randbits(62))
        self._name, self._load, self._on_update = name, load, on_update
        self._token, self._identity = token, identity
        self._soon = asyncio.Event()
        self._closing, self._stopped = 0, 0
        self._complaint = ""
        self._received_s = 0.0
        self._conversation: object = None

    def note_stopped(self) -> None:
        """All engines beside the pod stand still since the leader closed for a request."""
        self._stopped = self._closing
        self._soon.set()

    def show_age(self, now_ns: int) -> None:
        """Show in the metrics how old the leader's lease is."""
        if self.state.sent_ns:
            age = metrics.LEADER_LEASE_AGE.labels(self._name)
            age.set((now_ns - self.state.sent_ns) / 1e9)

    def forget(self) -> None:
        """Show nothing any more."""
        with contextlib.suppress(KeyError):
            metrics.LEADER_LEASE_AGE.remove(self._name)

    async def run(self) -> None:
        """Ask until cancelled."""
        while True:
            try:
                channel = self._dial()
            except OSError as error:  # no certificate yet
                self._complain(str(error))
            else:
                await self._follow(channel)
            await asyncio.sleep(_REDIAL_SECONDS)

    async def _follow(self, channel: grpc.aio.Channel) -> None:
        """Converse until the stream ends, or brings nothing that is of use for too long."""
        self._received_s = time.monotonic()
        conversation = asyncio.create_task(self._converse(channel))
        conversation.add_done_callback(_look_at)
        try:
            while (left := self._received_s + _SILENT_SECONDS - time.monotonic()) > 0:
                await asyncio.wait({conversation}, timeout=left)
                if conversation.done():
                    break
            self._complain(_outcome(conversation) or f"silent for {_SILENT_SECONDS:.0f} s")
        finally:
            # Neither waits for the peer, not even with a write under way on a stalled connection.
            conversation.cancel()
            await channel.close()

    def _dial(self) -> grpc.aio.Channel:
        authority = self._identity / tls.BUNDLE
        credentials = tls.client_credentials(authority, self._identity)
        # A connection of its own: one that a partition has stalled is not used again.
        return rpc.connect(
            self.group.guard, credentials=credentials, name=self.group.node, own=True
        )

    async def _converse(self, channel: grpc.aio.Channel) -> None:
        async for answer in rpc.converse(channel, FOLLOW, self._questions(), token=self._token):
            self._receive(answer)

    def _receive(self, update: LeaderUpdate) -> None:
        now_ns = time.monotonic_ns()
        before, self.state = self.state, self.state.apply(update, now_ns)
        if self.state.sent_ns != before.sent_ns:
            # Answers that come too late for their question are as good as silence: a new
            # connection has no backlog.
            self._received_s = time.monotonic()
            self._complain("")
        arrived = update.arrived and before.is_open and before.holds(now_ns)
        if arrived:
            self._closing = update.sequence
        if self.state.eager or (self.state.is_open and not before.is_open):
            self._soon.set()  # opened: the leader hears at once that engines compute here
        self._on_update(now_ns if arrived else 0)

    async def _questions(self) -> AsyncIterator[LeaderQuestion]:
        self._conversation = own = object()
        while self._conversation is own:  # until a newer stream takes over
            self._soon.clear()
            self.state, number = self.state.ask(time.monotonic_ns())
            load = self._load()
            yield LeaderQuestion(
                self.group.leader, self.pod, number, load.computing, load.lent, self._stopped
            )
            # Not `wait_for`: Python 3.11's can lose a cancellation that meets the event.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ASK_NS / 1e9):
                    await self._soon.wait()

    def _complain(self, text: str) -> None:
        if text and text != self._complaint:
            _log.warning("guard of node %s at %s: %s", self.group.node, self.group.guard, text)
        self._complaint = text


def _outcome(conversation: asyncio.Task[None]) -> str:
    """Why a conversation has ended; empty = it has not.

    Raises:
        Exception: anything but a broken or refused stream.
    """
    if not conversation.done() or conversation.cancelled():
        return ""
    error = conversation.exception()
    if error is not None and not isinstance(error, WireError):
        raise error
    return str(error or "it ended the stream")


def _look_at(conversation: asyncio.Task[None]) -> None:
    """Take what a conversation ended with, also of one for which nobody waits any more."""
    if not conversation.cancelled():
        conversation.exception()


@dataclass(frozen=True)
class _Link:
    link: FollowerLink
    task: asyncio.Task[None]

    def end(self) -> None:
        self.task.cancel()
        self.link.forget()


class Groups:
    """Those of one node; single-threaded.

    Args:
        leading: answers other nodes' guards.
        slots: of the node.
        token: the installation's.
        identity: folder with the node's certificate; None = it has none and follows nobody.
        on_update: called with a follower's pod after each update of its leader (``FollowerLink``).
    """

    def __init__(
        self,
        leading: Leading,
        slots: Mapping[SlotUid, GuardedSlot],
        token: str,
        identity: Path | None,
        on_update: Callable[[PodUid, int], None],
    ) -> None:
        self.leading = leading
        self._slots, self._token, self._identity = slots, token, identity
        self._on_update = on_update
        self._groups: Mapping[PodUid, ReplicaGroup] = {}
        self._links: dict[PodUid, _Link] = {}

    def take(self, groups: tuple[ReplicaGroup, ...]) -> None:
        """Set which replicas are several pods, as the operator reports."""
        self.leading.match(groups)
        self._groups = {follower.pod: group for group in groups for follower in group.followers}

    def match(self, replicas: Mapping[PodUid, GuardedReplica]) -> None:
        """Follow whom there is to follow, and nobody else.

        Raises:
            Exception: whatever has ended a link; the guard ends with it, as with its own loop.
        """
        granted = {slot.grant.pod_uid for slot in self._slots.values() if slot.grant is not None}
        wanted = {
            uid: self._groups[uid]
            for uid, replica in replicas.items()
            if replica.pod.follows and uid in self._groups and uid in granted
        }
        for uid, held in list(self._links.items()):
            if held.task.done():
                held.task.result()
            if wanted.get(uid) != held.link.group:
                self._links.pop(uid).end()
        for uid in set(wanted) - set(self._links):
            if self._identity is not None:
                self._links[uid] = self._follow(wanted[uid], replicas[uid], self._identity)

    def _follow(self, group: ReplicaGroup, replica: GuardedReplica, identity: Path) -> _Link:
        uid = replica.pod.uid
        link = FollowerLink(
            group,
            uid,
            name=replica.pod.name,
            load=lambda: self._load_of(uid),
            on_update=lambda arrived_ns: self._on_update(uid, arrived_ns),
            token=self._token,
            identity=identity,
        )
        return _Link(link, asyncio.create_task(link.run()))

    def _load_of(self, uid: PodUid) -> FollowerLoad:
        now_ns = time.monotonic_ns()
        here = [s for s in self._slots.values() if s.grant is not None and s.grant.pod_uid == uid]
        return FollowerLoad(
            lent=any(slot.serves(uid) for slot in here),
            computing=any(slot.is_computing(now_ns) for slot in here),
        )

    def following(self, replica: GuardedReplica, now_ns: int) -> LeaderLease | None:
        """The lease of its leader; None = it leads, or is one pod by itself."""
        if not replica.pod.follows:
            return None
        held = self._links.get(replica.pod.uid)
        if held is None:
            return _SILENT
        held.link.show_age(now_ns)
        return held.link.state

    def takes_stop(self, uid: PodUid, after_ns: int) -> bool:
        """Rollouts beside this replica stood so long after a request.

        Returns:
            Others of its pods matter for how long that took of all: they, or the leader, say so.
        """
        held = self._links.get(uid)
        if held is not None:
            held.link.note_stopped()
            return True
        return self.leading.takes_stop(uid, after_ns)

    def close(self) -> None:
        """Follow nobody any more."""
        for held in self._links.values():
            held.end()
        self._links.clear()
