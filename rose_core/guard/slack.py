"""What each serving request has left before its SLO, and which share of time may be lent.

| slack of | is | must be |
|---|---|---|
| a waiting request | arrival + TTFT budget - now - co-running prefill of it and those ahead | > 0 |
| a streaming request | first token + budget x tokens so far - now - one co-running step | > 0 |

A budget is the SLO less a margin (``margin``). A limit on the relative increase is a budget too:
what the predictor says of serving alone, times the allowed increase. Where it is the only limit,
a request that waits closes the gate, because its prefill would be slowed by more than that.

The duty is the share of a control period for which the permit may stand open so that the *average*
step stays inside its budget (``shares.lendable``); the slack of each stream is the account that
keeps it honest from token to token. Next step: ``gate``.
"""

from __future__ import annotations

from dataclasses import dataclass

from rose_core.guard.predictor import Predictor
from rose_core.guard.shares import lendable
from rose_core.telemetry.book import LiveRequest


@dataclass(frozen=True)
class Objective:
    """The serving owner's limits; 0 = not given.

    Attributes:
        margin: share of a budget that is never used.
        max_increase: allowed relative increase of latency by lending (0.05 = 5 %).
    """

    ttft_s: float = 0.0
    tpot_s: float = 0.0
    max_increase: float = 0.0
    margin: float = 0.2

    @property
    def given(self) -> bool:
        """There is a limit to measure slack against: both SLOs, or a relative one."""
        return bool((self.ttft_s and self.tpot_s) or self.max_increase)

    def budget_s(self, goal_s: float, alone_s: float) -> float:
        """What may be used of a latency that takes ``alone_s`` by itself; infinite: no limit."""
        limits = []
        if goal_s:
            limits.append(goal_s * (1 - self.margin))
        if self.max_increase:
            limits.append(alone_s * (1 + self.max_increase * (1 - self.margin)))
        return min(limits, default=float("inf"))


@dataclass(frozen=True)
class Slack:
    """Smallest slack over the requests in seconds; None = no request of that kind."""

    prefill_s: float | None
    decode_s: float | None
    duty: float


def measure(
    requests: tuple[LiveRequest, ...], objective: Objective, predictor: Predictor, now_ns: int
) -> Slack:
    """Slack and duty for the requests under way."""
    waiting = sorted((r for r in requests if not r.first_ns), key=lambda r: r.arrived_ns)
    streaming = [r for r in requests if r.first_ns]
    prefill = _prefill(waiting, objective, predictor, now_ns)
    decode = _decode(streaming, objective, predictor, now_ns)
    return Slack(prefill, decode, duty(len(streaming), objective, predictor))


def _prefill(
    waiting: list[LiveRequest], objective: Objective, predictor: Predictor, now_ns: int
) -> float | None:
    if not waiting:
        return None
    ahead, alone, least = 0.0, 0.0, float("inf")
    for request in waiting:
        ahead += predictor.prefill_s(request.size, shared=True)
        alone += predictor.prefill_s(request.size, shared=False)
        waited = (now_ns - request.arrived_ns) / 1e9
        # The prefill under way may be nearly done; its whole cost is counted, which errs safely.
        least = min(least, objective.budget_s(objective.ttft_s, alone) - waited - ahead)
    return least


def _decode(
    streaming: list[LiveRequest], objective: Objective, predictor: Predictor, now_ns: int
) -> float | None:
    if not streaming:
        return None
    alone = predictor.decode_s(len(streaming), shared=False)
    step = predictor.decode_s(len(streaming), shared=True)
    budget = objective.budget_s(objective.tpot_s, alone)
    return min(
        budget * request.tokens - (now_ns - request.first_ns) / 1e9 - step for request in streaming
    )


def duty(streaming: int, objective: Objective, predictor: Predictor) -> float:
    """Share of time (0..1) that may be lent while requests stream."""
    alone = predictor.decode_s(max(1, streaming), shared=False)
    budget = objective.budget_s(objective.tpot_s, alone)
    if budget == float("inf"):
        return 0.0
    return lendable(alone, predictor.decode_s(max(1, streaming), shared=True), budget)
