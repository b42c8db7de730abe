"""The guard's benchmark: its loads, its order, its statistics; on windows made up here."""

from __future__ import annotations

import os
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from bench.guard import analysis, gates
from bench.guard.__main__ import main, planned
from bench.guard.dialects import VLLM, events_in, tokens_in
from bench.guard.load import LOADS, Answer, Arrival, Served, schedule
from bench.guard.measured import Cost, CpuUsage, cpu_usage, strangers
from bench.guard.pace import hopeless
from bench.guard.report import figures, table
from bench.guard.results import Results
from bench.guard.run import goal_of
from bench.guard.run_record import picture
from bench.guard.windows import CONDITIONS, GUARDED, Goal
from bench.record import figure
from tests.guard.made_windows import SOLO, window

MS = 1_000_000


@pytest.mark.parametrize("name", list(LOADS))
def test_every_condition_of_a_round_meets_the_same_arrivals(name: str) -> None:
    load = LOADS[name]
    first, again = (schedule(load, 8.0, 1, 600.0) for _ in range(2))
    assert first == again
    assert first != schedule(load, 8.0, 2, 600.0)
    assert all(-load.lead_s <= arrival.at_s < 8.0 for arrival in first)
    assert len(first) > 5


def test_a_steady_load_brings_its_share_of_the_saturated_rate() -> None:
    arrivals = schedule(LOADS["steady-40"], 60.0, 0, 500.0)
    measured = [arrival for arrival in arrivals if arrival.at_s >= 0]
    assert sum(a.output for a in measured) / 60 == pytest.approx(0.4 * 500, rel=0.1)


def test_the_order_is_drawn_and_keeps_the_guard_in_one_piece() -> None:
    plan = planned([])
    orders = {tuple(plan.order(LOADS["conv"], number)) for number in range(30)}
    assert len(orders) > 10
    for order in orders:
        assert sorted(order) == sorted(CONDITIONS)
        guarded = [name in GUARDED for name in order]
        assert guarded in (sorted(guarded), sorted(guarded, reverse=True))
    assert "duty-75" in plan.order(LOADS["steady-40"], 0)
    assert planned(["--quick"]).rounds == 1


def test_tokens_are_counted_from_what_the_engine_says() -> None:
    line = b'data: {"text": "x", "meta_info": {"prompt_tokens": 3, "completion_tokens":17}}\n'
    spaced = line.replace(b":17", b": 17,")
    assert (tokens_in(line), tokens_in(spaced)) == (17, 17)
    assert tokens_in(b"data: [DONE]\n") == tokens_in(b"\n") == 0


def test_time_without_a_request_counts_overlaps_once() -> None:
    assert window("alone").idle_s == pytest.approx(10 - 40 * 0.1, rel=0.05)
    busy = window("alone", factor=10.0)
    assert busy.idle_s == 0.0


def test_pairing_cancels_what_the_load_does() -> None:
    alone = [window("alone", number=n) for n in range(2)]
    slower = [window("ours", number=n, factor=1.03) for n in range(2)]
    found = analysis.ratio(analysis.pairs(alone, slower, "TTFT"), 0.9)
    assert found is not None
    assert found.pairs == 80
    assert found.value == pytest.approx(1.03)
    assert found.high - found.low < 0.01, "far less than the spread of the latencies"


def test_rounds_that_only_one_side_has_do_not_count() -> None:
    assert analysis.pairs([window("alone")], [window("ours", number=1)], "TTFT") == []
    assert analysis.ratio([], 0.5) is None


def test_harvest_is_measured_against_idle_time_when_alone() -> None:
    alone = [window("alone", number=n) for n in range(3)]
    possible = 300.0 * alone[0].idle_s
    ours = [window("ours", number=n, harvested=round(0.9 * possible)) for n in range(3)]
    found = analysis.of_idle(ours, alone, 300.0)
    assert found is not None
    assert found.low <= found.value <= found.high
    assert found.value == pytest.approx(0.9, rel=0.02)


def test_violations_are_those_beyond_serving_alone() -> None:
    goal = (0.1, 0.015)
    alone, slow = [window("alone")], [window("unguarded", factor=2.5)]
    assert analysis.added(alone, alone, goal) == 0
    assert analysis.added(slow, alone, goal) == 40
    broken = window("ours")
    broken.answers, broken.failed = broken.answers[2:], 2
    assert analysis.added([broken], alone, goal) == 2, "a failed request is over its SLO"


