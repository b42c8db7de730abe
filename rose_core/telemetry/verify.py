"""Does the tap see every request? Its count against the engine's own.

Levels never match (the engine counted before the tap began), so the *difference* between the two
counts is watched: it must stay the same. Neither count is read at the same moment, so what the tap
counted when the engine answered is known only within bounds: at least what its heartbeat said a
moment *before* the engine was asked, at most what its heartbeat said *after* the answer. Each
reading therefore bounds the difference, and the readings agree while some difference fits them all.
Nothing is tolerated beyond these bounds. A path the tap cannot see (sockmap meshes, Unix sockets,
node ports, engine-to-engine ingress) makes the engine's count run away.

| readings | verified |
|---|---|
| the first; engine or tap restarted (a count fell) | unknown |
| fits the agreed difference or the one before; at most 1 % could hide in the bounds | yes |
| fits, but the bounds are wide (a busy replica) | as before, until they are narrow enough |
| fits neither, or the tap has not seen the agent's own scrapes | no, until a later one fits |
| no answer for a minute | unknown |
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from rose_core.telemetry.events import Health

_SILENT_NS = 60_000_000_000
_HIDING_SHARE = 100


class NumberBounds(NamedTuple):
    """Bounds of a number."""

    least: int
    most: int


class Count(NamedTuple):
    """What the tap had counted since its start when the engine answered.

    Attributes:
        requests: bounds of the generating requests.
        unsure: of these, how many the engine may not have counted (it never answered them, or has
            no such route).
    """

    requests: NumberBounds
    unsure: int = 0


def counted(before: Health, after: Health, *, at_arrival: bool) -> Count:
    """The tap's count between two of its heartbeats, by the moment at which the engine counts."""
    if at_arrival:
        return Count(NumberBounds(before.seen, after.seen), after.unsure)
    return Count(NumberBounds(before.finished, after.finished), after.unsure)


class _Mark(NamedTuple):
    """A difference engine - tap, and how many unsure requests there had been."""

    difference: NumberBounds
    unsure: int

    def meet(self, here: _Mark) -> _Mark | None:
        """What both readings allow; None when they contradict each other.

        Requests that the engine may not have counted can only have lowered the difference.
        """
        least = max(self.difference.least - (here.unsure - self.unsure), here.difference.least)
        most = min(self.difference.most, here.difference.most)
        return _Mark(NumberBounds(least, most), here.unsure) if least <= most else None

    def hidden(self, here: _Mark) -> int:
        """How many requests the tap may have missed since without a contradiction."""
        return here.difference.most - self.difference.least + here.unsure - self.unsure


@dataclass(frozen=True)
class SignalVerification:
    """State of the comparison.

    Attributes:
        verified: None = not compared yet.
        compared_ns: when the engine last answered.
        missed: requests the tap certainly did not see since the reading before (negative: saw too
            many).
    """

    verified: bool | None = None
    compared_ns: int = 0
    missed: int = 0
    _agreed: _Mark | None = None
    _last: _Mark | None = None
    _engine: int = 0
    _base: int = 0
    _tap: int = 0
    _own: int = 0

    def compare(
        self, engine: int, tap: Count, own_sent: int, own_seen: int, now_ns: int
    ) -> SignalVerification:
        """Add one reading.

        Args:
            engine: generating requests counted by the engine since its start.
            tap: what the tap had counted then.
            own_sent: the agent's own scrapes so far.
            own_seen: scrapes the tap has seen: proof that it sees this network path even when
                there is no traffic.
            now_ns: time of the reading.
        """
        most = tap.requests.most
        here = _Mark(NumberBounds(engine - most, engine - tap.requests.least), tap.unsure)
        unseen = own_sent - own_seen
        read = replace(
            self, compared_ns=now_ns, missed=0, _last=here, _engine=engine, _tap=most, _own=unseen
        )
        if self._last is None or engine < self._engine or most < self._tap:
            return replace(read, verified=None, _agreed=None, _base=most)
        base = next((m for m in (self._agreed, self._last) if m and m.meet(here)), None)
        if base is None or unseen > self._own:
            missed = _distance(self._last.difference, here.difference)
            agreed = self._agreed or self._last
            return replace(read, verified=False, missed=missed, _agreed=agreed, _base=most)
        narrow = base.hidden(here) * _HIDING_SHARE <= max(0, most - self._base)
        return replace(read, verified=True if narrow else self.verified, _agreed=base.meet(here))

    def unanswered(self, now_ns: int) -> SignalVerification:
        """The engine did not answer: what was agreed holds for a minute."""
        return self if now_ns - self.compared_ns <= _SILENT_NS else replace(self, verified=None)


def _distance(last: NumberBounds, here: NumberBounds) -> int:
    return max(0, here.least - last.most) + min(0, here.most - last.least)
