"""Agent -> operator ``Sync``: telemetry up, grants and pool policies down.

The agent dials, so GPU nodes need no listener for it. A grant is good until *the agent's own send
time* + ``ttl_seconds``: an answer that was delayed extends nothing. Times are seconds of the
sender's monotonic clock and are compared with nothing but themselves.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from rose_core.devices.memory import MemorySum
from rose_core.identity import GpuUuid, GrantKey, LeaseUid, PodUid, SlotKey
from rose_core.wire.routing import AdapterVersion


class SignalSource(StrEnum):
    """Where the knowledge about a serving replica comes from, best first."""

    WIRE_TAP = "WireTap"
    LOAD_SNAPSHOT = "LoadSnapshot"
    LOADS = "Loads"
    METRICS = "Metrics"


class SlotState(StrEnum):
    """Life of a slot on its node, as the agent reports it.

    ``Pending -> Starting -> Syncing -> Running <-> Stopped -> Releasing -> Gone``;
    ``Failed`` can follow any state before ``Gone`` and is left by back-off and a new start.
    """

    PENDING = "Pending"
    STARTING = "Starting"
    SYNCING = "Syncing"
    RUNNING = "Running"
    STOPPED = "Stopped"
    RELEASING = "Releasing"
    FAILED = "Failed"
    GONE = "Gone"


class CertificateReport(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the next request on an empty replica of the pool is promised on this node.

    Attributes:
        holds: it fits into the pool's TTFT, so gates may open.
        text: the sum in figures, for people.
        requests, exceeded: requests that were promised something, and those that took longer.
        allowed: how many of them may, by the levels of what they were promised.
    """

    holds: bool
    text: str = ""
    requests: int = 0
    exceeded: int = 0
    allowed: float = 0.0


class Trial(msgspec.Struct, frozen=True, omit_defaults=True):
    """Busy periods of lent and of withheld cycles, and those with a request above the SLO."""

    lent: int = 0
    lent_slow: int = 0
    withheld: int = 0
    withheld_slow: int = 0

    def count(self, *, withheld: bool, slow: bool) -> Trial:
        """With one busy period more."""
        one = Trial(withheld=1, withheld_slow=slow) if withheld else Trial(lent=1, lent_slow=slow)
        return self.plus(one)

    def plus(self, other: Trial) -> Trial:
        """Both together."""
        return Trial(
            self.lent + other.lent,
            self.lent_slow + other.lent_slow,
            self.withheld + other.withheld,
            self.withheld_slow + other.withheld_slow,
        )


class GroupPlace(msgspec.Struct, frozen=True):
    """Where a pod stands among the pods that are one replica (a LeaderWorkerSet's group).

    Attributes:
        group: tells the pool's groups apart: ``NAME/INDEX``.
        index: of the pod; 0 leads: it alone serves HTTP.
        size: pods of the group.
    """

    group: str
    index: int
    size: int


class ReplicaReport(msgspec.Struct, frozen=True, omit_defaults=True):
    """One serving replica as its node's agent sees it; ``None`` means unknown, never zero.

    Attributes:
        pool: ``namespace/name`` of the ServingPool whose policy the agent applies.
        stopped: the stop button (file on the node or pod annotation) is pressed.
        signal: best source that proves it is alive now.
        verified: the tap's request count equals the engine's own counter.
        refusal: closed reason why nothing may be lent here now (``docs/api.md``), or empty.
        kv_used_permille: KV pool in use, thousandths.
        busy_permille: share of the last report window with a request in flight, thousandths.
        refusal_text: the reason with its names and numbers; empty = what the word means.
        gpu_proof: on whose word the GPUs are the replica's (``rose_core.devices.ownership.Proof``).
        lendable_bytes: device memory that may be lent, of each of the GPUs.
        lendable_text: that sum in figures, for people; ``memory``: the sum, of the tightest GPU.
        device_class: of its GPUs (``rose_core.devices.classes``), empty when unknown.
        requests_total, slow_requests_total: finished requests and those above the pool's SLO.
        certificate: of the pool on this node, None where it names no TTFT.
        trial: the pool's busy periods on this node, lent and withheld, None before the first.
        place: of a pod that is a replica together with others, None where it is one by itself.
        unlent_reserved_milliseconds: of the pool on this node: GPU time in which nobody borrowed,
            by the share of memory that was kept back for lending.
    """

    pool: str
    pod_namespace: str
    pod_name: str
    pod_uid: PodUid
    gpu_uuids: tuple[GpuUuid, ...] = ()
    ready: bool = False
    stopped: bool = False
    signal: SignalSource | None = None
    verified: bool | None = None
    refusal: str = ""
    refusal_text: str = ""
    gpu_proof: str = ""
    running_requests: int | None = None
    kv_used_permille: int | None = None
    busy_permille: int | None = None
    lendable_bytes: int | None = None
    lendable_text: str = ""
    memory: MemorySum | None = None
    device_class: str = ""
    requests_total: int = 0
    slow_requests_total: int = 0
    certificate: CertificateReport | None = None
    trial: Trial | None = None
    place: GroupPlace | None = None
    unlent_reserved_milliseconds: int = 0