def test_the_best_fixed_share_is_the_largest_harmless_one() -> None:
    goal, alone = (0.1, 0.015), [window("alone")]
    mild = [window("static-duty", harvested=500, factor=1.2)]
    harsh = [window("unguarded", harvested=3000, factor=3.0)]
    assert analysis.oracle([mild, harsh, []], alone, goal) == mild
    assert analysis.oracle([harsh], alone, goal) is None
    assert analysis.oracle([mild, harsh], alone, goal, allowed=40) == harsh


def test_what_serving_spares_by_chance_pays_for_no_violation() -> None:
    goal, alone, lent = (0.1, 0.015), window("alone"), window("static-duty", harvested=500)
    alone.answers[3].first_s += 0.2  # one request alone is late by chance, another one when lent
    lent.answers[9].first_s += 0.2
    found = analysis.compared([lent], [alone], goal)
    assert (found.fresh, found.spared, found.net.value, found.net.pairs) == (1, 1, 0, 40)
    assert found.net.low < 0 < found.net.high
    assert analysis.oracle([[lent]], [alone], goal) is None
    assert analysis.compared([lent], [window("alone", number=1)], goal).net.pairs == 0


def test_requests_that_are_late_together_widen_the_interval() -> None:
    goal, alone = (0.1, 0.015), [window("alone")]
    together, apart = window("ours"), window("ours")
    for index in range(8):
        together.answers[10 + index].first_s += 0.2
        apart.answers[5 * index].first_s += 0.2
    widths = [
        net.high - net.low
        for net in (analysis.compared([w], alone, goal).net for w in (together, apart))
    ]
    assert widths[0] > widths[1]


def test_a_fixed_share_that_cannot_be_the_best_is_not_tried() -> None:
    assert not hopeless("duty-25", {})
    assert hopeless("duty-75", {"static-duty": False}), "half of the time does harm already"
    assert hopeless("duty-25", {"static-duty": True}), "half of the time does none"
    assert not hopeless("duty-37", {"static-duty": False, "duty-25": True})
    assert hopeless("duty-12", {"static-duty": False, "duty-25": True})
    assert not hopeless("static-duty", {"duty-12": False}), "a condition of its own"


def test_too_few_pairs_and_wide_intervals_decide_nothing() -> None:
    wide = figure("x", 1.0, "ratio", at_most=1.05, interval=(0.9, 1.2))
    clear = figure("x", 1.2, "ratio", at_most=1.05, interval=(1.1, 1.3))
    assert (wide.met, clear.met) == (None, False)
    windows = [window("alone"), window("ours")]
    rows = {row.name: row for row in figures(Results(windows, {}, SOLO))}
    assert rows["conv, ours / alone: TTFT p90"].met is True, "forty pairs"
    assert rows["conv, ours / alone: TTFT p99"].met is None


def test_the_report_has_every_condition_and_both_charts() -> None:
    windows = [
        window(condition, load=load, number=number, harvested=900)
        for load in ("conv", "steady-40")
        for condition in CONDITIONS
        for number in range(2)
    ]
    goal = goal_of(windows[0])
    assert goal is not None
    results = Results(windows, {"steady-40": goal}, SOLO)
    names = [row.name for row in figures(results)]
    assert len(names) == len(set(names))
    assert "steady-40: ours / rose-paper, harvest" in names
    assert all(condition in table(results) for condition in CONDITIONS)
    charts = ET.fromstring(picture(results)).findall("{http://www.w3.org/2000/svg}svg")  # noqa: S314
    assert len(charts) == 4


def test_what_others_use_of_the_machine_is_known() -> None:
    before, after = CpuUsage(0.0, 100.0, 40.0), CpuUsage(10.0, 109.0, 44.0)
    cores = os.cpu_count() or 1
    assert strangers(before, after) == pytest.approx(0.5 / cores)
    assert strangers(after, after) == 0.0
    assert cpu_usage().own_s > 0


def test_a_fixed_duty_is_open_for_its_share() -> None:
    rule = gates.duty(0.5)
    opened = [rule(now * MS) for now in range(200)]
    assert [bool(until) for until in opened] == [now % 100 < 50 for now in range(200)]
    assert opened[49] == 50 * MS, "never beyond its share"
    assert gates.always(7) > 7


def paper(served: Served, cuts: list[int]) -> gates.Paper:
    return gates.Paper(served, SOLO.profile, 0.1, 0.05, 1000, lambda: cuts.append(1))


