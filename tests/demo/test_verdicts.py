from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
from msgspec import structs

from rose_demo.records import Sample
from rose_demo.statistics import Estimate
from rose_demo.verdicts import CheckResult, Findings, judge, serving_checks


def words(findings: Findings) -> dict[str, CheckResult]:
    return {verdict.promise: verdict.result for verdict in findings.verdicts}


def test_a_good_run_keeps_every_promise(synthetic: ModuleType) -> None:
    findings = judge(synthetic.recording())
    assert set(words(findings).values()) == {CheckResult.KEPT}
    assert findings.exit_code == 0
    assert findings.borrowed_tokens == synthetic.samples()[-1].borrowed_tokens


def test_proven_harm_breaks_serving_first(synthetic: ModuleType) -> None:
    findings = judge(synthetic.recording(requests=synthetic.requests(harm=1.8)))
    assert words(findings)["Serving first"] is CheckResult.BROKEN
    assert findings.exit_code == 1


def test_a_slow_machine_does_not_break_it_and_proves_nothing(synthetic: ModuleType) -> None:
    findings = judge(synthetic.recording(requests=synthetic.requests(machine=1.5)))
    assert words(findings)["Serving first"] is CheckResult.UNPROVEN


WIDE = Estimate(1.1, 0.77, 1988.0)
SLOWER, AS_FAST, LOUD = Estimate(1.46, 1.25, 1.84), Estimate(1.02, 0.9, 1.2), Estimate(1.4, 0.8, 2)


@pytest.mark.parametrize(
    ("ratio", "excess", "word"),
    [
        (SLOWER, SLOWER, CheckResult.BROKEN),
        (SLOWER, LOUD, CheckResult.UNPROVEN),
        (SLOWER, AS_FAST, CheckResult.UNPROVEN),
        (AS_FAST, SLOWER, CheckResult.UNPROVEN),
        (AS_FAST, AS_FAST, CheckResult.KEPT),
        (AS_FAST, WIDE, CheckResult.UNPROVEN),
        (WIDE, AS_FAST, CheckResult.UNPROVEN),
    ],
)
def test_harm_is_judged_by_both_ratios_and_kept_only_where_neither_shows_it(
    synthetic: ModuleType, ratio: Estimate, excess: Estimate, word: CheckResult
) -> None:
    recording = synthetic.recording()
    findings = judge(recording)
    slower = replace(findings.comparisons[0], ratio=ratio, excess=excess)
    _, harm, *_ = serving_checks(recording, [slower], findings.attainments)
    assert harm.result is word


def test_a_figure_without_a_limit_decides_nothing(synthetic: ModuleType) -> None:
    serving = judge(synthetic.recording(stops_s=(0.5, 9.0))).verdicts[0]
    (figure,) = [check for check in serving.checks if "stood still" in check.text]
    assert figure.result is CheckResult.MEASURED
    assert serving.result is CheckResult.KEPT


def test_a_missed_slo_in_lent_windows_breaks_it(synthetic: ModuleType) -> None:
    findings = judge(synthetic.recording(requests=synthetic.requests(harm=12.0)))
    texts = [c.text for c in findings.verdicts[0].checks if c.result is CheckResult.BROKEN]
    assert any(text.startswith("SLO") for text in texts)


def test_a_failed_live_request_breaks_it(synthetic: ModuleType) -> None:
    rows = list(synthetic.requests())
    rows[7] = type(rows[7])(rows[7].role, rows[7].at_s, 10, 0, error="ServerDisconnected")
    findings = judge(synthetic.recording(requests=tuple(rows)))
    assert words(findings)["Serving first"] is CheckResult.BROKEN


def test_nothing_lent_proves_nothing(synthetic: ModuleType) -> None:
    unknown = tuple(Sample(at_s=float(i)) for i in range(240))
    findings = judge(synthetic.recording(samples=unknown))
    assert set(words(findings).values()) == {CheckResult.UNPROVEN}
    assert findings.exit_code == 1


def replaced(records: tuple[dict[str, Any], ...], event: str, **fields: object) -> tuple[Any, ...]:
    return tuple(r | fields if r["event"] == event else r for r in records)


@pytest.mark.parametrize(
    ("event", "fields"),
    [
        ("mismatch", {"k3": 0.3}),
        ("mismatch", {"invalid": 3}),
        ("end", {"reason": "MalformedReply: no log-probs"}),
        ("end", {"tokens": 10}),
        ("end", {"cut_tokens": 1}),
    ],
)
def test_wrong_tokens_break_exactness(
    synthetic: ModuleType, event: str, fields: dict[str, object]
) -> None:
    training = replaced(synthetic.training(), event, **fields)
    findings = judge(synthetic.recording(training=training))
    assert words(findings)["Exact and honest"] is CheckResult.BROKEN
    assert words(findings)["Serving first"] is CheckResult.KEPT


def test_tokens_that_were_in_flight_at_the_end_are_counted_one_by_one(
    synthetic: ModuleType,
) -> None:
    samples = synthetic.samples()
    total = (samples[-1].borrowed_tokens or 0) + (samples[-1].dedicated_tokens or 0)
    left = (*samples[:-1], structs.replace(samples[-1], undelivered_tokens=7))
    for received, word in (
        (total - 7, CheckResult.KEPT),
        (total, CheckResult.BROKEN),
        (total - 8, CheckResult.BROKEN),
    ):
        training = synthetic.training(tokens=received)
        findings = judge(synthetic.recording(samples=left, training=training))
        assert words(findings)["Exact and honest"] is word


@pytest.mark.parametrize(
    ("meter", "word"),
    [
        ({}, CheckResult.UNPROVEN),
        ({"inclusion": []}, CheckResult.UNPROVEN),
        ({"groups": 4}, CheckResult.UNPROVEN),
        ({"biased": True, "gap": -0.3}, CheckResult.BROKEN),
    ],
)
def test_the_bias_meter_is_one_of_the_verdicts(
    synthetic: ModuleType, meter: dict[str, Any], word: CheckResult
) -> None:
    if "groups" in meter:
        meter = synthetic.inclusion(control_groups=meter["groups"])
    elif "biased" in meter:
        meter = synthetic.inclusion(**meter)
    findings = judge(synthetic.recording(inclusion=meter))
    assert words(findings)["Exact and honest"] is word


@pytest.mark.parametrize("fields", [{"learned": False}, {"control_flat": False}])
def test_learning_that_is_not_real_breaks_usefulness(
    synthetic: ModuleType, fields: dict[str, object]
) -> None:
    training = replaced(synthetic.training(), "evaluation", **fields)
    assert words(judge(synthetic.recording(training=training)))["Useful"] is CheckResult.BROKEN


def test_a_trainer_that_died_breaks_exactness(synthetic: ModuleType) -> None:
    training = tuple(r for r in synthetic.training() if r["event"] != "end")
    assert (
        words(judge(synthetic.recording(training=training)))["Exact and honest"]
        is CheckResult.BROKEN
    )
