"""Exceptions of the sandbox room.

SandboxError
├── Unavailable       this machine lacks a part that the runtime needs
├── UnknownImage      no such image here
├── NoTemplates       this host reads no templates, or its cluster has none
├── UnknownTemplate   no such template in the host's namespace
├── UnknownSandbox    no such sandbox here, or it has ended
├── AlreadyThere      a sandbox of that key runs or is suspended here
├── Suspended         the sandbox is suspended; resume it first
├── CannotCheckpoint  something in the sandbox cannot be saved; it lives on
├── CannotRestore     the parts do not give a sandbox back; nothing of it is left behind
├── BadPath           a path that is none, leads nowhere or is no plain file
├── TooLarge          a file or a command over its bound
├── UnknownTurn       a turn without a record
├── HeardLate         the agent acted before its host heard of the turn
├── CommandDiffers    another command has been run under that name
├── TokensDiffer      a record is bound to other tokens than the caller's
├── HostAway          a sandbox host does not answer, or refused without a name
├── NotListening      nothing in the sandbox answers at that port
├── TooManyTunnels    the sandbox has as many connections as a host allows
└── RuntimeFailed     the runtime's own program failed; its words are in the text
"""

from __future__ import annotations

__all__ = [
    "AlreadyThere",
    "BadPath",
    "CannotCheckpoint",
    "CannotRestore",
    "CommandDiffers",
    "HeardLate",
    "HostAway",
    "NoTemplates",
    "NotListening",
    "RuntimeFailed",
    "SandboxError",
    "Suspended",
    "TokensDiffer",
    "TooLarge",
    "TooManyTunnels",
    "Unavailable",
    "UnknownImage",
    "UnknownSandbox",
    "UnknownTemplate",
    "UnknownTurn",
]


class SandboxError(Exception):
    """Base of everything ``rose_sandbox`` raises."""


class Unavailable(SandboxError):
    """This machine lacks a part that the runtime needs; the text says which and what brings it."""


class UnknownImage(SandboxError):
    """No such image here; the text lists those that are."""


class NoTemplates(SandboxError):
    """This host reads no templates, or its cluster does not have them: none can be had."""


class UnknownTemplate(SandboxError):
    """There is no template of that name in the host's namespace."""


class UnknownSandbox(SandboxError):
    """No such sandbox here, or it has ended."""


class AlreadyThere(SandboxError):
    """A sandbox of that key runs or is suspended here."""


class Suspended(SandboxError):
    """The sandbox is suspended; resume it first."""


class CannotCheckpoint(SandboxError):
    """Something in the sandbox cannot be saved; it lives on.

    Attributes:
        what: the thing in short, for records and metrics: "io_uring", "external socket".
    """

    def __init__(self, what: str, text: str) -> None:
        super().__init__(text)
        self.what = what


class CannotRestore(SandboxError):
    """The parts do not give a sandbox back; nothing of it is left behind."""


class BadPath(SandboxError):
    """A path that is none, leads nowhere or is no plain file."""


class TooLarge(SandboxError):
    """A file or a command over its bound."""


class NotListening(SandboxError):
    """Nothing in the sandbox answers at that port."""


class TooManyTunnels(SandboxError):
    """The sandbox has as many connections as a host allows; one must end first."""


class UnknownTurn(SandboxError):
    """A turn without a record; the text says which have one."""


class HeardLate(SandboxError):
    """The agent acted before its host heard of the turn: a record would mix two moments."""


class CommandDiffers(SandboxError):
    """Another command has been run under that name: a replay that is not the trajectory's."""


class TokensDiffer(SandboxError):
    """A record is bound to other tokens than the caller goes on from."""


class HostAway(SandboxError):
    """A sandbox host does not answer, or refused without a name of these."""


class RuntimeFailed(SandboxError):
    """The runtime's own program failed; its words are in the text."""
