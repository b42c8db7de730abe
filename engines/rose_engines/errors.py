"""Everything that engines and the tools around them can refuse.

EngineError
├── ArgumentRefused     an engine argument outside the allow-list, or with a wrong value
├── UnsupportedEngine   this build or layout of the engine is not one ROSE can steer
├── EngineUnavailable   the engine does not answer (starting, stopped, dead)
├── EngineRefused       the engine answered with an error
└── CommitRefused       a weight bundle was not committed; the old version goes on serving
"""

from __future__ import annotations


class EngineError(Exception):
    """Base of this package's errors."""


class ArgumentRefused(EngineError):
    """An engine argument outside the allow-list; the message names it."""


class UnsupportedEngine(EngineError):
    """The engine's build or its parameter layout is not one ROSE can steer."""


class EngineUnavailable(EngineError):
    """The engine does not answer: it is starting, stopped or dead."""


class EngineRefused(EngineError):
    """The engine answered with an error.

    Attributes:
        status: HTTP status of the answer.
    """

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class CommitRefused(EngineError):
    """A weight bundle was not committed; the version before goes on serving.

    Attributes:
        reason: closed word: ``WrongBase``, ``Corrupt``, ``Layout``, ``NotStaged``, ``Busy``,
            ``DigestMismatch``, ``LoadFailed``, ``Aborted``, ``Broken``.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(f"{reason}: {message}")
        self.reason = reason
        self.message = message


class BrokenWeights(EngineError):
    """An undo did not restore the weights; nothing may be sampled from this engine any more."""
