"""Exceptions of the wire.

WireError
├── Unavailable         the peer cannot be reached or did not answer in time
├── Refused             the peer understood and said no
└── MalformedMessage    bytes that are no message of the agreed type
"""


class WireError(Exception):
    """Base of everything ``rose_wire`` raises."""


class Unavailable(WireError):
    """The peer cannot be reached or did not answer in time; trying again may help."""


class Refused(WireError):
    """The peer understood the request and refuses it; trying the same again does not help."""


class MalformedMessage(WireError):
    """Bytes that are no message of the agreed type."""
