"""The leader's guard answers the guards of its followers' nodes, and tells them when it closes.

One stream for each follower (``rose_core.wire.leading``). What is not sent yet is replaced by what
is newer where a peer does not read. Who asks is known by its node's certificate, at every message:
only a node that has a pod of the same replica is answered, and only for that replica. Next step:
``groups.FollowerLink`` is the other end, ``rose_core.guard.following`` decides.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import dataclass, field

import msgspec

from rose_core.guard.following import GroupStop, answer
from rose_core.guard.gate import GateVerdict
from rose_core.identity import PodUid
from rose_core.wire.leading import LeaderQuestion, LeaderUpdate
from rose_core.wire.sync import ReplicaGroup
from rose_wire.certificates import names_node
from rose_wire.errors import Refused, WireError
from rose_wire.rpc import Server, peer
from rose_wire.services import FOLLOW

# Of the leader's own engine, among those whose stop is awaited; no pod has this name.
_OWN = ""
_MOST_UNSENT = 16


@dataclass(eq=False)
class _Stream:
    """What a leader's guard keeps of one follower.

    Attributes:
        computing_until_ns: how far its engines may compute, by what it was sent; 0 = they do not.
        closed: sequence of the closing update that they have not confirmed yet; 0 = none.
    """

    leader: PodUid = PodUid("")
    follower: PodUid = PodUid("")
    lent: bool = False
    computing_until_ns: int = 0
    closed: int = 0
    unsent: deque[LeaderUpdate | WireError] = field(
        default_factory=lambda: deque(maxlen=_MOST_UNSENT)
    )
    more: asyncio.Event = field(default_factory=asyncio.Event)

    def send(self, update: LeaderUpdate | WireError) -> None:
        self.unsent.append(update)
        self.more.set()


class Leading:
    """Answers for the replicas of this node that lead a group; single-threaded.

    Args:
        node: this node's name.
        verdict: the gate of a replica as it stands now; None = it is not here.
        term: the highest leader term that was obeyed.
        on_stop: called with a replica, how long after a request's arrival the last engine of its
            pods stood, nanoseconds.
        clock: monotonic nanoseconds.
    """

    def __init__(
        self,
        node: str,
        verdict: Callable[[PodUid, int], GateVerdict | None],
        term: Callable[[], int],
        on_stop: Callable[[PodUid, int], None],
        clock: Callable[[], int],
    ) -> None:
        self._node, self._verdict, self._term = node, verdict, term
        self._on_stop, self._clock = on_stop, clock
        self._boot, self._sequence = secrets.token_hex(8), 0
        self._streams: set[_Stream] = set()
        self._groups: Mapping[PodUid, ReplicaGroup] = {}
        self._open: dict[PodUid, bool] = {}
        self._stops: dict[PodUid, GroupStop] = {}

    def serve_on(self, server: Server) -> None:
        """Bind the method."""
        server.bidirectional(FOLLOW, self.follow)

    def match(self, groups: Iterable[ReplicaGroup]) -> None:
        """Set who follows whom, as the operator reports."""
        led = {group.leader: group for group in groups if group.node == self._node}
        self._groups = led
        for uid in set(self._open) - set(led):
            del self._open[uid]
            self._stops.pop(uid, None)

    async def follow(self, questions: AsyncIterator[LeaderQuestion]) -> AsyncIterator[LeaderUpdate]:
        """Answer one follower until it goes.

        Raises:
            Refused: its node has no pod of the replica, or this one does not lead it.
        """
        stream = _Stream()
        self._streams.add(stream)
        reading = asyncio.create_task(self._read(stream, questions))
        try:
            while not (reading.done() and not stream.unsent):
                stream.more.clear()
                while stream.unsent:
                    update = stream.unsent.popleft()
                    if isinstance(update, WireError):
                        raise update
                    yield update
                if not reading.done():
                    await stream.more.wait()
        finally:
            reading.cancel()
            self._streams.discard(stream)

    async def _read(self, stream: _Stream, questions: AsyncIterator[LeaderQuestion]) -> None:
        try:
            async for question in questions:
                self._check(question)
                self._answer(stream, question)
        except WireError as error:
            stream.send(error)
        finally:
            stream.more.set()

    def _check(self, question: LeaderQuestion) -> None:
        group = self._groups.get(question.leader)
        followers = (
            {follower.pod: follower.node for follower in group.followers}
            if group is not None
            else {}
        )
        node = followers.get(question.follower)
        if node is None or not names_node(node, peer()):
            names = ", ".join(sorted(peer())) or "nobody"
            raise Refused(
                f"the certificate names {names}; pod {question.follower} of it does not follow pod "
                f"{question.leader} of node {self._node}, as far as the operator has told"
            )

    def _answer(self, stream: _Stream, question: LeaderQuestion) -> None:
        now_ns = self._clock()
        stream.leader, stream.follower = question.leader, question.follower
        stream.lent = question.lent
        update = self._update(stream, now_ns, question.number)
        stream.computing_until_ns = now_ns + update.lease_ns if question.computing else 0
        stop = self._stops.get(stream.leader)
        if stop is not None and stream.closed and question.stopped >= stream.closed:
            stop.note(stream.follower, now_ns - stop.arrival_ns)
            stream.closed = 0
            self._finish(stream.leader, now_ns)
        stream.send(update)

    def _update(self, stream: _Stream, now_ns: int, number: int = 0) -> LeaderUpdate:
        verdict = self._verdict(stream.leader, now_ns)
        self._sequence += 1  # over all streams: one that a follower opens anew goes on from there
        if verdict is None:
            return LeaderUpdate(self._boot, self._term(), self._sequence, number)
        update = answer(
            is_open=verdict.open,
            reason=verdict.reason,
            until_ns=verdict.until_ns,
            now_ns=now_ns,
        )
        return msgspec.structs.replace(
            update, boot=self._boot, term=self._term(), sequence=self._sequence, number=number
        )

    # --- what the loop tells and asks

    def note(self, uid: PodUid, verdict: GateVerdict, arrival_ns: int, *, own: bool) -> None:
        """The gate of a replica that leads was judged; followers hear at once where it turned.

        Args:
            uid: the replica.
            verdict: of now.
            arrival_ns: of the request that was the reason, 0 = none was.
            own: an engine beside the leader itself was computing.
        """
        if uid not in self._groups:
            return
        now_ns = self._clock()
        turned = self._open.get(uid) is not verdict.open
        self._open[uid] = verdict.open
        if turned:
            self._push(uid, verdict, arrival_ns, now_ns, own=own)
        self._finish(uid, now_ns)

    def _push(
        self, uid: PodUid, verdict: GateVerdict, arrival_ns: int, now_ns: int, *, own: bool
    ) -> None:
        streams = [one for one in self._streams if one.leader == uid]
        arrived = bool(arrival_ns) and not verdict.open
        computing = [one for one in streams if one.computing_until_ns > now_ns] if arrived else []
        if computing:
            awaited = {str(one.follower) for one in computing} | ({_OWN} if own else set())
            self._stops[uid] = GroupStop(arrival_ns, awaited)
        for stream in streams:
            update = self._update(stream, now_ns)
            stream.send(msgspec.structs.replace(update, arrived=arrived))
            if not verdict.open:
                stream.computing_until_ns = 0
            if stream in computing:
                stream.closed = update.sequence

    def takes_stop(self, uid: PodUid, after_ns: int) -> bool:
        """The leader's own engine stood so long after an arrival; whether others are awaited."""
        stop = self._stops.get(uid)
        if stop is None or _OWN not in stop.awaited:
            return False
        stop.note(_OWN, after_ns)
        self._finish(uid, self._clock())
        return True

    def _finish(self, uid: PodUid, now_ns: int) -> None:
        stop = self._stops.get(uid)
        after_ns = stop.after_ns(now_ns) if stop is not None else None
        if stop is not None and after_ns is not None:
            del self._stops[uid]
            self._on_stop(uid, after_ns)

    def leads(self, uid: PodUid) -> bool:
        """Whether others follow this replica."""
        return uid in self._groups

    def has_lent_follower(self, uid: PodUid) -> bool:
        """Whether an engine serves beside a follower."""
        return any(stream.lent for stream in self._streams if stream.leader == uid)

    def computing_until_ns(self, uid: PodUid) -> int:
        """How far engines beside followers may compute; 0 = none does."""
        found = (stream.computing_until_ns for stream in self._streams if stream.leader == uid)
        return max(found, default=0)
