import math

import numpy as np
import pytest

from rose_trainer.mismatch import MismatchMeter, SamplingPlace


def test_equal_log_probs_are_no_mismatch() -> None:
    meter = MismatchMeter()
    meter.add([-1.0, -2.0], [-1.0, -2.0], version="r@1.0")
    total = meter.total()
    assert (total.tokens, total.k1, total.k3, total.largest, total.clipped) == (2, 0, 0, 0, 0)


def test_the_estimates_are_those_of_the_literature() -> None:
    meter = MismatchMeter(clip=0.2)
    meter.add([-1.0, -1.0], [-1.5, -1.1], version="r@1.0", pool="p")
    total = meter.total()
    assert total.k1 == pytest.approx(0.3)
    expected = (math.exp(-0.5) - 1 + 0.5 + math.exp(-0.1) - 1 + 0.1) / 2
    assert total.k3 == pytest.approx(expected)
    assert total.largest == pytest.approx(0.5)
    assert total.clipped == 0.5


def test_k3_converges_to_the_divergence() -> None:
    random = np.random.default_rng(0)
    engine, trainer = np.array([0.5, 0.3, 0.2]), np.array([0.4, 0.4, 0.2])
    tokens = random.choice(3, 200_000, p=engine)
    meter = MismatchMeter()
    meter.add(np.log(engine)[tokens], np.log(trainer)[tokens], version="r@1.0")
    truth = float((engine * np.log(engine / trainer)).sum())
    assert meter.total().k3 == pytest.approx(truth, rel=0.05)
    assert meter.total().k1 == pytest.approx(truth, rel=0.2)


def test_tokens_are_told_apart_by_pool_version_and_distance_from_a_splice() -> None:
    meter = MismatchMeter()
    behaviour = np.full(100, -1.0)
    trainer = behaviour.copy()
    trainer[20] = -3.0
    meter.add(behaviour, trainer, version="r@1.1", pool="lent", splices=[20])
    meter.add([-1.0], [-1.0], version="r@1.0", pool="own")
    rows = meter.rows()
    assert rows[SamplingPlace("lent", "r@1.1", "none")].tokens == 20
    assert rows[SamplingPlace("lent", "r@1.1", "0+")].largest == 2.0
    assert rows[SamplingPlace("lent", "r@1.1", "1+")].tokens == 7
    assert rows[SamplingPlace("lent", "r@1.1", "8+")].tokens == 56
    assert rows[SamplingPlace("lent", "r@1.1", "64+")].tokens == 16
    assert rows[SamplingPlace("own", "r@1.0", "none")].tokens == 1
    assert meter.total(pool="own").largest == 0
    meter.forget(version="r@1.1")
    assert meter.total().tokens == 1


def test_the_nearest_splice_counts() -> None:
    meter = MismatchMeter()
    meter.add(np.zeros(30), np.zeros(30), version="v", splices=[20, 5])
    assert meter.rows()[SamplingPlace("", "v", "0+")].tokens == 2


def test_what_is_not_finite_is_counted_and_raises_an_alarm() -> None:
    meter = MismatchMeter()
    meter.add([-1.0, float("-inf"), -1.0], [-1.0, -1.0, float("nan")], version="v")
    assert (meter.total().tokens, meter.total().invalid) == (1, 2)
    assert list(meter.alarms(k3=1.0, tokens=1)) == [SamplingPlace("", "v", "none")]


def test_an_alarm_needs_tokens_and_a_limit() -> None:
    meter = MismatchMeter()
    meter.add(np.full(200, -1.0), np.full(200, -2.0), version="v")
    assert meter.alarms(k3=0.01)
    assert not meter.alarms(k3=1.0)
    assert not meter.alarms(k3=0.01, tokens=1000)


def test_lengths_must_agree() -> None:
    with pytest.raises(ValueError, match="2 log-probabilities from the engine, 1 recomputed"):
        MismatchMeter().add([-1.0, -1.0], [-1.0], version="v")
