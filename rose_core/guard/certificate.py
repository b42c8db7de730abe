"""What lending may add to a time to first token, and whether that fits into the pool's SLO.

``docs/bound.md`` proves, for first-come engines that prefill before they decode,

    TTFT lent <= TTFT alone + D + S + C

| part | is at most |
|---|---|
| D, ``stop_s`` | arrival to a rollout engine at rest: tap, stop, rest of one rollout quantum |
| S, ``step_s`` | one decode step of serving that was under way; none on an empty replica |
| C, ``batch_s`` | the prefill of what else is in the request's batch, because it waited |

A gate on an empty replica opens if that fits for the next request:

| certificate | when | gate |
|---|---|---|
| none | the pool names no TTFT | as if there were none |
| not learned | fewer than nine requests that met the replica empty, or nine stops | as if none |
| holds | next + D <= SLO | may open |
| holds for short chunks | not with whole prefill chunks, but with a quarter | may open, for these |
| does not hold | next + D > SLO either way | closed, ``NotCertified`` |

D is learned for each size of the rollouts' prefill chunks (``CHUNK_DIVISORS``): the permit carries
the size, and the engine's next chunk has it. Short chunks are tried only where the next request
would keep its SLO alone, and not beside slots of several GPUs, whose ranks keep whole ones.

*Next* is a quantile over the last requests that met the replica empty, of

| it met a gate that was | counts as |
|---|---|
| closed | its TTFT, and the prefill of what came within D after it: C |
| open | its TTFT, which has both in it, less the time that rollouts took to stop for it |

Where the owner says what a request takes alone (``slo.ttftAloneMilliseconds``), that is *next*.
Both may only be too large: an open gate took at most that time, and D is at least that time. Both
are learned whatever the gate does. Stops are seen at open gates only, so after ``RELEARN`` requests
that met a gate which was shut for its certificate, what stops of the shortest chunks took is
forgotten; after as many that met a gate open for short chunks, what stops of whole ones took. So a
certificate that has shut a gate opens it again, and one that has shortened chunks tries whole ones
again: when what is asked has become smaller, or to learn stops anew. A request that would be late
alone shuts the gate whatever stops take, and nothing is learned anew for it.

Quantiles are adaptive conformal (``stats.Recent``), which takes n >= level / (1 - level) values.
With fewer of either the level is 0.9, and the certificate says so. Next step: ``gate`` asks it,
``experience`` keeps it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rose_core.stats import Recent

CHUNK_DIVISORS = (1, 4)
"""What the rollout engine's own prefill chunk is divided by, the whole one first. A quarter of it
takes no longer than a decode step of a full batch, so a smaller one would stop no sooner."""

FIRST_STOP_S = 0.075
"""D before a stop was seen: the p99 of arrival to standstill that ``rose advise`` assumes."""
FIRST_LEVEL = 0.9
"""Nine requests are enough for it, and one that stalled is outvoted by the next ten."""

RELEARN = 100
"""Requests. Nine are then needed without a promise, so that one in twelve has none at most."""

_REMEMBERED = 512
"""Requests: enough for the 99th percentile (99), few enough to forget a day's other half."""


@dataclass(frozen=True)
class LendingCost:
    """The most that lending adds to a TTFT; seconds. See the module for the parts."""

    stop_s: float
    step_s: float = 0.0
    batch_s: float = 0.0

    @property
    def added_s(self) -> float:
        """D + S + C."""
        return self.stop_s + self.step_s + self.batch_s


@dataclass(frozen=True)
class TtftCertificate:
    """What the next request on an empty replica is promised; seconds.

    Attributes:
        next_s: its TTFT alone with C, at the level.
        stop_s: D, at the level.
        level: share of requests for which this is claimed; 0 = not learned yet.
        chunk_divisor: for which of ``CHUNK_DIVISORS``.
    """

    slo_s: float
    next_s: float
    stop_s: float
    level: float
    chunk_divisor: int = 1

    @property
    def ceiling_s(self) -> float:
        """The TTFT that it does not exceed."""
        return self.next_s + self.stop_s

    @property
    def learned(self) -> bool:
        """Whether enough was seen to promise anything."""
        return self.level > 0

    @property
    def holds(self) -> bool:
        """Whether a gate may open on an empty replica."""
        return not self.learned or self.ceiling_s <= self.slo_s

    @property
    def text(self) -> str:
        """For people: the sum, in milliseconds."""
        chunks = "" if self.chunk_divisor == 1 else f" (prefill chunks 1/{self.chunk_divisor})"
        if not self.learned:
            return f"too few requests have met the replica empty, or stopped rollouts{chunks}"
        next_ms, stop_ms, all_ms, slo_ms = (
            round(1000 * part) for part in (self.next_s, self.stop_s, self.ceiling_s, self.slo_s)
        )
        sign = "<=" if self.holds else ">"
        return (
            f"p{100 * self.level:.0f} of TTFT {next_ms} + stop {stop_ms} = {all_ms} "
            f"{sign} {slo_ms} ms{chunks}"
        )


class LastTimes:
    """The last times of one kind, and what the next one does not exceed at each level asked for.

    Args:
        seconds: to begin with, oldest first.
    """

    def __init__(self, seconds: Iterable[float] = ()) -> None:
        self._recent = Recent()
        self._adjustments: dict[float, float] = {}
        for one in seconds:
            self.add(one)

    def __len__(self) -> int:
        return len(self._recent.values)

    def add(self, seconds: float) -> None:
        """One more; levels are adjusted by whether they had covered it."""
        for level, adjustment in self._adjustments.items():
            if _enough(len(self), level):
                missed = seconds > self._recent.bound(level, adjustment)
                self._adjustments[level] = Recent.adjust(adjustment, level, missed=missed)
        self._recent = self._recent.add(seconds, _REMEMBERED)

    def bound(self, level: float) -> float:
        """What the next one does not exceed at this level; some are needed."""
        return self._recent.bound(level, self._adjustments.setdefault(level, 0.0))

    @property
    def longest(self) -> float:
        """The longest; 0 = none is remembered."""
        return self._recent.ordered[-1] if len(self) else 0.0


