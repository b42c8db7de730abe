"""What each serving request has left before its SLO, and which share of time may be lent.

| slack of | is | must be |
|---|---|---|
| a waiting request | arrival + TTFT budget - now - prefills alone up to its own - step | > 0 |
| a streaming request | first token + TPOT budget x tokens so far - now - step | > 0 |

Both are what is left if the gate closes now: the co-running step under way ends, then serving is
alone again. The tap reports tokens now and then, so a stream's slack is what it was at the last
report: tokens that have not been reported yet are not late, unless nothing was reported for a whole
period.

A budget is the SLO less a margin (``margin``). A limit on the relative increase is a budget too:
what the predictor gives for serving alone, times the allowed increase. Where it is the only limit,
a request that waits closes the gate, because its prefill would be slowed by more than that.

The duty is the share of a control period for which the permit may stand open so that the *average*
step stays inside its budget (``shares.lendable``). What every stream has saved so far is spent too,
less the prefill of one more request, which would stop all of them, where the margin of its tokens
does not cover that. So a prediction that is too careful costs a period and not all the slack of a
request, and one that is too bold is caught by the slack. Savings count up to a stream's last token,
or the share would move with each one. Against a relative limit nothing counts as saved: that its
prediction lies above the usual request must not be lent. Next step: ``gate`` turns both into a
position.
"""

from __future__ import annotations

from dataclasses import dataclass

from rose_core.guard.predictor import Predictor
from rose_core.guard.shares import lendable
from rose_core.telemetry.book import LiveRequest

PERIOD_S = 0.1
"""Control period: short beside a TTFT budget, long beside a co-running step and a stop."""


@dataclass(frozen=True)
class LatencyObjective:
    """The serving owner's limits; 0 = not given.

    Attributes:
        margin: share of a budget that is never used.
        alone_s: TTFT of a request on an empty replica with nothing lent, as the owner says.
        max_increase: allowed relative increase of latency by lending (0.05 = 5 %).
    """

    ttft_s: float = 0.0
    tpot_s: float = 0.0
    max_increase: float = 0.0
    margin: float = 0.2
    alone_s: float = 0.0

    @property
    def given(self) -> bool:
        """There is a limit to measure slack against: both SLOs, or a relative one."""
        return bool((self.ttft_s and self.tpot_s) or self.max_increase)

    def budget_s(self, goal_s: float, alone_s: float) -> float:
        """What may be used of a latency that takes ``alone_s`` by itself; infinite: no limit."""
        return self._limit_s(goal_s, alone_s, 1 - self.margin)

    def whole_s(self, goal_s: float, alone_s: float) -> float:
        """The same without a margin."""
        return self._limit_s(goal_s, alone_s, 1.0)

    def _limit_s(self, goal_s: float, alone_s: float, used: float) -> float:
        limit = goal_s * used if goal_s else float("inf")
        if self.max_increase:
            limit = min(limit, alone_s * (1 + self.max_increase * used))
        return limit


@dataclass(frozen=True)
class Slack:
    """Smallest slack over the requests in seconds; None = no request of that kind."""

    prefill_s: float | None
    decode_s: float | None
    duty: float


def measure(
    requests: tuple[LiveRequest, ...],
    objective: LatencyObjective,
    predictor: Predictor,
    now_ns: int,
    period_s: float = PERIOD_S,
    *,
    tokens_until_ns: int = 0,
) -> Slack:
    """Slack and duty for requests under way; tokens known until ``tokens_until_ns`` (0: now)."""
    known_ns = tokens_until_ns if now_ns - tokens_until_ns < period_s * 1e9 else now_ns
    streaming = [r for r in requests if r.first_ns]
    waiting = []
    if len(streaming) < len(requests):
        waiting = sorted((r for r in requests if not r.first_ns), key=lambda r: r.arrived_ns)
    sizes = {r.size for r in requests}
    one_more = max([predictor.prefill_s(size, shared=False) for size in sizes], default=0.0)
    account = _Account.of(len(streaming), objective, predictor)
    decode, saved = account.least_s(streaming, known_ns, one_more)
    if objective.max_increase:
        saved = 0.0
    return Slack(
        _prefill(waiting, account.step, objective, predictor, now_ns),
        decode,
        duty(len(streaming), objective, predictor, saved / period_s),
    )


@dataclass(frozen=True)
class _Account:
    """What the streams of one batch earn and spend; seconds.

    Attributes:
        budget: earned by each token.
        margin: kept back of each token's SLO.
        step: of the batch beside a rollout engine.
    """

    budget: float
    margin: float
    step: float

    @classmethod
    def of(cls, streaming: int, objective: LatencyObjective, predictor: Predictor) -> _Account:
        alone = predictor.decode_s(streaming, shared=False)
        budget = objective.budget_s(objective.tpot_s, alone)
        whole = objective.whole_s(objective.tpot_s, alone)
        return cls(budget, whole - budget, predictor.decode_s(streaming, shared=True))

    def least_s(
        self, streaming: list[LiveRequest], known_ns: int, prefill_s: float
    ) -> tuple[float | None, float]:
        """Smallest slack of a stream, and the least that one has saved.

        Every stream is looked at for every step of its replica, so this calls nothing.

        Args:
            streaming: requests whose first token has been seen.
            known_ns: until when their tokens are known.
            prefill_s: of one more request.

        Returns:
            The slack at ``known_ns``, or at a later last token; None without a stream. The slack at
            the last token, less what the prefill would take of it; 0 without one.
        """
        if not streaming:
            return None, 0.0
        decode = saved = float("inf")
        budget, margin, step = self.budget, self.margin, self.step
        for request in streaming:
            first_ns, last_ns, tokens = request.first_ns, request.last_ns, request.tokens
            used_ns = last_ns - first_ns if last_ns > first_ns else 0
            kept = budget * tokens - used_ns / 1e9 - step
            if last_ns < known_ns:
                used_ns = known_ns - first_ns
            left = budget * tokens - used_ns / 1e9 - step
            if left < decode:  # noqa: PLR1730  # a call costs as much as the rest
                decode = left
            if (uncovered := prefill_s - margin * tokens) > 0.0:
                kept -= uncovered
            if kept < saved:  # noqa: PLR1730
                saved = kept
        return decode, saved


def _prefill(
    waiting: list[LiveRequest],
    step: float,
    objective: LatencyObjective,
    predictor: Predictor,
    now_ns: int,
) -> float | None:
    if not waiting:
        return None
    ahead, least = 0.0, float("inf")
    for request in waiting:
        ahead += predictor.prefill_s(request.size, shared=False)
        waited = (now_ns - request.arrived_ns) / 1e9
        # The prefill under way may be nearly done; its whole cost is counted, which errs safely.
        least = min(least, objective.budget_s(objective.ttft_s, ahead) - waited - ahead - step)
    return least


def duty(
    streaming: int, objective: LatencyObjective, predictor: Predictor, saved: float = 0.0
) -> float:
    """Share of time (0..1) that may be lent while requests stream; ``saved`` in periods."""
    alone = predictor.decode_s(max(1, streaming), shared=False)
    budget = objective.budget_s(objective.tpot_s, alone)
    if budget == float("inf"):
        return 0.0
    return lendable(alone, predictor.decode_s(max(1, streaming), shared=True), budget, saved)
