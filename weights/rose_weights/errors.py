"""Exceptions of the weight plane.

WeightsError
├── UnknownRun        no such run in this store
├── UnknownVersion    the version is not kept (any more)
├── Fenced            another publisher has taken the run over; this one must stop
├── HeadMoved         the head is not what the publisher believed; nothing was changed
├── Incomplete        a manifest lists blocks the store does not have; send them and try again
├── BadManifest       a manifest the store does not accept
├── StoreFailed       the store's disk is full or broken; the head has not moved
├── Forbidden         who the caller is does not allow it
├── BadTenants        the file of tenants is none, or lacks the one that was asked for
├── TooLarge          a version larger than what its receiver fetches
├── Outrun            another process wrote an object of a bucket first; the store reads it again
└── Damaged           bytes on disk or from the wire are not what their name says
"""

from __future__ import annotations


class WeightsError(Exception):
    """Base of everything ``rose_weights`` raises.

    ``code`` travels in front of the text, so that the other side can raise the same class.
    """

    @property
    def code(self) -> str:
        """The class's name."""
        return type(self).__name__


class UnknownRun(WeightsError):
    """No such run in this store; the trainer has not published yet, or the name is wrong."""


class UnknownVersion(WeightsError):
    """The version is not kept (any more)."""


class Fenced(WeightsError):
    """Another publisher has taken the run over; this one must stop."""


class HeadMoved(WeightsError):
    """The head is not what the publisher believed; nothing was changed."""


class Incomplete(WeightsError):
    """A manifest lists blocks the store does not have; send them and try again."""


class BadManifest(WeightsError):
    """A manifest the store does not accept; says which rule it breaks."""


class StoreFailed(WeightsError):
    """The store's disk is full or broken; the head has not moved."""


class TooLarge(WeightsError):
    """A version larger than what its receiver fetches; nothing of it was brought."""


class Outrun(WeightsError):
    """Somebody else wrote the object since it was read; the store reads it again, nobody hears."""


class Forbidden(WeightsError):
    """The caller's certificate does not allow it; the store's owner decides who may."""


class Damaged(WeightsError):
    """Bytes on disk or from the wire are not what their name says."""


_BY_NAME: dict[str, type[WeightsError]] = {
    kind.__name__: kind
    for kind in (
        UnknownRun,
        UnknownVersion,
        Fenced,
        HeadMoved,
        Incomplete,
        BadManifest,
        StoreFailed,
        Forbidden,
        Damaged,
    )
}


def codes() -> tuple[str, ...]:
    """What ``code`` can be of an error that travels."""
    return tuple(_BY_NAME)


def as_text(error: WeightsError) -> str:
    """The error for the wire."""
    return f"[{error.code}] {error}"


def from_text(text: str) -> WeightsError | None:
    """The error that ``as_text`` wrote, wherever it stands in the text; None when there is none."""
    for code, kind in _BY_NAME.items():
        found = text.find(f"[{code}] ")
        if found >= 0:
            return kind(text[found + len(code) + 3 :])
    return None


class BadTenants(WeightsError):
    """The file of tenants is none, or lacks the tenant or credential that was asked for."""