class SlotReport(msgspec.Struct, frozen=True, omit_defaults=True):
    """One slot as its node realises it.

    Attributes:
        reason: word of ``GateReason`` or ``HostReason``, also in conditions, Events and metrics.
        version, digest: attested on the live weights, empty before the first attestation.
        lent_milliseconds, open_milliseconds: time granted, and time with the gate open.
        reserved_milliseconds: time granted, by the share of memory that was kept back from serving.
        harvested_tokens: output tokens the slot's engine made.
        weight_bytes: size of the weights that were pulled for it.
        serving_requests: live requests that ended beside it.
        slo_violations: those of them that missed the pool's SLO and had met an open gate.
        serving_input_tokens, serving_output_tokens: of prompts and answers, by the serving engine's
            own count while the slot was granted.
        serving_requests_with_tokens: those of ``serving_requests`` that ended while it counted.
        reclaims: number of reclaims by ladder rung name.
        needs_bytes: what must be lent of each GPU for the slot's engine to start; None = unknown.
        adapters: of each run, where the engine holds several; ``version`` is of the first.
    """

    slot: SlotKey
    state: SlotState
    reason: str = ""
    message: str = ""
    gate_open: bool = False
    endpoint: str = ""
    version: str = ""
    digest: str = ""
    lent_milliseconds: int = 0
    open_milliseconds: int = 0
    harvested_tokens: int = 0
    reclaims: dict[str, int] = {}
    weight_bytes: int = 0
    serving_requests: int = 0
    slo_violations: int = 0
    needs_bytes: int | None = None
    adapters: tuple[AdapterVersion, ...] = ()
    reserved_milliseconds: int = 0
    serving_input_tokens: int = 0
    serving_output_tokens: int = 0
    serving_requests_with_tokens: int = 0


class SleepTerms(msgspec.Struct, frozen=True):
    """How a replica of the pool is put to sleep (``wholeReplica``).

    Attributes:
        release_bytes: what must become free before it counts as asleep.
        drain_seconds: longest time until it is not Ready and has no request.
        wake_seconds: longest time until it answers as before.
    """

    release_bytes: int
    drain_seconds: float = 60.0
    wake_seconds: float = 60.0


