"""What each serving request has left before its SLO, and which share of time may be lent.

Prefill slack of a waiting request: (arrival + TTFT budget) - now - predicted co-running prefill of
it and of those before it. Decode slack of a streaming request: (first token + budget per token so
far) - now - predicted co-running step. Budgets are the SLO less a margin. Both must be positive.

The duty is the share of a control period for which the permit may stand open so that the *average*
step stays inside the budget: with a step ``a`` alone and ``k a`` beside a rollout engine, a share
``f`` costs ``a (1 + (k - 1) f)``.
"""

from __future__ import annotations

from dataclasses import dataclass

from rose_core.guard.predictor import Predictor
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
    budget = objective.ttft_s * (1 - objective.margin)
    ahead, least = 0.0, float("inf")
    for request in waiting:
        ahead += predictor.prefill_s(request.size, shared=True)
        waited = (now_ns - request.arrived_ns) / 1e9
        # The prefill under way may be nearly done; its whole cost is counted, which errs safely.
        least = min(least, budget - waited - ahead)
    return least


def _decode(
    streaming: list[LiveRequest], objective: Objective, predictor: Predictor, now_ns: int
) -> float | None:
    if not streaming:
        return None
    budget = objective.tpot_s * (1 - objective.margin)
    step = predictor.decode_s(len(streaming), shared=True)
    return min(
        budget * request.tokens - (now_ns - request.first_ns) / 1e9 - step for request in streaming
    )


def duty(streaming: int, objective: Objective, predictor: Predictor) -> float:
    """Share of time (0..1) that may be lent while requests stream."""
    alone = predictor.decode_s(max(1, streaming), shared=False)
    slowdown = max(1.0, predictor.decode_s(max(1, streaming), shared=True) / alone)
    if slowdown <= 1.0:
        return 1.0
    limits = []
    if objective.tpot_s:
        limits.append(objective.tpot_s * (1 - objective.margin) / alone - 1)
    if objective.max_increase:
        limits.append(objective.max_increase * (1 - objective.margin))
    if not limits:
        return 0.0
    return min(1.0, max(0.0, min(limits) / (slowdown - 1)))