def test_the_papers_rules_stop_without_prefill_or_decode_slack() -> None:
    served, cuts = Served(), list[int]()
    rule = paper(served, cuts).rule
    assert rule(10**9)
    served.live[1] = Answer(Arrival(0.0, 100, 10), sent_s=1.0)  # a prefill of 30 ms
    assert rule(int(1.06e9))
    assert not rule(int(1.08e9)), "20 ms left"
    served.live[1] = Answer(Arrival(0.0, 100, 10), 1.0, 1.05, 1.05, tokens=1)
    assert rule(int(1.08e9))
    assert not rule(int(1.095e9)), "the next token comes too late"
    assert cuts == []
    served.live[2] = Answer(Arrival(0.0, 800, 10), sent_s=1.0)
    rule(int(1.0e9))
    assert cuts, "serving's KV passes the watermark"


def test_the_slo_is_twice_the_solo_latency() -> None:
    goal = goal_of(window("alone"))
    assert goal is not None
    assert goal.ttft_s == pytest.approx(0.12, rel=0.05)
    assert goal.milliseconds[1] == 20


def test_vllm_sends_an_event_for_each_token_and_errors_are_none() -> None:
    token = b'data: {"id":"c","choices":[{"index":0,"text":"x"}]}\n'
    assert [events_in(token, 0), events_in(token, 6)] == [1, 7]
    assert events_in(b'data: {"error":{"message":"bad token"}}\n', 3) == 0
    assert events_in(b"data: [DONE]\n", 3) == events_in(b"\n", 3) == 0
    assert VLLM.body([1, 2], 9)["prompt"] == [1, 2]


def test_a_serving_engine_that_is_not_installed_is_said_in_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ROSE_CACHE", str(tmp_path))
    assert main(["--serving", "vllm", "--quick"]) == 0
    assert capsys.readouterr().out == (
        "bench.guard: skipped, vLLM is not installed here: run `make vllm` (about 6 GB)\n"
    )


def test_what_guard_and_tap_cost_before_the_first_token_is_told_apart() -> None:
    """2 % of a core at rest and 10 ms of CPU per 1,000 tokens, whatever a window's rate."""
    costs = [
        Cost(10.0, tokens, 0.02 * 10.0 + tokens * 1e-5, 1, 1, resting_s=5.0, resting_cpu_s=0.1)
        for tokens in (500, 8000)
    ]
    apart = analysis.parted(costs)
    assert apart is not None
    assert apart.fixed == pytest.approx(0.02)
    assert apart.at(1000) == pytest.approx(0.03)
    assert analysis.parted([Cost(10.0, 500, 0.2, 1, 1)]) is None, "nobody looked at rest"
    made = window("ours")
    made.cost = costs[0]
    rows = {row.name: row for row in figures(Results([made], {}, SOLO))}
    assert rows["guard and tap: fixed"].value == pytest.approx(2.0)
    assert rows["guard and tap: 1,000 tokens/s more"].value == pytest.approx(1.0)
    assert rows["guard and tap: at 1,000 tokens/s"].aim
    # The quotient on this node's own 50 tokens/s is told beside it, with the aim as it was set.
    assert rows["guard and tap: core per 1,000 tokens/s"].value == pytest.approx(41.0)


def test_the_search_is_compared_with_ours_of_the_same_round() -> None:
    goals = {"steady-40": Goal(0.1, 0.015)}
    windows = [
        window("alone", load="steady-40", number=0),
        window("alone", load="steady-40", number=1),
        window("ours", load="steady-40", number=0, harvested=450),
        window("ours", load="steady-40", number=1, harvested=5000),
        window("duty-25", load="steady-40", number=0, harvested=500, factor=1.2),
        window("static-duty", load="steady-40", number=0, harvested=900, factor=3.0),
        window("static-duty", load="steady-40", number=1, harvested=2000),
    ]
    results = Results(windows, goals, SOLO)
    rows = {row.name: row for row in figures(results)}
    assert rows["steady-40: best fixed share, no request over"].value == pytest.approx(50.0)
    assert rows["steady-40: ours / best fixed share"].value == pytest.approx(0.9)
    assert rows["steady-40, ours: added violations"].met is True
    harmful = "steady-40, static-duty: added violations, not so alone"
    assert rows[harmful].value == 40
    assert results.harmless("steady-40") == {"static-duty": False, "duty-25": True}
