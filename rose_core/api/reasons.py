"""Conditions and their reasons: closed lists, the same word in condition, Event and metric."""

from __future__ import annotations

from enum import StrEnum


class ConditionType(StrEnum):
    """The statements ROSE makes about its objects."""

    READY = "Ready"
    ACCEPTED = "Accepted"
    GRANTED = "Granted"
    TELEMETRY_FRESH = "TelemetryFresh"
    SIGNAL_VERIFIED = "SignalVerified"
    SERVING_PROTECTED = "ServingProtected"
    LENDING_CERTIFIED = "LendingCertified"
    WEIGHTS_SYNCED = "WeightsSynced"
    DEVICE_ACCESS = "DeviceAccess"
    COMPUTE_AVAILABLE = "ComputeAvailable"
    MEMORY_AVAILABLE = "MemoryAvailable"
    OWNERSHIP_PROVEN = "OwnershipProven"
    DEVICES_FIT = "DevicesFit"
    ROUTER_READY = "RouterReady"
    RECLAIMING = "Reclaiming"
    PAUSED = "Paused"


class Reason(StrEnum):
    """Why a condition has its status, or why a replica is not lent; ``MEANING`` explains each."""

    # General.
    ACCEPTED = "Accepted"
    AS_EXPECTED = "AsExpected"
    NOT_OBSERVED_YET = "NotObservedYet"
    INVALID_SPEC = "InvalidSpec"
    OTHER = "Other"
    AUTOSCALER_CONFLICT = "AutoscalerConflict"
    # A lease is refused.
    UNKNOWN_POOL = "UnknownPool"
    POOL_NOT_LENDING = "PoolNotLending"
    POOL_NOT_ACCEPTED = "PoolNotAccepted"
    NAMESPACE_NOT_ALLOWED = "NamespaceNotAllowed"
    UNKNOWN_ENGINE_CLASS = "UnknownEngineClass"
    ARGUMENT_NOT_ALLOWED = "ArgumentNotAllowed"
    UNKNOWN_STORE = "UnknownStore"
    RUN_NOT_ALLOWED = "RunNotAllowed"
    NO_TENANT_POLICY = "NoTenantPolicy"
    TENANT_POLICY_FORBIDS = "TenantPolicyForbids"
    TENANT_CAP_REACHED = "TenantCapReached"
    LEASE_EXPIRED = "LeaseExpired"
    # Granting.
    ALL_SLOTS_GRANTED = "AllSlotsGranted"
    SOME_SLOTS_GRANTED = "SomeSlotsGranted"
    NO_REPLICA_QUALIFIES = "NoReplicaQualifies"
    NO_SLOTS_WANTED = "NoSlotsWanted"
    SUSPENDED = "Suspended"
    IDLE = "Idle"
    FEWER_WANTED = "FewerWanted"
    # A replica is not lent.
    QUALIFIES = "Qualifies"
    LENT = "Lent"
    REPLICA_NOT_READY = "ReplicaNotReady"
    STOP_REQUESTED = "StopRequested"
    TELEMETRY_STALE = "TelemetryStale"
    SIGNAL_MISSING = "SignalMissing"
    SIGNAL_NOT_ALLOWED = "SignalNotAllowed"
    SIGNAL_NOT_VERIFIED = "SignalNotVerified"
    NO_WIRE_TAP = "NoWireTap"
    KV_USE_TOO_HIGH = "KVUseTooHigh"
    MULTI_NODE_REPLICA = "MultiNodeReplica"
    SPANS_REPLICAS = "SpansReplicas"
    GPU_NOT_OWNED = "GpuNotOwned"
    GPU_CONTESTED = "GpuContested"
    SHARED_GPU = "SharedGpu"
    FOREIGN_PROCESS = "ForeignProcess"
    NO_GPU = "NoGPU"
    POD_UNREADABLE = "PodUnreadable"
    GPU_IN_USE = "GPUInUse"
    OTHER_DEVICE_CLASS = "OtherDeviceClass"
    TOO_FEW_GPUS = "TooFewGPUs"
    INSUFFICIENT_MEMORY = "InsufficientMemory"
    DEVICE_ACCESS = "DeviceAccess"
    DRIVER_TOO_OLD = "DriverTooOld"
    MPS_UNAVAILABLE = "MpsUnavailable"
    MPS_FAULT = "MpsFault"
    MPS_SERVING_OUTSIDE = "MpsServingOutside"
    MPS_WRONG_USER = "MpsWrongUser"
    DRIVER_LIMIT_UNAVAILABLE = "DriverLimitUnavailable"
    ELASTIC_UNAVAILABLE = "ElasticUnavailable"
    DEVICE_UNKNOWN = "DeviceUnknown"
    MIG_ENABLED = "MigEnabled"
    VIRTUAL_GPU = "VirtualGpu"
    XID_ERROR = "XidError"
    ECC_ERRORS = "EccErrors"
    THERMAL_THROTTLING = "ThermalThrottling"
    POWER_LIMIT = "PowerLimit"
    NOT_VACATED = "NotVacated"
    ENGINE_HOST_UNAVAILABLE = "EngineHostUnavailable"
    SERVING_RESTARTED = "ServingRestarted"
    BREAKER_OPEN = "BreakerOpen"
    COOLING_DOWN = "CoolingDown"
    SETTLING = "Settling"
    OUTSIDE_TIME_WINDOW = "OutsideTimeWindow"
    POOL_LIMIT_REACHED = "PoolLimitReached"
    NODE_LIMIT_REACHED = "NodeLimitReached"
    ZONE_LIMIT_REACHED = "ZoneLimitReached"
    LEASE_LIMIT_REACHED = "LeaseLimitReached"
    GROWTH_LIMITED = "GrowthLimited"
    PEAK_EXPECTED = "PeakExpected"
    NOT_WORTHWHILE = "NotWorthwhile"
    NODE_CORDONED = "NodeCordoned"
    NOT_DRAINED = "NotDrained"
    SLEEP_REFUSED = "SleepRefused"
    SLEEPER_UNAVAILABLE = "SleeperUnavailable"
    REQUEST_WHILE_ASLEEP = "RequestWhileAsleep"
    SERVING_WAKING = "ServingWaking"
    WAKE_OVERDUE = "WakeOverdue"
    # A slot is taken back.
    LEASE_DELETED = "LeaseDeleted"
    LEASE_SHRUNK = "LeaseShrunk"
    REPLICA_GONE = "ReplicaGone"
    PREEMPTED = "Preempted"
    REBALANCED = "Rebalanced"
    DUPLICATE_SLOT = "DuplicateSlot"
    NOT_RECLAIMING = "NotReclaiming"
    # Pools.
    OBSERVE_MODE = "ObserveMode"
    PAUSED_BY_OWNER = "PausedByOwner"
    NOT_PAUSED = "NotPaused"
    LENDING_ENABLED = "LendingEnabled"
    NO_REPLICAS = "NoReplicas"
    ALL_REPLICAS_FRESH = "AllReplicasFresh"
    SOME_REPLICAS_STALE = "SomeReplicasStale"
    WITHIN_OBJECTIVE = "WithinObjective"
    OBJECTIVE_MISSED = "ObjectiveMissed"
    NO_OBJECTIVE = "NoObjective"
    CERTIFICATE_HOLDS = "CertificateHolds"
    NOT_CERTIFIED = "NotCertified"
    ALL_ALLOCATED = "AllAllocated"
    WEAKLY_PROVEN = "WeaklyProven"
    # Slots and what runs in them.
    GRANT_ISSUED = "GrantIssued"
    AGENT_SILENT = "AgentSilent"
    ENGINE_STARTING = "EngineStarting"
    ENGINE_RUNNING = "EngineRunning"
    ENGINE_STOPPED = "EngineStopped"
    ENGINE_FAILED = "EngineFailed"
    GATE_HELD = "GateHeld"
    # Slots of a lease cannot start or go on: words of their engine hosts.
    START_FAILED = "StartFailed"
    BAD_ENGINE = "BadEngine"
    NO_MODEL = "NoModel"
    MPS_NOT_A_CLIENT = "MpsNotAClient"
    MPS_SHARE_NOT_GIVEN = "MpsShareNotGiven"
    ENGINE_EXITED = "EngineExited"
    LIMIT_REACHED = "LimitReached"
    BROKEN_WEIGHTS = "BrokenWeights"
    MEMORY_OVERRUN = "MemoryOverrun"
    MEMORY_KEPT = "MemoryKept"
    MEMORY_UNKNOWN = "MemoryUnknown"
    NOTHING_RELEASED = "NothingReleased"
    DORMANCY_FAILED = "DormancyFailed"
    # What is attested, and the lease as a whole.
    VERSION_ATTESTED = "VersionAttested"
    NO_VERSION_YET = "NoVersionYet"
    MIXED_VERSIONS = "MixedVersions"
    OWN_CHECKPOINT = "OwnCheckpoint"
    FROZEN = "Frozen"
    CHECKPOINTS_DIFFER = "CheckpointsDiffer"
    ROUTER_ANSWERS = "RouterAnswers"
    ROUTER_NOT_READY = "RouterNotReady"
    NO_SLOT_POSSIBLE = "NoSlotPossible"
    SLOTS_NOT_READY = "SlotsNotReady"
    SLOTS_READY = "SlotsReady"


