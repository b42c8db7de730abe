"""Every hard filter alone and in every pair; then what makes one engine better than another."""

from __future__ import annotations

import dataclasses
import math
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from rose_core.identity import WeightVersion
from rose_core.rollouts.engines.estimates import Hazard, Speed
from rose_core.rollouts.placement.scoring import lent_price, lent_seconds
from rose_core.rollouts.placement.selection import (
    EngineView,
    Obstacle,
    Placement,
    Policy,
    TurnView,
    Wait,
    obstacle,
    place,
    seconds,
    stall,
)
from rose_core.rollouts.versions import Pin
from rose_core.wire.routing import EngineKind

HEAD = WeightVersion("run", 2, 10)
POLICY = Policy(max_staleness=1)
GOOD = EngineView("a", EngineKind.BORROWED, HEAD, gate_open=True, cap=4)
OWN = replace(GOOD, kind=EngineKind.DEDICATED)
TURN = TurnView(context=100, expected=50)
NOW = 1000.0

# What breaks one condition each: changes of the engine, changes of the turn.
BROKEN: dict[Obstacle, tuple[dict[str, object], dict[str, object]]] = {
    Obstacle.LEAVING: ({"leaving": True}, {}),
    Obstacle.DEDICATED_ONLY: ({}, {"dedicated_only": True}),
    Obstacle.NOT_TAKEN: ({"refuses": ("min_p",)}, {"asked": frozenset({"min_p", "n"})}),
    Obstacle.LOST_IT: ({}, {"avoid": frozenset({"a"})}),
    Obstacle.PINNED: ({}, {"pin": Pin(minimum=WeightVersion("run", 2, 11))}),
    Obstacle.STALE: ({"version": WeightVersion("run", 2, 8)}, {}),
    Obstacle.GATE_CLOSED: ({"gate_open": False}, {}),
    Obstacle.BACKING_OFF: ({"backing_off_until": NOW + 1}, {}),
    Obstacle.FENCING: ({"fencing": True}, {}),
    Obstacle.FULL: ({"live": 4}, {}),
}


def broken(*words: Obstacle) -> tuple[TurnView, EngineView]:
    engine, turn = GOOD, TURN
    for word in words:
        of_engine, of_turn = BROKEN[word]
        engine = replace(engine, **of_engine)
        turn = replace(turn, **of_turn)
    return turn, engine


def test_an_engine_that_passes_every_filter_gets_the_turn() -> None:
    assert obstacle(TURN, GOOD, HEAD, POLICY, NOW) is None
    chosen = place(TURN, [GOOD], HEAD, POLICY, NOW)
    assert isinstance(chosen, Placement)
    assert chosen.engine == "a"


@pytest.mark.parametrize("word", BROKEN)
def test_each_filter_stops_by_its_own_name(word: Obstacle) -> None:
    turn, engine = broken(word)
    assert place(turn, [engine], HEAD, POLICY, NOW) == Wait(word)


@pytest.mark.parametrize("pair", list(combinations(BROKEN, 2)))
def test_of_two_obstacles_the_one_that_lasts_longer_is_named(pair: tuple[Obstacle, ...]) -> None:
    turn, engine = broken(*pair)
    assert obstacle(turn, engine, HEAD, POLICY, NOW) == min(pair)


def test_an_engine_without_attested_version_never_gets_a_turn() -> None:
    naked = replace(GOOD, version=None)
    assert place(TURN, [naked], HEAD, POLICY, NOW) == Wait(Obstacle.UNATTESTED)
    assert place(TURN, [naked], None, POLICY, NOW) == Wait(Obstacle.UNATTESTED)


def test_without_engines_the_wait_says_so() -> None:
    assert place(TURN, [], HEAD, POLICY, NOW) == Wait(Obstacle.NO_ENGINE)


def test_the_wait_names_the_engine_that_is_nearest_to_being_able() -> None:
    engines = [replace(GOOD, name="b", gate_open=False), replace(GOOD, live=4)]
    assert place(TURN, engines, HEAD, POLICY, NOW) == Wait(Obstacle.FULL)


@pytest.mark.parametrize(
    ("version", "fits"),
    [
        (WeightVersion("run", 2, 10), True),
        (WeightVersion("run", 2, 9), True),
        (WeightVersion("run", 2, 8), False),
        (WeightVersion("run", 1, 10), False),
        (WeightVersion("other", 2, 10), False),
    ],
)
def test_staleness_counts_publishes_of_the_same_incarnation(
    version: WeightVersion, fits: bool
) -> None:
    chosen = place(TURN, [replace(GOOD, version=version)], HEAD, POLICY, NOW)
    assert isinstance(chosen, Placement) == fits