def certify(
    nexts: LastTimes,
    stops: LastTimes,
    slo_s: float,
    percentile: int,
    *,
    alone_s: float = 0.0,
    chunk_divisor: int = 1,
) -> TtftCertificate:
    """The certificate of what was seen.

    Args:
        nexts: seconds of each request that met the replica empty, as the module counts them.
        stops: seconds from an arrival to a rollout engine at rest.
        slo_s: the pool's TTFT.
        percentile: share of requests that has to keep it, percent.
        alone_s: what the owner says of a request instead, at the percentile; 0 = learn it.
        chunk_divisor: with which prefill chunks the rollout engines were that stopped.
    """
    levels = (percentile / 100, min(FIRST_LEVEL, percentile / 100))
    fewest = len(stops) if alone_s else min(len(nexts), len(stops))
    level = next((one for one in levels if _enough(fewest, one)), 0.0)
    if not level:
        return _without_stops(nexts, slo_s, levels, alone_s, chunk_divisor)
    found = alone_s or nexts.bound(level)
    return TtftCertificate(slo_s, found, stops.bound(level), level, chunk_divisor)


def _without_stops(
    nexts: LastTimes,
    slo_s: float,
    levels: tuple[float, float],
    alone_s: float,
    chunk_divisor: int,
) -> TtftCertificate:
    """Nothing is promised, unless the next request is late by itself: no stop makes up for that."""
    level = next((one for one in levels if alone_s or _enough(len(nexts), one)), 0.0)
    found = alone_s or (nexts.bound(level) if level else 0.0)
    if found > slo_s:
        return TtftCertificate(slo_s, found, 0.0, level, chunk_divisor)
    return TtftCertificate(slo_s, 0.0, FIRST_STOP_S, 0.0, chunk_divisor)


def _enough(count: int, level: float) -> bool:
    return count >= level / (1 - level) - 1e-9


@dataclass
class CertificateCount:
    """Requests that met an open gate under a certificate, and those beyond its ceiling.

    Attributes:
        allowed: of those, what the certificates' levels allow.
    """

    requests: int = 0
    exceeded: int = 0
    allowed: float = 0.0

    def add(self, ttft_s: float, promised: TtftCertificate) -> bool:
        """Count one; returns whether it took longer than it was promised."""
        beyond = ttft_s > promised.ceiling_s
        self.requests += 1
        self.exceeded += beyond
        self.allowed += 1 - promised.level
        return beyond


class Envelope:
    """What a pool's last requests were; single-threaded.

    Replicas of one pool share it, so a new one does not begin with nothing.
    """

    def __init__(self) -> None:
        self._nexts = LastTimes()
        self._stops = {divisor: LastTimes() for divisor in CHUNK_DIVISORS}
        self._refused = dict.fromkeys(CHUNK_DIVISORS, 0)
        self._known: dict[tuple[float, int, float, bool], TtftCertificate] = {}

    def note_next(self, seconds: float) -> None:
        """A request has met the replica empty; see the module for what is counted of it."""
        self._nexts.add(seconds)
        self._known.clear()

    def note_refused(self, certificate: TtftCertificate) -> None:
        """A request has met a gate that this shut, or opened for short chunks alone."""
        if certificate.holds:
            refused = [divisor for divisor in CHUNK_DIVISORS if divisor < certificate.chunk_divisor]
        else:  # one size at a time: nine requests are without a promise then, and not eighteen
            refused = [certificate.chunk_divisor] if certificate.next_s <= certificate.slo_s else []
        for divisor in refused:
            self._refused[divisor] += 1
            if self._refused[divisor] >= RELEARN:
                self._stops[divisor] = LastTimes()
                self._known.clear()

    def note_stop(self, seconds: float, chunk_divisor: int = 1) -> None:
        """A request's arrival has stopped an engine within so long; its permit had this divisor."""
        self._stops[chunk_divisor].add(seconds)
        self._refused[chunk_divisor] = 0
        self._known.clear()

    @property
    def longest_stop_s(self) -> float:
        """The longest stop that is remembered."""
        return max(stops.longest for stops in self._stops.values()) or FIRST_STOP_S

    def certificate(
        self, slo_s: float, percentile: int, alone_s: float = 0.0, *, whole: bool = False
    ) -> TtftCertificate:
        """``certify`` of what is remembered, for the longest chunks for which it holds.

        Args:
            slo_s: as for ``certify``.
            percentile: the same.
            alone_s: the same.
            whole: the engine's chunks cannot be shortened.
        """
        key = slo_s, percentile, alone_s, whole
        if key not in self._known:
            self._known[key] = self._choose(*key)
        return self._known[key]

    def _choose(
        self, slo_s: float, percentile: int, alone_s: float, whole: bool
    ) -> TtftCertificate:
        found = []
        for divisor in CHUNK_DIVISORS[:1] if whole else CHUNK_DIVISORS:
            stops = self._stops[divisor]
            certificate = certify(
                self._nexts, stops, slo_s, percentile, alone_s=alone_s, chunk_divisor=divisor
            )
            found.append(certificate)
            # A request that would miss its SLO alone is no reason to try shorter chunks.
            if certificate.holds or certificate.next_s >= slo_s:
                break
        return found[-1]
