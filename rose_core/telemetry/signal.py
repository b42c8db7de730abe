"""All sources about one replica, merged into one ``ServingSignal``.

Any source may say *busy*; *empty* needs a source that proves it is alive now. The tap proves it
by its heartbeat (silence of traffic is not staleness), a polled source by a recent answer.

| tap | other figures | signal |
|---|---|---|
| alive, verified, n in flight | none, or agree | n requests, source WireTap |
| alive, verified, 0 in flight | busy for longer than the grace | unknown: SignalContradicted |
| alive, lossy or not verified | | unknown: a tap that may be wrong is not outvoted |
| unverified and TLS is open, absent for 10 s, not allowed | fresh | the figures' count |
| same | none fresh | unknown |

A request whose end cannot show is *outstanding*: on a TLS connection, or the tap joined in the
middle of its response, or its end may be among lost segments, or its slow reader takes nothing. It
counts as under way until figures have been idle for ``outstanding_ns`` after its last sign of life;
without figures it counts for ever.

| outstanding | figures idle since its last sign of life | counts |
|---|---|---|
| opaque, or packets were lost while it was open | for 2 s | no longer |
| its first token was seen, none for 10 s | for 10 s | no longer |
| any | not, or no figures | as under way |
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from rose_core.telemetry.book import Book, LiveRequest
from rose_core.telemetry.dialects import Figures
from rose_core.wire.sync import SignalSource

LEAK_NS = 10_000_000_000
LEVEL_LEAK_NS = 60_000_000_000
# Between two answers an engine is taken to be as busy as at the second, but for no longer.
SPAN_NS = 1_500_000_000


@dataclass(frozen=True)
class Reading:
    """What a polled source has said over time: since when busy, since when idle, is it plausible?

    Figures are compared with themselves, because a gauge that leaks looks like work for ever:
    SGLang's own count of active requests grows with every stream, and vLLM's ``/load`` is 0 for
    ever unless it was switched on. A level above zero although no token counter has moved for long
    is therefore not work but *unknown*; a level of a source without token counters is believed to
    be zero only once it has been seen above zero.

    Attributes:
        read_ns: when the engine last answered.
        busy_since_ns: since when the figures have shown work without a break, None when idle.
        idle_since_ns: since when they have shown none, None when busy.
        moved_ns: when they last changed.
        proven: they have shown work at least once.
        worked_ns: time in which they have shown work so far; what begins and ends between two
            answers, and a first prefill, is not in it.
    """

    source: SignalSource
    read_ns: int
    figures: Figures
    busy_since_ns: int | None = None
    idle_since_ns: int | None = None
    moved_ns: int = 0
    proven: bool = False
    worked_ns: int = 0

    @property
    def plausible(self) -> bool:
        """It says busy or idle; a leaking or unproven one says neither."""
        return self.busy_since_ns is not None or self.idle_since_ns is not None

    @property
    def leaking(self) -> bool:
        """The level stays above zero although nothing moves."""
        if not level(self.figures):
            return False
        patience = LEAK_NS if self.figures.activity else LEVEL_LEAK_NS
        return self.moved_ns > 0 and self.read_ns - self.moved_ns > patience


def level(figures: Figures) -> int:
    """Requests that the engine says it has."""
    return (figures.running or 0) + (figures.waiting or 0)


def advance(before: Reading | None, source: SignalSource, figures: Figures, now_ns: int) -> Reading:
    """Add one answer of a polled source to its earlier ones.

    Any change of a token counter counts as work, because SGLang shows a request's prefill there
    before it shows the request. A counter that falls is an engine that began anew.
    """
    known = figures.running is not None
    moved = before is not None and figures.activity != before.figures.activity
    working = known and (moved or level(figures) > 0)
    busy = (before.busy_since_ns if before else None) or now_ns
    idle = (before.idle_since_ns if before else None) or now_ns
    reading = Reading(
        source,
        now_ns,
        figures,
        busy_since_ns=busy if working else None,
        idle_since_ns=idle if known and not working else None,
        moved_ns=now_ns if before is None or _changed(before.figures, figures) else before.moved_ns,
        proven=working or (before is not None and before.proven),
        worked_ns=before.worked_ns if before else 0,
    )
    if reading.leaking or (figures.level_only and not reading.proven):
        return replace(reading, busy_since_ns=None, idle_since_ns=None)
    if before is None or not working:
        return reading
    return replace(reading, worked_ns=reading.worked_ns + min(now_ns - before.read_ns, SPAN_NS))


def _changed(before: Figures, now: Figures) -> bool:
    """Whether the engine worked in between; without token counters only the level can tell."""
    if now.activity or before.activity:
        return now.activity != before.activity
    return level(now) != level(before)


class Doubt(StrEnum):
    """Why the state of a replica is unknown."""

    NO_SIGNAL = "SignalMissing"
    STALE = "SignalStale"
    LOST = "SignalLost"
    OPAQUE = "SignalOpaque"
    UNVERIFIED = "SignalUnverified"
    CONTRADICTED = "SignalContradicted"


@dataclass(frozen=True)
class SignalLimits:
    """When a source stops being believed; nanoseconds."""

    tap_stale_ns: int = 200_000_000
    figures_stale_ns: int = 500_000_000
    after_loss_ns: int = 2_000_000_000
    contradiction_ns: int = 1_500_000_000
    fallback_ns: int = 10_000_000_000
    outstanding_ns: int = 2_000_000_000
    stalled_ns: int = 10_000_000_000


@dataclass(frozen=True)
class ServingSignal:
    """What is known about a replica now.

    Attributes:
        source: best source that proves it is alive; None = nothing does.
        running: requests under way; None = unknown.
        requests: them, one by one, when the tap is the source.
        empty_since_ns: since when none has been under way; None = busy or unknown.
        doubt: why ``running`` is unknown.
        believed_until_ns: when the source has to be heard of again; no permit outlasts that, so a
            source that dies is acted upon at its deadline and not a step later. 0 = no such moment.
        tokens_until_ns: until when ``requests`` have their tokens; 0 = until now.
    """

    source: SignalSource | None
    running: int | None
    requests: tuple[LiveRequest, ...] = ()
    empty_since_ns: int | None = None
    doubt: Doubt | None = None
    believed_until_ns: int = 0
    tokens_until_ns: int = 0


def unknown(doubt: Doubt) -> ServingSignal:
    """The signal that closes the gate."""
    return ServingSignal(None, None, doubt=doubt)


def merge(
    book: Book | None,
    verified: bool | None,
    readings: tuple[Reading, ...],
    *,
    allowed: tuple[SignalSource, ...],
    limits: SignalLimits,
    now_ns: int,
) -> ServingSignal:
    """Merge the signals of the tap and of the polled sources."""
    fresh = [
        r
        for r in readings
        if r.source in allowed
        and now_ns - r.read_ns <= limits.figures_stale_ns
        and r.figures.running is not None
        and r.plausible
    ]
    doubt = Doubt.NO_SIGNAL
    if book is not None and SignalSource.WIRE_TAP in allowed:
        trouble = _tap_doubt(book, verified, limits, now_ns)
        if trouble is None:
            return _with_tap(book, fresh, limits, now_ns)
        silent_ns = now_ns - max(book.last_seen_ns, book.began_ns)
        absent = trouble in {Doubt.NO_SIGNAL, Doubt.STALE} and silent_ns > limits.fallback_ns
        if not absent and trouble is not Doubt.OPAQUE:
            return unknown(trouble)
        doubt = trouble
    return _without_tap(book, fresh, doubt, limits, now_ns)


def _tap_doubt(
    book: Book, verified: bool | None, limits: SignalLimits, now_ns: int
) -> Doubt | None:
    health = book.health
    if health is None:
        return Doubt.NO_SIGNAL
    lost = now_ns - max(health.lost_ns, book.blind_ns) < limits.after_loss_ns
    differs = book.mismatch_ns and now_ns - book.mismatch_ns < limits.tap_stale_ns
    rules = (
        (now_ns - book.last_seen_ns > limits.tap_stale_ns, Doubt.STALE),
        (health.problem or lost or differs, Doubt.LOST),
        # A verified tap counted as many requests in clear text as the engine counted at all: what
        # is encrypted (the outside of a mesh) was no more than that.
        (health.opaque and not verified, Doubt.OPAQUE),
        (not verified, Doubt.UNVERIFIED),
    )
    return next((doubt for applies, doubt in rules if applies), None)


def _with_tap(book: Book, fresh: list[Reading], limits: SignalLimits, now_ns: int) -> ServingSignal:
    requests = _under_way(book, fresh, limits, now_ns)
    empty = book.empty_since_ns()
    if empty is None and not requests:
        # Every request left is outstanding only; empty since they last showed life.
        empty = max(r.last_seen_ns for r in book.live.values())
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
    until = book.last_seen_ns + limits.tap_stale_ns
    return ServingSignal(
        *(SignalSource.WIRE_TAP, len(requests), requests, empty),
        believed_until_ns=until,
        tokens_until_ns=book.health.time_ns if book.health is not None else 0,
    )


def _under_way(
    book: Book, fresh: list[Reading], limits: SignalLimits, now_ns: int
) -> tuple[LiveRequest, ...]:
    """The tap's requests without those that figures show to be over."""
    idle = [r.idle_since_ns for r in fresh if r.source is not SignalSource.METRICS]
    if not idle or None in idle:
        return tuple(book.live.values())
    quiet_ns = now_ns - max(since for since in idle if since is not None)

    def counts(request: LiveRequest) -> bool:
        silent_ns = min(quiet_ns, now_ns - request.last_seen_ns)
        if request.opaque or request.doubtful:
            return silent_ns < limits.outstanding_ns
        return not request.first_ns or silent_ns < limits.stalled_ns

    return tuple(request for request in book.live.values() if counts(request))


def _without_tap(
    book: Book | None, fresh: list[Reading], doubt: Doubt, limits: SignalLimits, now_ns: int
) -> ServingSignal:
    if not fresh:
        return unknown(doubt)
    reading = min(fresh, key=lambda r: list(SignalSource).index(r.source))
    if reading.source is SignalSource.METRICS:
        # Its gauges refresh with the engine's log: they may show work, never emptiness.
        return unknown(doubt)
    running = level(reading.figures)
    if book is not None:
        # Any source may close.
        running = max(running, len(_under_way(book, fresh, limits, now_ns)))
    empty = reading.idle_since_ns if running == 0 else None
    if running == 0 and empty is None:
        running = 1  # a token counter moved although no request is shown
    until = reading.read_ns + limits.figures_stale_ns
    return ServingSignal(reading.source, running, (), empty, believed_until_ns=until)
