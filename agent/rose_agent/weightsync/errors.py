"""Exceptions of weight-sync.

SyncError
├── WrongDigest         the live weights are not what the manifest says
└── WrongAnswers        the engine computes something else than its version should
"""


class SyncError(Exception):
    """Base of everything weight-sync raises."""


class WrongDigest(SyncError):
    """The live weights are not what the manifest says; the engine is quarantined."""


class WrongAnswers(SyncError):
    """The engine computes something else than its version should; it is quarantined."""
