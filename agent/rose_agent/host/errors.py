"""Exceptions of the engine host.

HostError
├── GroupError          a process group could not be made, stopped, continued or ended
├── NoFreezer           the asked-for way to stop a tree is not available on this machine
├── BadEngine           the slot's engine cannot be started as asked; trying again does not help
├── NotReady            the engine's process runs but never became ready
├── BrokenEngine        the engine's weights are broken; it is started anew
├── WrongGeneration     an older generation of a slot tried to act for a newer one
└── UnknownSlot         no engine for this slot on this host
"""


class HostError(Exception):
    """Base of everything the engine host raises."""


class GroupError(HostError):
    """A process group could not be made, stopped, continued or ended."""


class NoFreezer(HostError):
    """The asked-for way to stop a process tree is not available; says which and why."""


class BadEngine(HostError):
    """The slot's engine cannot be started as asked; says what to change."""


class NotReady(HostError):
    """The engine's process runs but never became ready."""


class BrokenEngine(HostError):
    """The engine's weights are broken (an undo failed); it is started anew."""


class WrongGeneration(HostError):
    """An older generation of a slot tried to act for a newer one."""


class UnknownSlot(HostError):
    """No engine for this slot on this host."""