def test_who_asks_for_an_old_version_by_name_gets_it() -> None:
    old = WeightVersion("run", 2, 3)
    turn = replace(TURN, pin=Pin(exact=old))
    engines = [GOOD, replace(GOOD, name="b", version=old)]
    chosen = place(turn, engines, HEAD, POLICY, NOW)
    assert isinstance(chosen, Placement)
    assert chosen.engine == "b"


def test_a_session_stays_at_home_while_its_prefix_is_worth_more_than_a_place_in_the_queue() -> None:
    speed = Speed(step_seconds=0.01, prefill_seconds_per_token=0.001)
    home = replace(GOOD, name="home", live=2, speed=speed)
    other = replace(GOOD, name="other", speed=speed)
    long = TurnView(context=4000, expected=50, home="home", cached=3900)
    short = TurnView(context=4000, expected=50, home="home", cached=10)
    for turn, expected in ((long, "home"), (short, "other")):
        chosen = place(turn, [home, other], HEAD, POLICY, NOW)
        assert isinstance(chosen, Placement)
        assert chosen.engine == expected


def test_a_prefill_counts_for_every_turn_that_stands_still_meanwhile() -> None:
    speed = Speed(step_seconds=0.01, prefill_seconds_per_token=0.001)
    busy = replace(GOOD, name="busy", live=3, speed=speed)
    turn = TurnView(context=2000, expected=10)
    assert stall(turn, busy) == pytest.approx(3 * 2.0)
    # A faster engine with turns on it loses against a slower one that is idle.
    idle = replace(GOOD, name="idle", speed=replace(speed, prefill_seconds_per_token=0.002))
    chosen = place(turn, [busy, idle], HEAD, POLICY, NOW)
    assert isinstance(chosen, Placement)
    assert chosen.engine == "idle"


def test_a_home_that_cannot_take_the_turn_is_left() -> None:
    home = replace(GOOD, name="home", gate_open=False)
    turn = TurnView(context=4000, expected=50, home="home", cached=3900)
    chosen = place(turn, [home, GOOD], HEAD, POLICY, NOW)
    assert isinstance(chosen, Placement)
    assert chosen.engine == "a"


def test_a_small_gain_is_not_worth_a_move() -> None:
    speed = Speed(step_seconds=0.01, prefill_seconds_per_token=0.001)
    home = replace(OWN, name="home", speed=replace(speed, step_seconds=0.0335))
    other = replace(OWN, name="other", speed=speed)
    # Leaving costs 1 s of prefill once; the other engine saves 1.2 s of decoding: less than 1.5 s.
    turn = TurnView(context=1000, expected=50, home="home", cached=1000)
    assert seconds(turn, home) > seconds(turn, other)
    chosen = place(turn, [home, other], HEAD, POLICY, NOW)
    assert isinstance(chosen, Placement)
    assert chosen.engine == "home"


def test_a_trajectory_with_much_still_to_write_moves_to_where_steps_are_short() -> None:
    speed = Speed(0.02, 0.0002, usual_live=12, spread=4.0, joint=0.004)
    home = replace(OWN, name="home", cap=16, live=11, speed=speed)
    empty = replace(OWN, name="empty", cap=16, live=0, speed=speed)
    turn = TurnView(context=8000, expected=50, home="home", cached=8000, rest_tokens=50)
    for rest, expected in ((50.0, "home"), (4000.0, "empty")):
        chosen = place(replace(turn, rest_tokens=rest), [home, empty], HEAD, POLICY, NOW)
        assert isinstance(chosen, Placement)
        assert chosen.engine == expected


def test_a_turn_counts_for_every_step_that_it_lengthens() -> None:
    speed = Speed(0.02, 0.0, usual_live=4, spread=1.0, joint=0.001)
    turn = TurnView(context=10, expected=100)
    assert stall(turn, replace(GOOD, live=3, speed=speed)) == pytest.approx(3 * 100 * 0.001)


def test_a_lent_gpu_that_computes_anyway_costs_what_a_turn_adds_to_its_steps() -> None:
    speed = Speed(0.02, 0.0002, usual_live=4, spread=1.0, joint=0.001)
    turn = TurnView(context=1000, expected=100, home="a", cached=400, rest_tokens=5000)
    tokens = 100 + POLICY.horizon_tokens
    idle, busy = (replace(GOOD, name="a", live=live, speed=speed) for live in (0, 4))
    assert lent_seconds(turn, idle, POLICY) == pytest.approx(
        600 * 0.0002 + tokens * speed.step_at(1)
    )
    assert lent_seconds(turn, busy, POLICY) == pytest.approx(600 * 0.0002 + tokens * 0.001)
    assert lent_seconds(turn, replace(idle, kind=EngineKind.DEDICATED), POLICY) == 0.0


