"""What the guard's benchmark says of causes: lost harvest, time at the gate."""

from __future__ import annotations

from typing import Any

import pytest

from bench.guard import analysis, reactions
from bench.guard.report import figures
from bench.guard.results import Results
from bench.guard.rollouts import Rollouts
from bench.guard.windows import Goal
from tests.guard.made_windows import SOLO, window


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
