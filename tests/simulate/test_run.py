"""Whole runs: determinism, conservation, failures, staleness."""

from functools import cache

import msgspec
import pytest

from rose_simulate.model.clock import SECOND
from rose_simulate.model.outcome import RunOutcome, paired_ratio
from rose_simulate.model.regimes import RULES
from rose_simulate.model.run import ledger, run
from rose_simulate.model.scenarios.possible import impossible
from rose_simulate.model.scenarios.scenario import Regime, Scenario
from rose_simulate.model.simulation import Simulation
from tests.simulate.worlds import MATERIAL, scenario


def outcome(setup: Scenario, regime: Regime, seed: int = 1) -> RunOutcome:
    return run(setup, regime, seed, MATERIAL, {})[0]


@cache
def plain(regime: Regime) -> RunOutcome:
    return outcome(scenario(), regime)


@pytest.mark.parametrize(
    "regime", [Regime.ON_OFF, Regime.WHOLE_REPLICA, Regime.ROSE_PAPER, Regime.OURS]
)
def test_same_seed_same_bytes(regime: Regime) -> None:
    first = msgspec.json.encode(plain(regime))
    assert msgspec.json.encode(outcome(scenario(), regime)) == first
    assert msgspec.json.encode(outcome(scenario(), regime, seed=2)) != first


@pytest.mark.parametrize("regime", list(Regime))
def test_every_regime_serves_the_same_requests_and_adds_up(regime: Regime) -> None:
    found, alone = plain(regime), plain(Regime.FIXED)
    assert [s.requests for s in found.services] == [s.requests for s in alone.services]
    job = found.jobs[0]
    assert job.started >= job.finished >= job.accepted
    assert job.tokens >= job.redone_tokens + job.discarded_tokens
    assert found.borrowed_computing_ms <= found.borrowed_held_ms
    assert found.shared_ms <= found.borrowed_computing_ms
    book = ledger(found)
    assert book.tokens.useful == pytest.approx(found.useful_tokens_per_s * found.seconds)


def test_lending_helps_a_starved_job() -> None:
    fixed, ours = (plain(regime) for regime in (Regime.FIXED, Regime.OURS))
    assert ours.jobs[0].finished > fixed.jobs[0].finished
    assert ours.jobs[0].borrowed_tokens > 0
    assert fixed.jobs[0].borrowed_tokens == 0


def test_a_lost_engine_costs_the_paper_tokens_and_us_none() -> None:
    failures = [{"kind": "engine", "at_s": 30 + 4 * n, "target": n % 3} for n in range(14)]
    setup = scenario(failures=failures)
    ours, paper = outcome(setup, Regime.OURS), outcome(setup, Regime.ROSE_PAPER)
    keep = outcome(setup, Regime.ROSE_PAPER_KEEP)
    assert ours.jobs[0].moves > 0
    assert ours.jobs[0].redone_tokens == keep.jobs[0].redone_tokens == 0
    assert paper.jobs[0].redone_tokens > 0


def test_a_dead_link_keeps_borrowed_engines_behind() -> None:
    setup = scenario(failures=[{"kind": "link", "at_s": 0, "seconds": 89}])
    assert outcome(setup, Regime.OURS).jobs[0].borrowed_tokens == 0
    assert outcome(scenario(), Regime.OURS).jobs[0].borrowed_tokens > 0


def test_a_synchronous_job_drops_nothing() -> None:
    plain = scenario()
    job = plain.jobs[0].model_copy(update={"staleness": 0})
    found = outcome(plain.model_copy(update={"jobs": (job,)}), Regime.OURS)
    assert found.jobs[0].steps > 1
    assert found.jobs[0].dropped == 0


def test_a_trainer_that_takes_the_oldest_first_drops_nothing_where_another_does() -> None:
    def dropped(*, oldest_first: bool) -> int:
        reported = _job(batch_groups=1, train_s=0.1, oldest_first=oldest_first)
        return outcome(reported, Regime.OURS).jobs[0].dropped

    assert dropped(oldest_first=False) > 0
    assert dropped(oldest_first=True) == 0


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


