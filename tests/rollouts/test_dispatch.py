"""Which waiting turn goes next: homes are waited for, for as long as a move would cost."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from msgspec.structs import replace

from rose_core.identity import WeightVersion
from rose_core.rollouts.engines.estimates import Speed
from rose_core.rollouts.placement.dispatch import DispatchState, next_turn
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
    assert next_turn([Waiter(FRESH)], scene([HOME, OTHER], residents())) == (
        None,
        None,
    )
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
