"""How long a reply is expected to take, and how far that may be trusted."""

from __future__ import annotations

import pytest

from rose_core.rollouts.capacity.reply_time import ENOUGH, REMEMBERED, Queue, Trust, reply_seconds
from rose_core.rollouts.engines.estimates import Speed
from rose_core.rollouts.placement.views import EngineView, TurnView
from rose_core.rollouts.versions import parse
from rose_core.wire.routing import EngineKind

VERSION = parse("run@1.0")
SPEED = Speed(step_seconds=0.1, prefill_seconds_per_token=0.01)


def engine(name: str, *, gate_open: bool = True, live: int = 0, cap: int = 4) -> EngineView:
    return EngineView(name, EngineKind.BORROWED, VERSION, gate_open, cap, live, speed=SPEED)


def test_the_home_of_a_turn_need_not_compute_what_it_has() -> None:
    turn = TurnView(context=1000, expected=50, home="a", cached=900)
    both = (engine("a"), engine("b"))
    assert reply_seconds(turn, both, Queue()) == pytest.approx(100 * 0.01 + 50 * 0.1)
    assert reply_seconds(turn, (engine("b"),), Queue()) == pytest.approx(1000 * 0.01 + 50 * 0.1)


def test_a_queue_is_waited_for_at_the_speed_at_which_turns_end() -> None:
    turn = TurnView(context=0, expected=10)
    full = (engine("a", live=4),)
    queue = Queue(waiting=9, ends_per_second=2.0)
    assert reply_seconds(turn, full, queue) == pytest.approx(10 / 2 + 1.0)
    assert reply_seconds(turn, full, Queue(waiting=1)) == pytest.approx(2 * 1.0 + 1.0)
    assert reply_seconds(turn, (engine("a"),), queue) == pytest.approx(6 / 2 + 1.0)


def test_a_shut_gate_is_expected_to_stay_as_long_again() -> None:
    shut = (engine("a", gate_open=False),)
    turn = TurnView(context=0, expected=10)
    assert reply_seconds(turn, shut, Queue(shut_seconds=30.0)) == pytest.approx(31.0)


def test_nobody_knows_where_no_engine_could_take_the_turn() -> None:
    none = EngineView("a", EngineKind.BORROWED, None, gate_open=True, cap=4)
    assert reply_seconds(TurnView(context=1, expected=1), (none,), Queue()) is None


def test_trust_is_the_share_of_late_replies_that_took_as_long_as_expected() -> None:
    trust = Trust()
    assert trust.confidence == 0.5
    for _ in range(ENOUGH):
        trust.note(1.0, 2.0)
    assert trust.confidence == 1.0
    for _ in range(REMEMBERED):
        trust.note(1.0, 0.5)
    assert trust.confidence == 0.0
