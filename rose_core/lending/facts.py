"""What the planner sees: one ``Snapshot``. What it answers stands in ``answers``.

Times are seconds since the epoch, ages are seconds; ``None`` is unknown, never zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from rose_core.api.poollending import Spread
from rose_core.api.reasons import Reason
from rose_core.identity import LeaseUid, PodUid, SlotUid


@dataclass(frozen=True)
class PlannerPolicy:
    """The planner's own figures.

    Attributes:
        stale_seconds: a report older than this opens nothing.
        settle_seconds: a replica must qualify this long before it is lent (hysteresis).
        cool_seconds: a GPU that was given back rests this long.
        patience_seconds: a lent replica may be unfit this long before its slot is released.
        forget_seconds: a silent node's slots are released after this.
        preempt_after_seconds: a slot is not preempted earlier.
        max_kv_permille: a replica that uses more of its KV pool is not lent.
        rebalance_seconds: a slot above its lease's share is not taken for another lease earlier.
        toggle_seconds: what a loan costs before it gives anything (engine start, weights), until
            the lease's own loans have shown it.
        borrow_gain: a loan must be expected to last this many times its cost.
        deaf_seconds: a router's report that is older says nothing about demand.
        first_seconds: a lease without any turn yet holds its slots for so long: a trainer starts.
        ready_seconds: what lies between a wish for slots and the start of their engines: a look at
            the router, a pass, a node's Sync.
        by_gain: inside a priority a slot goes where it brings most (``shares.gain``), not by weight
        alone.
    """

    stale_seconds: float = 15.0
    settle_seconds: float = 10.0
    cool_seconds: float = 30.0
    patience_seconds: float = 60.0
    forget_seconds: float = 300.0
    preempt_after_seconds: float = 60.0
    max_kv_permille: int = 900
    rebalance_seconds: float = 600.0
    toggle_seconds: float = 60.0
    borrow_gain: float = 2.0
    deaf_seconds: float = 60.0
    first_seconds: float = 600.0
    ready_seconds: float = 15.0
    by_gain: bool = False


@dataclass(frozen=True)
class DailyWindow:
    """Minutes of the day in UTC; ``days`` are 0 = Monday, on which the window starts."""

    days: frozenset[int]
    start_minute: int
    end_minute: int


@dataclass(frozen=True)
class LoadOutlook:
    """What a pool's load is going to be (``forecast``).

    Attributes:
        peak_permille: highest expected share of busy time until the horizon, over its replicas.
        lead_seconds: the horizon.
        max_busy_permille: replicas that are not lent must carry the peak below this.
        learned: the shape of the day is known for all of the horizon.
    """

    peak_permille: int
    lead_seconds: float
    max_busy_permille: int
    learned: bool = True


@dataclass(frozen=True)
class WholeTerms:
    """What the owner allows of replicas that sleep (``whole``).

    Attributes:
        max_asleep: most that sleep at once.
        min_awake: replicas that stay Ready, as if no sleeper ever woke.
        max_busy_permille: those awake must carry the expected peak below this.
    """

    max_asleep: int
    min_awake: int
    max_busy_permille: int


@dataclass(frozen=True)
class BreakerTerms:
    """What happens when live traffic misses its objective.

    Attributes:
        missed: it misses it now.
        returns: everything lent goes back while the breaker is open; otherwise nothing is added.
    """

    missed: bool = False
    cooldown_seconds: float = 600.0
    returns: bool = False


@dataclass(frozen=True)
class PoolTerms:
    """What the owner allows.

    Attributes:
        per_node, per_minute: most replicas lent on one node, most loans made in a minute.
        per_zone_percent: most lent of a zone's replicas.
        per_lease_percent: most that one lease holds of what the pool may lend.
        remembered_replicas: how many it had when the operator started, while agents may still be
            on their way back; keeps a restart from looking like a smaller pool. 0 afterwards.
    """

    key: str
    max_replicas_percent: int
    min_unlent_replicas: int
    allowed_signals: frozenset[str]
    windows: tuple[DailyWindow, ...] = ()
    remembered_replicas: int = 0
    per_node: int | None = None
    per_zone_percent: int = 100
    per_lease_percent: int = 100
    per_minute: int | None = None
    spread: Spread = Spread.LEAST_USED
    outlook: LoadOutlook | None = None
    breaker: BreakerTerms = field(default_factory=BreakerTerms)
    whole: WholeTerms | None = None


def devices_of(node: str, gpus: tuple[str, ...]) -> frozenset[str]:
    """GPUs of a node; NVIDIA's names are unique, those of a static list may repeat on each node."""
    return frozenset(f"{node}/{gpu}" for gpu in gpus)


