"""Exceptions of the wire.

WireError
├── Unavailable         the peer cannot be reached or did not answer in time
├── Refused             the peer understood and said no
├── NotConfigured       no API server is configured, or its configuration is wrong
├── StatusError         the API server answered with a status that is an error
└── MalformedMessage    bytes that are no message of the agreed type
"""

from collections.abc import Mapping
from typing import Any


class WireError(Exception):
    """Base of everything ``rose_wire`` raises."""


class Unavailable(WireError):
    """The peer cannot be reached or did not answer in time; trying again may help."""


class Refused(WireError):
    """The peer understood the request and refuses it; trying the same again does not help."""


class NotConfigured(WireError):
    """No API server is configured, or its configuration is wrong; says which file, and why."""


class StatusError(WireError):
    """The API server answered with a status that is an error.

    Attributes:
        code: of HTTP.
        message: the server's own, else what the code means.
        details: of which kind and object; empty where something else than the server answered.
        retry_after: seconds it asked us to wait, 0 when it named no time.
    """

    def __init__(
        self,
        code: int,
        message: str,
        details: Mapping[str, Any] | None = None,
        retry_after: float = 0.0,
    ) -> None:
        self.code, self.message = code, message
        self.details, self.retry_after = details or {}, retry_after
        super().__init__(f"{code}: {message}")


class MalformedMessage(WireError):
    """Bytes that are no message of the agreed type."""