MEANING: dict[Reason, str] = {
    Reason.ACCEPTED: "the spec is valid and everything it names exists",
    Reason.AS_EXPECTED: "nothing to report",
    Reason.NOT_OBSERVED_YET: "nobody has looked yet; no agent has reported",
    Reason.INVALID_SPEC: "the object cannot be read as its kind; the message names the field",
    Reason.OTHER: "a word of another version that this operator does not know",
    Reason.AUTOSCALER_CONFLICT: "an autoscaler of serving follows figures of whole GPUs",
    Reason.UNKNOWN_POOL: "`poolRef` names no ServingPool",
    Reason.POOL_NOT_LENDING: "the pool's mode is Observe or Paused",
    Reason.POOL_NOT_ACCEPTED: "the pool itself is refused; see its conditions",
    Reason.NAMESPACE_NOT_ALLOWED: "the pool does not lend to the lease's namespace",
    Reason.UNKNOWN_ENGINE_CLASS: "the installation offers no such engine class",
    Reason.ARGUMENT_NOT_ALLOWED: "an engine argument is outside the allow-list",
    Reason.UNKNOWN_STORE: "`weights.storeName` is not on the platform's list",
    Reason.RUN_NOT_ALLOWED: "the platform does not let this namespace follow `weights.run`",
    Reason.NO_TENANT_POLICY: "no TenantPolicy selects the lease's namespace",
    Reason.TENANT_POLICY_FORBIDS: "the policies of its namespace do not allow what it asks for",
    Reason.TENANT_CAP_REACHED: "older leases of its namespace use up what its policies allow",
    Reason.LEASE_EXPIRED: "`lifetimeSeconds` have passed since the lease was made",
    Reason.ALL_SLOTS_GRANTED: "`slots.max` slots are wanted and granted",
    Reason.SOME_SLOTS_GRANTED: "at least `slots.min`, fewer than are wanted",
    Reason.NO_REPLICA_QUALIFIES: "fewer than `slots.min` are granted; the message counts why",
    Reason.NO_SLOTS_WANTED: "`slots.max` is 0",
    Reason.SUSPENDED: "`spec.suspend` is true",
    Reason.IDLE: "no turn for `slots.idleSeconds`; turns, or the next step, bring the slots back",
    Reason.FEWER_WANTED: "the lease has all slots that its turns can use, fewer than `slots.max`",
    Reason.QUALIFIES: "the replica may be lent",
    Reason.LENT: "the replica is lent to the named lease",
    Reason.REPLICA_NOT_READY: "the serving pod is not Ready",
    Reason.STOP_REQUESTED: "the stop button of the node or the pod is pressed",
    Reason.TELEMETRY_STALE: "the node's agent has not reported for too long",
    Reason.SIGNAL_MISSING: "no signal source proves that it is alive",
    Reason.SIGNAL_NOT_ALLOWED: "the living source is not in `allowedSignals`",
    Reason.SIGNAL_NOT_VERIFIED: "the tap's request count does not (yet) equal the engine's",
    Reason.NO_WIRE_TAP: "only the engine's own figures are seen: nothing counts a second time",
    Reason.KV_USE_TOO_HIGH: "recent KV use leaves no room",
    Reason.MULTI_NODE_REPLICA: "the serving replica is several pods, and nobody says which (an "
    "engine with `--nnodes` without LeaderWorkerSet's labels) or not all of them are reported by "
    "guards that others may ask; or several nodes report the pod",
    Reason.SPANS_REPLICAS: "the GPU is allocated to several serving replicas",
    Reason.GPU_NOT_OWNED: "the GPU that the replica names is allocated to another pod",
    Reason.GPU_CONTESTED: "several replicas name the same GPU, and nobody proves whose it is",
    Reason.SHARED_GPU: "the GPU is allocated in shares, or to several pods; it has no one owner",
    Reason.FOREIGN_PROCESS: "somebody who does not own the GPU computes on it; the text says who",
    Reason.NO_GPU: "the agent found no GPU of this replica",
    Reason.POD_UNREADABLE: "what is written on the serving pod cannot be read; the text says what",
    Reason.GPU_IN_USE: "a GPU of the replica is lent already or not yet vacated",
    Reason.OTHER_DEVICE_CLASS: "the replica's GPU is none of the lease's `deviceClasses`",
    Reason.TOO_FEW_GPUS: "the replica has fewer GPUs than the lease's `gpusPerSlot`",
    Reason.INSUFFICIENT_MEMORY: "too little device memory may be lent",
    Reason.DEVICE_ACCESS: "the engine host cannot use the replica's GPUs",
    Reason.DRIVER_TOO_OLD: "the node's driver does not run the CUDA of the engine image",
    Reason.MPS_UNAVAILABLE: "`compute: MPS`: no MPS daemon of driver 550 or later answers there",
    Reason.MPS_FAULT: "the MPS server is in FAULT; every client on that GPU has to leave first",
    Reason.MPS_SERVING_OUTSIDE: "serving is no client of the daemon: its owner has not opted in",
    Reason.MPS_WRONG_USER: "the MPS server cannot be seen to serve the engine's user",
    Reason.DRIVER_LIMIT_UNAVAILABLE: "`memoryLimit: Driver`: the driver sets no limits here",
    Reason.ELASTIC_UNAVAILABLE: "`memorySource: Elastic`: kvcached is missing or does not work",
    Reason.DEVICE_UNKNOWN: "the device driver does not tell about the replica's GPU",
    Reason.VIRTUAL_GPU: "the GPU is a vGPU, or is shared out as vGPUs; only whole GPUs are lent",
    Reason.MIG_ENABLED: "the GPU is cut into slices; only whole GPUs are lent",
    Reason.XID_ERROR: "the driver reported a fault of the GPU; it needs a reset",
    Reason.ECC_ERRORS: "the GPU has uncorrected memory errors or rows that wait to be replaced",
    Reason.THERMAL_THROTTLING: "the GPU lowers its clocks because it is hot",
    Reason.POWER_LIMIT: "the GPU draws more than `maxPowerWatts`",
    Reason.NOT_VACATED: "an engine that should be gone has a process on the GPU",
    Reason.ENGINE_HOST_UNAVAILABLE: "the node's engine host does not answer",
    Reason.SERVING_RESTARTED: "the serving container restarted and is not stable yet",
    Reason.BREAKER_OPEN: "live traffic missed its objective; lending rests",
    Reason.COOLING_DOWN: "the replica was given back a moment ago",
    Reason.SETTLING: "the replica qualifies, not yet for long enough",
    Reason.OUTSIDE_TIME_WINDOW: "none of the pool's time windows is open",
    Reason.POOL_LIMIT_REACHED: "`maxReplicasPercent` or `minUnlentReplicas` allow no more",
    Reason.NODE_LIMIT_REACHED: "`maxReplicasPerNode` allows no more on this node",
    Reason.ZONE_LIMIT_REACHED: "`maxReplicasPerZonePercent` allows no more in this zone",
    Reason.LEASE_LIMIT_REACHED: "`maxReplicasPerLeasePercent` allows this lease no more",
    Reason.GROWTH_LIMITED: "`maxLoansPerMinute` were made in the last minute",
    Reason.PEAK_EXPECTED: "`forecast`: the replica is needed for the load that is coming",
    Reason.NOT_WORTHWHILE: "the loan would end before it has paid for its start",
    Reason.NODE_CORDONED: "the node is unschedulable; its GPUs are freed before a drain",
    Reason.NOT_DRAINED: "`wholeReplica`: the pod stayed Ready, or busy, for `drainSeconds`",
    Reason.SLEEP_REFUSED: "`wholeReplica`: serving did not give `minReleasedMebibytes`",
    Reason.SLEEPER_UNAVAILABLE: "`wholeReplica`: the node's sleeper does not answer",
    Reason.REQUEST_WHILE_ASLEEP: "`wholeReplica`: a request came to a sleeping replica",
    Reason.SERVING_WAKING: "`wholeReplica`: serving slept and does not serve yet",
    Reason.WAKE_OVERDUE: "`wholeReplica`: serving did not wake in `wakeSeconds`; it is restarted",
    Reason.LEASE_DELETED: "the lease is gone",
    Reason.LEASE_SHRUNK: "the lease wants fewer slots",
    Reason.REPLICA_GONE: "the serving replica is gone",
    Reason.PREEMPTED: "a lease of higher priority lacks its minimum",
    Reason.REBALANCED: "an equal lease has fewer slots than its weight entitles it to",
    Reason.DUPLICATE_SLOT: "another slot holds the same GPU",
    Reason.NOT_RECLAIMING: "nothing is being taken back",
    Reason.OBSERVE_MODE: "`mode: Observe`: metrics only, nothing is lent",
    Reason.PAUSED_BY_OWNER: "`mode: Paused`",
    Reason.NOT_PAUSED: "the owner has not paused the pool",
    Reason.LENDING_ENABLED: "`mode: Lend`, and at least one replica reports",
    Reason.NO_REPLICAS: "no agent reports a replica of this pool",
    Reason.ALL_REPLICAS_FRESH: "every replica has fresh telemetry",
    Reason.SOME_REPLICAS_STALE: "the message counts replicas without fresh telemetry",
    Reason.WITHIN_OBJECTIVE: "slow requests stay inside the objective's percentile",
    Reason.OBJECTIVE_MISSED: "more requests were slow than the objective's percentile allows",
    Reason.NO_OBJECTIVE: "the pool names no absolute objective",
    Reason.CERTIFICATE_HOLDS: "what the next request may need beside lending fits into the TTFT",
    Reason.NOT_CERTIFIED: "it does not fit: gates on empty replicas stay shut until it does",
    Reason.ALL_ALLOCATED: "the kubelet says of every replica which GPUs are its own",
    Reason.WEAKLY_PROVEN: "some replicas' GPUs are told by process lists or by hand",
    Reason.GRANT_ISSUED: "the node's agent has reported the slot under a valid grant",
    Reason.AGENT_SILENT: "the node's agent does not report; its grant lapses",
    Reason.ENGINE_STARTING: "the engine or its weights are on their way",
    Reason.ENGINE_RUNNING: "the engine may compute whenever the gate is open",
    Reason.ENGINE_STOPPED: "the guard holds the engine stopped",
    Reason.ENGINE_FAILED: "the engine failed; it is started again with back-off",
    Reason.GATE_HELD: "the guard has closed the gate for longer than a burst",
    Reason.START_FAILED: "engines do not become ready; the message ends with a log (RL team)",
    Reason.BAD_ENGINE: "no engine can be started as the lease asks; change the lease (RL team)",
    Reason.NO_MODEL: "`model.name` is not on the slot's node; it has to be brought (platform)",
    Reason.MPS_NOT_A_CLIENT: "an engine is no client of its node's MPS daemon (platform)",
    Reason.MPS_SHARE_NOT_GIVEN: "an engine does not have the share of its pool (platform)",
    Reason.ENGINE_EXITED: "an engine ended by itself; the message ends with its log (RL team)",
    Reason.LIMIT_REACHED: "an engine reached its limit of memory or processes (RL team)",
    Reason.BROKEN_WEIGHTS: "weights of the run could neither be put in nor taken back (RL team)",
    Reason.MEMORY_OVERRUN: "an engine held more device memory than it may (platform)",
    Reason.MEMORY_KEPT: "elastic memory did not go down to its budget (platform)",
    Reason.MEMORY_UNKNOWN: "nobody tells whether an engine's memory became free (platform)",
    Reason.NOTHING_RELEASED: "an engine said that it let go of its memory, and did not (platform)",
    Reason.DORMANCY_FAILED: "an engine did not let go of its memory when told (platform)",
    Reason.VERSION_ATTESTED: "the live weights carry an attested version",
    Reason.NO_VERSION_YET: "no weight version is attested",
    Reason.MIXED_VERSIONS: "ready slots carry different versions; the message says which",
    Reason.FROZEN: "engines have attested the checkpoint that the lease asked for and keeps",
    Reason.OWN_CHECKPOINT: "engines have their own checkpoint, and no published version yet",
    Reason.CHECKPOINTS_DIFFER: "engines have different checkpoints, and no published version yet",
    Reason.ROUTER_ANSWERS: "the lease's router has a ready pod",
    Reason.ROUTER_NOT_READY: "the lease's router has no ready pod",
    Reason.NO_SLOT_POSSIBLE: "no pool of the lease reports a GPU that could be lent, so it has no "
    "router yet",
    Reason.SLOTS_NOT_READY: "slots are granted, fewer than `slots.min` run",
    Reason.SLOTS_READY: "at least `slots.min` slots run and the router answers",
}