class PoolPolicy(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a ServingPool asks of the agents; enough to protect serving without the operator.

    Attributes:
        pool: ``namespace/name``.
        labels: match labels of the serving pods, in the pool's namespace.
        engine: ``SGLang`` or ``VLLM``; selects the telemetry dialect.
        ttft_milliseconds, tpot_milliseconds: SLO, 0 when the pool names none.
        ttft_alone_milliseconds: of a request on an empty replica with nothing lent, 0 = learn it.
        max_increase_percent: allowed increase of latency by lending, 0 when not given.
        withheld_percent: of gaps between requests to withhold by a coin (``crossover.Cycles``).
        allowed_signals: sources the owner permits, best first.
        memory_headroom_gib, memory_headroom_percent: as the owner says; both None = by the kind of
            serving's pool (``rose_core.devices.memory.Headroom``).
        memory_regrow: ``CoolDown`` or ``NextStep``, after a budget was cut.
        max_power_watts: most that a lent GPU may draw, 0 when the pool names none.
        compute: ``TimeSlice`` or ``MPS``; clients of one MPS server share their faults.
        memory_source: ``Reserved`` or ``Elastic``; engines of the latter begin with little.
        max_compute_percent: most of a GPU's time that permits may stand open, 0 = no limit of the
            owner's (with MPS the driver keeps a share instead, ``Sharing``).
        sleep: how replicas are put to sleep, None = never.
    """

    pool: str
    mode: str
    labels: dict[str, str]
    port: int
    engine: str = "SGLang"
    ttft_milliseconds: int = 0
    tpot_milliseconds: int = 0
    percentile: int = 99
    ttft_alone_milliseconds: int = 0
    max_increase_percent: int = 0
    withheld_percent: int = 0
    allowed_signals: tuple[SignalSource, ...] = tuple(SignalSource)
    memory_headroom_gib: int | None = None
    memory_headroom_percent: int | None = None
    memory_regrow: str = "CoolDown"
    max_power_watts: int = 0
    compute: str = "TimeSlice"
    memory_source: str = "Reserved"
    max_compute_percent: int = 0
    sleep: SleepTerms | None = None


class Sharing(msgspec.Struct, frozen=True, omit_defaults=True):
    """How an engine shares its GPU with serving, as the serving owner chose.

    Attributes:
        compute: ``TimeSlice`` or ``MPS``.
        percent: of the multiprocessors, with MPS; fixed when the engine starts.
        busy_percent: share of a second engine, which alone computes while serving is busy without
            a pause; 0 = there is none.
        memory_source: ``Reserved`` or ``Elastic``.
        memory_limit: ``None`` or ``Driver``.
    """

    compute: str = "TimeSlice"
    percent: int = 0
    memory_source: str = "Reserved"
    memory_limit: str = "None"
    busy_percent: int = 0


class AdapterSpec(msgspec.Struct, frozen=True):
    """The LoRA adapters that an engine computes with; the tensors of each are its run's.

    Attributes:
        rank: of their matrices.
        targets: modules of the model that they change (``rose_core.adapters.TARGETS``).
        slots: adapters that it holds at a time, each of another run.
    """

    rank: int
    targets: tuple[str, ...]
    slots: int = 1

    @property
    def shared(self) -> bool:
        """Requests say which run's adapter they are for."""
        return self.slots > 1


class EngineSpec(msgspec.Struct, frozen=True, omit_defaults=True):
    """The rollout engine a slot runs.

    Attributes:
        engine_class: named engine build of the chart.
        model: reference the node resolves (a folder name under the host's model folder).
        arguments: engine arguments, already checked against the allow-list.
        context_tokens: longest prompt plus output.
        kv_tokens: size of the KV pool in tokens.
        sharing: how it shares its GPU with serving.
        kv_policy: what becomes of cached KV at a commit: ``Keep``, ``Recompute`` or ``Reuse``.
        ranks: GPUs of the grant that it is spread over (tensor parallelism).
        adapter: None = the run's versions are whole models.
        drafts: it drafts tokens from what the router sends, and verifies them.
        kv_store_bytes: what the lease's engines of a node may keep of each other's keys; 0 = none.
    """

    engine_class: str
    model: str
    arguments: dict[str, str] = {}
    context_tokens: int = 4096
    kv_tokens: int = 16384
    max_running: int = 8
    sharing: Sharing = Sharing()
    kv_policy: str = "Keep"
    ranks: int = 1
    adapter: AdapterSpec | None = None
    drafts: bool = False
    kv_store_bytes: int = 0

    @property
    def shares_adapters(self) -> bool:
        """Whether it holds the adapters of several runs."""
        return self.adapter is not None and self.adapter.shared


class WeightSource(msgspec.Struct, frozen=True):
    """Where the slot's weights come from; the address is the platform's, never the lease's.

    Attributes:
        endpoint: ``host:port`` of the store or relay, resolved from ``weightStoreName``; empty for
            frozen weights, which come from nowhere but the node's disk.
        run: training run to follow; ``identity.FROZEN_RUN`` for frozen weights.
        max_staleness: versions the engine may lag behind the head.
        others: runs whose adapters the engine holds beside ``run``'s; they come and go while it
            runs.
    """

    endpoint: str
    run: str
    max_staleness: int = 1
    others: tuple[str, ...] = ()

    @property
    def frozen(self) -> bool:
        """Whether the engine keeps the checkpoint that it was started from."""
        return not self.endpoint

    @property
    def runs(self) -> tuple[str, ...]:
        """Every run whose weights the engine holds, its first one first."""
        return (self.run, *self.others)


class RouterProof(msgspec.Struct, frozen=True, omit_defaults=True):
    """By what an agent and the router of a lease know each other.

    Attributes:
        token: shown to this router; good at no other. Empty: the installation's.
        authority: of routers' certificates, PEM; empty: the installation's.
    """

    token: str = ""
    authority: bytes = b""

    def __repr__(self) -> str:
        """Without the token: grants end up in logs."""
        return "RouterProof(...)"


class Grant(msgspec.Struct, frozen=True):
    """The right to run one slot on one serving replica's GPUs until the deadline.

    Attributes:
        key: leader term, slot uid and generation.
        ttl_seconds: counted from the moment the agent *sent* the request this answers.
        router: ``host:port`` where the agent attaches the slot's engine (``routing``).
        proof: by what the two know each other.
        whole: serving is put to sleep first.
        lease_uid: a lease that is made anew under its name has another; empty = not told.
    """

    key: GrantKey
    ttl_seconds: float
    slot_name: str
    lease: str
    pool: str
    pod_uid: PodUid
    pod_name: str
    gpu_uuids: tuple[GpuUuid, ...]
    engine: EngineSpec
    weights: WeightSource
    router: str
    max_concurrent_turns: int = 8
    whole: bool = False
    proof: RouterProof = RouterProof()
    lease_uid: LeaseUid = LeaseUid("")


MOST_MODELS = 64
"""More of a node are not told, each is a line of every report: a list of so many may lack some."""


class NodeModel(msgspec.Struct, frozen=True):
    """A model that lies on the node.

    Attributes:
        bytes: of all its files.
        digest: tells two of one name apart (``rose_agent.host.discovery.inventory``).
    """

    name: str
    bytes: int
    digest: str


class SyncRequest(msgspec.Struct, frozen=True):
    """Sent every ``sync_period_seconds`` of the last reply, and at once after a transition.

    Attributes:
        highest_term: highest leader term this node has obeyed.
        capabilities: word -> empty when available, else the reason why not.
        models: what the node's engine host has found; None when it does not say.
        guard: ``host:port`` where other nodes' guards ask this one (``leading``); empty: nowhere.
    """

    node: str
    agent_version: str
    highest_term: int
    replicas: tuple[ReplicaReport, ...] = ()
    slots: tuple[SlotReport, ...] = ()
    capabilities: dict[str, str] = {}
    models: tuple[NodeModel, ...] | None = None
    guard: str = ""


class FollowerPod(msgspec.Struct, frozen=True):
    """A pod of a replica whose requests another pod takes, and its node."""

    pod: PodUid
    node: str


class ReplicaGroup(msgspec.Struct, frozen=True):
    """A replica over several pods, for the guards of their nodes.

    Attributes:
        leader: the pod that takes its requests; ``node`` is where, ``guard`` where its guard is
            asked.
        followers: the others; their nodes' guards alone may ask.
    """

    leader: PodUid
    node: str
    guard: str
    followers: tuple[FollowerPod, ...]


class SyncReply(msgspec.Struct, frozen=True):
    """Every grant the node holds now; a slot that is missing has been taken back.

    Attributes:
        complete: False while the operator does not know all its objects (it just started or is
            not the leader): the agent keeps what it has until the deadline and starts nothing.
        groups: replicas over several pods, of which one is on the node.
    """

    term: int
    complete: bool
    grants: tuple[Grant, ...] = ()
    pools: tuple[PoolPolicy, ...] = ()
    sync_period_seconds: float = 2.0
    groups: tuple[ReplicaGroup, ...] = ()


class NoticeRequest(msgspec.Struct, frozen=True):
    """An agent asks to be told when its grants change."""

    node: str


class Notice(msgspec.Struct, frozen=True):
    """The node's grants have changed: ``Sync`` now instead of at the next period.

    It carries nothing, so it can be lost, doubled or late without harm.
    """
