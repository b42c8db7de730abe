"""Whether a GPU is fit to be lent: the first rule that applies decides.

| refusal | when | ends |
|---|---|---|
| ``DeviceUnknown`` | the driver did not answer | with the next answer |
| ``MigEnabled`` | the GPU is cut into slices, whose figures are not those of the GPU | with it |
| ``VirtualGpu`` | it is a share of a GPU, or is shared out to virtual machines (vGPU) | never |
| ``XidError`` | the driver reported a fault of the device | with its reset, the agent's restart |
| ``EccErrors`` | uncorrected memory errors, or rows that wait to be replaced | with a reset |
| ``ThermalThrottling`` | the GPU lowers its clocks because it is hot | 60 s after the last sign |
| ``SharedGpu``, ``NoGPU`` | it is not the pod's alone, or not at all (``ownership``) | with that |
| ``ForeignProcess`` | somebody else computes on it (``ownership``) | with them |
| ``NotVacated`` | an engine that should be gone has a process on it (``devices.watch``) | with it |
| ``PowerLimit`` | it draws more than the pool's ``maxPowerWatts`` | 60 s below 95 % of that |

An Xid names a fault in the driver's log. Those in ``PROGRAM_XIDS`` are faults of one program on its
own context: with time-slicing they concern nobody else and are no reason to stop lending. Clients
of one MPS server share their faults, so there every Xid counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

PROGRAM_XIDS = frozenset({13, 31, 43, 45, 68, 109})
RESUME_SECONDS = 60.0
_RESUME_SHARE = 0.95


class DeviceRefusal(StrEnum):
    """Why a GPU is not lent; the same word as in conditions and metrics."""

    NONE = ""
    UNKNOWN = "DeviceUnknown"
    MIG = "MigEnabled"
    VIRTUAL = "VirtualGpu"
    XID = "XidError"
    ECC = "EccErrors"
    THERMAL = "ThermalThrottling"
    POWER = "PowerLimit"
    NOT_VACATED = "NotVacated"
    SHARED = "SharedGpu"
    FOREIGN = "ForeignProcess"
    NO_GPU = "NoGPU"
    UNREADABLE = "PodUnreadable"


class Virtualization(StrEnum):
    """How a GPU is virtual; one that a machine has for itself (passthrough) is not."""

    GUEST = "guest"
    HOST = "host"


@dataclass(frozen=True)
class Vitals:
    """What the driver says about a GPU's health; ``None`` = it does not say.

    Attributes:
        mig: the GPU is cut into slices; ``mig_ends``: its next reset ends that.
        virtualization: the GPU is shared with or by other machines.
        uncorrected_errors: memory errors since the driver was loaded.
        remap_pending: rows of memory wait for a reset to be replaced.
        thermal: the clocks are lowered because of heat.
        power_milliwatts: drawn now.
        temperature_celsius: of the GPU.
        xids: faults reported since the agent started, oldest first.
    """

    mig: bool = False
    mig_ends: bool = False
    virtualization: Virtualization | None = None
    uncorrected_errors: int | None = None
    remap_pending: bool | None = None
    thermal: bool | None = None
    power_milliwatts: int | None = None
    temperature_celsius: int | None = None
    xids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Fitness:
    """The verdict, and what it needs to remember.

    Attributes:
        seen_s: when it was last true; heat and power refuse for a while longer.
    """

    refusal: DeviceRefusal = DeviceRefusal.NONE
    message: str = ""
    seen_s: float = 0.0

    @property
    def fit(self) -> bool:
        """Nothing speaks against lending."""
        return not self.refusal


@dataclass(frozen=True)
class FitnessLimits:
    """What the pool allows.

    Attributes:
        max_power_watts: most that the GPU may draw; 0 = no limit.
        shared_faults: serving and rollouts are clients of one MPS server.
    """

    max_power_watts: int = 0
    shared_faults: bool = False


def assess(before: Fitness, vitals: Vitals | None, limits: FitnessLimits, now_s: float) -> Fitness:
    """One look at a GPU.

    Args:
        before: the verdict of the look before.
        vitals: None when the driver did not answer.
        limits: what the pool allows.
        now_s: monotonic seconds.
    """
    if vitals is None:
        return Fitness(DeviceRefusal.UNKNOWN, "the device driver does not answer", now_s)
    found = _lasting(vitals, limits, now_s) or _passing(before, vitals, limits, now_s)
    if found is not None:
        return found
    lingers = before.refusal in {DeviceRefusal.THERMAL, DeviceRefusal.POWER}
    if lingers and now_s - before.seen_s < RESUME_SECONDS:
        return before
    return Fitness()


def _lasting(vitals: Vitals, limits: FitnessLimits, now_s: float) -> Fitness | None:
    counted = [xid for xid in vitals.xids if limits.shared_faults or xid not in PROGRAM_XIDS]
    rules = (
        (vitals.mig, DeviceRefusal.MIG, _mig(vitals)),
        (vitals.virtualization, DeviceRefusal.VIRTUAL, _virtual(vitals)),
        (counted, DeviceRefusal.XID, f"the driver reported Xid {_list(counted)}; reset the GPU"),
        (
            vitals.uncorrected_errors,
            DeviceRefusal.ECC,
            f"{vitals.uncorrected_errors} uncorrected memory errors since the driver was loaded",
        ),
        (
            vitals.remap_pending,
            DeviceRefusal.ECC,
            "memory rows wait to be replaced; reset the GPU",
        ),
    )
    return next((Fitness(reason, text, now_s) for applies, reason, text in rules if applies), None)


def _passing(
    before: Fitness, vitals: Vitals, limits: FitnessLimits, now_s: float
) -> Fitness | None:
    if vitals.thermal:
        degrees = vitals.temperature_celsius
        text = f"the GPU is throttled by heat{'' if degrees is None else f' at {degrees} C'}"
        return Fitness(DeviceRefusal.THERMAL, text, now_s)
    if not limits.max_power_watts:
        return None
    if vitals.power_milliwatts is None:
        return Fitness(DeviceRefusal.POWER, "the driver does not say what the GPU draws", now_s)
    share = _RESUME_SHARE if before.refusal is DeviceRefusal.POWER else 1.0
    watts = vitals.power_milliwatts / 1000
    if watts <= limits.max_power_watts * share:
        return None
    text = f"the GPU draws {watts:.0f} W, the pool allows {limits.max_power_watts} W"
    return Fitness(DeviceRefusal.POWER, text, now_s)


def _mig(vitals: Vitals) -> str:
    ends = " (switched off from its next reset on)" if vitals.mig_ends else ""
    return f"MIG is enabled{ends}; only whole GPUs are lent"


def _virtual(vitals: Vitals) -> str:
    if vitals.virtualization is Virtualization.GUEST:
        return "it is a vGPU: other virtual machines compute on the same GPU; pass it through whole"
    return "it is shared out to virtual machines as vGPUs; only whole GPUs are lent"


def _list(xids: list[int]) -> str:
    return ", ".join(map(str, sorted(set(xids))))