# What an agent may say in ``ReplicaReport.refusal``.
REPLICA_REFUSALS = frozenset(
    {
        Reason.MULTI_NODE_REPLICA,
        Reason.SPANS_REPLICAS,
        Reason.SHARED_GPU,
        Reason.FOREIGN_PROCESS,
        Reason.NO_GPU,
        Reason.POD_UNREADABLE,
        Reason.GPU_IN_USE,
        Reason.INSUFFICIENT_MEMORY,
        Reason.DEVICE_ACCESS,
        Reason.DRIVER_TOO_OLD,
        Reason.MPS_UNAVAILABLE,
        Reason.MPS_FAULT,
        Reason.MPS_SERVING_OUTSIDE,
        Reason.MPS_WRONG_USER,
        Reason.DRIVER_LIMIT_UNAVAILABLE,
        Reason.ELASTIC_UNAVAILABLE,
        Reason.DEVICE_UNKNOWN,
        Reason.MIG_ENABLED,
        Reason.VIRTUAL_GPU,
        Reason.XID_ERROR,
        Reason.ECC_ERRORS,
        Reason.THERMAL_THROTTLING,
        Reason.POWER_LIMIT,
        Reason.NOT_VACATED,
        Reason.ENGINE_HOST_UNAVAILABLE,
        Reason.SERVING_RESTARTED,
        Reason.BREAKER_OPEN,
        Reason.COOLING_DOWN,
        Reason.REPLICA_NOT_READY,
        Reason.STOP_REQUESTED,
        Reason.SIGNAL_MISSING,
        Reason.SIGNAL_NOT_VERIFIED,
        Reason.TELEMETRY_STALE,
        Reason.NOT_DRAINED,
        Reason.SLEEP_REFUSED,
        Reason.SLEEPER_UNAVAILABLE,
        Reason.REQUEST_WHILE_ASLEEP,
        Reason.SERVING_WAKING,
        Reason.WAKE_OVERDUE,
    }
)


def replica_refusal(text: str) -> Reason | None:
    """The agent's refusal as a reason; ``None`` for none, a catch-all for an unknown one."""
    if not text:
        return None
    try:
        return Reason(text)
    except ValueError:
        return Reason.OTHER
