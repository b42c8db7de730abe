"""What a polled source has said over time: since when busy, since when idle, and is it plausible?

Figures are compared with themselves, because a gauge that leaks looks like work for ever: SGLang's
own count of active requests grows with every stream, and vLLM's ``/load`` is 0 for ever unless it
was switched on. A level above zero although no token counter has moved for long is therefore not
work but *unknown*; a level of a source without token counters is believed to be zero only once it
has been seen above zero.
Next step: ``signal`` merges readings with the tap.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from rose_core.telemetry.dialects import Figures
from rose_core.wire.sync import SignalSource

LEAK_NS = 10_000_000_000
LEVEL_LEAK_NS = 60_000_000_000
# Between two answers an engine is taken to be as busy as at the second, but for no longer.
SPAN_NS = 1_500_000_000


@dataclass(frozen=True)
class Reading:
    """Figures of one polled source.

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
    """Add one answer of a polled source to what it said before.

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
