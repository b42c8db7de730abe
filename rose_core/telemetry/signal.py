"""All sources about one replica, merged into one ``ServingSignal``.

Any source may say *busy*; *empty* needs a source that proves it is alive now. The tap proves it
by its heartbeat (silence of traffic is not staleness), a polled source by a recent answer.

| tap | other figures | signal |
|---|---|---|
| alive, verified, n in flight | none, or agree | n requests, source WireTap |
| alive, verified, 0 in flight | busy for longer than the grace | unknown: SignalContradicted |
| alive, lossy or not verified | | unknown: a tap that may be wrong is not outvoted |
| opaque, absent for 10 s, not allowed | fresh | the figures' count |
| same | none fresh | unknown |
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from rose_core.telemetry.book import Book, LiveRequest
from rose_core.telemetry.dialects import Figures
from rose_core.wire.sync import SignalSource


class Doubt(StrEnum):
    """Why the state of a replica is unknown."""

    NO_SIGNAL = "SignalMissing"
    STALE = "SignalStale"
    LOST = "SignalLost"
    OPAQUE = "SignalOpaque"
    UNVERIFIED = "SignalUnverified"
    CONTRADICTED = "SignalContradicted"


@dataclass(frozen=True)
class Limits:
    """When a source stops being believed; nanoseconds."""

    tap_stale_ns: int = 250_000_000
    figures_stale_ns: int = 500_000_000
    after_loss_ns: int = 2_000_000_000
    contradiction_ns: int = 1_500_000_000
    fallback_ns: int = 10_000_000_000


@dataclass(frozen=True)
class Reading:
    """Figures of one polled source.

    Attributes:
        read_ns: when the engine last answered.
        busy_since_ns: since when the figures have shown work without a break, None when idle.
        idle_since_ns: since when they have shown none, None when busy.
    """

    source: SignalSource
    read_ns: int
    figures: Figures
    busy_since_ns: int | None = None
    idle_since_ns: int | None = None


@dataclass(frozen=True)
class ServingSignal:
    """What is known about a replica now.

    Attributes:
        source: best source that proves it is alive; None = nothing does.
        running: requests under way; None = unknown.
        requests: them, one by one, when the tap is the source.
        empty_since_ns: since when none has been under way; None = busy or unknown.
        doubt: why ``running`` is unknown.
    """

    source: SignalSource | None
    running: int | None
    requests: tuple[LiveRequest, ...] = ()
    empty_since_ns: int | None = None
    doubt: Doubt | None = None


def unknown(doubt: Doubt) -> ServingSignal:
    """The signal that closes the gate."""
    return ServingSignal(None, None, doubt=doubt)


def merge(
    book: Book | None,
    verified: bool | None,
    readings: tuple[Reading, ...],
    *,
    allowed: tuple[SignalSource, ...],
    limits: Limits,
    now_ns: int,
) -> ServingSignal:
    """Merge what the tap and the polled sources say."""
    fresh = [
        r
        for r in readings
        if r.source in allowed
        and now_ns - r.read_ns <= limits.figures_stale_ns
        and r.figures.running is not None
    ]
    doubt = Doubt.NO_SIGNAL
    if book is not None and SignalSource.WIRE_TAP in allowed:
        trouble = _tap_doubt(book, verified, limits, now_ns)
        if trouble is None:
            return _with_tap(book, fresh, limits, now_ns)
        silent_ns = now_ns - max(book.heard_ns, book.began_ns)
        absent = trouble in {Doubt.NO_SIGNAL, Doubt.STALE} and silent_ns > limits.fallback_ns
        if not absent and trouble is not Doubt.OPAQUE:
            return unknown(trouble)
        doubt = trouble
    return _without_tap(book, fresh, doubt)


def _tap_doubt(book: Book, verified: bool | None, limits: Limits, now_ns: int) -> Doubt | None:
    health = book.health
    if health is None:
        return Doubt.NO_SIGNAL
    lost = now_ns - max(health.lost_ns, book.blind_ns) < limits.after_loss_ns
    differs = book.mismatch_ns and now_ns - book.mismatch_ns < limits.tap_stale_ns
    rules = (
        (now_ns - book.heard_ns > limits.tap_stale_ns, Doubt.STALE),
        (health.problem or lost or differs, Doubt.LOST),
        (health.opaque, Doubt.OPAQUE),
        (not verified, Doubt.UNVERIFIED),
    )
    return next((doubt for applies, doubt in rules if applies), None)


def _with_tap(book: Book, fresh: list[Reading], limits: Limits, now_ns: int) -> ServingSignal:
    empty = book.empty_since_ns()
    busy = [
        r.busy_since_ns
        for r in fresh
        if r.busy_since_ns is not None and r.source is not SignalSource.METRICS
    ]
    contradicted = empty is not None and any(
        now_ns - max(since, empty) > limits.contradiction_ns for since in busy
    )
    if contradicted:
        return unknown(Doubt.CONTRADICTED)
    requests = tuple(book.live.values())
    return ServingSignal(SignalSource.WIRE_TAP, len(requests), requests, empty)


def _without_tap(book: Book | None, fresh: list[Reading], doubt: Doubt) -> ServingSignal:
    if not fresh:
        return unknown(doubt)
    reading = min(fresh, key=lambda r: list(SignalSource).index(r.source))
    if reading.source is SignalSource.METRICS:
        # Its gauges refresh with the engine's log: they may show work, never emptiness.
        return unknown(doubt)
    running = (reading.figures.running or 0) + (reading.figures.waiting or 0)
    if book is not None:
        running = max(running, len(book.live))  # any source may close
    empty = reading.idle_since_ns if running == 0 else None
    if running == 0 and empty is None:
        running = 1  # a token counter moved although no request is shown
    return ServingSignal(reading.source, running, (), empty)


def advance(before: Reading | None, source: SignalSource, figures: Figures, now_ns: int) -> Reading:
    """Add one answer of a polled source to what it said before.

    Any change of a token counter counts as work, because SGLang shows a request's prefill there
    before it shows the request.
    """
    moved = before is not None and figures.activity != before.figures.activity
    working = moved or (figures.running or 0) + (figures.waiting or 0) > 0
    unknown_now = figures.running is None
    busy = (before.busy_since_ns if before else None) or now_ns
    idle = (before.idle_since_ns if before else None) or now_ns
    return Reading(
        source,
        now_ns,
        figures,
        busy_since_ns=busy if working and not unknown_now else None,
        idle_since_ns=idle if not working and not unknown_now else None,
    )
