"""Drafts in the simulator: what a step with them costs, gives, and how long it cannot stop."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from rose_simulate.model.clock import SECOND, VirtualClock
from rose_simulate.model.fleets.curves import dedicated_tokens_per_s
from rose_simulate.model.gpus.batch import BatchEngine, Sequence
from rose_simulate.model.jobs.workload import PlannedTurn
from rose_simulate.model.scenarios.costs import costs
from rose_simulate.model.scenarios.scenario import RolloutJob
from tests.simulate.worlds import scenario

PLAIN = costs("H100", "Qwen3-8B", 1.0)
DRAFTS = costs("H100", "Qwen3-8B", 1.0, draft_nodes=8, tokens_per_step=2.0)


def test_a_step_pays_for_what_it_verifies_and_gives_several_tokens() -> None:
    without, _ = PLAIN.step(4, 8000)
    verified = PLAIN.prefill(4 * 8, 0.0) - PLAIN.prefill(0, 0.0)
    first, _ = DRAFTS.step(4, 8000)
    assert first == pytest.approx((without + verified) / 2)


def test_drafts_that_are_never_right_only_cost() -> None:
    lost = costs("H100", "Qwen3-8B", 1.0, draft_nodes=8)
    assert lost.step(16, 1000)[0] > PLAIN.step(16, 1000)[0]


def test_a_fleets_own_engines_draft_as_its_lent_ones_do() -> None:
    job = scenario().jobs[0]
    reported = job.model_copy(update={"draft_nodes": 8, "tokens_per_step": 2.0})
    pool = [(PlannedTurn(1000, 400, 0.0),)]
    plain, drafts = (dedicated_tokens_per_s(one, 0.5, pool) for one in (job, reported))
    assert drafts > 1.2 * plain


def test_a_stop_may_have_to_wait_for_a_whole_step() -> None:
    clock = VirtualClock()
    engine = BatchEngine(clock, DRAFTS, 100_000, lambda: None)
    done: list[int] = []
    engine.submit(Sequence("s", 100, 200, lambda: None, lambda: done.append(clock.now_ns)))
    clock.run(round(0.2 * SECOND))
    step = DRAFTS.step(1, 100)[0] * 2
    assert 0.5 * step < engine.residual() <= 1.01 * step
    clock.run(60 * SECOND)
    assert done


def test_several_tokens_a_step_without_drafts_are_refused() -> None:
    job = scenario().jobs[0].model_dump()
    with pytest.raises(ValidationError, match="tokens_per_step: 2 needs draft_nodes"):
        RolloutJob.model_validate({**job, "tokens_per_step": 2})
    RolloutJob.model_validate({**job, "tokens_per_step": 2, "draft_nodes": 8})
