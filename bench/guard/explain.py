"""A line for each request over its objective: what had the core, and what would have saved it.

The excess is what the request took beyond its objective. A cause is named only if the processor
time it took from the engines' core during the request is at least that much: without it the request
would have kept its objective. This is arithmetic and no proof, so a line carries the figures too.

| cause | processor time that covers the excess |
|---|---|
| ``alone`` | none is needed: the same request is over its objective when served alone |
| ``rollouts`` | the rollout engine's |
| ``machine`` | other processes' on the core, or stolen from it |
| ``engine`` | serving's own, per token, beyond what the same request took alone |
| ``together`` | no single one, but their sum |
| ``unexplained`` | not even that |

Next step: ``report`` counts them, ``run_record`` writes them to ``NAME-explain.json``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bench.guard.load import Answer
from bench.guard.measured import Window, key_of, over, violates
from bench.guard.witness import CpuShares, between

Goal = tuple[float, float]


@dataclass(frozen=True)
class Line:
    """One request over its objective; milliseconds unless said otherwise.

    Attributes:
        index: of the request in its window's schedule.
        at_s: its arrival in the window, seconds.
        what: ``TTFT`` or ``TPOT``.
        took, goal, alone: that latency, its objective, and the same request's served alone.
        alone_over: served alone it is over its objective too.
        excess: time beyond the objective, over all its tokens.
        others: requests beside it, averaged over its time.
        opened: share of its time with an open gate.
        spans: how often the gate opened in its time.
        longest: the longest step between two of its tokens, and ``longest_at``: when (s).
        serving, rollouts, others_cpu, steal, waited: what became of the core in its time.
        cpu_per_token, alone_cpu_per_token: serving's processor time per token of any request.
    """

    load: str
    condition: str
    round: int
    index: int
    at_s: float
    what: str
    took: float
    goal: float
    alone: float | None
    alone_over: bool
    excess: float
    others: float
    opened: float
    spans: int
    longest: float
    longest_at: float
    serving: float
    rollouts: float
    others_cpu: float
    steal: float
    waited: float
    cpu_per_token: float
    alone_cpu_per_token: float
    cause: str

    @property
    def text(self) -> str:
        """For people."""
        alone = "-" if self.alone is None else f"{self.alone:.1f}"
        return (
            f"{self.load} {self.condition} round {self.round + 1} #{self.index} at "
            f"{self.at_s:.2f} s: {self.what} {self.took:.1f} > {self.goal:.1f} (alone {alone}), "
            f"{self.cause}; excess {self.excess:.0f} ms; beside {self.others:.1f}; gate open "
            f"{100 * self.opened:.0f} % in {self.spans}; core ms: serving {self.serving:.0f}, "
            f"rollouts {self.rollouts:.0f}, others {self.others_cpu:.0f}, steal {self.steal:.0f}, "
            f"serving queued {self.waited:.0f}; CPU/token {self.cpu_per_token:.1f} (alone "
            f"{self.alone_cpu_per_token:.1f}); longest step {self.longest:.0f} at "
            f"{self.longest_at:.2f} s"
        )


def explain(windows: Sequence[Window], alone: Sequence[Window], goal_s: Goal) -> list[Line]:
    """A line for each request of the windows over its objective."""
    by_round = {window.round: window for window in alone}
    return [
        _line(window, by_round.get(window.round), index, answer, goal_s)
        for window in windows
        for index, answer in enumerate(window.answers)
        if answer.arrival.at_s >= 0 and violates(answer, goal_s)
    ]


def _line(window: Window, base: Window | None, index: int, answer: Answer, goal_s: Goal) -> Line:
    what, took, goal, excess = over(answer, goal_s)
    twin = _twin(base, answer) if base is not None and base is not window else None
    start, end = _interval(answer, what)
    shares = between(window.looks, start, end) or CpuShares(end - start, 0, 0, 0, 0, 0)
    cpu = _per_token(window, answer)
    alone_cpu = _per_token(base, twin) if base is not None and twin is not None else 0.0
    dear = max(0.0, cpu - alone_cpu) * _tokens(window, start, end) if alone_cpu else 0.0
    alone_over = twin is not None and violates(twin, goal_s)
    longest, longest_at = answer.longest_step
    opened = [(max(start, a), min(end, b)) for a, b in window.opened if a < end and b > start]
    return Line(
        load=window.load,
        condition=window.condition,
        round=window.round,
        index=index,
        at_s=round(answer.arrival.at_s, 3),
        what=what,
        took=_ms(took),
        goal=_ms(goal),
        alone=_alone(twin, what),
        alone_over=alone_over,
        excess=_ms(excess),
        others=round(_beside(window, answer, start, end), 2),
        opened=round(sum(b - a for a, b in opened) / max(1e-9, end - start), 3),
        spans=len(opened),
        longest=_ms(longest),
        longest_at=round(longest_at - window.began_s, 3),
        serving=_ms(shares.serving),
        rollouts=_ms(shares.rollouts),
        others_cpu=_ms(shares.others),
        steal=_ms(shares.steal),
        waited=_ms(shares.waited),
        cpu_per_token=_ms(cpu),
        alone_cpu_per_token=_ms(alone_cpu),
        cause="alone" if alone_over else cause(excess, shares, dear),
    )


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 2)


def cause(excess_s: float, shares: CpuShares, dear_s: float) -> str:
    """What covers the excess by itself, else whether all of them do."""
    found = {
        "rollouts": shares.rollouts,
        "machine": shares.others + shares.steal,
        "engine": dear_s,
    }
    name = max(found, key=lambda one: found[one])
    if found[name] >= excess_s:
        return name
    return "together" if sum(found.values()) >= excess_s else "unexplained"


def _twin(base: Window, answer: Answer) -> Answer | None:
    return next((one for one in base.answers if key_of(one) == key_of(answer)), None)


def _alone(twin: Answer | None, what: str) -> float | None:
    value = None if twin is None else twin.ttft_s if what == "TTFT" else twin.tpot_s
    return None if value is None else _ms(value)


def _interval(answer: Answer, what: str) -> tuple[float, float]:
    if what == "TTFT":
        return answer.sent_s, answer.first_s
    return answer.first_s, answer.last_s


def _tokens(window: Window, start_s: float, end_s: float) -> int:
    """Tokens of all requests in an interval."""
    return sum(start_s <= t <= end_s for one in window.answers for t in one.times)


def _per_token(window: Window, answer: Answer) -> float:
    """Serving's processor seconds per token of any request, in this one's time."""
    shares = between(window.looks, answer.sent_s, answer.ended_s)
    tokens = _tokens(window, answer.sent_s, answer.ended_s)
    return shares.serving / tokens if shares and tokens else 0.0


def _beside(window: Window, answer: Answer, start_s: float, end_s: float) -> float:
    spans = (
        max(0.0, min(end_s, one.ended_s) - max(start_s, one.sent_s))
        for one in window.answers
        if one is not answer
    )
    return sum(spans) / max(1e-9, end_s - start_s)
