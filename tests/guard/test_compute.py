"""The owner's share of a GPU's time: kept in every window, whatever the gate would allow."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from rose_core.guard.compute import WINDOW_NS, ComputeWindow
from rose_core.guard.gate import GateLimits, GateVerdict, judge
from rose_core.guard.reasons import GateReason
from tests.guard.worlds import MS, NOW, S, busy, facts, idle

PERMIT_NS = 140 * MS


def lend(
    percent: int, seconds: int, *, tick_ms: int = 5, seed: int | None = None
) -> tuple[list[tuple[int, int]], list[GateVerdict]]:
    """Spans that were open and verdicts, of a guard that looks every tick; with a seed, serving
    is busy for some of the time."""
    draw = random.Random(seed)
    compute, verdicts, spans, until, works = ComputeWindow(percent=percent), [], [], 0, False
    for now in range(NOW, NOW + seconds * S, tick_ms * MS):
        if seed is not None and draw.random() < 0.02:
            works = not works
        signal = busy() if works else idle(for_ms=1000)
        verdict = judge(facts(signal, compute=compute), GateLimits(), now)
        before = until
        until = min(now + PERMIT_NS, verdict.until_ns) if verdict.open else 0
        compute = compute.opened(until, now)
        verdicts.append(verdict)
        if before > now - tick_ms * MS:  # what the permit of the tick before was worth
            spans.append((now - tick_ms * MS, min(before, now)))
    return spans, verdicts


def worst(spans: list[tuple[int, int]]) -> int:
    """Most open time of any window; it ends where a span ends."""
    return max(
        sum(max(0, min(e, end) - max(b, end - WINDOW_NS)) for b, e in spans) for _, end in spans
    )


@pytest.mark.parametrize("percent", [1, 5, 30, 90])
def test_no_window_holds_more_than_the_owner_allows(percent: int) -> None:
    spans, _ = lend(percent, 5)
    assert worst(spans) <= WINDOW_NS * percent // 100


@pytest.mark.parametrize("seed", range(5))
def test_nor_does_one_where_serving_comes_and_goes(seed: int) -> None:
    spans, _ = lend(30, 10, seed=seed)
    assert worst(spans) <= WINDOW_NS * 30 // 100


def test_an_idle_replica_lends_nearly_all_of_the_share() -> None:
    spans, _ = lend(30, 10)
    assert sum(end - begin for begin, end in spans) >= 10 * WINDOW_NS * 0.3 * 0.85


def test_a_limit_that_is_used_up_pauses_and_says_until_when() -> None:
    _, verdicts = lend(30, 2)
    paused = next(v for v in verdicts if not v.open)
    assert (paused.reason, paused.duty) == (GateReason.COMPUTE_LIMIT, 0.3)
    assert paused.again_ns == NOW + WINDOW_NS + 100 * MS


def test_engines_are_not_let_go_for_moments() -> None:
    _, verdicts = lend(30, 10)
    openings = sum(b.open and not a.open for a, b in itertools.pairwise(verdicts))
    assert openings <= 10


def test_a_permit_is_replaced_by_the_next_and_not_added_to_it() -> None:
    compute = (
        ComputeWindow(percent=30).opened(NOW + PERMIT_NS, NOW).opened(NOW + 150 * MS, NOW + 10 * MS)
    )
    assert compute.spent_ns(NOW + 150 * MS) == 150 * MS


def test_a_permit_that_is_closed_early_costs_only_what_was_open() -> None:
    compute = ComputeWindow(percent=30).opened(NOW + PERMIT_NS, NOW).opened(0, NOW + 10 * MS)
    assert compute.spent_ns(NOW + 500 * MS) == 10 * MS


def test_serving_that_is_busy_is_the_first_reason() -> None:
    spent = ComputeWindow(((NOW - 300 * MS, NOW),), percent=30)
    verdict = judge(facts(busy(), compute=spent), GateLimits(), NOW)
    assert verdict.reason is GateReason.SERVING_BUSY


def test_without_a_limit_nothing_is_counted_or_closed() -> None:
    compute = ComputeWindow().opened(NOW + PERMIT_NS, NOW)
    assert compute == ComputeWindow()
    assert judge(replace(facts(idle(for_ms=1000)), compute=compute), GateLimits(), NOW).open
