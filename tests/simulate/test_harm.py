"""What a comparison says of serving, of the paper's two readings and of a band of interference."""

import pytest

from rose_core.accounting.cost import break_even_lent_hour
from rose_simulate.model.outcome import RunOutcome
from rose_simulate.model.run import ledger, run
from rose_simulate.model.scenarios.scenario import Interference, Load, Regime, Scenario
from rose_simulate.pages.study_page import page
from rose_simulate.runs.study import PRICES, Result, study
from tests.simulate.worlds import MATERIAL, scenario

BAND = (
    Interference(serving_slowdown=1.15, rollout_slowdown=1.3),
    Interference(serving_slowdown=2.0, rollout_slowdown=2.0),
)
BOTH = (Regime.FIXED, Regime.ROSE_PAPER, Regime.ROSE_PAPER_DEDICATED, Regime.OURS)


def quiet(_one: RunOutcome) -> None:
    """Progress is of no interest here."""


def found() -> Result:
    return study(scenario(regimes=BOTH), MATERIAL, [0.5], quiet, band=BAND)


def swamped(ttft_ms: float) -> Scenario:
    """One burst at the end that is still in the queue when the run is over."""
    setup = scenario(seconds=20)
    load = Load(burst_every_s=60, burst_size=300, burst_prompt=6000, offset_s=15)
    changes = {"load": load, "ttft_ms": ttft_ms}
    return setup.model_copy(update={"services": (setup.services[0].model_copy(update=changes),)})


def test_each_request_is_compared_with_itself_served_alone() -> None:
    _, alone = run(scenario(), Regime.FIXED, 1, MATERIAL, {})
    same, _ = run(scenario(), Regime.FULL_MEMORY, 1, MATERIAL, alone)
    beside, _ = run(scenario(), Regime.UNGUARDED, 1, MATERIAL, alone)
    (calm,), (disturbed,) = same.services, beside.services
    assert (calm.ttft_paired, calm.slower_5, calm.slower_25) == (1.0, 0.0, 0.0)
    assert disturbed.slower_5 is not None
    assert disturbed.slower_25 is not None
    assert disturbed.slower_5 >= disturbed.slower_25 > 0
    assert disturbed.ttft_p50 <= disturbed.ttft_p90 <= disturbed.ttft_p99


def test_a_request_that_still_waits_at_the_end_is_late_once_its_limit_has_passed() -> None:
    strict, _ = run(swamped(500), Regime.FIXED, 1, MATERIAL, {})
    patient, _ = run(swamped(60_000), Regime.FIXED, 1, MATERIAL, {})
    (service,) = strict.services
    assert service.unfinished > 0
    assert service.violations > 0.9 * service.requests
    assert patient.services[0].violations == 0


def test_every_regime_is_run_at_every_factor_of_interference() -> None:
    rows = found().rows
    assert [(row.regime, row.slowdown) for row in rows] == [
        (regime.value, one.serving_slowdown) for one in BAND for regime in BOTH
    ]
    mild, hard = (row for row in rows if row.regime == Regime.ROSE_PAPER)
    assert mild.ttft_p50_ratio is not None
    assert hard.ttft_p50_ratio is not None
    assert mild.ttft_p50_ratio < hard.ttft_p50_ratio


def test_who_lends_nothing_is_run_once_for_all_factors() -> None:
    done: list[str] = []
    setup = scenario(regimes=(Regime.FIXED, Regime.OURS))
    study(setup, MATERIAL, [0.5], lambda one: done.append(one.regime), band=BAND)
    assert sorted(done) == ["fixed", "ours", "ours"]


def test_the_better_reading_of_the_papers_placement_is_compared_and_named() -> None:
    result = found()
    for slowdown in (1.15, 2.0):
        rows = {row.regime: row for row in result.rows if row.slowdown == slowdown}
        readings = [rows[one] for one in ("rose-paper", "rose-paper-dedicated")]
        best = max(readings, key=lambda row: row.useful_tokens_per_s)
        ours = rows["ours"]
        assert ours.best == best.regime
        assert ours.against_best is not None
        assert ours.against_best.mean == pytest.approx(
            ours.useful_tokens_per_s / best.useful_tokens_per_s
        )
        assert best.against_best is None
    assert f"`{result.rows[-1].best}`" in page("x", "(x)", "Says.", (result,)).text


def test_the_papers_placement_is_run_in_both_readings() -> None:
    rows = {row.regime: row for row in found().rows if row.slowdown == 2.0}
    jobs = {o.regime: o.jobs[0] for o in found().outcomes if o.slowdown == 2.0}
    borrowed = {name: job.borrowed_tokens / job.tokens for name, job in jobs.items()}
    assert borrowed["rose-paper"] > borrowed["rose-paper-dedicated"]
    assert rows["rose-paper-dedicated"].throughput is not None


def test_the_trainers_gpus_raise_the_price_at_which_borrowing_pays() -> None:
    setup = scenario()
    prices = []
    for gpus in (0, 2):
        job = setup.jobs[0].model_copy(update={"trainer_gpus": gpus})
        here = setup.model_copy(update={"jobs": (job,)})
        alone, ours = (
            ledger(run(here, one, 1, MATERIAL, {})[0]) for one in (Regime.FIXED, Regime.OURS)
        )
        assert ours.dedicated.held_milliseconds == (1 + gpus) * 90_000
        prices.append(break_even_lent_hour(ours, alone, PRICES))
    assert prices[0] is not None
    assert prices[1] == pytest.approx(3 * prices[0])


def test_gpu_hours_won_are_told_for_each_request_made_late() -> None:
    for row in found().rows:
        if row.regime == Regime.FIXED:
            assert (row.gpu_hours, row.per_violation) == (None, None)
            continue
        assert row.throughput is not None
        assert row.gpu_hours == pytest.approx(90 / 3600 * (row.throughput.mean - 1))
        if row.added_violations:
            assert row.per_violation is not None
            assert row.per_violation * row.added_violations == pytest.approx(row.gpu_hours)
        else:
            assert row.per_violation is None