class Traits(NamedTuple):
    """What leases choose replicas by.

    Attributes:
        device_class: of their GPUs, empty when unknown.
        gpus: how many each has.
        models: what lies on their node; None when nobody says.
    """

    device_class: str
    gpus: int
    models: frozenset[str] | None


@dataclass(frozen=True)
class Replica:
    """One serving replica as its agent reports it.

    Attributes:
        stale: no fresh report speaks of it; how old the last one is stands in ``silence``.
        refusal: the agent's own word, with ``refusal_text`` as it was sent.
        kv_permille: recent mean of KV use.
        occupied: the agent still reports a slot here that is not gone.
        zone: of the node, empty when unknown.
        cordoned: the node is marked unschedulable: somebody is about to drain it.
        proven: the kubelet has allocated the GPUs to it.
        memory: what may be lent of each of its GPUs, as a sum in figures; for people alone.
        lendable_bytes: that sum; None = nobody has worked it out, or the driver does not tell.
        gpu_bytes: memory of the tightest of its GPUs, all of it; None = unknown.
        device_class: of its GPUs, empty when unknown.
        models: what lies on its node; None when nobody says.
        group: of several pods that are one replica together, with a slot each; empty = it is one
            by itself.
    """

    uid: PodUid
    name: str
    node: str
    pool: str
    gpus: tuple[str, ...]
    ready: bool
    stopped: bool
    signal: str | None
    verified: bool | None
    kv_permille: int | None
    refusal: Reason | None = None
    refusal_text: str = ""
    occupied: bool = False
    zone: str = ""
    cordoned: bool = False
    stale: bool = False
    proven: bool = False
    memory: str = ""
    lendable_bytes: int | None = None
    gpu_bytes: int | None = None
    device_class: str = ""
    models: frozenset[str] | None = None
    group: str = ""

    @property
    def unit(self) -> str:
        """What counts as one replica against the owner's limits."""
        return self.group or self.uid

    @property
    def devices(self) -> frozenset[str]:
        """Its GPUs, by names that no other node has."""
        return devices_of(self.node, self.gpus)

    @property
    def traits(self) -> Traits:
        """What leases choose it by."""
        return Traits(self.device_class, len(self.gpus), self.models)


@dataclass(frozen=True)
class Demand:
    """What a lease's router says of its turns, over all replicas of it (``demand``).

    Attributes:
        turns: most live and waiting at once, lately; 0 when there is none now or lately.
        usual_turns: the same, in a usual step.
        dedicated_turns: how many of them its dedicated engines carry half full.
        idle_seconds: since the last turn, None before the first.
        published_seconds: since a version came after the last turn; None when none has.
        expected_seconds: until the next turns, None when nothing says.
        up_seconds: since the router (the oldest of its replicas) was started.
        age_seconds: how long ago the router was heard.
    """

    turns: int
    usual_turns: int = 0
    dedicated_turns: int = 0
    idle_seconds: float | None = None
    published_seconds: float | None = None
    expected_seconds: float | None = None
    up_seconds: float = 0.0
    age_seconds: float = 0.0


@dataclass(frozen=True)
class EngineNeeds:
    """What must be lent of each GPU for a lease's engine to start, as engine hosts have sized it.

    A host sizes an engine when it is to start it, so nothing is known of a lease without a slot so
    far. Nodes differ little (their GPUs, what they have measured), so the least that any of a pool
    has said stands in for those that have not been asked.

    Attributes:
        nodes: (pool, node) -> bytes.
    """

    nodes: Mapping[tuple[str, str], int] = field(default_factory=dict)

    @cached_property
    def _least(self) -> Mapping[str, int]:
        found: dict[str, int] = {}
        for (pool, _), needed in self.nodes.items():
            found[pool] = min(needed, found.get(pool, needed))
        return found

    def on(self, replica: Replica) -> int | None:
        """Bytes that it needs there; None = unknown."""
        own = self.nodes.get((replica.pool, replica.node))
        return self._least.get(replica.pool) if own is None else own


