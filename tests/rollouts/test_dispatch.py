"""Which waiting turn goes next: homes are waited for, for as long as a move would cost."""

from __future__ import annotations

import dataclasses
import functools
import math
import random
from dataclasses import dataclass

import pytest
from msgspec.structs import replace

from rose_core.identity import WeightVersion
from rose_core.rollouts.engines.estimates import Speed
from rose_core.rollouts.placement.dispatch import (
    ROOM_SECONDS,
    DispatchState,
    at_once,
    next_turn,
)
from rose_core.rollouts.placement.guards import NOTHING_KNOWN, RolloutOutlook
from rose_core.rollouts.placement.residency import IDLE_SECONDS, Residents
from rose_core.rollouts.placement.selection import EngineView, Policy, TurnView
from rose_core.wire.routing import EngineKind

HEAD = WeightVersion("run", 0, 3)
POLICY = Policy(max_staleness=1, explore=0.0)
SPEED = Speed(step_seconds=0.02, prefill_seconds_per_token=0.0001)
HOME = EngineView("home", EngineKind.DEDICATED, HEAD, gate_open=True, cap=4, live=4, speed=SPEED)
OTHER = replace(HOME, name="other", live=3)
NOW = 100.0


@dataclass(frozen=True)
class Waiter:
    view: TurnView
    since: float = NOW


def resident(context: int = 10_000, home: str = "home") -> TurnView:
    return TurnView(context=context, expected=100, home=home, cached=context)


def scene(engines: list[EngineView], residents: Residents | None = None) -> DispatchState:
    return DispatchState(engines, HEAD, POLICY, NOW, residents=residents)


FRESH = TurnView(context=6000, expected=100)


def test_a_turn_waits_for_its_full_home_and_the_next_goes_first() -> None:
    chosen, again = next_turn([Waiter(resident()), Waiter(FRESH)], scene([HOME, OTHER]))
    assert chosen is not None
    assert (chosen[0], chosen[1].engine) == (1, "other")
    # The move would cost a prefill of 10,000 tokens during which four turns stand still.
    assert again == pytest.approx(NOW + 10_000 * 0.0001 * 4)


def test_it_moves_once_it_has_waited_as_long_as_the_move_costs() -> None:
    long_ago = Waiter(resident(), since=NOW - 4.1)
    chosen, again = next_turn([long_ago], scene([HOME, OTHER]))
    assert chosen is not None
    assert chosen[1].engine == "other"
    assert again is None


@pytest.mark.parametrize("change", [{"leaving": True}, {"version": WeightVersion("run", 0, 1)}])
def test_a_home_that_will_not_take_it_again_is_not_waited_for(change: dict[str, object]) -> None:
    gone = replace(HOME, **change)
    chosen, _ = next_turn([Waiter(resident())], scene([gone, OTHER]))
    assert chosen is not None
    assert chosen[1].engine == "other"


def test_a_home_without_its_keys_is_not_waited_for() -> None:
    turn = replace(resident(), cached=0)
    chosen, _ = next_turn([Waiter(turn)], scene([HOME, OTHER]))
    assert chosen is not None


def test_a_home_with_room_takes_its_turn_at_once() -> None:
    free = replace(HOME, live=3)
    chosen, again = next_turn([Waiter(resident())], scene([free, OTHER]))
    assert chosen is not None
    assert chosen[1].engine == "home"
    assert again is None


def test_nothing_goes_when_every_engine_is_full_or_shut() -> None:
    shut = replace(OTHER, gate_open=False)
    assert next_turn([Waiter(FRESH)], scene([HOME, shut])) == (None, None)


def test_what_one_turn_may_not_use_does_not_hold_back_the_next() -> None:
    borrowed = replace(OTHER, kind=EngineKind.BORROWED)
    waiting = [Waiter(replace(FRESH, dedicated_only=True)), Waiter(FRESH)]
    chosen, _ = next_turn(waiting, scene([HOME, borrowed]))
    assert chosen is not None
    assert (chosen[0], chosen[1].engine) == (1, "other")


def residents(pool: int = 30_000) -> Residents:
    made = Residents()
    made.set_pool("other", pool)
    for name in ("a", "b", "c"):
        made.begin_turn("other", name, 10_000)
    return made


def test_a_session_more_than_the_pool_holds_waits() -> None:
    waits = next_turn([Waiter(FRESH)], scene([HOME, OTHER], residents()))
    assert waits == (None, NOW + ROOM_SECONDS)
    made = residents(pool=40_000)
    chosen, _ = next_turn([Waiter(FRESH)], scene([HOME, OTHER], made))
    assert chosen is not None


def test_keys_of_sessions_in_their_environment_count_until_they_are_old() -> None:
    made = residents()
    made.end_turn("other", "c", 10_000, NOW)
    assert made.without_room(FRESH, [OTHER], NOW + 1) == {"other"}
    assert not made.without_room(FRESH, [OTHER], NOW + IDLE_SECONDS + 1)


