"""The demo's load follows the speed of the machine it runs on."""

import dataclasses

import pytest

from rose_demo.calibrate import (
    LEAST_OBJECTIVE,
    Objective,
    ServingSpeed,
    busy_share,
    fit,
    objective,
    speed_of,
)
from rose_demo.errors import SetUpFailed
from rose_demo.records import Request, Role
from rose_demo.trace import Arrival, Scale

LOAD = [Arrival(float(at), 1200, 240) for at in range(100)]
FAST = ServingSpeed(0.002, 0.0001, 0.001)
SLOW = ServingSpeed(0.05, 0.0008, 0.012)


def fitted(speed: ServingSpeed) -> Scale:
    return fit(LOAD, Scale(), speed, seconds=100.0, share=0.33)


def busy(scale: Scale, speed: ServingSpeed) -> float:
    """As LOAD stands for what the usual share keeps, more or fewer of it in proportion."""
    alone = busy_share(map(scale.shorten, LOAD), speed, 100.0)
    return alone * scale.keep / Scale.keep


def test_a_fast_machine_gets_more_requests_of_the_same_lengths() -> None:
    scale = fitted(FAST)
    assert scale.length_divisor == Scale.length_divisor
    assert scale.keep > Scale.keep
    assert busy(scale, FAST) == pytest.approx(0.33, rel=0.05)


def test_no_machine_gets_more_than_the_trace() -> None:
    assert fitted(ServingSpeed(1e-6, 1e-9, 1e-9)).keep == 1.0


def test_a_slow_one_gets_fewer_and_shorter_requests() -> None:
    assert busy(Scale(), SLOW) > 0.6
    scale = fitted(SLOW)
    assert scale.length_divisor > Scale.length_divisor
    assert scale.longest_prompt < Scale.longest_prompt
    assert scale.keep < Scale.keep
    assert busy(scale, SLOW) == pytest.approx(0.33, rel=0.05)


def test_half_the_speed_never_gives_more() -> None:
    half = fitted(ServingSpeed(*(2 * cost for cost in dataclasses.astuple(SLOW))))
    assert half.length_divisor > fitted(SLOW).length_divisor
    assert half.keep < fitted(SLOW).keep


def test_what_is_promised_follows_the_speed_and_is_never_tight() -> None:
    assert objective(fitted(FAST), FAST) == LEAST_OBJECTIVE
    scale = Scale(longest_prompt=400, shortest_output=9)
    slow = objective(scale, ServingSpeed(0.1, 0.00125, 0.02))
    assert slow == Objective(ttft_ms=1800, tpot_ms=170)  # 2 x 600 ms and 40 + 75 ms, half more


def request(prompt: int, ttft: float | None, tpot: float | None, error: str = "") -> Request:
    return Request(Role.LENT, 0.0, prompt, 3, ttft, tpot, 1.0, 0.0, error, 0)


def test_speed_is_the_best_of_what_was_seen() -> None:
    short = [request(40, 0.09, 0.05), request(40, 0.07, 0.04), request(40, None, None, "refused")]
    long = [request(440, 0.27, 0.03), request(440, 0.90, 0.02)]
    speed = speed_of(short, long)
    assert speed.prefill_s == pytest.approx(0.0005)
    assert speed.request_s == pytest.approx(0.05)
    assert speed.decode_s == 0.02
    assert speed.seconds(Arrival(0.0, 100, 11)) == pytest.approx(0.05 + 0.05 + 0.2)


def test_a_replica_that_answers_nothing_is_named_with_its_error() -> None:
    lost = [request(40, None, None, "ClientConnectorError: refused")]
    with pytest.raises(SetUpFailed, match="refused"):
        speed_of(lost, lost)
