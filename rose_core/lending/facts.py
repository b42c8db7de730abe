"""What the planner sees (``Snapshot``) and what it answers (``Plan``).

Times are seconds since the epoch, ages are seconds; ``None`` is unknown, never zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rose_core.api.reasons import Reason


@dataclass(frozen=True)
class Policy:
    """The planner's own figures.

    Attributes:
        stale_seconds: a report older than this opens nothing.
        settle_seconds: a replica must qualify this long before it is lent (hysteresis).
        cool_seconds: a GPU that was given back rests this long.
        patience_seconds: a lent replica may be unfit this long before its slot is released.
        forget_seconds: a silent node's slots are released after this.
        preempt_after_seconds: a slot is not preempted earlier.
        max_kv_permille: a replica that uses more of its KV pool is not lent.
    """

    stale_seconds: float = 15.0
    settle_seconds: float = 10.0
    cool_seconds: float = 30.0
    patience_seconds: float = 60.0
    forget_seconds: float = 300.0
    preempt_after_seconds: float = 60.0
    max_kv_permille: int = 900


@dataclass(frozen=True)
class Window:
    """Minutes of the day in UTC; ``days`` are 0 = Monday, on which the window starts."""

    days: frozenset[int]
    start_minute: int
    end_minute: int


@dataclass(frozen=True)
class Pool:
    """What the owner allows.

    Attributes:
        remembered_replicas: how many it had when the operator started, while agents may still be
            on their way back; keeps a restart from looking like a smaller pool. 0 afterwards.
    """

    key: str
    max_replicas_percent: int
    min_unlent_replicas: int
    allowed_signals: frozenset[str]
    windows: tuple[Window, ...] = ()
    remembered_replicas: int = 0


@dataclass(frozen=True)
class Replica:
    """One serving replica as its agent reports it.

    Attributes:
        age_seconds: since the report arrived.
        refusal: the agent's own word, with ``refusal_text`` as it was sent.
        kv_permille: recent mean of KV use.
        occupied: the agent still reports a slot here that is not gone.
    """

    uid: str
    name: str
    node: str
    pool: str
    gpus: tuple[str, ...]
    ready: bool
    stopped: bool
    signal: str | None
    verified: bool | None
    kv_permille: int | None
    age_seconds: float
    refusal: Reason | None = None
    refusal_text: str = ""
    occupied: bool = False


@dataclass(frozen=True)
class Lease:
    """What an RL team asks for; ``refusal`` is admission's word (the lease is not accepted)."""

    key: str
    uid: str
    pool: str
    priority: int
    created: float
    min_slots: int
    max_slots: int
    refusal: Reason | None = None

    @property
    def rank(self) -> tuple[int, float, str]:
        """Sort key: higher priority first, then the older lease."""
        return (-self.priority, self.created, self.key)


@dataclass(frozen=True)
class Slot:
    """A RolloutSlot that exists; ``released`` ones still hold their GPUs."""

    name: str
    uid: str
    lease: str
    lease_uid: str
    pool: str
    node: str
    replica: str
    gpus: tuple[str, ...]
    created: float
    released: bool = False


@dataclass(frozen=True)
class Memory:
    """What the planner remembers from pass to pass; losing it only delays loans.

    Attributes:
        fit_since: replica uid -> since when it qualifies.
        unfit_since: slot uid -> since when its replica does not.
        freed_at: GPU -> when a slot on it was last seen.
    """

    fit_since: Mapping[str, float] = field(default_factory=dict)
    unfit_since: Mapping[str, float] = field(default_factory=dict)
    freed_at: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Snapshot:
    """Everything a plan depends on, besides the time.

    Attributes:
        silence: node -> seconds since its agent last reported (or since the operator started).
        reporting: nodes whose last report is fresh, so that what they leave out is gone.
    """

    pools: tuple[Pool, ...] = ()
    replicas: tuple[Replica, ...] = ()
    leases: tuple[Lease, ...] = ()
    slots: tuple[Slot, ...] = ()
    silence: Mapping[str, float] = field(default_factory=dict)
    reporting: frozenset[str] = frozenset()
    memory: Memory = field(default_factory=Memory)
    policy: Policy = field(default_factory=Policy)


@dataclass(frozen=True)
class Lend:
    """Make a slot for this lease on this replica."""

    lease: str
    replica: str


@dataclass(frozen=True)
class Release:
    """Take this slot back."""

    slot: str
    reason: Reason
    message: str = ""


@dataclass(frozen=True)
class Verdict:
    """Why one replica is, or is not, lent; the unit of every explanation."""

    replica: str
    reason: Reason
    message: str = ""


@dataclass(frozen=True)
class Outcome:
    """What a lease has after this plan, and why not more."""

    wanted: int
    granted: int
    reason: Reason
    message: str
    verdicts: tuple[Verdict, ...] = ()


@dataclass(frozen=True)
class Plan:
    """The planner's answer.

    Attributes:
        verdicts: replica uid -> whether it may be lent.
        outcomes: lease key -> what it has.
    """

    lends: tuple[Lend, ...]
    releases: tuple[Release, ...]
    verdicts: Mapping[str, Verdict]
    outcomes: Mapping[str, Outcome]
    memory: Memory