def test_a_session_that_went_elsewhere_or_is_over_makes_room() -> None:
    made = residents()
    made.set_pool("home", 100_000)
    made.begin_turn("home", "a", 10_000)
    assert not made.without_room(FRESH, [OTHER], NOW)
    made = residents()
    made.drop_session("b")
    assert not made.without_room(FRESH, [OTHER], NOW)


def test_home_an_idle_engine_and_an_unknown_pool_always_have_room() -> None:
    made = residents()
    assert not made.without_room(resident(home="other"), [OTHER], NOW)
    assert not made.without_room(FRESH, [replace(OTHER, live=0)], NOW)
    made.set_pool("other", 0)
    assert not made.without_room(FRESH, [OTHER], NOW)
    made = residents()
    made.drop_engine("other")
    assert not made.without_room(FRESH, [OTHER], NOW)


def drawn_scene(draw: random.Random) -> tuple[TurnView, DispatchState]:
    """A turn that comes, and engines in any state."""
    engines = [
        EngineView(
            name,
            draw.choice(list(EngineKind)),
            draw.choice([HEAD, HEAD, HEAD, WeightVersion("run", 0, 1), None]),
            gate_open=draw.random() < 0.8,
            cap=4,
            live=draw.choice([0, 1, 3, 4]),
            leaving=draw.random() < 0.1,
            fencing=draw.random() < 0.1,
            kept=draw.random() < 0.1,
            backing_off_until=draw.choice([0.0, NOW, NOW + 1]),
            speed=SPEED,
            refuses=draw.choice([(), ("regex",)]),
        )
        for name in ("home", "other", "third")[: draw.randrange(4)]
    ]
    turn = TurnView(
        context=10_000,
        expected=100,
        dedicated_only=draw.random() < 0.2,
        home=draw.choice(["", "home", "home", "gone"]),
        cached=draw.choice([0, 500, 10_000, 20_000]),
        avoid=draw.choice([frozenset(), frozenset({"other"})]),
        begins=draw.random() < 0.3,
        alone=draw.random() < 0.1,
        asked=draw.choice([frozenset(), frozenset({"regex"})]),
        from_version=draw.choice([None, HEAD, WeightVersion("run", 0, 1)]),
        control=draw.random() < 0.2,
        losses=draw.choice([0, 9]),
        budget_seconds=draw.choice([math.inf, 1.0, 0.0]),
        since_move=draw.choice([0, 9]),
        stratum="long",
        tail=draw.random() < 0.5,
    )
    residents = Residents()
    for engine in engines:
        residents.set_pool(engine.name, draw.choice([0, 11_000, 100_000]))
        residents.begin_turn(engine.name, "another", draw.choice([1, 9_000]))
    policy = draw.choice([POLICY, dataclasses.replace(POLICY, explore=0.5)])
    swapping = draw.choice([frozenset[str](), frozenset({HEAD.run})])
    outlook = RolloutOutlook(
        borrowed_share=0.5,
        stratum_share=draw.choice([{}, {"long": 0.1}, {"long": 0.9}]),
        dice=draw.random(),
        safe=draw.random() < 0.5,
        swapping=swapping,
    )
    return turn, DispatchState(engines, HEAD, policy, NOW, outlook, residents)


def test_a_turn_that_comes_alone_is_placed_as_the_queue_would() -> None:
    draw, placed = random.Random(20), 0
    for _ in range(5000):
        turn, state = drawn_scene(draw)
        chosen, _ = next_turn([Waiter(turn)], state)
        bare = replace(state, outlook=NOTHING_KNOWN)
        found = at_once(turn, bare, functools.partial(getattr, state, "outlook"))
        assert found == (None if chosen is None else chosen[1]), (turn, state)
        placed += chosen is not None
    assert 400 < placed < 4000


def test_a_turn_that_goes_on_waits_for_a_pool_as_long_as_idle_keys_count_there() -> None:
    pool = residents()
    goes_on = Waiter(replace(FRESH, home="gone", cached=0), since=NOW - ROOM_SECONDS + 1)
    assert next_turn([goes_on], scene([HOME, OTHER], pool)) == (None, NOW + 1)
    long_ago = dataclasses.replace(goes_on, since=NOW - ROOM_SECONDS)
    chosen, _ = next_turn([long_ago], scene([HOME, OTHER], pool))
    assert chosen is not None
    assert chosen[1].engine == "other"


def test_one_that_begins_waits_for_a_pool_for_as_long_as_it_takes() -> None:
    begins = Waiter(replace(FRESH, begins=True), since=0.0)
    assert next_turn([begins], scene([HOME, OTHER], residents())) == (None, None)
