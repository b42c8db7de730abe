"""Exceptions of weight-sync.

SyncError
├── GateStayedClosed    the engine got no open permit in which to answer
└── WrongDigest         the live weights are not what the manifest says
"""


class SyncError(Exception):
    """Base of everything weight-sync raises."""


class GateStayedClosed(SyncError):
    """The engine got no open permit in which to answer."""


class WrongDigest(SyncError):
    """The live weights are not what the manifest says; the engine is quarantined."""
