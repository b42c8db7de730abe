"""The benchmark of tail batching on real parts: curves from progress files, and what they show."""

from typing import Any

import pytest

from bench.rounds.curves import PLAIN, ROUNDS, Curve, curve_of, figures, pairs, table


def records(slope: float, steps: int = 40, cut: int = 0) -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = [{"event": "start", "seconds": 0.0}]
    for step in range(0, steps + 1, 10):
        made.append({"event": "round", "trained": 64, "cut": cut, "put_off": 8, "seconds": 1.0})
        reward = 0.25 + slope * step
        made.append({"event": "evaluation", "step": step, "trained": reward, "seconds": step / 2})
    return [*made, {"event": "end", "tokens": 1000 * steps, "seconds": 30.0}]


def test_a_curve_is_read_off_the_progress_file() -> None:
    found = curve_of(ROUNDS, 3, records(0.01, cut=16))
    assert (found.steps, found.seconds, found.tokens) == (40, 20.0, 40_000)
    assert (found.trained, found.cut, found.put_off) == (320, 80, 40)
    assert found.reward(15) == pytest.approx(0.4)
    assert found.reward(0) == found.reward(-1) == 0.25
    assert found.reward(99) == pytest.approx(0.65)


def test_a_run_that_was_never_evaluated_is_named() -> None:
    with pytest.raises(ValueError, match="plain, seed 2, was never evaluated"):
        curve_of(PLAIN, 2, records(0.0)[:1])


def both(gap: float) -> list[Curve]:
    made = []
    for seed, slope in enumerate((0.010, 0.011, 0.012)):
        made.append(curve_of(PLAIN, seed, records(slope)))
        made.append(curve_of(ROUNDS, seed, records(slope + gap / 40, cut=16)))
    return made


@pytest.mark.parametrize(("gap", "met"), [(0.0, True), (-0.2, False)])
def test_rounds_are_compared_at_the_last_step_that_both_have(gap: float, met: bool) -> None:
    longer = curve_of(PLAIN, 0, records(0.010, steps=80))
    found = {one.name: one for one in figures([longer, *both(gap)[1:]])}
    difference = found["reward, rounds less plain, at the last common step"]
    assert difference.value == pytest.approx(gap)
    assert difference.met is met
    mean = found["reward, rounds less plain, mean of all common steps"]
    assert mean.value == pytest.approx(gap / 2)
    assert mean.met is met
    assert found["last common step"].value == 40
    assert found["rounds: share of episodes that were cut"].value == pytest.approx(0.2)
    assert found["plain: steps per minute"].value == pytest.approx(120.0)


def test_a_seed_without_its_pair_is_left_out() -> None:
    found = both(0.0)
    assert [plain.seed for plain, _ in pairs(found[:-1])] == [0, 1]
    lines = table(found).splitlines()
    assert len(lines) == 2 + 5
    assert lines[-1] == "| 40 | 0.690 | 0.690 |"
