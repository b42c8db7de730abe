"""How requests beside lending lie to their bound: the lines, and those beyond them; pure.

``bound`` says what the parts of a line are, and measures them. A request alone is held against the
largest of the *others* alone, so that it is as hard for it as for one that met an open gate.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import msgspec

from bench.record import Figure, figure
from rose_agent.host.enforcement.enforcer import TICK_SECONDS
from rose_core.guard.freezing import Grace
from rose_core.guard.ladder import LadderLimits
from rose_core.stats import mixture_sequence, quantile
from rose_core.telemetry.signal import SignalLimits

LEVEL = 0.99
"""What certificates claim that count."""
LONGEST_STOP_S = (
    max(SignalLimits().tap_stale_ns, LadderLimits().permit_ns) + Grace().iteration_ns
) / 1e9 + TICK_SECONDS
"""D, can be: the larger sum of ``docs/guard.md``, whichever of tap and guard hangs."""


class Request(msgspec.Struct, frozen=True):
    """One request that met an empty replica; seconds.

    Attributes:
        lent: it met an open gate; else nothing was lent, and rollouts had been at rest.
        behind: another one was sent close behind it.
        ttft_s: as the kernel stamps its first segment and the answer's.
        client_s: the same as its client saw it.
        batch_s: C.
        closed_s: of D, own: until the permit was closed.
        stop_s: D, own; None = alone.
        answered: the host reported it; else the gate opened first, and it took at least as long.
        learned_s: D, learned; None = fewer stops than the percentile takes.
        promised_s: the percentile of D; the same.
        waited_s: for how long serving's threads, summed up, waited for a core until its end.
        rollouts_s: for how long rollouts' threads had one meanwhile; None = not known, the gate
            was open again before that was read.
    """

    lent: bool
    behind: bool
    ttft_s: float
    client_s: float
    batch_s: float = 0.0
    closed_s: float | None = None
    stop_s: float | None = None
    answered: bool = True
    learned_s: float | None = None
    promised_s: float | None = None
    waited_s: float = 0.0
    rollouts_s: float | None = None


class Promised(msgspec.Struct):
    """The guard's own count between two looks, under a certificate of the percentile.

    Attributes:
        requests, exceeded: that met an open gate; of them, those beyond next + D.
        allowed: what the certificates' levels allow.
        alone, alone_exceeded: while nothing was lent; beyond the ceiling that stood before.
    """

    requests: int = 0
    exceeded: int = 0
    allowed: float = 0.0
    alone: int = 0
    alone_exceeded: int = 0


class Look(msgspec.Struct):
    """What was seen between two looks at the guard.

    Attributes:
        part: the same for all looks of some four minutes of one run, whose requests are compared.
        unclear: requests that met a shut gate in a lent window or one that had only just shut.
        lost: requests that the guard's records do not have, without a TTFT, or that failed.
        strangers: share of the machine that processes other than the benchmark's used.
    """

    part: float
    requests: list[Request] = []
    promised: Promised = msgspec.field(default_factory=Promised)
    unclear: int = 0
    lost: int = 0
    strangers: float = 0.0
    load: float = 0.0


@dataclass(frozen=True)
class Beyond:
    """Requests beyond one line, with and without lending.

    Attributes:
        worst: the largest TTFT of a lent request as a share of its line.
    """

    lent: int
    lent_of: int
    alone: int
    alone_of: int
    worst: float


Stop = Callable[[Request], float | None]
"""Which D a request's line has; None leaves it out."""


def can_be(_one: Request) -> float:
    """D, can be."""
    return LONGEST_STOP_S


def learned(one: Request) -> float | None:
    """D, learned."""
    return one.learned_s


def own(one: Request) -> float | None:
    """D, own; of a request alone nothing."""
    return one.stop_s if one.lent else 0.0


