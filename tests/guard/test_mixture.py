"""Cost alone and beside a rollout engine, read from requests that met something in between."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose_core.guard.predictor import Mixture

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
        mixture = mixture.add(cost, share, BELIEVED, quantile=quantile, step=0.05)
    return mixture


def spread(count: int) -> list[float]:
    draw = random.Random(3)
    return [draw.random() for _ in range(count)]


def test_it_starts_at_the_profile() -> None:
    assert Mixture().factor(BELIEVED, shared=False) == pytest.approx(1.0)
    assert Mixture().factor(BELIEVED, shared=True) == pytest.approx(BELIEVED)


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


def test_the_factor_is_a_quantile_of_what_was_seen() -> None:
    mixture = taught(1.0, BELIEVED, spread(2000), noise=0.3, quantile=0.9)
    draw = random.Random(9)
    costs = [draw.uniform(0.7, 1.3) for _ in range(1000)]
    covered = sum(cost <= mixture.factor(BELIEVED, shared=False) for cost in costs) / len(costs)
    assert 0.75 <= covered <= 1.0


@given(st.lists(st.tuples(st.floats(1e-9, 1e9), st.floats(0.0, 1.0)), max_size=60))
def test_whatever_was_seen_the_factors_are_usable(requests: list[tuple[float, float]]) -> None:
    mixture = Mixture()
    for cost, share in requests:
        mixture = mixture.add(cost, share, BELIEVED, quantile=0.9, step=0.1)
    alone, shared = (mixture.factor(BELIEVED, shared=shared) for shared in (False, True))
    assert 0 < alone <= shared <= 10.001 * alone < float("inf")
