"""A replica over several nodes: a follower's gate opens only under the leader's lease.

Only the leader's node sees the replica's requests. Its guard sends updates to the guards of the
other nodes, one hop, and each of them opens its own permits only while it holds one:

| update of the leader | then the follower's gate |
|---|---|
| open, answers a question of ours, newer than the last | open until that was *sent* + lease |
| closed, whenever it comes | closed, for the leader's reason |
| open, nobody asked | as it was; ``eager``: ask at once |
| open, to a question that is unknown, old or was answered | as it was |
| open, sequence not above the last of its boot, or a lower term | as it was |
| none until the last one's end | closed, ``LeaderSilent`` |

So whatever delays, loses, doubles or reorders updates, or stops the leader's guard, no permit of a
follower outlasts by more than ``MAX_LEASE_NS`` the moment at which the update that opened it was
sent: the leader answers after the question was sent. Words between other processes than those two
are refused by the connection's certificates. Clocks are the nodes' own monotonic ones, and are not
compared with each other.

The state is kept by the follower, ``answer`` is the leader's half. ``GroupStop`` is how long such a
replica takes to stop, the hop included. Next step: ``gate`` judges by it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from rose_core.guard.ladder import LadderLimits
from rose_core.guard.reasons import GateReason
from rose_core.wire.leading import LeaderUpdate

ASK_NS = 60_000_000
"""Between two questions; with a round trip of up to 75 ms a gate that is open stays open."""

MAX_LEASE_NS = LadderLimits().permit_ns
"""Longest lease: what an open permit of the leader's own node may last."""

STOP_WAIT_NS = 1_000_000_000
"""So long followers are waited for that shall say that their engines stand."""

LOST_STOP_NS = 250_000_000
"""What a follower that did not say so counts as: its engines stand within it, whoever is dead."""

# Questions that still may be answered; an older one's lease would be over.
_OPEN_QUESTIONS = MAX_LEASE_NS // ASK_NS + 2


@dataclass(frozen=True)
class LeaderLease:
    """What a follower's guard holds: the leader's last update, and how long it counts.

    Attributes:
        next_number: of the next question; begins at a chance number, so that no answer to an
            earlier process is taken for ours.
        asked: (number, when sent) of questions that may still be answered.
        boot, term, sequence: of the newest update that was taken.
        answered: the newest question that was.
        is_open: whether that update opens the gate; ``reason`` why.
        sent_ns: from when its age counts.
        until_ns: its end.
        eager: the leader's gate has opened since we asked.
    """

    next_number: int = 1
    asked: tuple[tuple[int, int], ...] = ()
    boot: str = ""
    term: int = 0
    sequence: int = 0
    answered: int = 0
    is_open: bool = False
    reason: GateReason = GateReason.LEADER_SILENT
    sent_ns: int = 0
    until_ns: int = 0
    eager: bool = False

    def holds(self, now_ns: int) -> bool:
        """Whether the lease holds; on a clock that has gone backwards it does not."""
        return self.sent_ns <= now_ns < self.until_ns

    def ask(self, now_ns: int) -> tuple[LeaderLease, int]:
        """With one question more, sent now; and its number."""
        number = self.next_number
        asked = (*self.asked, (number, now_ns))[-_OPEN_QUESTIONS:]
        return replace(self, next_number=number + 1, asked=asked, eager=False), number

    def apply(self, update: LeaderUpdate, now_ns: int) -> LeaderLease:
        """The lease after an update of the leader's guard."""
        if not update.open:
            return self._close(update, now_ns)
        if not update.number:
            return replace(self, eager=True)
        sent_ns = dict(self.asked).get(update.number)
        if sent_ns is None or not self._is_newer(update):
            return self
        return replace(
            self._with(update),
            is_open=True,
            reason=_reason(update),
            sent_ns=sent_ns,
            until_ns=sent_ns + max(0, min(update.lease_ns, MAX_LEASE_NS)),
        )

    def _close(self, update: LeaderUpdate, now_ns: int) -> LeaderLease:
        """Any closing update closes; only one newer than all others is remembered as such."""
        state = self._with(update) if self._is_newer(update) else self
        sent_ns = dict(self.asked).get(update.number, now_ns)
        return replace(
            state,
            is_open=False,
            reason=_reason(update),
            sent_ns=sent_ns,
            until_ns=sent_ns + MAX_LEASE_NS,
        )

    def _is_newer(self, update: LeaderUpdate) -> bool:
        if update.term < self.term:
            return False
        if update.boot == self.boot:
            return update.sequence > self.sequence
        return update.number > self.answered  # of another process: by what it answers

    def _with(self, update: LeaderUpdate) -> LeaderLease:
        done = max(self.answered, update.number)
        return replace(
            self,
            boot=update.boot,
            term=update.term,
            sequence=update.sequence,
            answered=done,
            asked=tuple((number, sent) for number, sent in self.asked if number > done),
        )


def _reason(update: LeaderUpdate) -> GateReason:
    try:
        return GateReason(update.reason)
    except ValueError:  # of another version's guard
        return GateReason.LEADER_SILENT


def answer(*, is_open: bool, reason: GateReason, until_ns: int, now_ns: int) -> LeaderUpdate:
    """What the leader's verdict of this moment lets followers do; the caller numbers it.

    Args:
        is_open: its gate.
        reason: why.
        until_ns: how far the leader's own permit may reach; 0 = no bound of its own.
        now_ns: the leader's clock.
    """
    lease_ns = MAX_LEASE_NS if not until_ns else min(MAX_LEASE_NS, until_ns - now_ns)
    still = is_open and lease_ns > 0
    return LeaderUpdate("", 0, 0, 0, still, reason.value, lease_ns if still else 0)


@dataclass
class GroupStop:
    """How long after a request's arrival the last engine of a replica over several nodes stood.

    All of it is measured by the leader's clock, from the arrival until the follower's report that
    its engines stand has come back. So both ways of the hop are in it: of engines that the leader
    knew to compute, what the certificate's D takes may be too large, and is never too small.

    Attributes:
        arrival_ns: the request's.
        awaited: who has not said so yet.
        worst_ns: of those that have.
    """

    arrival_ns: int
    awaited: set[str] = field(default_factory=set)
    worst_ns: int = 0

    def note(self, who: str, after_ns: int) -> None:
        """The engines of one of them stand, so long after the arrival."""
        if who in self.awaited:
            self.awaited.discard(who)
            self.worst_ns = max(self.worst_ns, after_ns)

    def after_ns(self, now_ns: int) -> int | None:
        """The longest of all; None while somebody may still say so."""
        if not self.awaited:
            return self.worst_ns
        overdue = now_ns - self.arrival_ns >= STOP_WAIT_NS
        return max(self.worst_ns, LOST_STOP_NS) if overdue else None
