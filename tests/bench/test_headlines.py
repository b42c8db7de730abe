"""The simulator's benchmark judges production by its aims, and nobody else."""

import pytest

from bench.simulate import AIM, headline
from rose_simulate.model.outcome import Interval
from rose_simulate.model.scenarios.scenario import Regime
from rose_simulate.runs.study import StudyRow

BELOW, ABOVE = 0.9 * AIM, 1.1 * AIM


def row(regime: Regime, low: float, high: float, *, added: int = 0) -> StudyRow:
    ratio = Interval((low + high) / 2, low, high, pairs=3)
    return StudyRow(
        regime=regime,
        derate=0.5,
        throughput=ratio,
        against_paper=ratio,
        useful_tokens_per_s=1000.0,
        accepted=256,
        dropped_share=0.0,
        recovery_s=None,
        added_violations=added,
        requests=100,
        ttft_p50_ratio=1.0,
        ttft_p90_ratio=1.0,
        ttft_p99_ratio=1.0,
        tpot_p99_ratio=1.0,
        redone_share=0.0,
        cost_per_accepted=None,
        break_even=None,
    )


def verdicts(one: StudyRow) -> dict[str, bool | None]:
    return {found.name.rpartition(": ")[2]: found.met for found in headline("normal", one)}


@pytest.mark.parametrize(
    ("low", "high", "met"),
    [(BELOW, 0.95 * AIM, False), (BELOW, ABOVE, None), (1.05 * AIM, ABOVE, True)],
)
def test_the_gain_over_the_paper_is_met_or_missed_only_where_its_interval_says_so(
    low: float, high: float, *, met: bool | None
) -> None:
    assert verdicts(row(Regime.OURS, low, high))["x rose-paper at its best"] is met


def test_a_violation_that_production_adds_misses_its_aim() -> None:
    assert verdicts(row(Regime.OURS, ABOVE, ABOVE))["added violations"] is True
    assert verdicts(row(Regime.OURS, ABOVE, ABOVE, added=1))["added violations"] is False


def test_baselines_have_no_aims() -> None:
    assert set(verdicts(row(Regime.UNGUARDED, BELOW, BELOW, added=5)).values()) == {None}
