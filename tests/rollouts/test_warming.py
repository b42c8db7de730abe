"""Which trajectories are warmed elsewhere while their tools run, and what keeps them from it."""

from __future__ import annotations

import dataclasses

import pytest
from msgspec.structs import replace

from rose_core.identity import WeightVersion
from rose_core.rollouts.engines.estimates import Hazard, Speed
from rose_core.rollouts.placement.dispatch import DispatchState
from rose_core.rollouts.placement.residency import Residents
from rose_core.rollouts.placement.selection import EngineView, Policy, TurnView
from rose_core.rollouts.placement.warming import Resting, ReturnRates, Warm, WarmBound, to_warm
from rose_core.wire.routing import EngineKind

HEAD = WeightVersion("run", 0, 3)
NOW = 100.0
SPEED = Speed(step_seconds=0.02, prefill_seconds_per_token=0.0001)
HOME = EngineView("home", EngineKind.BORROWED, HEAD, gate_open=True, cap=4, speed=SPEED)
OTHER = replace(HOME, name="other", live=1)
DEDICATED = replace(OTHER, name="ours", kind=EngineKind.DEDICATED, live=3)
VIEW = TurnView(context=6000, expected=100, home="home")
REST = Resting(
    name="t",
    context=6000,
    since=NOW - 1.0,
    times=0,
    home="home",
    keys=True,
    shut_since=None,
    view=lambda: VIEW,
)


def known() -> ReturnRates:
    """Trajectories that come back after some seconds."""
    returns = ReturnRates()
    for _ in range(10):
        returns.record_return(5.0)
    return returns


def asked(
    rests: list[Resting],
    engines: list[EngineView],
    *,
    waiting: int = 0,
    warming: frozenset[str] = frozenset(),
    returns: ReturnRates | None = None,
    residents: Residents | None = None,
) -> tuple[Warm, ...]:
    scene = DispatchState(engines, HEAD, Policy(explore=0.0), NOW, residents=residents)
    return to_warm(rests, scene, returns or known(), waiting=waiting, warming=warming)


def test_a_trajectory_whose_home_is_gone_is_warmed_where_it_would_go() -> None:
    assert asked([REST], [OTHER]) == (Warm("t", "other"),)


@pytest.mark.parametrize(
    "change", [{"keys": False}, {"shut_since": NOW - WarmBound().shut_seconds}], ids=str
)
def test_so_is_one_whose_home_lost_its_keys_or_is_shut_for_long(change: dict[str, object]) -> None:
    shut = replace(HOME, gate_open="shut_since" not in change)
    rest = dataclasses.replace(REST, **change)  # type: ignore[arg-type]
    found = asked([rest], [shut, OTHER])
    assert [one.name for one in found] == ["t"]
    assert found[0].engine != "home" or shut.gate_open


@pytest.mark.parametrize("change", [{}, {"shut_since": NOW - 1.0}], ids=str)
def test_a_home_that_is_there_or_shut_for_a_moment_is_kept(change: dict[str, object]) -> None:
    assert asked([dataclasses.replace(REST, **change)], [HOME, OTHER]) == ()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "change", [{"times": WarmBound().times}, {"context": WarmBound().least_tokens - 1}], ids=str
)
def test_what_is_not_worth_it_is_left_alone(change: dict[str, object]) -> None:
    assert asked([dataclasses.replace(REST, **change)], [OTHER]) == ()  # type: ignore[arg-type]


def test_nothing_is_warmed_while_a_turn_waits() -> None:
    assert asked([REST], [OTHER], waiting=1) == ()


def test_an_engine_beside_busy_serving_is_left_alone() -> None:
    often_shut = Hazard(open_seconds=40.0, closed_seconds=60.0)
    busy = replace(OTHER, hazard=often_shut)
    assert asked([REST], [busy]) == ()
    assert asked([REST], [busy, DEDICATED]) == (Warm("t", "ours"),)


def test_an_engine_warms_one_at_a_time_and_the_newest_goes_first() -> None:
    older = dataclasses.replace(REST, name="older", since=NOW - 3.0)
    assert asked([older, REST], [OTHER]) == (Warm("t", "other"),)
    assert asked([REST], [OTHER], warming=frozenset({"other"})) == ()


def test_a_pool_that_it_would_overflow_is_left_alone() -> None:
    residents = Residents()
    residents.set_pool("other", 8000)
    residents.begin_turn("other", "someone", 5000)
    assert asked([REST], [OTHER], residents=residents) == ()


def test_trajectories_that_do_not_come_back_stop_it() -> None:
    assert asked([REST], [OTHER], returns=ReturnRates()) == ()
    seldom = known()
    for _ in range(30):
        seldom.record_absence()
    assert asked([REST], [OTHER], returns=seldom) == ()


def test_the_longer_one_rests_the_less_it_is_expected_back() -> None:
    returns = known()
    shares = [returns.share(rested) for rested in (0.0, 1.0, 9.0, 70.0)]
    assert shares == sorted(shares, reverse=True)
    assert shares[0] > 0.9
    assert shares[-1] == 0.0