def test_an_idle_lent_engine_is_not_woken_for_what_another_does_nearly_as_soon() -> None:
    speed = Speed(0.02, 0.0002, usual_live=4, spread=1.0, joint=0.001)
    idle = replace(GOOD, name="idle", cap=8, speed=speed)
    busy = replace(GOOD, name="busy", cap=8, live=2, speed=speed)
    turn = TurnView(context=500, expected=300)
    for weight, expected in ((0.0, "idle"), (POLICY.lent_weight, "busy")):
        policy = dataclasses.replace(POLICY, lent_weight=weight)
        chosen = place(turn, [idle, busy], HEAD, policy, NOW)
        assert isinstance(chosen, Placement)
        assert chosen.engine == expected


def test_a_lent_gpus_time_costs_what_its_guard_has_measured() -> None:
    def price(slowdown: float) -> float:
        return lent_price(replace(GOOD, slowdown=slowdown), POLICY)

    assert price(0.0) == price(2.0) == POLICY.lent_weight, "taking turns, until it is measured"
    assert price(1.15) == pytest.approx(0.15 * POLICY.lent_weight)
    assert price(1.0) == 0.0
    assert price(9.0) == price(math.inf) == 2 * POLICY.lent_weight, "no more was tried"
    assert {price(none) for none in (0.5, -1.0, math.nan)} == {POLICY.lent_weight}, "no slowdowns"


def test_where_co_running_costs_little_an_idle_lent_engine_is_woken() -> None:
    speed = Speed(0.02, 0.0002, usual_live=4, spread=1.0, joint=0.001)
    turn = TurnView(context=500, expected=300)
    for slowdown, expected in ((2.0, "busy"), (1.0, "idle")):
        idle = replace(GOOD, name="idle", cap=8, speed=speed, slowdown=slowdown)
        chosen = place(turn, [idle, replace(idle, name="busy", live=2)], HEAD, POLICY, NOW)
        assert isinstance(chosen, Placement)
        assert chosen.engine == expected


def test_equal_engines_share_the_turns() -> None:
    live = {"a": 0, "b": 0, "c": 0}
    for _ in range(12):
        views = [replace(GOOD, name=name, live=count) for name, count in live.items()]
        chosen = place(TURN, views, HEAD, POLICY, NOW)
        assert isinstance(chosen, Placement)
        live[chosen.engine] += 1
    assert set(live.values()) == {4}


def test_an_engine_that_is_often_taken_back_is_the_second_choice() -> None:
    shaky = replace(GOOD, name="shaky", hazard=Hazard(reclaims=30, open_seconds=60))
    chosen = place(replace(TURN, expected=500), [shaky, GOOD], HEAD, POLICY, NOW)
    assert isinstance(chosen, Placement)
    assert chosen.engine == "a"


def test_an_engine_that_is_closed_half_the_time_counts_as_half_as_fast() -> None:
    flickering = replace(GOOD, hazard=Hazard(open_seconds=100, closed_seconds=100))
    assert seconds(TURN, flickering) == pytest.approx(2 * seconds(TURN, GOOD))


def test_a_dedicated_engine_is_preferred_among_equals() -> None:
    dedicated = replace(GOOD, name="z", kind=EngineKind.DEDICATED)
    chosen = place(TURN, [GOOD, dedicated], HEAD, POLICY, NOW)
    assert isinstance(chosen, Placement)
    assert chosen.engine == "z"


ENGINES = st.builds(
    EngineView,
    name=st.sampled_from("abcdef"),
    kind=st.sampled_from(EngineKind),
    version=st.none() | st.builds(WeightVersion, st.just("run"), st.just(2), st.integers(7, 10)),
    gate_open=st.booleans(),
    cap=st.integers(0, 4),
    live=st.integers(0, 4),
    leaving=st.booleans(),
    fencing=st.booleans(),
    backing_off_until=st.sampled_from([0.0, NOW + 5]),
    hazard=st.builds(Hazard, st.floats(0, 50), st.floats(1, 300)),
)


@given(
    engines=st.lists(ENGINES, max_size=6, unique_by=lambda engine: engine.name),
    dedicated_only=st.booleans(),
    home=st.sampled_from(["", "a", "b"]),
)
def test_whatever_the_fleet_no_turn_goes_where_it_must_not(
    engines: list[EngineView], dedicated_only: bool, home: str
) -> None:
    turn = replace(TURN, dedicated_only=dedicated_only, home=home, cached=60)
    chosen = place(turn, engines, HEAD, POLICY, NOW)
    able = [
        engine
        for engine in engines
        if engine.gate_open
        and not engine.leaving
        and not engine.fencing
        and engine.backing_off_until <= NOW
        and engine.live < engine.cap
        and engine.version is not None
        and HEAD.sequence - engine.version.sequence <= 1
        and (not dedicated_only or engine.kind is EngineKind.DEDICATED)
    ]
    if able:
        assert isinstance(chosen, Placement)
        assert chosen.engine in {engine.name for engine in able}
    else:
        assert isinstance(chosen, Wait)
