"""Elastic parallelism: which width a round gets, and that switching loses nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rose_simulate.model.clock import SECOND
from rose_simulate.model.jobs.widths import MARGIN, RoundSeen, Width, Written, decide, seconds
from rose_simulate.model.regimes import RULES
from rose_simulate.model.scenarios.costs import ModelCosts, costs, kv_tokens
from rose_simulate.model.scenarios.possible import impossible
from rose_simulate.model.scenarios.scenario import Nodes, Regime, Scenario
from rose_simulate.model.simulation import Simulation
from tests.simulate.worlds import MATERIAL, scenario

GPUS = 8


def width(gpus: int, model: str = "Qwen3-8B") -> Width:
    times = costs("H100", model, 0.5, gpus, attention=True)
    return Width(gpus, GPUS // gpus, kv_tokens("H100", model, 0.9, gpus), 16 * gpus, times)


def widths(model: str = "Qwen3-8B") -> list[Width]:
    return [width(gpus, model) for gpus in (1, 2, 4, 8)]


def slower(times: ModelCosts, factor: float) -> ModelCosts:
    """The same engine, with everything that it does taking so much longer."""
    fit = times.fit
    return replace(
        times,
        fit=replace(
            fit,
            t0_ms=fit.t0_ms * factor,
            per_sequence_ms=fit.per_sequence_ms * factor,
            per_1k_context_ms=fit.per_1k_context_ms * factor,
            prefill_tokens_per_s=fit.prefill_tokens_per_s / factor,
        ),
    )


def round_of(*lengths: int, kept: int, read: int = 8000) -> RoundSeen:
    """Those beyond the shortest ``kept`` were stopped half-way."""
    last = sorted(lengths)[kept - 1]
    found = [Written(min(one, last), read, ended=one <= last) for one in lengths]
    return RoundSeen(tuple(found), kept)


EVEN = [1000 + 10 * n for n in range(128)]
TAILED = [*EVEN[:-2], 9000, 12000]


def test_a_round_with_work_until_its_end_is_for_narrow_engines_and_one_with_a_tail_for_wide() -> (
    None
):
    full = round_of(*([2000] * 128), kept=128, read=16_000)
    tailed = round_of(*TAILED, kept=128, read=16_000)
    assert decide(full, widths(), present=8) == 1
    assert decide(tailed, widths(), present=1) == 8


def test_a_gain_below_the_margin_moves_nothing_in_either_direction() -> None:
    seen = round_of(*EVEN, kept=128)
    narrow, wide = width(2), width(8)
    assert decide(seen, [narrow, wide], present=2) == 8
    lasts = seconds(seen, narrow), seconds(seen, wide)
    assert lasts[0] is not None
    assert lasts[1] is not None
    # The wide ones, made so much slower that the gain is half the margin.
    scale = lasts[0] / lasts[1] * (1 - MARGIN / 2)
    near = replace(wide, times=slower(wide.times, scale))
    assert decide(seen, [narrow, near], present=2) == 2
    assert decide(seen, [narrow, near], present=8) == 8


def test_the_first_round_of_a_kind_takes_what_is_there() -> None:
    assert decide(None, widths(), present=4) == 4


def test_a_width_whose_pool_does_not_hold_the_longest_trajectory_is_left() -> None:
    seen = round_of(*([2000] * 64), kept=64, read=30_000)
    narrow = width(1, "Qwen3-32B")
    assert narrow.kv_tokens < 32_000
    assert seconds(seen, narrow) is None
    assert decide(seen, widths("Qwen3-32B"), present=1) > 1
    assert decide(seen, [narrow], present=1) == 1, "there is no other"


def test_a_pool_that_holds_few_at_a_time_makes_others_wait() -> None:
    seen = round_of(*([2000] * 16), kept=16)
    whole = Width(1, 1, 400_000, 16, width(1).times)
    small = Width(1, 1, 40_000, 16, width(1).times)
    quick, slow = seconds(seen, whole), seconds(seen, small)
    assert quick is not None
    assert slow is not None
    assert slow > 1.5 * quick


def elastic(**changes: object) -> Scenario:
    plain = scenario(seconds=600)
    found: dict[str, object] = {
        "dedicated": 4,
        "gpus_per_engine": 1,
        "borrowed": 0,
        "borrows_from": "",
        "staleness": 0,
        "batch_groups": 4,
        "surplus": 0.5,
        "member_surplus": 0.5,
        "train_s": 10,
        "widths": (1, 2, 4),
    }
    job = plain.jobs[0].model_copy(update=found | changes)
    return plain.model_copy(update={"jobs": (job,)})


def test_engines_that_change_their_width_lose_no_trajectory_and_keep_their_gpus() -> None:
    reported = elastic()
    assert not list(impossible(reported))
    world = Simulation(reported, RULES[Regime.FIXED], 1, MATERIAL)
    world.clock.run(round(reported.seconds * SECOND))
    own, job = world.own["grpo"], world.jobs["grpo"]
    assert own.switches > 0
    assert len(own.engines) * own.width == 4
    assert job.counts.steps > 5
    assert job.counts.started == job.counts.finished + job.inside
    assert set(world.routers["grpo"].engines) <= {one.name for one in own.engines}
    assert world.routers["grpo"].counts.moves == 0, "no turn was on an engine that ended"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"surplus": None, "member_surplus": 0.0}, "give a surplus"),
        ({"widths": (3,)}, "do not divide"),
    ],
)
def test_widths_that_cannot_be_are_refused(changes: dict[str, object], reason: str) -> None:
    found = [why for where, why in impossible(elastic(**changes)) if where[-1] == "widths"]
    assert any(reason in why for why in found), found


def test_widths_are_refused_where_machines_fail() -> None:
    reported = elastic().model_copy(update={"nodes": Nodes(fail_every_s=600)})
    assert any("failing node" in why for _, why in impossible(reported))