class Findings:
    """All requests that are on disk."""

    def __init__(self, looks: Sequence[Look]) -> None:
        self.looks = looks
        self.requests = [one for look in looks for one in look.requests]

    @cached_property
    def _groups(self) -> list[list[Request]]:
        """Those that are compared with each other: of one part, with or without another behind."""
        found: dict[tuple[float, bool], list[Request]] = defaultdict(list)
        for look in self.looks:
            for one in look.requests:
                found[look.part, one.behind].append(one)
        return [group for group in found.values() if sum(not one.lent for one in group) > 1]

    def count(self, *, lent: bool) -> int:
        """How many."""
        return sum(one.lent is lent for group in self._groups for one in group)

    def lines(self, share: float, stop: Stop) -> Iterator[tuple[Request, float]]:
        """Each request with TTFT alone + D + C, seconds.

        Args:
            share: quantile of TTFT alone that stands for it; 1 = the largest of the others.
            stop: D.
        """
        for group in self._groups:
            alone = sorted(one.ttft_s for one in group if not one.lent)
            stands = quantile(alone, share)
            for one in group:
                itself = share == 1 and not one.lent and one.ttft_s == alone[-1]
                stop_s = stop(one)
                if stop_s is not None:
                    yield one, (alone[-2] if itself else stands) + stop_s + one.batch_s

    def beyond(self, share: float, stop: Stop) -> Beyond:
        """Those that took longer than their lines; the arguments are those of ``lines``."""
        both = list(self.lines(share, stop))
        lent = [one.ttft_s / line_s for one, line_s in both if one.lent]
        alone = [one.ttft_s / line_s for one, line_s in both if not one.lent]
        above = [sum(one > 1 for one in kind) for kind in (lent, alone)]
        return Beyond(above[0], len(lent), above[1], len(alone), max(lent, default=0.0))

    def added_s(self, *, lent: bool) -> list[float]:
        """By how much each took longer than the median alone, seconds; C is left in."""
        found = []
        for group in self._groups:
            middle = quantile([one.ttft_s for one in group if not one.lent], 0.5)
            found += [one.ttft_s - middle for one in group if one.lent is lent]
        return found

    @property
    def stops(self) -> list[Request]:
        """Those for which rollouts stopped, when the guard had learned what stops take."""
        return [
            one for one in self.requests if one.stop_s is not None and one.learned_s is not None
        ]


_LINES = ((1.0, "the largest"), (0.99, "p99"), (0.5, "the median"))
_STOPS: tuple[tuple[str, Stop], ...] = (
    ("D that can be", can_be),
    ("the longest D learned", learned),
    ("its own D", own),
)
_QUANTILES = (0.5, 0.9, 0.99, 0.999, 1.0)


def figures_of(looks: Sequence[Look]) -> list[Figure]:
    """What all runs say."""
    found = Findings(looks)
    if not (found.count(lent=True) and found.count(lent=False)):
        return []
    bound = found.beyond(1.0, can_be)
    most = mixture_sequence(bound.lent, bound.lent_of)
    return [
        figure("requests at an open gate", bound.lent_of, "1", at_least=10_000),
        figure("of them beyond the bound", bound.lent, "1", at_most=0),
        figure("share beyond, at most (95 %, at every look)", most.high, "ratio"),
        figure("largest TTFT / bound", bound.worst, "ratio", at_most=1),
        *(one for share, alone in _LINES for one in _beyond(found, share, alone)),
        *_added(found),
        *_stops(found),
        *_computed(found),
        *_promised(looks),
        figure("requests not compared: gate only just shut", sum(x.unclear for x in looks), "1"),
        figure(
            "requests that failed, or that the guard's records lack",
            sum(x.lost for x in looks),
            "1",
        ),
        figure(
            "open gates without a stop",
            sum(one.lent and one.stop_s is None for one in found.requests),
            "1",
        ),
        figure("others' share of the machine, mean", _mean(x.strangers for x in looks), "ratio"),
        figure("load of the machine, mean", _mean(x.load for x in looks), "1"),
    ]


def _beyond(found: Findings, share: float, alone: str) -> Iterator[Figure]:
    for name, stop in _STOPS:
        one = found.beyond(share, stop)
        line = f"{alone} alone + C + {name}"
        yield figure(f"beyond {line}: at an open gate", one.lent, f"of {one.lent_of}")
        without = f"{alone} alone + C" if stop is own else line
        yield figure(f"beyond {without}: alone", one.alone, f"of {one.alone_of}")
        yield figure(f"largest TTFT / ({line})", one.worst, "ratio")


