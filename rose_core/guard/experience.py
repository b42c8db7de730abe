"""What finished requests teach: cost, margin, and how fast the error budget burns.

A request is followed from its arrival to its end beside the integral of the gate's open time, so
that at its end it is known for which share of its time it ran beside rollouts:

| a finished request | teaches |
|---|---|
| share of its time beside an open gate | the predictor: cost alone, or beside a rollout engine |
| latency / SLO, and what rollouts account for of it, when it met an open gate | the margin |
| over the SLO or not | the error budget of its pool (``ErrorBudget``), which opens the breaker |

The guard of a node and the simulator both learn by this. Next step: ``gate`` is judged on it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rose_core.guard.budget import Breaker, BurnLimits, BurnMeter
from rose_core.guard.margin import Margin
from rose_core.guard.predictor import Predictor
from rose_core.guard.shares import LEAST_SHARE, OpenTime
from rose_core.guard.slack import Objective
from rose_core.telemetry.book import FinishedRequest

BUDGET_CAUSE = "error-budget"


@dataclass
class ErrorBudget:
    """Error budget and breaker of one pool."""

    limits: BurnLimits = field(default_factory=BurnLimits)
    burn: BurnMeter = field(default_factory=BurnMeter)
    breaker: Breaker = field(default_factory=Breaker)

    def spend(self, met: RequestExposure, percentile: int, now_ns: int) -> bool:
        """Take one request that was compared with its SLO.

        Returns:
            It was slow and the budget burns: the breaker ought to be opened.
        """
        self.burn.add(slow=met.slow, exposed=met.exposed, now_ns=now_ns)
        return met.slow and self.burn.burning(percentile, now_ns)

    def trip(self, cause: str, now_ns: int) -> bool:
        """Open the breaker, or keep it open.

        Returns:
            It was closed before.
        """
        fresh = not self.breaker.open(now_ns)
        self.breaker = self.breaker.trip(cause, now_ns, self.limits)
        return fresh


@dataclass(frozen=True, slots=True)
class RequestExposure:
    """What a finished request met.

    Attributes:
        prefill, decode: share of that part of its time beside an open gate.
        used: the worse of TTFT and TPOT as a share of its SLO; 0 = nothing to compare.
        rollouts: share of that latency that rollouts account for.
    """

    prefill: float
    decode: float
    used: float
    rollouts: float = 0.0

    @property
    def exposed(self) -> bool:
        """Whether it ran beside rollouts for long enough to have been slowed by them."""
        return max(self.prefill, self.decode) >= LEAST_SHARE

    @property
    def slow(self) -> bool:
        """Whether it missed its SLO."""
        return self.used > 1


@dataclass
class Lessons:
    """What requests have taught.

    Replicas of one pool run the same engine on the same devices, so they may share it, and a new
    one does not begin from the profile.
    """

    predictor: Predictor = field(default_factory=Predictor)
    margin: Margin = field(default_factory=Margin)


@dataclass(slots=True)
class _Mark:
    """Open time of the gate up to a request's arrival and to its first token."""

    arrived_ns: int
    first_ns: int | None = None


class Experience:
    """Follows one replica's requests and learns from them; single-threaded.

    Args:
        now_ns: the beginning.
        predictor: to start from.
        lessons: shared with other replicas; replaces ``predictor``.
    """

    def __init__(
        self, now_ns: int, predictor: Predictor | None = None, *, lessons: Lessons | None = None
    ) -> None:
        self.lessons = lessons or Lessons(predictor or Predictor())
        self.open_time = OpenTime(now_ns)
        self._marks: dict[int, _Mark] = {}

    @property
    def predictor(self) -> Predictor:
        """Cost of prefill and decode, as learned."""
        return self.lessons.predictor

    @property
    def margin(self) -> Margin:
        """How much of a budget is kept back, as learned."""
        return self.lessons.margin

    @property
    def followed(self) -> int:
        """Requests under way."""
        return len(self._marks)

    def begin(self, number: int, now_ns: int) -> None:
        """Begin to follow a request; a second time for the same one changes nothing."""
        self._marks.setdefault(number, _Mark(self.open_time.at(now_ns)))

    def note_first_token(self, number: int, now_ns: int) -> None:
        """Note when its first token left."""
        if mark := self._marks.get(number):
            mark.first_ns = self.open_time.at(now_ns)

    def dismiss(self, number: int) -> None:
        """Stop following what was not a generating request after all."""
        self._marks.pop(number, None)

    def forget(self) -> None:
        """Requests under way cannot be followed to their end any more."""
        self._marks.clear()

    def learn(self, done: FinishedRequest, goals: Objective, others: int) -> RequestExposure:
        """A request is over.

        Args:
            done: the request.
            goals: the pool's SLO; 0 = not given.
            others: requests still under way.
        """
        prefill, decode = self._shares(done)
        # By what was known before it: a late request must not be its own witness.
        losses = self.predictor.loss(decoding=False), self.predictor.loss(decoding=True)
        taught = self.lessons
        if done.ttft_s is not None:
            learn_prefill = taught.predictor.learn_prefill
            taught.predictor = learn_prefill(done.size, done.ttft_s, share=prefill)
        if done.tpot_s is not None:
            learn_decode = taught.predictor.learn_decode
            taught.predictor = learn_decode(1 + others, done.tpot_s, share=decode)
        met = RequestExposure(
            prefill, decode, *_used(done, goals, prefill * losses[0], decode * losses[1])
        )
        if met.used and met.exposed:
            taught.margin = taught.margin.learn(met.used, met.rollouts)
        return met

    def _shares(self, done: FinishedRequest) -> tuple[float, float]:
        mark = self._marks.pop(done.number, None)
        if mark is None:
            return 0.0, 0.0
        end = self.open_time.at(done.ended_ns)
        first = mark.first_ns if mark.first_ns is not None else end
        prefill = _share(first - mark.arrived_ns, (done.first_ns or done.ended_ns), done.arrived_ns)
        decode = _share(end - first, done.ended_ns, done.first_ns) if done.first_ns else 0.0
        return prefill, decode


def _share(open_ns: int, end_ns: int, start_ns: int) -> float:
    elapsed = end_ns - start_ns
    return min(1.0, max(0.0, open_ns / elapsed)) if elapsed > 0 else 0.0


def _used(
    done: FinishedRequest, goals: Objective, prefill: float, decode: float
) -> tuple[float, float]:
    """The worse latency / SLO, and which share of that latency rollouts account for."""
    both = ((done.ttft_s, goals.ttft_s, prefill), (done.tpot_s, goals.tpot_s, decode))
    found = ((value / goal, rollouts) for value, goal, rollouts in both if value and goal)
    return max(found, default=(0.0, 0.0))
