"""What the planner answers: loans, releases, and for everything why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rose_core.api.reasons import Reason
from rose_core.identity import PodUid
from rose_core.lending.facts import PlannerMemory


@dataclass(frozen=True)
class Lend:
    """Make a slot for this lease on this replica.

    Attributes:
        whole: serving is put to sleep for it.
    """

    lease: str
    replica: PodUid
    whole: bool = False


@dataclass(frozen=True)
class SlotRelease:
    """Take this slot back."""

    slot: str
    reason: Reason
    message: str = ""


@dataclass(frozen=True)
class ReplicaDecision:
    """Why one replica is, or is not, lent; the unit of every explanation."""

    replica: str
    reason: Reason
    message: str = ""


@dataclass(frozen=True)
class LeaseDecision:
    """What a lease has after this plan, and why not more.

    Attributes:
        share: slots its weight entitles it to, of those the pool may lend now.
    """

    wanted: int
    granted: int
    reason: Reason
    message: str
    verdicts: tuple[ReplicaDecision, ...] = ()
    share: int = 0


@dataclass(frozen=True)
class Misfit:
    """A lease whose engine no GPU of a pool can hold, however idle they become.

    Attributes:
        lease: its key.
        text: the figures of both sides.
    """

    lease: str
    reason: Reason
    text: str


@dataclass(frozen=True)
class LendingPlan:
    """The planner's answer.

    Attributes:
        verdicts: replica uid -> whether it may be lent.
        outcomes: lease key -> what it has.
        members: pool key -> verdict of every replica of it, loans included.
        unwanted: pool key -> GPUs of replicas that could be lent now and that no lease wants.
        misfits: pool key -> leases whose engines none of its GPUs can hold.
        possible: keys of leases to which some replica could be lent, if not now then in a while.
    """

    lends: tuple[Lend, ...]
    releases: tuple[SlotRelease, ...]
    verdicts: Mapping[PodUid, ReplicaDecision]
    outcomes: Mapping[str, LeaseDecision]
    memory: PlannerMemory
    members: Mapping[str, tuple[ReplicaDecision, ...]]
    unwanted: Mapping[str, int] = field(default_factory=dict)
    misfits: Mapping[str, tuple[Misfit, ...]] = field(default_factory=dict)
    possible: frozenset[str] = frozenset()
