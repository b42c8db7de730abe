"""Gates that are not ours, moved by the benchmark itself: a thread that writes the permit.

| condition | open |
|---|---|
| ``unguarded`` | always |
| ``static-duty`` | half of every 100 ms (other shares are the offline search for the best one) |
| ``rose-paper`` | while every serving request has prefill and decode slack by an offline profile |

``rose-paper`` follows the published rules: dual slack at each tick, the rollout budget halved once
when serving's KV use passes a watermark, frozen until the next step (here: the next window), halved
work aborted. It is given what it could not have: requests without delay, and solo costs measured on
this very pair of engines.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

from bench.guard.load import Served
from bench.guard.rollouts import Rollouts
from rose_engines.node.doorbell import ring
from rose_engines.node.permit import Permit

_TICK_SECONDS = 0.004
_PERMIT_NS = 30_000_000
PERIOD_NS = 100_000_000
# rose_simulate.model.gpus.paper has the sections of the paper these come from.
_WATERMARK = 0.8

Rule = Callable[[int], int]
"""Time (ns) -> until when the permit may stand open; 0 = closed."""
Spans = list[tuple[float, float]]


@dataclass(frozen=True)
class Profile:
    """Costs of the serving engine alone, seconds; by least squares over a probe."""

    prefill_base_s: float
    prefill_token_s: float
    step_s: float

    def prefill_s(self, tokens: int) -> float:
        """Time to the first token of a prompt."""
        return self.prefill_base_s + self.prefill_token_s * tokens


def always(now_ns: int) -> int:
    """No guard."""
    return now_ns + _PERMIT_NS


def duty(share: float) -> Rule:
    """Open for a share of each period."""

    def rule(now_ns: int) -> int:
        until = now_ns - now_ns % PERIOD_NS + int(share * PERIOD_NS)
        return min(until, now_ns + _PERMIT_NS) if now_ns < until else 0

    return rule


@dataclass
class Paper:
    """The published rules for one window."""

    served: Served
    profile: Profile
    ttft_s: float
    tpot_s: float
    kv_tokens: int
    cut: Callable[[], None]

    def rule(self, now_ns: int) -> int:
        """Open while both slacks are positive for every request."""
        now_s = now_ns / 1e9
        live = list(self.served.live.values())
        if sum(a.arrival.prompt + a.tokens for a in live) > _WATERMARK * self.kv_tokens:
            self.cut()
        for answer in live:
            if not answer.first_s:
                left = self.ttft_s - (now_s - answer.sent_s)
                if left <= self.profile.prefill_s(answer.arrival.prompt):
                    return 0
            elif self.tpot_s <= now_s - answer.last_s + self.profile.step_s:
                return 0
        return now_ns + _PERMIT_NS


@contextlib.asynccontextmanager
async def gate(permit: Permit, rule: Rule, bell: Path) -> AsyncIterator[Spans]:
    """Run a rule on the permit and ring at each change; the permit is closed afterwards.

    Yields:
        When it stood open, seconds of the clock; the last one grows.
    """
    ending = threading.Event()
    spans: Spans = []

    def follow() -> None:
        while not ending.wait(_TICK_SECONDS):
            now_s = time.monotonic()
            was_open = permit.until_ns > time.monotonic_ns()
            until = rule(time.monotonic_ns())
            if until:
                permit.extend(until)
                start = spans.pop()[0] if was_open and spans else now_s
                spans.append((start, until / 1e9))
            else:
                permit.close_now()
            if was_open != bool(until):
                ring(bell)

    thread = threading.Thread(target=follow, name="gate")
    thread.start()
    try:
        yield spans
    finally:
        ending.set()
        await asyncio.to_thread(thread.join)
        permit.close_now()
        ring(bell)


def paper(
    served: Served, profile: Profile, goal_s: tuple[float, float], kv: int, rollouts: Rollouts
) -> Paper:
    """The paper's rules for one window; ``goal_s`` = TTFT and TPOT."""
    loop = asyncio.get_running_loop()

    def cut() -> None:
        loop.call_soon_threadsafe(rollouts.halve)

    return Paper(served, profile, *goal_s, kv, cut)