def _added(found: Findings) -> Iterator[Figure]:
    learnt = [one.learned_s for one in found.requests if one.learned_s is not None]
    typical_s = quantile(learnt, 0.5) if learnt else math.nan
    yield figure("the longest D learned, median over requests", 1e3 * typical_s, "ms")
    yield figure("D that can be", 1e3 * LONGEST_STOP_S, "ms")
    for lent, name in ((True, "at an open gate"), (False, "alone")):
        added = found.added_s(lent=lent)
        for share in _QUANTILES:
            value = quantile(added, share)
            title = f"TTFT over the median alone, {name}, {_name_of(share)}"
            yield figure(title, 1e3 * value, "ms")
            if lent:
                yield figure(f"{title}, of D learned", value / typical_s, "ratio")


def _stops(found: Findings) -> Iterator[Figure]:
    stops = found.stops
    yield figure("stops with a D learned", len(stops), "1")
    if not stops:
        return
    took = [one.stop_s for one in stops if one.stop_s is not None]
    above = sum((one.stop_s or 0.0) > (one.promised_s or 0.0) for one in stops)
    yield figure("of them beyond the p99 learned", above, "1")
    yield figure("what the percentile allows", (1 - LEVEL) * len(stops), "1")
    longer = sum((one.stop_s or 0.0) > (one.learned_s or 0.0) for one in stops)
    yield figure("of them beyond the longest of the 512 before", longer, "1")
    yield figure("of them beyond D that can be", sum(one > LONGEST_STOP_S for one in took), "1")
    unanswered = sum(not one.answered for one in stops)
    yield figure("of them not reported before the gate opened again", unanswered, "1")
    for share in _QUANTILES:
        yield figure(f"stop, {_name_of(share)}", 1e3 * quantile(took, share), "ms")


def _computed(found: Findings) -> Iterator[Figure]:
    """What of D is felt: for how long rollouts had a core while the request was under way."""
    known = [(one, one.rollouts_s) for one in found.requests if one.rollouts_s is not None]
    lent = [(one, had) for one, had in known if one.lent]
    yield figure("open gates with an account of rollouts' core", len(lent), "1")
    if not lent:
        return
    for share in _QUANTILES:
        value = quantile([had for _, had in lent], share)
        yield figure(f"core that rollouts had until its end, {_name_of(share)}", 1e3 * value, "ms")
    for name, stop in _STOPS:
        above = sum(had > (stop(one) or math.inf) for one, had in lent)
        yield figure(f"of them longer than {name}", above, "1")
    alone = max((had for one, had in known if not one.lent), default=0.0)
    yield figure("the same alone, largest", 1e3 * alone, "ms")


def _promised(looks: Sequence[Look]) -> Iterator[Figure]:
    each = [look.promised for look in looks]
    count, exceeded = sum(x.requests for x in each), sum(x.exceeded for x in each)
    alone, without = sum(x.alone for x in each), sum(x.alone_exceeded for x in each)
    yield figure("under a certificate of the 99th percentile", count, "1")
    yield figure("of them beyond next + D", exceeded, "1")
    yield figure("what their levels allow", sum(x.allowed for x in each), "1")
    share = mixture_sequence(exceeded, count).high
    yield figure("share beyond next + D, at most (95 %, at every look)", share, "ratio")
    yield figure("alone meanwhile", alone, "1")
    yield figure("of them beyond next + D, alone", without, "1")


def causes(found: Findings) -> Iterator[str]:
    """A line for each request beyond the largest alone + C + the longest D learned."""
    for one, line_s in found.lines(1.0, learned):
        if one.ttft_s > line_s:
            parts = {
                "line": line_s,
                "closed after": one.closed_s,
                "own D": one.stop_s,
                "rollouts had a core for": one.rollouts_s,
                "serving's threads waited for one": one.waited_s,
            }
            told = ", ".join(f"{k} {1e3 * v:.1f}" for k, v in parts.items() if v is not None)
            kind = "at an open gate" if one.lent else "alone"
            yield f"beyond, {kind}: TTFT {1e3 * one.ttft_s:.1f} ms; {told}"


def _name_of(share: float) -> str:
    return "largest" if share == 1 else f"p{100 * share:g}"


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found) if found else math.nan
