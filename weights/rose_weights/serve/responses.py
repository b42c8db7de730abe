"""What a store says of runs and versions, and how its errors travel.

Next step: ``service`` answers with these; ``relay`` refuses the same way.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Awaitable, Callable, Iterator
from typing import TypeVar

from rose_core.delta import DeltaError, Manifest
from rose_weights import metrics
from rose_weights.errors import BadManifest, WeightsError, as_text, codes
from rose_weights.messages import Description, VersionInfo
from rose_weights.store.state import RunState, StoredVersion
from rose_wire.errors import Refused

# A counter that appears with its first refusal hides that one from rate() and increase(), which
# compare two readings: each code stands at zero from the start.
for _code in codes():
    metrics.REFUSALS.labels(_code)

_RequestT = TypeVar("_RequestT")
_ReplyT = TypeVar("_ReplyT")


def plan_kind(manifest: Manifest, merged: int) -> str:
    """How a receiver gets to its version: the label of the plans' counter."""
    if manifest.base is None:
        return "Full"
    return ("Same", "Delta", "Merged")[min(merged, 2)]


def info(stored: StoredVersion) -> VersionInfo:
    """One version."""
    return VersionInfo(
        stored.version,
        stored.digest,
        stored.base,
        stored.step,
        stored.changes,
        stored.bytes,
        stored.encode_seconds,
    )


def description(state: RunState) -> Description:
    """One run."""
    head = state.kept(state.head)
    return Description(
        run=state.run,
        head=None if head is None else info(head),
        versions=tuple(info(kept) for kept in state.versions),
        fence=state.fence,
        publisher=state.publisher,
    )


def measure(state: RunState, stored: StoredVersion) -> None:
    """Count a version that became the head."""
    metrics.COMMITS.labels(state.run, "Published").inc()
    metrics.HEAD_INCARNATION.labels(state.run).set(stored.version.incarnation)
    metrics.HEAD_SEQUENCE.labels(state.run).set(stored.version.sequence)
    metrics.DELTA_BYTES.labels(state.run).inc(stored.bytes)
    metrics.CHANGED_RATIO.labels(state.run).set(stored.changes / max(stored.elements, 1))


def run_of(manifest: bytes) -> str:
    """The run that an encoded manifest belongs to.

    Raises:
        BadManifest: it cannot be read.
    """
    try:
        return Manifest.decode(manifest).target.run
    except DeltaError as error:
        raise BadManifest(str(error)) from error


@contextlib.contextmanager
def refusing() -> Iterator[None]:
    """Errors of the store as refusals that the other side can read."""
    try:
        yield
    except (WeightsError, DeltaError) as error:
        metrics.REFUSALS.labels(type(error).__name__).inc()
        text = as_text(error) if isinstance(error, WeightsError) else str(error)
        raise Refused(text) from error


def answering(
    handler: Callable[[_RequestT], Awaitable[_ReplyT]],
) -> Callable[[_RequestT], Awaitable[_ReplyT]]:
    """A handler whose errors are refusals."""

    @functools.wraps(handler)
    async def answer(request: _RequestT) -> _ReplyT:
        with refusing():
            return await handler(request)

    return answer
