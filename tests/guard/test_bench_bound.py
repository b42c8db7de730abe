"""What the benchmark of the bound on real engines counts, and what it leaves out."""

from __future__ import annotations

from typing import Any

import pytest

from bench.guard.beyond import (
    LONGEST_STOP_S,
    Findings,
    Look,
    Promised,
    Request,
    can_be,
    causes,
    figures_of,
    learned,
    own,
)
from bench.guard.bound import Asked, Certificate, Counter, Reader, slowest
from tests.guard.test_periods import SUMS

MS = 1_000_000


def certificate(level: float, requests: int, exceeded: int = 0) -> Certificate:
    return Certificate(level, 0.2, "", requests, exceeded, 0.01 * requests)


def finished(
    number: int, at_ms: float, ttft_ms: float | None = 10, window: str = "lent"
) -> list[dict[str, Any]]:
    arrived = round(at_ms * MS)
    ttft = None if ttft_ms is None else ttft_ms / 1e3
    done = {"t": arrived + 15 * MS, "what": "finished", "request": number, "window": window}
    return [
        {"t": arrived, "what": "predicted", "request": number, "alone": 0.007},
        done | {"arrived": arrived, "ttft": ttft},
    ]


def gate(at_ms: float, *, is_open: bool) -> dict[str, Any]:
    return {"t": round(at_ms * MS), "what": "gate", "open": is_open}


def stopping(at_ms: float, stop_ms: float = 4, *, answered: bool = True) -> list[dict[str, Any]]:
    arrived = round(at_ms * MS)
    after = round(stop_ms * MS)
    stopped = {"t": arrived + after, "what": "stopped", "after_ns": after, "answered": answered}
    return [
        {"t": arrived, "what": "closed", "arrival": arrived, "after_ns": MS},
        stopped | {"arrival": arrived},
    ]


def asked(at_ms: float, *, behind: bool = False) -> Asked:
    sent = (at_ms - 0.4) / 1e3
    return Asked(sent, 0.011, sent + 0.016, behind, 0.001, 0.002)


def test_a_request_is_lent_that_closed_the_gate_and_alone_where_rollouts_were_at_rest() -> None:
    entries = [
        gate(90, is_open=True),
        *stopping(100),
        gate(101, is_open=False),
        *finished(1, 100),
        *finished(2, 120, window="withheld"),  # 19 ms after the gate has shut
        *finished(3, 200, window="withheld"),
        *finished(4, 300),  # at a shut gate, in a lent window
        *finished(5, 400, None),
    ]
    look = Reader().read(entries, [asked(at) for at in (100, 120, 200, 300, 400, 500)])
    assert [(one.lent, one.ttft_s, one.client_s) for one in look.requests] == [
        (True, 0.010, 0.011),
        (False, 0.010, 0.011),
    ]
    assert [(one.stop_s, one.closed_s) for one in look.requests] == [(0.004, 0.001), (None, None)]
    assert (look.unclear, look.lost) == (2, 2)


def test_what_was_sent_behind_a_request_is_its_c() -> None:
    entries = [*finished(1, 100, window="withheld"), *finished(2, 103.5), *finished(3, 180)]
    (one,) = Reader().read(entries, [asked(100, behind=True)]).requests
    assert (one.behind, one.batch_s) == (True, 0.007)


def test_d_is_learned_of_stops_before_the_request_alone() -> None:
    reader, entries = Reader(), []
    for number in range(100):
        entries += stopping(100 * number, 4 if number else 9) + finished(number, 100 * number)
    entries += stopping(10_000, 50, answered=False) + finished(100, 10_000)
    seen = reader.read(entries, [asked(100 * number) for number in range(1, 101)]).requests
    assert seen[0].learned_s is None
    assert (seen[-1].learned_s, seen[-1].stop_s, seen[-1].answered) == (0.009, 0.05, False)
    later = stopping(20_000) + finished(101, 20_000)
    assert reader.read(later, [asked(20_000)]).requests[0].learned_s == 0.05


def test_what_rollouts_computed_after_the_gate_opened_again_is_not_taken_for_d() -> None:
    entries = [*stopping(100), gate(101, is_open=False), *finished(1, 100)]
    known = Reader().read([*entries, gate(120, is_open=True)], [asked(100)]).requests[0]
    unknown = Reader().read([*entries, gate(112, is_open=True)], [asked(100)]).requests[0]
    assert (known.rollouts_s, unknown.rollouts_s) == (0.002, None)
    crossed = Reader().read([gate(100.3, is_open=True), *entries], [asked(100)]).requests[0]
    assert crossed.rollouts_s == 0.002, "it opened before the guard had heard of the request"


