"""One GPU between a serving and a rollout engine: who is slowed by whom, and when."""

from collections.abc import Callable

import pytest

from rose_simulate.model.clock import SECOND, VirtualClock
from rose_simulate.model.gpus.batch import BatchEngine, Sequence
from rose_simulate.model.gpus.device import CorunningCost, SharedGpus
from rose_simulate.model.scenarios.costs import costs

MPS = CorunningCost(serving_slowdown=1.5, rollout_slowdown=1.66, rollout_alone=1.66)
SLICES = CorunningCost(serving_slowdown=2.0, rollout_slowdown=2.0)


def ended(sharing: CorunningCost, *, serves: bool, rolls: bool) -> tuple[float, float]:
    """When a request of serving, and one of rollouts, of equal length would have ended."""
    clock = VirtualClock()
    device = SharedGpus(clock, sharing)
    own = costs("H100", "Qwen2.5-7B", 0.5)
    device.serving, rollout = (
        BatchEngine(clock, own, 100_000, device.update, quantum=512) for _ in range(2)
    )
    device.attach(rollout)
    device.allow()
    ends = [0.0, 0.0]

    def done(which: int) -> Callable[[], None]:
        def note() -> None:
            ends[which] = clock.now_s

        return note

    for which, engine in enumerate((device.serving, rollout)):
        if (serves, rolls)[which]:
            engine.submit(Sequence("", 1000, 200, lambda: None, done(which)))
    clock.run(60 * SECOND)
    return ends[0], ends[1]


def test_a_fixed_share_costs_rollouts_while_serving_is_idle_too() -> None:
    alone = ended(SLICES, serves=False, rolls=True)[1]
    assert alone > 0
    assert ended(MPS, serves=False, rolls=True)[1] == pytest.approx(1.66 * alone, rel=0.01)


def test_serving_is_never_given_a_share() -> None:
    assert ended(MPS, serves=True, rolls=False) == ended(SLICES, serves=True, rolls=False)


def test_both_are_slowed_while_both_compute() -> None:
    alone = ended(SLICES, serves=True, rolls=False)[0]
    assert ended(SLICES, serves=True, rolls=True)[0] == pytest.approx(2.0 * alone, rel=0.01)
    assert ended(MPS, serves=True, rolls=True)[0] == pytest.approx(1.5 * alone, rel=0.01)
