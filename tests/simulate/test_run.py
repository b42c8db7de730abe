"""Whole runs: determinism, conservation, failures, staleness."""

import msgspec
import pytest

from rose_core.simulate.outcome import Outcome, paired_ratio
from rose_core.simulate.run import ledger, run
from rose_core.simulate.scenario import Regime, Scenario
from tests.simulate.worlds import MATERIAL, scenario


def outcome(told: Scenario, regime: Regime, seed: int = 1) -> Outcome:
    return run(told, regime, seed, MATERIAL, {})[0]


@pytest.mark.parametrize("regime", list(Regime))
def test_same_seed_same_bytes(regime: Regime) -> None:
    first = msgspec.json.encode(outcome(scenario(), regime))
    assert msgspec.json.encode(outcome(scenario(), regime)) == first
    assert msgspec.json.encode(outcome(scenario(), regime, seed=2)) != first


@pytest.mark.parametrize("regime", list(Regime))
def test_every_regime_serves_the_same_requests_and_adds_up(regime: Regime) -> None:
    found = outcome(scenario(), regime)
    alone = outcome(scenario(), Regime.FIXED)
    assert [s.requests for s in found.services] == [s.requests for s in alone.services]
    job = found.jobs[0]
    assert job.started >= job.finished >= job.accepted
    assert job.tokens >= job.redone_tokens + job.discarded_tokens
    assert found.borrowed_computing_ms <= found.borrowed_held_ms
    assert found.shared_ms <= found.borrowed_computing_ms
    book = ledger(found)
    assert book.tokens.useful == pytest.approx(found.useful_tokens_per_s * found.seconds)


def test_lending_helps_a_starved_job() -> None:
    fixed, ours = (outcome(scenario(), regime) for regime in (Regime.FIXED, Regime.OURS))
    assert ours.jobs[0].finished > fixed.jobs[0].finished
    assert ours.jobs[0].borrowed_tokens > 0
    assert fixed.jobs[0].borrowed_tokens == 0


def test_a_lost_engine_costs_the_paper_tokens_and_us_none() -> None:
    failures = [{"kind": "engine", "at_s": 30 + n, "target": n % 3} for n in range(50)]
    told = scenario(failures=failures)
    ours, paper = outcome(told, Regime.OURS), outcome(told, Regime.ROSE_PAPER)
    keep = outcome(told, Regime.ROSE_PAPER_KEEP)
    assert ours.jobs[0].moves > 0
    assert ours.jobs[0].redone_tokens == keep.jobs[0].redone_tokens == 0
    assert paper.jobs[0].redone_tokens > 0


def test_a_dead_link_keeps_borrowed_engines_behind() -> None:
    told = scenario(failures=[{"kind": "link", "at_s": 0, "seconds": 89}])
    assert outcome(told, Regime.OURS).jobs[0].borrowed_tokens == 0
    assert outcome(scenario(), Regime.OURS).jobs[0].borrowed_tokens > 0


def test_a_synchronous_job_drops_nothing() -> None:
    plain = scenario()
    job = plain.jobs[0].model_copy(update={"staleness": 0})
    found = outcome(plain.model_copy(update={"jobs": (job,)}), Regime.OURS)
    assert found.jobs[0].steps > 1
    assert found.jobs[0].dropped == 0


def test_paired_ratio_and_its_interval() -> None:
    same = paired_ratio([2.0, 4.0, 8.0], [1.0, 2.0, 4.0])
    assert [same.mean, same.low, same.high] == pytest.approx([2, 2, 2])
    spread = paired_ratio([2.0, 3.0], [1.0, 1.0])
    assert spread.low is not None
    assert spread.high is not None
    assert spread.low < spread.mean < spread.high
    assert paired_ratio([3.0], [2.0]).low is None
    with pytest.raises(ValueError, match="positive"):
        paired_ratio([1.0], [0.0])
