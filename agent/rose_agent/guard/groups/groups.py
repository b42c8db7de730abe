"""Replicas over several nodes: whom this node's guard follows, and who follows it.

| a pod of a group is here, and | then |
|---|---|
| it leads | other nodes' guards are answered (``leading``) |
| it follows, a slot is granted beside it, the operator has told of its leader | that one is asked |
| it follows, else | its gate is closed, ``LeaderSilent`` |
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from rose_agent.guard.groups.followerlink import FollowerLink, FollowerLoad
from rose_agent.guard.groups.leading import Leading
from rose_agent.guard.replicas.replica import GuardedReplica
from rose_agent.guard.slots.slot import GuardedSlot
from rose_core.guard.following import HeldWord
from rose_core.identity import PodUid, SlotUid
from rose_core.wire.sync import ReplicaGroup

_SILENT = HeldWord()


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
        on_word: called with a follower's pod after each word of its leader (``FollowerLink``).
    """

    def __init__(
        self,
        leading: Leading,
        slots: Mapping[SlotUid, GuardedSlot],
        token: str,
        identity: Path | None,
        on_word: Callable[[PodUid, int], None],
    ) -> None:
        self.leading = leading
        self._slots, self._token, self._identity = slots, token, identity
        self._on_word = on_word
        self._groups: Mapping[PodUid, ReplicaGroup] = {}
        self._links: dict[PodUid, _Link] = {}

    def take(self, groups: tuple[ReplicaGroup, ...]) -> None:
        """Take the operator's word for which replicas are several pods."""
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
            on_word=lambda arrived_ns: self._on_word(uid, arrived_ns),
            token=self._token,
            identity=identity,
        )
        return _Link(link, asyncio.create_task(link.run()))

    def _load_of(self, uid: PodUid) -> FollowerLoad:
        now_ns = time.monotonic_ns()
        here = [s for s in self._slots.values() if s.grant is not None and s.grant.pod_uid == uid]
        return FollowerLoad(
            lent=any(slot.serves(uid) for slot in here),
            computing=any(slot.computing(now_ns) for slot in here),
        )

    def following(self, replica: GuardedReplica, now_ns: int) -> HeldWord | None:
        """What is held of the words of its leader; None = it leads, or is one pod by itself."""
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
