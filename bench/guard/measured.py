"""What one window was measured to be: its answers, its rollout tokens, its costs; plain data.

Next step: ``windows`` makes them, ``run_record`` writes them down, ``analysis`` compares them.
"""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass, field

import psutil

from bench.guard.load import Answer


@dataclass(frozen=True)
class Cost:
    """What guard and tap used in a window, and what the node made meanwhile.

    Attributes:
        resting_s, resting_cpu_s: the same just before, while nobody asked serving for anything.
    """

    elapsed_s: float
    tokens: int
    cpu_s: float
    rss_bytes: int
    pss_bytes: int
    resting_s: float = 0.0
    resting_cpu_s: float = 0.0


@dataclass
class Window:
    """One condition in one round of one load.

    Attributes:
        harvested: rollout tokens that arrived in the measured seconds.
        closed_s: from an arrival's first segment to the closed permit.
        token_s: from there to the last rollout token before the gate opened again.
        stopped_s: to the host's word that every thread stands still.
        released_s: from the open gate to the first rollout token.
        open_s: how long the gate stood open for want of requests.
        strangers: share of the machine that processes other than the benchmark's used.
        opened: when the gate stood open, of the clock.
        gate_s: seconds in each position of a guard's gate.
        solo_rate: rollout tokens per second alone, measured right after a window served alone.
        idle_tokens: rollout tokens that came while no request was under way.
    """

    load: str
    condition: str
    round: int
    seconds: float
    began_s: float
    answers: list[Answer]
    failed: int
    harvested: int
    closed_s: list[float] = field(default_factory=list)
    token_s: list[float] = field(default_factory=list)
    stopped_s: list[float] = field(default_factory=list)
    released_s: list[float] = field(default_factory=list)
    open_s: float = 0.0
    cost: Cost | None = None
    strangers: float = 0.0
    opened: list[tuple[float, float]] = field(default_factory=list)
    gate_s: dict[str, float] = field(default_factory=dict)
    solo_rate: float = 0.0
    idle_tokens: int = 0

    @property
    def measured(self) -> list[Answer]:
        """Answers to arrivals of the measured window."""
        return [answer for answer in self.answers if answer.arrival.at_s >= 0]

    @property
    def gaps(self) -> list[tuple[float, float]]:
        """When no request was under way, inside the measured seconds."""
        spans = sorted((a.sent_s, a.ended_s) for a in self.answers)
        until, end = self.began_s, self.began_s + self.seconds
        found = []
        for start, stop in [*spans, (end, end)]:
            if min(start, end) > until:
                found.append((until, min(start, end)))
            until = max(until, min(stop, end))
        return found

    @property
    def idle_s(self) -> float:
        """Measured seconds in which no request was under way."""
        return sum(end - start for start, end in self.gaps)

    def values(self, what: str) -> list[float]:
        """TTFT or TPOT of the measured answers, seconds."""
        found = (a.ttft_s if what == "TTFT" else a.tpot_s for a in self.measured)
        return [value for value in found if value is not None]

    def violations(self, goal_s: tuple[float, float]) -> int:
        """Requests over the SLO; one that failed is over."""
        return sum(violates(answer, goal_s) for answer in self.measured) + self.failed


def violates(answer: Answer, goal_s: tuple[float, float]) -> bool:
    """It took longer than its objective."""
    ttft, tpot = goal_s
    return answer.ttft_s > ttft or (answer.tpot_s or 0.0) > tpot


def key_of(answer: Answer) -> tuple[float, int, int]:
    """What makes a request the same in every condition."""
    arrival = answer.arrival
    return arrival.at_s, arrival.prompt, arrival.output


@dataclass(frozen=True)
class CpuUsage:
    """CPU seconds of the whole machine and of this process with its descendants, so far."""

    at_s: float
    machine_s: float
    own_s: float


def cpu_usage() -> CpuUsage:
    """Now."""
    whole = psutil.cpu_times()
    own = 0.0
    root = psutil.Process()
    for process in [root, *root.children(recursive=True)]:
        with contextlib.suppress(psutil.Error):
            times = process.cpu_times()
            own += times.user + times.system
    busy = whole.user + whole.system + whole.nice + whole.irq + whole.softirq + whole.steal
    return CpuUsage(time.monotonic(), busy, own)


def strangers(before: CpuUsage, after: CpuUsage) -> float:
    """Share of the machine that everything else used between two looks, 0..1.

    Much of it makes a measurement worthless.
    """
    possible = (after.at_s - before.at_s) * (os.cpu_count() or 1)
    others = (after.machine_s - before.machine_s) - (after.own_s - before.own_s)
    return min(1.0, max(0.0, others / possible)) if possible > 0 else 0.0
