"""What the guard's benchmark says of causes: late requests, lost harvest, time at the gate."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest

from bench.guard import analysis, reactions
from bench.guard.explain import explain
from bench.guard.report import figures
from bench.guard.results import Results
from bench.guard.rollouts import Rollouts
from bench.guard.windows import Goal
from bench.guard.witness import Look, Witness, between
from tests.guard.made_windows import SOLO, window


def looked(*rows: tuple[float, float, float, float, float, float]) -> list[Look]:
    return [Look(*row) for row in rows]


def test_the_core_is_accounted_for_between_two_looks() -> None:
    looks = looked((10.0, 1.0, 2.0, 0.5, 4.0, 0.1), (12.0, 2.0, 2.4, 0.9, 5.6, 0.3))
    found = between(looks, 10.5, 11.5)
    assert found is not None
    assert (found.elapsed, found.serving, found.rollouts) == pytest.approx((1.0, 0.5, 0.2))
    assert (found.others, found.steal, found.waited) == pytest.approx((0.1, 0.1, 0.2))
    assert between(looks[:1], 10.0, 11.0) is None


@pytest.mark.parametrize(
    ("rollouts", "others", "steal", "cause"),
    [
        (0.5, 0.0, 0.0, "rollouts"),
        (0.05, 0.1, 0.1, "machine"),
        (0.1, 0.05, 0.05, "together"),
        (0.02, 0.02, 0.0, "unexplained"),
    ],
)
def test_a_late_request_has_a_line_that_says_what_had_the_core(
    rollouts: float, others: float, steal: float, cause: str
) -> None:
    """A request 0.15 s over its objective; a cause must have taken at least that."""
    alone, ours = window("alone"), window("ours")
    late = ours.answers[7]
    late.first_s, late.last_s, late.ended_s = late.sent_s + 0.25, late.last_s + 0.2, 1009.0
    late.times = [late.first_s, late.first_s + 0.04, late.last_s]
    ours.opened = [(late.sent_s + 0.05, late.sent_s + 0.1)]
    spent = rollouts + others
    ours.looks = looked(
        (late.sent_s, 0.0, 0.0, 0.0, 0.0, 0.0),
        (late.first_s, 0.0, rollouts, 0.0, spent, steal),
    )
    (line,) = explain([ours], [alone], (0.1, 10.0))
    assert (line.index, line.what, line.cause) == (7, "TTFT", cause)
    assert line.excess == pytest.approx(150)
    assert line.opened == pytest.approx(0.2)
    assert line.rollouts == pytest.approx(1e3 * rollouts)
    assert line.alone is not None
    assert line.alone < 100
    assert cause in line.text
    alone.answers[7].first_s += 0.2
    assert explain([ours], [alone], (0.1, 10.0))[0].cause == "alone"


def test_where_the_harvest_of_idle_time_went_adds_up() -> None:
    alone, ours = [window("alone")], [window("ours", harvested=1200)]
    idle = ours[0].idle_s
    ours[0].open_s, ours[0].released_s = 0.9 * idle, [0.05 * idle]
    found = analysis.lost(ours, alone, 300.0)
    share = analysis.of_idle(ours, alone, 300.0)
    assert found is not None
    assert share is not None
    assert found.shut == pytest.approx(0.1)
    assert found.waking == pytest.approx(0.05)
    parts = (found.longer, found.shut, found.waking, found.slower)
    assert sum(parts) + share.value == pytest.approx(1.0)


def test_what_unguarded_gets_while_nobody_asks_is_what_any_gate_could() -> None:
    alone, free = window("alone"), window("unguarded", harvested=2000)
    alone.solo_rate, free.idle_tokens = 250.0, 1000
    found = analysis.in_idle([free], [alone], 300.0)
    assert found is not None
    assert found.value == pytest.approx(1000 / (250.0 * free.idle_s)), "that round's own rate"


def test_a_witness_sees_the_processor_time_of_both_engines() -> None:
    here = Witness(os.getpid(), 0)
    with here.watching() as looks:
        until = time.process_time() + 0.15
        while time.process_time() < until:
            pass
    assert len(looks) >= 2
    assert looks[-1].serving - looks[0].serving >= 0.1
    assert looks[-1].rollouts == 0.0
    assert looks[-1].waited >= looks[0].waited


# --- the gates that are not ours


def entry(at_s: float, what: str, **details: object) -> dict[str, Any]:
    return {"t": round(at_s * 1e9), "what": what, **details}


def test_what_the_gate_was_open_for_is_told_apart_from_what_the_core_gave() -> None:
    made, nobody = window("ours"), Rollouts("http://nowhere")
    turns = [
        entry(1000.5, "gate", open=False, reason="ServingBusy"),
        entry(1001.0, "gate", open=False, reason="CoolDown"),
        entry(1001.05, "gate", open=True, reason="Idle"),
        entry(1003.0, "gate", open=False, reason="ServingBusy"),
        entry(1003.1, "gate", open=True, reason="Slack"),
    ]
    reactions.releases(turns, made, nobody)
    assert made.open_s == pytest.approx(0.5 + 1.95), "a duty is not idle time"
    assert analysis.open_of_idle([made]) == pytest.approx(made.open_s / made.idle_s)
    still = window("ours")
    reactions.releases([], still, nobody)
    assert still.open_s == 0.0, "a gate that never turned"


def test_the_gates_time_is_told_by_its_reason() -> None:
    turns = [
        entry(990.0, "gate", open=True, reason="Idle"),
        entry(1000.5, "gate", open=False, reason="BreakerOpen"),
        entry(1001.0, "order", order="HOLD"),
        entry(1004.5, "gate", open=True, reason="Slack"),
    ]
    spent = reactions.positions(turns, 1000.0, 1010.0)
    expected = {"open, Idle": 0.5, "closed, BreakerOpen": 4.0, "open, Slack": 5.5}
    assert spent == pytest.approx(expected)
    assert reactions.spans(turns, 1010.0) == [(990.0, 1000.5), (1004.5, 1010.0)]
    made = window("ours", load="steady-40")
    made.gate_s = spent
    results = Results([made, window("alone", load="steady-40")], {"steady-40": Goal(1, 1)}, SOLO)
    rows = {row.name: row.value for row in figures(results)}
    assert rows["steady-40, ours: gate closed, BreakerOpen"] == pytest.approx(0.4)


def test_a_pause_inside_a_duty_cycle_is_no_stop() -> None:
    made, nobody = window("ours"), Rollouts("http://nowhere")
    closed = [
        entry(1001.0, "closed", arrival=1_001_000_000_000, reason="Slack"),
        entry(1002.0, "closed", arrival=1_002_000_000_000, reason="NoPrefillSlack"),
    ]
    reactions.stops(closed, made, nobody)
    assert made.token_s == [0.0], "one stop, and no token after it"