def _job(**changes: object) -> Scenario:
    plain = scenario(seconds=300)
    job = plain.jobs[0].model_copy(update=changes)
    return plain.model_copy(update={"jobs": (job,)})


def test_tail_batching_trains_every_prompt_and_discards_what_it_put_off() -> None:
    reported = _job(staleness=0, batch_groups=2, surplus=0.5)
    world = Simulation(reported, RULES[Regime.OURS], 1, MATERIAL)
    world.clock.run(round(reported.seconds * SECOND))
    job = world.jobs["grpo"]
    counts = job.counts
    assert counts.deferred > 0
    assert counts.discarded_tokens > 0
    assert counts.dropped == 0
    trained = [fate.session.partition(".")[0] for fate in counts.fates if fate.trained]
    assert len(trained) == counts.accepted
    members = reported.jobs[0].group
    assert all(trained.count(name) == members for name in set(trained)), "no prompt twice"


def test_a_surplus_of_responses_is_cut_counted_and_never_trained_on() -> None:
    reported = _job(staleness=0, batch_groups=2, surplus=0.5, member_surplus=0.5)
    world = Simulation(reported, RULES[Regime.OURS], 1, MATERIAL)
    world.clock.run(round(reported.seconds * SECOND))
    job, members = world.jobs["grpo"], reported.jobs[0].group
    counts = job.counts
    assert counts.steps > 2
    assert counts.cut > 0
    assert counts.started == counts.finished + job.inside
    cut = {fate.session for fate in counts.fates if not fate.trained}
    assert len(cut) == counts.cut
    trained = [fate.session for fate in counts.fates if fate.trained]
    assert not cut & set(trained)
    prompts = [session.partition(".")[0] for session in trained]
    assert all(prompts.count(name) == members for name in set(prompts)), "no prompt twice"


def test_tail_batching_is_refused_where_steps_overlap() -> None:
    (where, reason), *_ = impossible(_job(staleness=1, surplus=0.5))
    assert where == ("jobs", 0, "surplus")
    assert "staleness must be 0" in reason


def _played(**changes: object) -> Simulation:
    reported = _job(staleness=0, batch_groups=2, surplus=0.5, member_surplus=0.5, **changes)
    world = Simulation(reported, RULES[Regime.OURS], 1, MATERIAL)
    world.clock.run(round(reported.seconds * SECOND))
    return world


def test_a_trainer_that_streams_steps_as_often_or_more_and_never_before_its_last_group() -> None:
    whole, streamed = (_played(streams=one).jobs["grpo"].counts for one in (False, True))
    assert whole.steps > 2
    assert sum(streamed.step_s) / streamed.steps < sum(whole.step_s) / whole.steps
    train_s = _job().jobs[0].train_s
    # The last group's own part cannot be hidden, and more than the step's other part is not won.
    assert min(streamed.step_s) >= train_s / 2
    trained = [fate.session.partition(".")[0] for fate in streamed.fates if fate.trained]
    assert len(trained) == streamed.accepted


def test_a_reward_that_takes_time_ends_its_trajectory_that_much_later() -> None:
    soon, late = (_played(reward_s=one).jobs["grpo"] for one in (0.0, 20.0))
    assert late.counts.finish_s[0] == pytest.approx(soon.counts.finish_s[0] + 20.0)
    assert late.counts.steps < soon.counts.steps
    assert late.counts.started == late.counts.finished + late.inside
    cut = {fate.session for fate in late.counts.fates if not fate.trained}
    assert len(cut) == late.counts.cut > 0, "some were cut while they waited for their reward"


def test_streaming_without_rounds_is_refused() -> None:
    (where, reason), *_ = impossible(_job(staleness=0, streams=True))
    assert where == ("jobs", 0, "streams")
    assert "give a surplus too" in reason


def test_a_surplus_of_responses_without_rounds_is_refused() -> None:
    (where, reason), *_ = impossible(_job(staleness=0, member_surplus=0.25))
    assert where == ("jobs", 0, "member_surplus")
    assert "give a surplus too" in reason
