"""Cost alone and beside a rollout engine, read from requests that met something in between."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose_core.guard.predictor import Mixture
from tests.guard.costs import MOVING, most_hits, moving

BELIEVED = 2.0


def seen(alone: float, slowdown: float, share: float) -> float:
    return alone / (1 - share * (1 - 1 / slowdown))


def taught(
    alone: float,
    slowdown: float,
    shares: Sequence[float],
    *,
    noise: float = 0.0,
    quantile: float = 0.5,
) -> Mixture:
    draw, mixture = random.Random(7), Mixture()
    for share in shares:
        cost = seen(alone, slowdown, share) * draw.uniform(1 - noise, 1 + noise)
        mixture = mixture.add(cost, share, BELIEVED, quantile=quantile)
    return mixture


def spread(count: int) -> list[float]:
    draw = random.Random(3)
    return [draw.random() for _ in range(count)]


def test_it_starts_at_the_profile() -> None:
    assert Mixture().factor(BELIEVED, shared=False, quantile=0.9) == pytest.approx(1.0)
    assert Mixture().factor(BELIEVED, shared=True, quantile=0.9) == pytest.approx(BELIEVED)


@pytest.mark.parametrize(("alone", "slowdown"), [(1.0, 2.0), (3.0, 1.3), (0.2, 5.0), (1.5, 1.0)])
def test_shares_that_differ_tell_both_costs(alone: float, slowdown: float) -> None:
    line = taught(alone, slowdown, spread(300)).line(BELIEVED)
    assert line.cost(0.0) == pytest.approx(alone, rel=0.1)
    assert line.cost(1.0) == pytest.approx(slowdown * alone, rel=0.25)


@pytest.mark.parametrize("alone", [0.5, 1.2, 4.0])
def test_a_steady_share_tells_the_height_and_leaves_the_slope_to_the_profile(alone: float) -> None:
    # Serving is slower alone than its profile says: no reason to blame the rollouts for it.
    mixture = taught(alone, BELIEVED, [0.3] * 200, noise=0.1)
    line = mixture.line(BELIEVED)
    assert line.cost(0.3) == pytest.approx(seen(alone, BELIEVED, 0.3), rel=0.05)
    assert line.cost(1.0) / line.cost(0.0) == pytest.approx(BELIEVED, rel=0.1)


@pytest.mark.parametrize("quantile", [0.9, 0.99])
@pytest.mark.parametrize("sigma", [0.1, 0.2, 0.3, 0.5, 0.8])
def test_so_many_costs_lie_above_a_quantile_as_it_claims(sigma: float, quantile: float) -> None:
    above = misses(moving("still", 10_000, sigma=sigma), quantile)
    assert least_hits(10_000, 1 - quantile) <= above <= most_hits(10_000, 1 - quantile)


@pytest.mark.parametrize("quantile", [0.9, 0.99])
@pytest.mark.parametrize("kind", MOVING)
def test_no_more_costs_lie_above_it_whatever_moves(kind: str, quantile: float) -> None:
    assert misses(moving(kind, 10_000), quantile) <= most_hits(10_000, 1 - quantile)


def test_no_stretch_misses_more_than_the_steps_allow() -> None:
    for kind in MOVING:
        missed = list(missing(moving(kind, 6_000, seed=2), 0.9))
        for start in range(0, 6_000, 500):
            # The sum of the steps, and one for each tenth by which costs outgrow all before them.
            assert sum(missed[start : start + 500]) <= 50 + 26 + math.log(3) / math.log(1.1)


@pytest.mark.parametrize("count", [9, 15, 40])
def test_a_replica_that_has_just_begun_claims_no_more_than_it_keeps(count: int) -> None:
    draw, tries, above = random.Random(11), 2000, 0
    for _ in range(tries):
        mixture = Mixture()
        for _ in range(count):
            cost = draw.lognormvariate(0, 0.3)
            mixture = mixture.add(cost, 0.0, BELIEVED, quantile=0.9)
        known = mixture.factor(BELIEVED, shared=False, quantile=0.9)
        above += draw.lognormvariate(0, 0.3) > known
    assert above <= most_hits(tries, 0.1)


def test_the_quantile_holds_under_a_duty_too() -> None:
    draw, mixture, above = random.Random(5), Mixture(), 0
    for number in range(10_000):
        share = draw.random()
        cost = seen(1.0, 1.5, share) * draw.lognormvariate(0, 0.3)
        if number >= 300:  # until the line knows what rollouts cost
            loss = mixture.line(BELIEVED).loss
            known = mixture.factor(BELIEVED, shared=False, quantile=0.9) / (1 - share * loss)
            above += cost > known
        mixture = mixture.add(cost, share, BELIEVED, quantile=0.9)
    assert least_hits(9700, 0.1) <= above <= most_hits(9700, 0.1)


def missing(costs: Iterable[float], quantile: float) -> Iterator[bool]:
    """Of each cost whether it lies above what was predicted before it."""
    mixture = Mixture()
    for cost in costs:
        yield cost > mixture.factor(BELIEVED, shared=False, quantile=quantile)
        mixture = mixture.add(cost, 0.0, BELIEVED, quantile=quantile)


def misses(costs: Iterable[float], quantile: float) -> int:
    return sum(missing(costs, quantile))


def least_hits(tries: int, share: float) -> int:
    return round(2 * tries * share) - most_hits(tries, share)


@given(st.lists(st.tuples(st.floats(1e-9, 1e9), st.floats(0.0, 1.0)), max_size=60))
def test_whatever_was_seen_the_factors_are_usable(requests: list[tuple[float, float]]) -> None:
    mixture = Mixture()
    for cost, share in requests:
        mixture = mixture.add(cost, share, BELIEVED, quantile=0.9)
    alone, shared = (
        mixture.factor(BELIEVED, shared=shared, quantile=0.9) for shared in (False, True)
    )
    assert 0 < alone <= shared <= 10.001 * alone < float("inf")
