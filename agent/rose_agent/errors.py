"""Exceptions of the processes of a node.

AgentError
├── AccessChanged       what the container can see of the GPUs has changed; only a new one helps
├── BadConfiguration    a flag or a file is missing or malformed
├── ApiUnreachable      the Kubernetes API server does not answer or refuses
├── NoKernelCounts      the kernel cannot count tokens for the tap; it reads them itself
├── DeviceError
│   ├── NoDevices       the driver cannot work on this machine at all
│   ├── UnknownGpu      no GPU with that UUID here
│   ├── QueryFailed     the driver could not answer now; what was asked is unknown
│   └── MpsError        the MPS control daemon does not answer, or refuses
├── HostError           (of the engine host; each has a closed word for an engine's status)
│   ├── GroupError      a process group could not be made, stopped, continued or ended
│   ├── NoFreezer       the asked-for way to stop a tree is not available on this machine
│   ├── NoLimits        an asked-for limit of engines cannot be set on this machine
│   ├── BadInput        a flag, or a file that it names, is wrong: the verb ends with code 2
│   ├── BadEngine       the slot's engine cannot be started as asked; trying again does not help
│   ├── NotShared       its GPU cannot be shared as the pool asks now; tried again later
│   ├── NoMemory        its GPU has too little free memory now; tried again later
│   ├── NotReady        the engine's process runs but never became ready
│   ├── BrokenEngine    the engine cannot go on as it is; it is started anew
│   └── WrongGeneration an older generation of a slot tried to act for a newer one
└── SyncError           (of weight-sync)
    ├── WrongDigest     the live weights are not what the manifest says
    └── WrongAnswers    the engine computes something else than its version should
"""

from __future__ import annotations

from rose_core.host_reasons import HostReason


class AgentError(Exception):
    """Base of what the processes of a node raise."""


class AccessChanged(AgentError):
    """What the container can see of the node's GPUs has changed; only a new one helps."""


class BadConfiguration(AgentError):
    """A flag or a file is missing or malformed; the message names it."""


class ApiUnreachable(AgentError):
    """The Kubernetes API server does not answer or refuses; trying again may help."""


class NoKernelCounts(AgentError):
    """The kernel cannot count tokens for the tap here; the text says why."""


class DeviceError(AgentError):
    """Base of everything the device drivers raise."""


class NoDevices(DeviceError):
    """The driver cannot work on this machine at all; says why."""


class UnknownGpu(DeviceError):
    """No GPU with that UUID on this node."""


class MpsError(DeviceError):
    """The MPS control daemon does not answer, or refuses; says what it said."""


class QueryFailed(DeviceError):
    """The driver could not answer now; what was asked is unknown."""


class HostError(AgentError):
    """Base of everything the engine host raises.

    Attributes:
        reason: closed word for an engine's status.
    """

    reason = HostReason.START_FAILED


class GroupError(HostError):
    """A process group could not be made, stopped, continued or ended."""


class NoFreezer(HostError):
    """The asked-for way to stop a process tree is not available; says which and why."""


class NoLimits(HostError):
    """An asked-for limit of engines cannot be set on this machine; says which."""


class BadInput(HostError):
    """A flag of the verb, or a file that it names, is wrong; says which and what to do."""


class BadEngine(HostError):
    """The slot's engine cannot be started as asked; says what to change."""

    reason = HostReason.BAD_ENGINE


class NoModel(HostError):
    """The node has no such model, at least not yet; says where it was looked for."""

    reason = HostReason.NO_MODEL


class NoMemory(HostError):
    """The engine's GPU has too little free memory now; says how much it needs and finds.

    Attributes:
        needed: bytes that it needs of each GPU; None = that is not what it failed at.
    """

    reason = HostReason.INSUFFICIENT_MEMORY

    def __init__(self, message: str, needed: int | None = None) -> None:
        super().__init__(message)
        self.needed = needed


class NotShared(HostError):
    """The engine's GPU cannot be shared as the pool asks now; the reason says which way."""

    def __init__(self, reason: HostReason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class NotReady(HostError):
    """The engine's process runs but never became ready."""


class BrokenEngine(HostError):
    """The engine cannot go on as it is (an undo failed, memory was not let go of)."""

    def __init__(self, message: str, reason: HostReason = HostReason.BROKEN_WEIGHTS) -> None:
        super().__init__(message)
        self.reason = reason


class WrongGeneration(HostError):
    """An older generation of a slot tried to act for a newer one."""


class SyncError(AgentError):
    """Base of everything weight-sync raises."""


class WrongDigest(SyncError):
    """The live weights are not what the manifest says; the engine is quarantined."""


class WrongAnswers(SyncError):
    """The engine computes something else than its version should; it is quarantined."""