@dataclass(frozen=True)
class Lease:
    """What an RL team asks for; ``refusal`` is admission's reason (the lease is not accepted).

    Attributes:
        weight: share beside the other leases of the same priority.
        preempts: its minimum may take slots of weaker leases.
        ends_at: when it expires, None for never.
        toggle_seconds: what its loans have cost until they ran, None before the first.
        demand: its router's last report; None = there is none.
        more_pools: others that it borrows from, besides ``pool``.
        device_classes: of GPUs that it takes, empty = any.
        needs: memory that its engine needs.
        gpus_per_slot: of one replica, that its engine is spread over.
        turns_per_slot: turns that one slot takes at a time.
        idle_seconds: how long slots are held without a turn.
        suspended: its team wants nothing for now.
        model: that its engines load.
        reduced, reduced_text: why ``demand`` has made ``max_slots`` smaller than the spec's.
    """

    key: str
    uid: LeaseUid
    pool: str
    priority: int
    created: float
    min_slots: int
    max_slots: int
    refusal: Reason | None = None
    weight: int = 1
    preempts: bool = True
    ends_at: float | None = None
    toggle_seconds: float | None = None
    demand: Demand | None = None
    more_pools: tuple[str, ...] = ()
    device_classes: frozenset[str] = frozenset()
    needs: EngineNeeds = field(default_factory=EngineNeeds)
    gpus_per_slot: int = 1
    turns_per_slot: int = 8
    idle_seconds: float = 90.0
    suspended: bool = False
    model: str = ""
    reduced: Reason | None = None
    reduced_text: str = ""

    @property
    def pools(self) -> tuple[str, ...]:
        """Every pool that it borrows from."""
        return (self.pool, *self.more_pools)

    def takes(self, replica: Replica) -> bool:
        """Whether it can use the replica's GPUs (``takes_traits``)."""
        return self.takes_traits(replica.traits)

    def takes_traits(self, traits: Traits) -> bool:
        """Whether GPUs are of its class, and enough for a slot, and its model is on their node.

        A node that does not say which models it has is tried.
        """
        known = traits.models is None or self.model in traits.models
        return known and self.takes_class(traits.device_class) and traits.gpus >= self.gpus_per_slot

    def takes_class(self, device_class: str) -> bool:
        """Whether GPUs are of a class that it asks for; unknown is none."""
        return not self.device_classes or device_class in self.device_classes

    def fits(self, replica: Replica) -> bool:
        """Whether what may be lent there is enough for its engine, for all that is known.

        Where one of the two figures is unknown the node decides: it starts nothing that it has not
        sized, and says what it lacks.
        """
        needed, room = self.needs.on(replica), replica.lendable_bytes
        return needed is None or room is None or needed <= room

    def fits_asleep(self, replica: Replica) -> bool:
        """Whether its engine is no larger than the GPU, which it has once serving sleeps."""
        needed, room = self.needs.on(replica), replica.gpu_bytes
        return needed is None or room is None or needed <= room

    @property
    def rank(self) -> tuple[int, float, str]:
        """Sort key: higher priority first, then the older lease."""
        return (-self.priority, self.created, self.key)


@dataclass(frozen=True)
class Slot:
    """A RolloutSlot that exists; ``released`` ones still hold their GPUs.

    Attributes:
        running: its engine has been brought up; ending it would waste that.
        whole: serving sleeps for it.
        lacks_memory: its node has found too little memory to start its engine.
    """

    name: str
    uid: SlotUid
    lease: str
    lease_uid: LeaseUid
    pool: str
    node: str
    replica: PodUid
    gpus: tuple[str, ...]
    created: float
    released: bool = False
    running: bool = True
    whole: bool = False
    lacks_memory: bool = False

    @property
    def devices(self) -> frozenset[str]:
        """Its GPUs, by names that no other node has."""
        return devices_of(self.node, self.gpus)


@dataclass(frozen=True)
class PlannerMemory:
    """What the planner remembers from pass to pass; losing it only delays loans.

    Attributes:
        fit_since: replica uid -> since when it qualifies.
        unfit_since: slot uid -> since when its replica does not.
        freed_at: GPU (``Slot.devices``) -> when a slot on it was last seen.
        missed_at: pool key -> when its objective was last missed.
        loans_at: pool key -> when loans were made, the last minute only.
    """

    fit_since: Mapping[PodUid, float] = field(default_factory=dict)
    unfit_since: Mapping[SlotUid, float] = field(default_factory=dict)
    freed_at: Mapping[str, float] = field(default_factory=dict)
    missed_at: Mapping[str, float] = field(default_factory=dict)
    loans_at: Mapping[str, tuple[float, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Snapshot:
    """Everything a plan depends on, besides the time.

    Attributes:
        silence: node -> seconds since its agent last reported (or since the operator started).
        reporting: nodes whose last report is fresh, so that what they leave out is gone.
    """

    pools: tuple[PoolTerms, ...] = ()
    replicas: tuple[Replica, ...] = ()
    leases: tuple[Lease, ...] = ()
    slots: tuple[Slot, ...] = ()
    silence: Mapping[str, float] = field(default_factory=dict)
    reporting: frozenset[str] = frozenset()
    memory: PlannerMemory = field(default_factory=PlannerMemory)
    policy: PlannerPolicy = field(default_factory=PlannerPolicy)
