"""Exceptions of the operator.

OperatorError
├── ConfigurationError    a flag or a file of the operator is wrong
├── ApiUnavailable        the API server does not answer; trying again helps
├── ApiRefused            the API server understood and refused (with its status code)
└── NotLeader             the operator may not write now
"""

from __future__ import annotations

UNAUTHORIZED = 401
NOT_FOUND = 404


class OperatorError(Exception):
    """Base of everything ``rose_operator`` raises."""


class ConfigurationError(OperatorError):
    """A flag or a file of the operator is wrong; says which, where and what it must be."""


class ApiUnavailable(OperatorError):
    """The API server does not answer or is overloaded; trying again helps.

    Attributes:
        retry_after: seconds the server asked us to wait, 0 when it named no time.
    """

    def __init__(self, message: str, retry_after: float = 0.0) -> None:
        self.retry_after = retry_after
        super().__init__(message)


class ApiRefused(OperatorError):
    """The API server refuses the request; trying the same again does not help."""

    def __init__(self, code: int, message: str) -> None:
        self.code = code
        super().__init__(f"{code}: {message}")


class NotLeader(OperatorError):
    """A write was attempted without the leader Lease."""
