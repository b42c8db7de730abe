"""Guard -> leader's guard ``Follow``: messages between the guards of one replica's nodes.

The follower asks; each answer repeats the question's number, so its age counts from the moment at
which *the follower* asked, on the follower's own clock. An update that nobody asked for can only
close a gate. Nothing here is compared with another machine's clock.
"""

from __future__ import annotations

import msgspec

from rose_core.identity import PodUid


class LeaderQuestion(msgspec.Struct, frozen=True, omit_defaults=True):
    """A follower's guard asks for the leader's lease, every ``following.ASK_NS``.

    Attributes:
        leader, follower: pods of the replica: whose gate is asked for, and who follows it.
        number: of this question; grows, and begins anywhere.
        computing: the permit of an engine beside the follower is open.
        lent: an engine serves beside the follower.
        stopped: sequence of the closing update since which all engines there stand still; 0 = none.
    """

    leader: PodUid
    follower: PodUid
    number: int
    computing: bool = False
    lent: bool = False
    stopped: int = 0


class LeaderUpdate(msgspec.Struct, frozen=True, omit_defaults=True):
    """How the leader's gate stands.

    Attributes:
        boot: which process says so; another one begins its sequence anew.
        term: highest leader term of the operator that it has obeyed.
        sequence: grows with every update of that process.
        number: of the question that this answers; 0 = nobody asked.
        open: followers may open.
        reason: a ``GateReason``.
        lease_ns: how long they may, from the moment at which the question was sent.
        arrived: it closes because of a request; ``LeaderQuestion.stopped`` answers that.
    """

    boot: str
    term: int
    sequence: int
    number: int = 0
    open: bool = False
    reason: str = ""
    lease_ns: int = 0
    arrived: bool = False
