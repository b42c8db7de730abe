"""Closed words of the engine host: why an engine is not simply serving, or was ended.

The same word stands in ``EngineStatus``, in the guard's flight recorder, in the slot's report and
condition, and as the label of ``rose_host_killed_engines_total``. ``rose_core.guard.reasons`` has
the guard's own. A word of another version reads as ``OTHER``, so that a neighbour's news never
costs the message that brings it.
"""

from __future__ import annotations

from enum import StrEnum


class HostReason(StrEnum):
    """Why an engine stands still, failed, rests or is gone; ``HOST_MEANING`` explains each."""

    NONE = ""
    OTHER = "Other"
    # It stands still.
    PERMIT_LAPSED = "PermitLapsed"
    STOP_PRESSED = "StopPressed"
    HELD_BY_GUARD = "HeldByGuard"
    HELD_BY_COMMIT = "HeldByCommit"
    HELD_BY_RETRACT = "HeldByRetract"
    MEMORY_RELEASED = "MemoryReleased"
    # It is being ended, or is gone.
    STOP_ORDERED = "StopOrdered"
    REPLACED = "Replaced"
    HOST_ENDING = "HostEnding"
    ORPHAN = "Orphan"
    DID_NOT_STOP = "DidNotStop"
    # It cannot start.
    START_FAILED = "StartFailed"
    BAD_ENGINE = "BadEngine"
    NO_MODEL = "NoModel"
    INSUFFICIENT_MEMORY = "InsufficientMemory"
    ELASTIC_UNAVAILABLE = "ElasticUnavailable"
    DRIVER_LIMIT_UNAVAILABLE = "DriverLimitUnavailable"
    MPS_UNAVAILABLE = "MpsUnavailable"
    MPS_FAULT = "MpsFault"
    MPS_SERVING_OUTSIDE = "MpsServingOutside"
    MPS_WRONG_USER = "MpsWrongUser"
    MPS_NOT_A_CLIENT = "MpsNotAClient"
    MPS_SHARE_NOT_GIVEN = "MpsShareNotGiven"
    # It ran and cannot go on.
    ENGINE_EXITED = "EngineExited"
    LIMIT_REACHED = "LimitReached"
    BROKEN_WEIGHTS = "BrokenWeights"
    MEMORY_OVERRUN = "MemoryOverrun"
    MEMORY_KEPT = "MemoryKept"
    MEMORY_UNKNOWN = "MemoryUnknown"
    NOTHING_RELEASED = "NothingReleased"
    DORMANCY_FAILED = "DormancyFailed"

    @classmethod
    def _missing_(cls, value: object) -> HostReason | None:
        """A word of another version; whatever is no word at all is an error as ever."""
        return cls.OTHER if isinstance(value, str) else None


HOST_MEANING: dict[HostReason, str] = {
    HostReason.OTHER: "a word of another version that this process does not know",
    HostReason.PERMIT_LAPSED: "its permit is closed or was not extended",
    HostReason.STOP_PRESSED: "the node's stop button is pressed",
    HostReason.HELD_BY_GUARD: "the guard holds it, whoever else does",
    HostReason.HELD_BY_COMMIT: "new weights are being put in",
    HostReason.HELD_BY_RETRACT: "its turns are being taken back",
    HostReason.MEMORY_RELEASED: "it is dormant: its memory is free",
    HostReason.STOP_ORDERED: "the guard ordered its end; the gate's reason says why",
    HostReason.REPLACED: "an order of a higher generation took its place",
    HostReason.HOST_ENDING: "the engine host itself ends",
    HostReason.ORPHAN: "an earlier engine host left it behind",
    HostReason.DID_NOT_STOP: "it went on computing, or starting, although it had to stand still",
    HostReason.START_FAILED: "it could not be started, or never became ready; tried again",
    HostReason.BAD_ENGINE: "it cannot be started as ordered; a new order is needed",
    HostReason.NO_MODEL: "its model is not on the node; tried again",
    HostReason.INSUFFICIENT_MEMORY: "its GPU has too little free memory, or too little is lent",
    HostReason.ELASTIC_UNAVAILABLE: "kvcached is missing, or its pool is not the ordered one",
    HostReason.DRIVER_LIMIT_UNAVAILABLE: "the driver sets no memory limit, or it does not hold",
    HostReason.MPS_UNAVAILABLE: "no MPS daemon of driver 550 or later answers on its node",
    HostReason.MPS_FAULT: "the MPS server is in FAULT; every client on that GPU has to leave first",
    HostReason.MPS_SERVING_OUTSIDE: "serving is no client of the daemon",
    HostReason.MPS_WRONG_USER: "the MPS server cannot be seen to serve the engine's user",
    HostReason.MPS_NOT_A_CLIENT: "the MPS server does not list it: it has the whole GPU",
    HostReason.MPS_SHARE_NOT_GIVEN: "it sees more multiprocessors than its share, or tells none",
    HostReason.ENGINE_EXITED: "its process ended by itself; the message ends with its log",
    HostReason.LIMIT_REACHED: "its process ended at its limit of memory or processes",
    HostReason.BROKEN_WEIGHTS: "its weights could neither be renewed nor put back",
    HostReason.MEMORY_OVERRUN: (
        "it holds more device memory than it was made for, and that was corrected before or does "
        "not fit"
    ),
    HostReason.MEMORY_KEPT: "its elastic memory did not go down to its budget in time",
    HostReason.MEMORY_UNKNOWN: "nobody tells whether its memory became free",
    HostReason.NOTHING_RELEASED: "it said that it let go of its memory, and did not",
    HostReason.DORMANCY_FAILED: "it did not answer the order to let go of its memory",
}
"""What each word means, for people and for docs/engine-host.md."""

TROUBLE = frozenset(
    {
        HostReason.START_FAILED,
        HostReason.BAD_ENGINE,
        HostReason.NO_MODEL,
        HostReason.INSUFFICIENT_MEMORY,
        HostReason.ELASTIC_UNAVAILABLE,
        HostReason.DRIVER_LIMIT_UNAVAILABLE,
        HostReason.MPS_UNAVAILABLE,
        HostReason.MPS_FAULT,
        HostReason.MPS_SERVING_OUTSIDE,
        HostReason.MPS_WRONG_USER,
        HostReason.MPS_NOT_A_CLIENT,
        HostReason.MPS_SHARE_NOT_GIVEN,
        HostReason.ENGINE_EXITED,
        HostReason.LIMIT_REACHED,
        HostReason.BROKEN_WEIGHTS,
        HostReason.MEMORY_OVERRUN,
        HostReason.MEMORY_KEPT,
        HostReason.MEMORY_UNKNOWN,
        HostReason.NOTHING_RELEASED,
        HostReason.DORMANCY_FAILED,
    }
)
"""Why an engine cannot start or go on: words that the owner of its lease hears as well."""

SHOWN_IN_FULL = frozenset(
    {
        HostReason.START_FAILED,
        HostReason.BAD_ENGINE,
        HostReason.NO_MODEL,
        HostReason.ENGINE_EXITED,
        HostReason.LIMIT_REACHED,
        HostReason.BROKEN_WEIGHTS,
    }
)
"""Words whose message speaks of the lease's own order, engine and run alone.

The messages of the others name what else is on the GPU, which is its owner's; the lease hears what
the word means.
"""

PENDING = frozenset({HostReason.NONE, HostReason.STOP_ORDERED})
"""Words with which the host adds nothing: the guard's reason for the slot is the reason."""
