"""Exceptions of the engine host.

HostError
├── GroupError          a process group could not be made, stopped, continued or ended
├── NoFreezer           the asked-for way to stop a tree is not available on this machine
├── NoLimits            an asked-for limit of engines cannot be set on this machine
├── BadInput            a flag, or a file that it names, is wrong: the verb ends with code 2
├── BadEngine           the slot's engine cannot be started as asked; trying again does not help
├── NotShared           its GPU cannot be shared as the pool asks now; tried again later
├── NoMemory            its GPU has too little free memory now; tried again later
├── NotReady            the engine's process runs but never became ready
├── BrokenEngine        the engine cannot go on as it is; it is started anew
└── WrongGeneration     an older generation of a slot tried to act for a newer one
"""

from __future__ import annotations

from rose_core.wire.reasons import HostReason


class HostError(Exception):
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


class NoMemory(HostError):
    """The engine's GPU has too little free memory now; says how much it needs and finds."""

    reason = HostReason.INSUFFICIENT_MEMORY


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