def alone(ttft_s: float, *, behind: bool = False) -> Request:
    return Request(False, behind, ttft_s, ttft_s, 0.01 if behind else 0.0, learned_s=0.03)


def lent(ttft_s: float, stop_s: float = 0.02, *, behind: bool = False) -> Request:
    batch_s = 0.01 if behind else 0.0
    return Request(True, behind, ttft_s, ttft_s, batch_s, stop_s=stop_s, learned_s=0.03)


def test_a_request_is_beyond_that_takes_longer_than_the_largest_alone_with_d_and_c() -> None:
    requests = [alone(0.01), alone(0.02), lent(0.039), lent(0.045), lent(0.051)]
    found = Findings([Look(1.0, requests)])
    assert (found.beyond(1.0, own).lent, found.beyond(1.0, learned).lent) == (2, 1)
    (told,) = causes(found)
    assert told.startswith("beyond, at an open gate: TTFT 51.0 ms; line 50.0, own D 20.0")
    bound = found.beyond(1.0, can_be)
    assert (bound.lent, bound.lent_of, bound.alone_of) == (0, 3, 2)
    assert bound.worst == pytest.approx(0.051 / (0.02 + LONGEST_STOP_S))
    behind = [alone(0.01, behind=True), alone(0.02, behind=True), lent(0.045, behind=True)]
    assert Findings([Look(1.0, behind)]).beyond(1.0, own).lent == 0, "C is 10 ms"


def test_a_request_alone_is_compared_with_the_others() -> None:
    stalled = [alone(0.01), alone(0.02), alone(0.3), lent(0.01)]
    found = Findings([Look(1.0, stalled)])
    assert (found.beyond(1.0, can_be).alone, found.beyond(1.0, own).alone) == (1, 1)
    assert found.beyond(1.0, can_be).lent == 0


def test_looks_of_one_part_belong_together_and_other_parts_do_not() -> None:
    looks = [
        Look(1.0, [alone(0.3)]),
        Look(2.0, [alone(0.01), lent(0.29)]),
        Look(2.0, [alone(0.01)]),
    ]
    found = Findings(looks)
    assert found.beyond(1.0, can_be).lent == 1
    assert (found.count(lent=True), found.count(lent=False)) == (1, 2)


def test_d_that_can_be_is_the_largest_sum_of_the_guards_page() -> None:
    assert round(1e3 * LONGEST_STOP_S) == max(sum(parts) for parts in SUMS.values())


def test_only_what_passed_between_two_certificates_of_the_percentile_counts() -> None:
    counter = Counter()
    assert counter.take(None, [0.3]) == Promised()
    assert counter.take(certificate(0.9, 5, 2), [0.3]) == Promised()
    assert counter.take(certificate(0.99, 20, 3), [0.3]) == Promised(), "the 0.9 promised some"
    seen = counter.take(certificate(0.99, 50, 4), [0.1, 0.3])
    assert (seen.requests, seen.exceeded, seen.alone, seen.alone_exceeded) == (30, 1, 2, 1)
    assert seen.allowed == pytest.approx(0.3)
    assert counter.take(certificate(0.9, 60, 9), [0.3]) == Promised(), "it had to learn anew"


def test_one_request_beyond_misses_the_aim_and_so_do_too_few() -> None:
    requests = [alone(0.01), alone(0.01), lent(0.3), lent(0.01)]
    by_name = {one.name: one for one in figures_of([Look(1.0, requests)])}
    assert by_name["of them beyond the bound"].met is False
    assert by_name["requests at an open gate"].met is False
    assert by_name["stop, largest"].value == pytest.approx(20)
    assert figures_of([]) == []


def test_the_slowest_are_kept_with_what_the_guard_recorded_of_them() -> None:
    entries = [*stopping(100), *finished(1, 100), *finished(2, 200), *finished(3, 3000, 90)]
    kept = slowest([asked(100), asked(200), asked(3000)], entries)
    assert [one["kind"] for one in kept] == ["lent", "alone", "alone"]
    assert [e["what"] for e in kept[1]["entries"]] == ["predicted", "finished"]
